"""Commands on systems that lack what Linux has: no traceback, and the container where there is an engine.

Each runs in a process from which the modules and functions that Windows lacks have been taken away. What a real engine
does with the command is tried in tests/deploy/test_image.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TAKEN_AWAY = """
import importlib, os, select, signal, socket, sys, types
# Packages of others have branches for other systems. These are theirs to test, so they are imported as they are here.
import asyncio, subprocess, shutil, tarfile, getpass, tempfile, typer, rich.console, pydantic, pydantic_settings
import platformdirs, anyio, mcp, mcp.client, httpx, jsonschema, packaging, yaml

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses", "pyseccomp"}
NAMES = {
    os: "geteuid getuid getgid getegid fchmod fchown chown O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_NONBLOCK O_PATH "
    "O_TMPFILE pidfd_open sched_getaffinity sched_setaffinity killpg getpgid setsid fork memfd_create getxattr mkfifo",
    signal: "SIGKILL SIGHUP SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE SIGQUIT SIGWINCH pidfd_send_signal",
    select: "poll epoll",
    socket: "SO_PEERCRED SCM_RIGHTS send_fds recv_fds CMSG_SPACE CMSG_LEN",
}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
fork, pipes = os.fork, os.dup2
for holder, names in NAMES.items():
    for name in names.split():
        if hasattr(holder, name):
            delattr(holder, name)
