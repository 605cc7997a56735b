"""Commands on a real terminal: whatever a session, a server or a file says, nothing of it acts."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import tty
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ran_sessions import execute, settings_in

from belljar.cli.streams import one_line, shown_output
from belljar.environments import Environment
from belljar.http.server_socket import open_reachable_runtime
from live_server import clean_environment
from serving_process import COLD, serve_command, variables

pytestmark = pytest.mark.anyio

# Titles, the clipboard, links, questions that a terminal answers, modes, other screens, strings to store, 8-bit forms,
# character sets, resets, the bell, and marks that turn text around.
ATTACKS = (
    *(
        "\x1b]0;owned\x07",
        "\x1b]52;c;b3duZWQ=\x07",
        "\x1b]8;;http://evil.example\x1b\\",
        "\x1b[c",
        "\x1b[6n",
        "\x1b[5n",
    ),
    *(
        "\x1b[?1049h",
        "\x1b[2J",
        "\x1b[1A",
        "\x1b[H",
        "\x1bP$qm\x1b\\",
        "\x1b_x\x1b\\",
        "\x9b2J",
        "\x9d0;owned\x9c",
        "\x1bc",
    ),
    *(
        "\x0e",
        "\x1b(0",
        "\x07",
        "\x05",
        "\x7f",
        "\u202e",
        "\u2066",
        "\u200f",
        "\u061c",
        "\u2028",
        "\x1b[20t",
        "\x1b]0;open",
    ),
)
HOSTILE = "".join(f"<{attack}>" for attack in ATTACKS)
ALLOWED = re.compile(r"\x1b\[[0-9;:]*m|\x1b\[[0-9]*[CDGK]|\r\n|[\r\b\n\t]")
ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Screen:
    """What a terminal was sent, and how the command ended."""

    text: str
    status: int

    def acting(self) -> list[str]:
        return ACTS.findall(ALLOWED.sub("", self.text))


def on_terminal(*words: str, cwd: Path | None = None, **variables: object) -> Screen:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    environment = clean_environment(**{"TERM": "xterm", "COLUMNS": 200, **variables})
    with subprocess.Popen(
        [sys.executable, "-m", "belljar", *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=cwd,
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65_536):
                seen += chunk
        except OSError:  # the command has closed its end
            pass
        finally:
            os.close(ours)
    return Screen(seen.decode(errors="surrogateescape"), process.returncode)


@dataclass
class HostileServer:
    """A server whose principal, code and output are hostile."""

    data: Path
    session_id: str


@pytest.fixture(scope="module")
async def hostile_server(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HostileServer]:
    data = tmp_path_factory.mktemp("data")
    data.chmod(0o711)
    async with open_reachable_runtime(settings_in(data, default_environment)) as runtime:
        session = runtime.sessions.create(f"somebody{HOSTILE}")
        await execute(
            session, f"# {HOSTILE.replace(chr(0x2028), '')}\nprint({HOSTILE!r})\nraise ValueError({HOSTILE!r})"
        )
        await execute(session, "import os\nos._exit(3)")
        yield HostileServer(data, session.id)


@pytest.mark.parametrize(
    "words",
    [
        ["sessions"],
        ["export", "SESSION", "-o", "-", "--format", "md"],
        ["export", "SESSION", "-o", "-", "--format", "ipynb"],
        ["export", f"nope{HOSTILE}".replace("\0", ""), "-o", "-", "--format", "md"],
    ],
)
async def test_what_a_session_chose_does_not_act_through_commands_that_look_at_it(
    hostile_server: HostileServer, words: list[str]
) -> None:
    words = [hostile_server.session_id if word == "SESSION" else word for word in words]
    screen = await asyncio.to_thread(on_terminal, *words, BELLJAR_DATA_DIRECTORY=hostile_server.data)
    assert screen.acting() == []
    assert len(screen.text) > 20


async def test_code_that_runs_on_a_terminal_has_colours_and_progress_bars_and_nothing_else(
    default_environment: Environment, tmp_path: Path
) -> None:
    code = (
        f"import sys\nhostile = {HOSTILE!r}\nprint(hostile)\nprint(hostile, file=sys.stderr)\n"
        "print('\\x1b[1;31mred\\x1b[0m 10%\\r\\x1b[K20%\\b!')\n"
        "sys.stdout.write('half \\x1b'); sys.stdout.flush(); sys.stdout.write('[32m green\\n'); sys.stdout.flush()\n"
        "name = ''.join(c for c in hostile if c not in '/\\0')[:80]\nopen(name, 'w').close()\n"
        "print('\\x1b[8mhidden')\nsys.exit(hostile)"
    )
    screen = await asyncio.to_thread(
        on_terminal,
        *("run", "-c", code),
        BELLJAR_DATA_DIRECTORY=tmp_path / "data",
        BELLJAR_DOWNLOAD_DIRECTORY=tmp_path / "downloads",
        BELLJAR_ENVIRONMENT=default_environment.python,
    )
    assert screen.acting() == []
    assert "\x1b[1;31mred\x1b[0m 10%\r\x1b[K20%\b!" in screen.text
    assert "half \x1b[32m green" in screen.text
    # What the code left on is off before our own line, and before the person's prompt.
    assert screen.text.rindex("\x1b[0m") > screen.text.rindex("\x1b[8m")
    assert screen.text.rindex("saved in ") > screen.text.rindex("\x1b[0m")
    (folder,) = (tmp_path / "downloads").iterdir()
    assert [ACTS.findall(path.name) for path in folder.iterdir()] == [[]]


async def test_a_pipe_gets_the_bytes_of_the_code_and_safe_lines_of_ours(
    default_environment: Environment, tmp_path: Path
) -> None:
    variables: dict[str, Any] = {
        "BELLJAR_DATA_DIRECTORY": tmp_path / "data",
        "BELLJAR_DOWNLOAD_DIRECTORY": tmp_path / "downloads",
        "BELLJAR_ENVIRONMENT": default_environment.python,
    }
    code = f"print({HOSTILE!r})\nopen('a\\x1b]0;x\\x07\\nb', 'w').close()"
    answer = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "belljar", "run", "-c", code],
        capture_output=True,
        env=clean_environment(**variables),
    )
    assert answer.stdout.decode() == f"{HOSTILE}\n"
    (line,) = [line for line in answer.stderr.decode().split("\n") if line.startswith("saved in ")]
    assert ACTS.findall(line) == []


@pytest.mark.parametrize("is_typed", [True, False], ids=["a person", "a client"])
def test_serve_tells_a_person_at_a_terminal_what_it_is_and_a_client_nothing(
    default_environment: Environment, tmp_path: Path, is_typed: bool
) -> None:
    typing, stdin = pty.openpty() if is_typed else reversed(os.pipe())
    environment = {**variables(tmp_path), **COLD}
    with subprocess.Popen(
        serve_command(default_environment),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    ) as process:
        os.close(stdin)
        if is_typed:
            os.write(typing, b"\x04")  # Ctrl-D
        else:
            os.close(typing)
        said, told = process.communicate(timeout=60)
    if is_typed:
        os.close(typing)
    assert (said, process.returncode) == (b"", 0)
    assert (b"belljar install claude-desktop" in told) is is_typed


def test_servers_of_the_toolbox_do_not_act_through_their_names_and_last_words(tmp_path: Path) -> None:
    servers = {"x": {"command": sys.executable, "args": ["-c", f"import sys; sys.exit({HOSTILE!r})"]}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    screen = on_terminal("toolbox", "list", "--mcp-config", str(tmp_path / "servers.json"))
    assert screen.acting() == []
    assert "x" in screen.text


@pytest.mark.parametrize(
    "words", [["policy", "check", "FILE"], ["policy", "test", "FILE", "--code", "FILE"], ["trust", "FILE"]]
)
def test_files_of_others_do_not_act_through_what_is_said_of_them(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / f"a{HOSTILE.replace('/', '')[:60]}"
    folder.mkdir()
    (folder / "belljar.toml").write_text(f'sandbox = "process"\n{json.dumps("max" + HOSTILE)} = 1\n')
    words = [str(folder / "belljar.toml") if word == "FILE" else word for word in words]
    screen = on_terminal(*words, cwd=folder)
    assert screen.status == 2
    assert screen.acting() == []


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_survives_however_it_is_cut(attack: str) -> None:
    for place in range(len(attack) + 1):
        shown = shown_output(attack[:place]) + shown_output(attack[place:])
        assert not ACTS.search(ALLOWED.sub("", shown))
    assert not ACTS.search(one_line(attack))
