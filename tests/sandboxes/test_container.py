"""What only the container provider has: engines and their refusals, the handshake, and an end with its server."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from imported_image import import_image
from trials import DEADLINE_S, ENVIRONMENT, PYTHON, READABLE, Opener, read_to_end, read_until, run, usable

from belljar.environments import Environment
from belljar.errors import InvalidArgument, SandboxUnavailable
from belljar.python.local import open_session
from belljar.sandboxes.base import Limits, Provider, SandboxSpec
from belljar.sandboxes.container import process as containment
from belljar.sandboxes.container import provider as container
from belljar.sandboxes.container.engines import LABEL, ContainerEngine, find_engines
from belljar.sandboxes.container.process import Handshake
from belljar.sandboxes.container.provider import ContainerProvider
from belljar.sandboxes.container.run_arguments import RunArguments, find_interpreter
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups
from belljar.sandboxes.limits.cgroups import adopt
from waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="containers elsewhere are on a machine of their own"),
]

Program = Callable[[str, str], Path]

LIMITS = Limits(memory_mb=128, cpus=1, processes=40, disk_mb=16, temporary_mb=8, open_files=100)
SERVER = """
import asyncio, os, pathlib, sys
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import SandboxSpec
from belljar.settings import Settings

async def main():
    folder, image, python, *readable = sys.argv[2:]
    provider = open_provider(Settings(sandbox="container", container_image=image))
    folder = pathlib.Path(folder)
    sandbox = await provider.open(SandboxSpec("s", folder, folder, folder, list(map(pathlib.Path, readable))))
    pipe = int(sys.argv[1])
    code = f"import os, signal; os.fork() or os.setsid(); os.write({pipe}, b'x'); signal.pause()"
    await sandbox.spawn([python, "-c", code], environment={}, stdout=1, stderr=2, pass_fds=[pipe])
    os.close(pipe)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def provider() -> Provider:
    return usable("container")


