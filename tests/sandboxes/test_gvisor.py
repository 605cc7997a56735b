"""What is gVisor's own: another kernel behind the same contract, its limits, and what is said where it is missing."""

import os
import platform
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from trials import DEADLINE_S, ENVIRONMENT, PYTHON, READABLE, Opener, read_until, run, usable

from belljar.errors import SandboxUnavailable
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import Interruptible, Limits, Provider, SandboxSpec
from belljar.sandboxes.gvisor import GVisorProvider, find_runsc
from belljar.sandboxes.limits.systemd_scope import find_control_groups
from belljar.sandboxes.process import open_descendant
from belljar.settings import Settings

pytestmark = pytest.mark.anyio

FORK = """
import os, signal
children = []
try:
    while len(children) < 100:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError as error:
    print(error.errno, 3 < len(children) < 20)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
MACHINE = """
import errno, os, resource
print(os.cpu_count(), open('/proc/cpuinfo').read().count('processor'), open('/proc/meminfo').readline().split()[1])
print(resource.getrlimit(resource.RLIMIT_NOFILE))
for folder in ('/tmp', '/dev/shm', '/home/belljar', '/mnt/data'):
    try:
        open(folder + '/large', 'wb').write(bytes(12 << 20))
    except OSError as error:
        print(folder, errno.errorcode[error.errno])
"""


@pytest.fixture
def gvisor() -> Provider:
    return usable("gvisor")


def _spec(folder: Path, limits: Limits) -> SandboxSpec:
    for name in ("workspace", "scratch", "home"):
        (folder / name).mkdir()
    return SandboxSpec(
        "limited", folder / "workspace", folder / "scratch", folder / "home", readable=READABLE, limits=limits
    )


async def test_the_kernel_inside_is_another(gvisor: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(gvisor)
    told = (await run(sandbox, "import os; print(os.uname().release, os.getpid())")).output
    assert told.split()[0] != platform.release()
    assert told.split()[1] == "1"


async def test_nothing_can_be_written_but_the_sessions_own(gvisor: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(gvisor)
    code = f"""
import errno, os
for folder in ('/', '/usr', '/etc', '/proc', {str(Path(PYTHON).parent)!r}):
    try:
        open(folder + '/new', 'w'); print('written:', folder)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOENT): print(folder, error)
open('/dev/null', 'r+').close()
"""
    assert (await run(sandbox, code)).output == ""


async def test_a_tree_in_a_temporary_folder_is_shown(gvisor: Provider, open_sandbox: Opener, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("shown")
    sandbox, _ = await open_sandbox(gvisor, readable=[tree])
    code = f"import os; print(open({str(tree / 'file')!r}).read(), os.listdir({str(tmp_path)!r}))"
    assert (await run(sandbox, code)).output == "shown ['tree']\n"


async def test_what_the_host_writes_later_is_seen(gvisor: Provider, open_sandbox: Opener, tmp_path: Path) -> None:
    tree = tmp_path / "packages"
    tree.mkdir()
    sandbox, _ = await open_sandbox(gvisor, readable=[tree])
    ours, theirs = socket.socketpair()
    code = (
        f"import os, socket; peer = socket.socket(fileno={theirs.fileno()}); print(os.listdir({str(tree)!r}))\n"
        f"peer.send(b'x'); peer.recv(1); print(os.listdir({str(tree)!r}))"
    )
    reading, writing = os.pipe()
    with ours, theirs:
        process = await sandbox.spawn(
            [PYTHON, "-uc", code], environment=ENVIRONMENT, stdout=writing, stderr=writing, pass_fds=[theirs.fileno()]
        )
        os.close(writing)
        assert await read_until(reading, b"\n") == b"[]\n"
        (tree / "late.py").write_text("")
        ours.send(b"x")
        assert await read_until(reading, b"\n") == b"['late.py']\n"
        assert await process.wait() == 0
    os.close(reading)


async def test_a_socket_of_the_hosts_in_the_scratch_folder_answers(gvisor: Provider, open_sandbox: Opener) -> None:
    sandbox, spec = await open_sandbox(gvisor)
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(DEADLINE_S)
        server.bind(str(spec.scratch / "socket"))
        (spec.scratch / "socket").chmod(0o666)
        server.listen()
        code = (
            "import socket; peer = socket.socket(socket.AF_UNIX); "
            f"peer.connect({sandbox.scratch + '/socket'!r}); peer.send(b'asked')"
        )
        assert (await run(sandbox, code)).status == 0
        connection, _ = server.accept()
        with connection:
            assert connection.recv(5) == b"asked"


async def test_an_interrupt_reaches_the_command(gvisor: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(gvisor)
    code = "import signal\ntry: print('up', flush=True); signal.pause()\nexcept KeyboardInterrupt: print('stopped')"
    reading, writing = os.pipe()
    process = await sandbox.spawn([PYTHON, "-c", code], environment=ENVIRONMENT, stdout=writing, stderr=writing)
    os.close(writing)
    await read_until(reading, b"up\n")
    assert isinstance(process, Interruptible)
    process.interrupt()
    assert await read_until(reading, b"stopped\n") == b"stopped\n"
    assert await process.wait() == 0
    os.close(reading)
    process.interrupt()


def test_a_server_that_is_killed_takes_its_kernels_along(gvisor: Provider, tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_gvisor import ENVIRONMENT, PYTHON, Limits, _spec, usable
async def main():
    sandbox = await usable("gvisor").open(_spec(Path({str(tmp_path)!r}), Limits()))
    command = [PYTHON, "-c", "import signal; print('up', flush=True); signal.pause()"]
    await sandbox.spawn(command, environment=ENVIRONMENT, stdout=1, stderr=2)
    signal.pause()
asyncio.run(main())
"""
    assert gvisor.name == "gvisor"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        kernel = open_descendant(server.pid, "runsc-sandbox")
        assert kernel is not None
        server.kill()
        assert select.select([kernel], [], [], DEADLINE_S)[0] == [kernel]
        os.close(kernel)