sys.platform = "win32"
# Since 3.12 it asks Windows whether the current folder belongs to the path.
shutil._winapi = types.SimpleNamespace(NeedCurrentDirectoryForExePath=lambda name: False)
"""
# Starting such a process takes a second, so one is started, and a copy of it runs each command.
COPIES = f"""{TAKEN_AWAY}
import json
for line in sys.stdin:
    asked = json.loads(line)
    if not (pid := fork()):
        for number, path in enumerate(asked["files"]):
            pipes(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.environ.clear()
        os.environ.update(asked["variables"])
        os.chdir(asked["folder"])
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        status = 0
        try:
            exec(asked["code"])
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

ENGINE = """#!/bin/sh
case "$1" in
info) echo '{"ServerVersion": "28.1.0"}' ;;
image) [ "$3" != missing ] ;;
run) echo "$@"; /bin/cat ;;
esac
"""


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def copies() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", COPIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@dataclass(frozen=True)
class Elsewhere:
    """A machine of another kind, on which `docker` is a script that repeats what it is told."""

    folder: Path
    variables: dict[str, str]
    copies: subprocess.Popen[str]

    def run(self, *words: str, stdin: str = "", **variables: str) -> Answer:
        return self.execute(f"from belljar.cli import main\nmain({[*words]!r})", stdin, variables)

    def execute(self, code: str, stdin: str = "", variables: dict[str, str] | None = None) -> Answer:
        files = [self.folder.parent / name for name in ("stdin", "stdout", "stderr")]
        for file, text in zip(files, (stdin, "", ""), strict=True):
            file.write_text(text)
        asked = {
            "files": [str(file) for file in files],
            "variables": {**self.variables, **(variables or {})},
            "folder": str(self.folder),
            "code": code,
        }
        assert self.copies.stdin
        assert self.copies.stdout
        print(json.dumps(asked), file=self.copies.stdin, flush=True)
        return Answer(int(self.copies.stdout.readline()), files[1].read_text(), files[2].read_text())


@pytest.fixture
def elsewhere(tmp_path: Path, copies: subprocess.Popen[str]) -> Elsewhere:
    (tmp_path / "bin").mkdir()
    (tmp_path / "place").mkdir()
    engine = tmp_path / "bin" / "docker.exe"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    variables = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PATHEXT": ".exe"}
    variables["PATH"] = str(engine.parent)  # an engine of this machine must not be found
    return Elsewhere(tmp_path / "place", variables, copies)


def test_what_is_said_of_a_machine_without_an_engine_is_two_lines(elsewhere: Elsewhere, tmp_path: Path) -> None:
    for words in (["serve"], ["run", "-c", "1"]):
        answer = elsewhere.run(*words, PATH=str(tmp_path))
        assert (answer.status, answer.out) == (1, "")
        first, second = answer.err.splitlines()
        assert first == "error: sessions need Linux, this is win32, and neither docker nor podman answers"
        assert second.startswith("hint: Start Docker Desktop ")
    assert [*elsewhere.folder.iterdir()] == []


def test_commands_that_need_no_session_work(elsewhere: Elsewhere) -> None:
    assert "doctor" in elsewhere.run("--help").out
    entry = json.loads(elsewhere.run("install", "claude-desktop").out)["mcpServers"]["belljar"]
    assert "serve" in entry["args"]
    (elsewhere.folder / "belljar.toml").write_text("max_queue = 3")
    assert "is not read" in elsewhere.run("config").err
    assert "which sets max_queue" in elsewhere.run("trust").err
    next(elsewhere.folder.parent.rglob("trusted.json")).chmod(0o666)  # as every file looks on Windows
    assert " 3 " in elsewhere.run("config").out
    findings = json.loads(elsewhere.run("doctor", "--json").out)
    assert [(each["name"], each["status"]) for each in findings][2:] == [("docker", "ok"), ("image", "ok")]


def test_doctor_tells_what_the_lack_of_an_image_costs(elsewhere: Elsewhere) -> None:
    answer = elsewhere.run("doctor", BELLJAR_CONTAINER_IMAGE="missing")
    assert answer.status == 1
    assert "fail  image" in answer.out
    assert "to get it: docker build -t missing ." in answer.out
    assert "Traceback" not in answer.err


def test_a_command_of_linux_only_says_so_and_still_has_its_help(elsewhere: Elsewhere) -> None:
    answer = elsewhere.run("sessions", "--anything")
    assert (answer.status, answer.err.splitlines()[0]) == (
        2,
        "error: belljar sessions needs Linux, and this is win32",
    )
    assert "List the sessions" in elsewhere.run("sessions", "--help").out


def test_serve_starts_the_container_and_passes_settings_and_files_on(elsewhere: Elsewhere) -> None:
    (elsewhere.folder / "rules.toml").write_text("")
    answer = elsewhere.run(
        *("serve", "--surface", "executor", "--policy", "rules.toml"),
        stdin="said by a client",
        BELLJAR_MEMORY_MB="512",
        BELLJAR_DATA_DIRECTORY="/only/here",
    )
    words, _, said = answer.out.partition("\n")
    assert words.startswith("run -i --rm --security-opt seccomp=")
    assert "-v belljar:/data -e BELLJAR_MEMORY_MB -e BELLJAR_SURFACES=executor" in words
    rules = elsewhere.folder / "rules.toml"
    assert f"-v {rules}:/files/policy.toml:ro -e BELLJAR_POLICY=/files/policy.toml" in words
    assert words.endswith(" belljar:latest container")
    assert "DATA_DIRECTORY" not in words
    assert said == "said by a client"
    served = elsewhere.run("serve", "--http", ":9000").out
    assert served.startswith("run --rm ")
    assert "-p 127.0.0.1:9000:8000 -e BELLJAR_HTTP=0.0.0.0:8000" in served
    # Only we know at which address people reach it.
    assert "-e BELLJAR_PUBLIC_URL=http://127.0.0.1:9000" in served
    for wildcard in ("0.0.0.0", "[::]"):
        told = elsewhere.run("serve", "--http", f"{wildcard}:9000").out
        assert f"-p {wildcard}:9000:8000" in told
        assert "-e BELLJAR_PUBLIC_URL=http://localhost:9000" in told
    named = elsewhere.run("serve", "--http", ":9000", BELLJAR_PUBLIC_URL="https://jar.example.org").out
    assert "-e BELLJAR_PUBLIC_URL " in named
    assert "BELLJAR_PUBLIC_URL=" not in named


def test_run_hands_the_code_over_and_leaves_no_empty_folder(elsewhere: Elsewhere) -> None:
    (elsewhere.folder / "code.py").write_text("print('hi')")
    answer = elsewhere.run("run", "--timeout", "5", "--out", "results", "code.py", "--flag", "2")
    words, _, code = answer.out.partition("\n")
    out = elsewhere.folder / "results"
    assert f"-v {out}:/out belljar:latest run --out /out --out-told-as {out} --timeout 5 - --flag 2" in words
    assert (code, answer.status) == ("print('hi')", 0)
    assert [path.name for path in elsewhere.folder.iterdir()] == ["code.py"]
    in_downloads = elsewhere.run(
        "run", "-c", "1", BELLJAR_DOWNLOAD_DIRECTORY=str(elsewhere.folder.parent / "downloads")
    )
    assert f"-v {elsewhere.folder.parent / 'downloads' / 'run-'}" in in_downloads.out
    assert elsewhere.run("run", "gone.py").err.startswith("error: gone.py cannot be read: ")


def test_a_client_of_a_server_elsewhere_can_be_imported_and_says_when_nothing_answers(elsewhere: Elsewhere) -> None:
    code = (
        "import asyncio, belljar\n"
        "async def look():\n"
        "    async with belljar.connect('http://127.0.0.1:1/mcp') as server: pass\n"
        "try: asyncio.run(look())\n"
        "except belljar.BelljarError as error: print(error)\n"
    )
    answer = elsewhere.execute(code)
    assert (answer.status, answer.err) == (0, "")
    assert "127.0.0.1:1" in answer.out