@pytest.fixture
def engine(provider: Provider) -> ContainerEngine:
    return next(engine for engine in find_engines("auto") if isinstance(engine, ContainerEngine))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Puts a shell script in an engine's place, the only one there is."""
    monkeypatch.setattr("belljar.sandboxes.container.engines._search_path", lambda: str(tmp_path))

    def write(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


def _answer(facts: object) -> str:
    return f"""[ "$1" = info ] && {{ cat <<'END'\n{json.dumps(facts)}\nEND\nexit; }}"""


DOCKER = {"ServerVersion": "28.2.2", "SecurityOptions": ["name=seccomp"], "MemoryLimit": True, "PidsLimit": True}
PODMAN = {
    "host": {"security": {"rootless": False}, "cgroupVersion": "v2", "cgroupControllers": ["cpu", "memory", "pids"]},
    "version": {"Version": "5.0.0"},
}


# Engines


def test_without_an_engine_the_check_says_what_to_install(program: Program) -> None:
    began = time.monotonic()
    (line,) = ContainerProvider().check()
    assert (line.is_ok, line.detail, line.hint) == (False, "podman or docker not found", "Install podman or docker")
    assert time.monotonic() - began < 5


def test_an_engine_that_does_not_answer_is_told_in_its_words(program: Program) -> None:
    program("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    (line,) = ContainerProvider().check()
    assert line.detail == "docker does not answer: Cannot connect to the Docker daemon"
    assert "docker info" in line.hint


def test_an_engine_that_answers_nonsense_is_told(program: Program) -> None:
    program("podman", "echo nonsense")
    (line,) = ContainerProvider().check()
    assert (line.is_ok, "cannot be read" in line.detail) == (False, True)


def test_a_missing_image_is_told_with_how_to_build_it(program: Program) -> None:
    program("docker", f"{_answer(DOCKER)}\necho 'Error: No such image: belljar:latest' >&2; exit 1")
    engine, image = ContainerProvider().check()
    assert (engine.is_ok, image.is_ok) == (True, False)
    assert image.detail == "belljar:latest: Error: No such image: belljar:latest"
    assert "docker build -t belljar:latest ." in image.hint


def test_a_container_that_does_not_start_is_told_in_the_engines_words(program: Program) -> None:
    refusing = 'case "$*" in *inspect*) echo "{}";; *) echo "OCI runtime error: crun: no" >&2; exit 126;; esac'
    program("podman", f"{_answer(PODMAN)}\n{refusing}")
    *_, line = ContainerProvider().check()
    assert (line.name, line.is_ok) == ("container", False)
    assert line.detail == "podman made no container: OCI runtime error: crun: no"


def test_an_image_with_volumes_is_refused_where_the_engine_would_make_them(program: Program) -> None:
    program("docker", f"""{_answer(DOCKER)}\necho '{{"Volumes": {{"/data": {{}}}}}}'""")
    *_, line = ContainerProvider().check()
    assert (line.is_ok, "/data" in line.detail) == (False, True)


def test_podman_is_asked_first_and_the_one_that_works_is_taken(program: Program) -> None:
    program("podman", "exit 1")
    program("docker", _answer(DOCKER))
    silent, answering = find_engines("auto")
    assert silent == ("podman", "status 1")
    assert isinstance(answering, ContainerEngine)
    assert (answering.kind, answering.version, answering.controllers) == ("docker", "28.2.2", {"memory", "pids"})
    assert [*find_engines("podman")] == [silent]


def test_docker_says_what_it_can_limit(program: Program) -> None:
    for key, controller in {"MemoryLimit": "memory", "CpuCfsQuota": "cpu", "PidsLimit": "pids"}.items():
        program("docker", _answer({"ServerVersion": "28.2.2", key: True}))
        (engine,) = find_engines("docker")
        assert isinstance(engine, ContainerEngine)
        assert engine.controllers == {controller}


def test_a_program_called_docker_may_be_podman(program: Program) -> None:
    program("docker", _answer(PODMAN))
    (engine,) = find_engines("docker")
    assert isinstance(engine, ContainerEngine)
    assert engine.kind == "podman"


def test_rootless_podman_sets_no_limits_in_the_old_hierarchy(program: Program) -> None:
    host = {**PODMAN["host"], "security": {"rootless": True}, "cgroupVersion": "v1"}
    program("podman", _answer({**PODMAN, "host": host}))
    (engine,) = find_engines("auto")
    assert isinstance(engine, ContainerEngine)
    assert (engine.is_rootless, engine.controllers) == (True, frozenset())


def test_podman_is_tried_with_other_runtimes_and_without_mapped_users(program: Program) -> None:
    program("runc", "")
    engine = ContainerEngine("podman", "podman", "5", is_rootless=True, controllers=frozenset())
    tried = [(fallback.options, fallback.maps_users) for fallback in engine.fallbacks()]
    assert (("--runtime", "runc"), True) in tried
    assert ((), False) in tried
    assert engine.users(None)[0][:2] == ["--userns", "keep-id"]
    assert replace(engine, maps_users=False).users(None)[0] == ["--user", "0:0"]


def test_other_platforms_than_on_linux_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    (line,) = ContainerProvider().check()
    assert (line.is_ok, "darwin" in line.detail) == (False, True)


async def test_opening_without_an_engine_is_refused_with_the_next_action(program: Program, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        await ContainerProvider().open(SandboxSpec("s", tmp_path, tmp_path, tmp_path))
    assert refusal.value.hint == "Install podman or docker"


# What is shown


def test_the_interpreter_is_a_shown_trees_else_the_images(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    spec = SandboxSpec("s", tmp_path, tmp_path, tmp_path, [tmp_path])
    assert find_interpreter(spec, ["true"]) == str(tmp_path / "bin" / "python3")
    (tmp_path / "bin" / "python3").unlink()
    (tmp_path / "bin" / "python3").symlink_to("/usr/bin/env")
    assert find_interpreter(spec, ["true"]) == "python3"


def test_a_path_that_would_be_read_as_options_is_refused(tmp_path: Path) -> None:
    engine = ContainerEngine("docker", "docker", "28", is_rootless=False, controllers=frozenset())
    folder = tmp_path / "a,readonly=false"
    folder.mkdir()
    arguments = RunArguments(engine, "image", SandboxSpec("s", folder, tmp_path, tmp_path), "name", [])
    with pytest.raises(InvalidArgument, match="readonly=false"):
        arguments.mounts(["true"], tmp_path, tmp_path)


async def test_a_tree_is_shown_read_only_at_its_own_path(
    provider: Provider, open_sandbox: Opener, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    (tree / "file").write_text("shown")
    sandbox, _ = await open_sandbox(provider, readable=[tree])
    code = f"print(open('{tree}/file').read(), flush=True); open('{tree}/other', 'w')"
    outcome = await run(sandbox, code)
    assert outcome.output.startswith("shown\n")
    assert "Read-only file system" in outcome.output


async def test_the_session_is_a_user_of_its_own_with_a_name(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, spec = await open_sandbox(provider)
    code = "import os, pwd; print(pwd.getpwuid(os.getuid()).pw_name, os.getgroups() in ([], [os.getgid()]))"
    assert (await run(sandbox, code)).output == "belljar True\n"
    if os.geteuid() == 0 and not provider.warning:
        assert spec.workspace.stat().st_uid >= 10_000


# The handshake


async def test_nothing_of_the_init_process_is_left_for_the_session(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(provider)
    code = """
import os
print(os.listdir('/run/container-init'), os.listdir('/run/belljar'))
for path in ('/proc/1/fd/3', '/proc/1/mem', '/proc/1/environ'):
    try: print(open(path, 'rb').read(9))
    except OSError as error: print(error.strerror)
"""
    assert (await run(sandbox, code)).output == "[] []\n" + "Permission denied\n" * 3


async def test_one_peer_is_let_in_and_nobody_after_it() -> None:
    handshake = Handshake(os.geteuid(), {"passwd": "text"})
    path, folder = str(handshake.step / "init.sock"), handshake.step.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(path)
        init = await handshake.wait_for_init()
        assert init is not None
        assert init.pid == os.getpid()
        assert not folder.exists()
        with pytest.raises(OSError, match="No such file"):
            second.connect(path)
        init.connection.close()


async def test_another_user_is_not_let_in() -> None:
    handshake = Handshake(os.geteuid() + 1, {})
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.setblocking(False)
        stranger.connect(str(handshake.step / "init.sock"))
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
    handshake.close()
    assert await handshake.wait_for_init() is None


async def test_the_environment_is_not_told_to_the_engine(
    provider: Provider, open_sandbox: Opener, engine: ContainerEngine
) -> None:
    sandbox, _ = await open_sandbox(provider)
    reading, writing = os.pipe()
    code = "import signal; print('up', flush=True); signal.pause()"
    await sandbox.spawn(
        [PYTHON, "-c", code], environment={**ENVIRONMENT, "TOKEN": "hunter2"}, stdout=writing, stderr=writing
    )
    os.close(writing)
    await read_until(reading, b"up")
    os.close(reading)
    (name,) = [name for name in engine.names(_numbers()) if name.startswith(f"belljar-{os.getpid()}-")]
    told = subprocess.run(engine.command("inspect", name), capture_output=True, text=True, check=True).stdout
    assert "container-init" in told
    assert "hunter2" not in told
    assert "signal.pause" not in told


async def test_a_descriptor_may_have_a_number_beyond_the_limit(provider: Provider, tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sandbox = await provider.open(_spec(tmp_path))
    reading, writing = os.pipe()
    number = os.dup2(writing, min(soft - 1, 900), inheritable=False)
    outcome = await run(sandbox, f"import os; os.write({number}, b'far')", pass_fds=[number])
    for descriptor in (writing, number):
        os.close(descriptor)
    await sandbox.aclose()
    assert outcome.output == ""
    assert await read_to_end(reading) == "far"


async def test_a_missing_command_is_told_on_stderr(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(provider)
    outcome = await run(sandbox, "", command=["nowhere"])
    assert (outcome.status, outcome.output) == (127, "belljar: nowhere: No such file or directory\n")


async def test_what_cannot_be_executed_is_refused_before_a_container_is_made(
    provider: Provider, open_sandbox: Opener
) -> None:
    sandbox, _ = await open_sandbox(provider)
    with pytest.raises(InvalidArgument, match="null byte"):
        await run(sandbox, "a\0b")
    with pytest.raises(InvalidArgument, match="variable name"):
        await run(sandbox, "pass", environment={"A=B": ""})


async def test_an_interpreter_that_the_image_cannot_run_is_told_in_its_words(
    provider: Provider, open_sandbox: Opener, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "python3").write_text("#!/bin/sh\necho 'GLIBC_9.99 not found' >&2\nexit 1\n")
    (tree / "bin" / "python3").chmod(0o755)
    sandbox = await provider.open(_spec(tmp_path, readable=[tree]))
    with pytest.raises(SandboxUnavailable, match=r"GLIBC_9\.99 not found"):
        await run(sandbox, "", command=["true"])
    await sandbox.aclose()


# Limits


async def test_limits_hold_and_are_told(provider: Provider, tmp_path: Path) -> None:
    if provider.warning:
        pytest.skip(provider.warning)
    sandbox = await provider.open(_spec(tmp_path))
    code = """
import os, resource, signal, sys
print(os.cpu_count(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], open('/proc/meminfo').readline().split()[1])
for folder in ('/tmp', '/dev/shm', '/home/belljar'):
    try: open(folder + '/file', 'wb').write(bytes(9 << 20))
    except OSError as error: print(error.strerror)
    os.unlink(folder + '/file')
try:
    while os.fork(): pass
    signal.pause()
except OSError as error: print(error.strerror, flush=True)
bytearray(256 << 20)
"""
    outcome = await run(sandbox, code)
    full = "No space left on device\n" * 3
    assert outcome.output == f"1 100 {128 * 1024}\n{full}Resource temporarily unavailable\n"
    assert outcome.status == -signal.SIGKILL
    found = {incident.kind: incident.detail for incident in sandbox.incidents()}
    assert found.keys() == {"out_of_memory", "too_many_processes"}
    assert found["out_of_memory"].endswith("the limit is 128 MB")
    assert sandbox.memory_peak_mb() > 100
    assert sandbox.incidents() == []
    await sandbox.aclose()


def test_limits_are_found_in_a_unified_group_above_the_commands_own(tmp_path: Path) -> None:
    """crun puts the command into a group below the one that it limits."""
    own = tmp_path / "scope" / "container"
    own.mkdir(parents=True)
    for folder, most in ((own, "max"), (own.parent, str(128 << 20))):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "pids.max").write_text("max\n")
    (own.parent / "memory.events").write_text("oom 1\noom_kill 1\n")
    found = containment.limiting(ControlGroups("v2", dict.fromkeys(("memory", "pids"), own), is_unified=True), LIMITS)
    assert found == {"memory": own.parent}
    group = adopt(found, is_unified=True)
    assert group.hits("memory") == 1
    group.release()


# The end


async def test_nothing_outlives_a_server_that_is_killed(
    provider: Provider, engine: ContainerEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    sources = Path(container.__file__).parents[2]
    host = await usable("process").open(SandboxSpec("server", tmp_path, tmp_path, tmp_path))
    reading, writing = os.pipe()
    server = await host.spawn(
        [sys.executable, "-c", SERVER, str(writing), str(folder), import_image(), PYTHON, *map(str, READABLE)],
        environment={**os.environ, "PYTHONPATH": os.pathsep.join([str(sources), *sys.path])},
        stdout=writing,
        stderr=writing,
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        assert (await read_until(reading, b"xx"))[-2:] == b"xx"
        os.kill(server.pid, signal.SIGKILL)
        assert await read_to_end(reading) == ""
    finally:
        await host.aclose()
    await until(lambda: not any(name.startswith(f"belljar-{server.pid}-") for name in engine.names(_numbers())))


async def test_containers_of_dead_servers_are_removed_and_no_others(
    provider: Provider, engine: ContainerEngine, tmp_path: Path
) -> None:
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    names = {
        "dead": f"belljar-{os.getpid()}-1-test",
        "ours": f"belljar-{os.getpid()}-{started}-test",
        "foreign": "somebody-1-1-elses",
    }
    try:
        for name in names.values():
            create = engine.command(
                "create", "--name", name, "--label", f"{LABEL}={_numbers()}", import_image(), "true"
            )
            subprocess.run(create, check=True, capture_output=True)
        another = ContainerProvider("auto", import_image())
        sandbox = await another.open(_spec(tmp_path))
        await sandbox.aclose()
        assert {*engine.names(_numbers())} >= {names["ours"], names["foreign"]}
        assert names["dead"] not in engine.names(_numbers())
    finally:
        for name in names.values():
            engine.remove(name)


async def test_a_spawn_that_is_cancelled_leaves_nothing(
    provider: Provider, open_sandbox: Opener, engine: ContainerEngine
) -> None:
    sandbox, _ = await open_sandbox(provider)
    spawning = asyncio.create_task(run(sandbox, "import signal; signal.pause()"))
    # One step: the engine has been started, and has not answered.
    await asyncio.sleep(0)
    spawning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawning
    await sandbox.aclose()
    assert not [name for name in engine.names(_numbers()) if name.startswith(f"belljar-{os.getpid()}-")]


# A kernel


async def test_a_kernel_runs_is_interrupted_and_dies_of_a_cause(
    provider: Provider, default_environment: Environment, tmp_path: Path
) -> None:
    flags = {"sandbox": "container", "container_image": import_image(), "memory_mb": 256, "data_directory": tmp_path}
    async with open_session(str(default_environment.python), **flags) as session:
        assert (await session.execute("answer = 6 * 7; answer")).result == "42"
        assert (await session.execute("while True: pass", timeout_s=0.5)).status == "timeout"
        assert (await session.execute("answer")).result == "42"
        if not provider.warning:
            assert (await session.execute("bytearray(512 << 20)")).status == "out_of_memory"


def _spec(folder: Path, readable: list[Path] | None = None) -> SandboxSpec:
    places = [folder / name for name in ("workspace", "scratch", "home")]
    for place in places:
        place.mkdir()
    return SandboxSpec("s", *places, readable=READABLE if readable is None else readable, limits=LIMITS)


def _numbers() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)