async def test_want_of_memory_is_a_sigkill_and_told(gvisor: Provider, tmp_path: Path) -> None:
    if "memory" not in find_control_groups().usable():
        pytest.skip("control groups cannot be written here")
    sandbox = await gvisor.open(_spec(tmp_path, Limits(memory_mb=160)))
    try:
        outcome = await run(sandbox, "held = []\nwhile len(held) < 50: held.append(bytearray(b'x' * (10 << 20)))")
        assert outcome.status == -signal.SIGKILL
        assert [incident.kind for incident in sandbox.incidents()] == ["out_of_memory"]
        assert (await run(sandbox, "print('again')")).output == "again\n"
    finally:
        await sandbox.aclose()


async def test_a_fork_bomb_is_refused_and_the_kernel_lives(gvisor: Provider, tmp_path: Path) -> None:
    sandbox = await gvisor.open(_spec(tmp_path, Limits(processes=20)))
    try:
        assert (await run(sandbox, FORK)).output == "11 True\n"
    finally:
        await sandbox.aclose()


async def test_the_machine_inside_has_the_size_of_the_limits(gvisor: Provider, tmp_path: Path) -> None:
    limits = Limits(memory_mb=400, cpus=1, open_files=64, temporary_mb=8, disk_mb=10)
    sandbox = await gvisor.open(_spec(tmp_path, limits))
    try:
        assert (await run(sandbox, MACHINE)).output.splitlines() == [
            f"1 1 {400 * 1024}",
            "(64, 64)",
            "/tmp ENOSPC",
            "/dev/shm ENOSPC",
            "/home/belljar ENOSPC",
            "/mnt/data EFBIG",
        ]
    finally:
        await sandbox.aclose()


async def test_a_command_that_is_not_there_ends_with_its_name(gvisor: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(gvisor)
    outcome = await run(sandbox, "", command=["/nowhere/python"])
    assert outcome.status > 0
    assert "/nowhere/python" in outcome.output


def test_without_runsc_it_says_what_to_install() -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        open_provider(Settings(sandbox="gvisor", runsc="no-such-runsc"))
    if sys.platform == "linux":
        assert "no-such-runsc: not found" in refusal.value.message
        assert "install" in refusal.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="it is refused elsewhere, before anything is asked")
def test_what_does_not_work_is_told_in_its_own_words(tmp_path: Path) -> None:
    if not all(check.is_ok for check in usable("namespace").check()):
        pytest.skip("no bubblewrap")
    broken = tmp_path / "runsc"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *version*) echo "runsc version 7";; *) echo "it broke" >&2; exit 1;; esac\n'
    )
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    provider = GVisorProvider(str(broken))
    found, verdict = provider.check()
    assert (found.is_ok, found.detail) == (True, f"7, {broken}")
    assert not verdict.is_ok
    assert "it broke" in verdict.detail


@pytest.mark.parametrize("name", ["darwin", "win32"])
def test_other_platforms_than_on_linux_it_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "platform", name)
    (check,) = GVisorProvider().check()
    assert not check.is_ok
    assert name in check.detail


def test_a_program_that_cannot_run_is_told(tmp_path: Path) -> None:
    program = tmp_path / "runsc"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    assert str(find_runsc(str(program))).startswith("does not run")


def test_nobody_below_goes_by_that_name() -> None:
    assert open_descendant(os.getpid(), "runsc-sandbox") is None
