"""A server that is killed while it starts a sandbox leaves nobody behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trials import usable

from belljar.sandboxes.namespace.process import OrphanReaper

DEADLINE_S = 30
SERVER = """
import asyncio, os, signal, sys
from pathlib import Path
from belljar.sandboxes.base import SandboxSpec
from belljar.sandboxes.namespace.process import NamespaceProcess
from belljar.sandboxes.namespace.provider import NamespaceProvider

point, folder, stdout = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
passing = getattr(NamespaceProcess, point)

def pass_and_die(*arguments):
    passing(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    for name in ("workspace", "scratch", "home"):
        (folder / name).mkdir()
    spec = SandboxSpec("session", folder / "workspace", folder / "scratch", folder / "home")
    sandbox = await NamespaceProvider().open(spec)
    setattr(NamespaceProcess, point, pass_and_die)
    await sandbox.spawn(["/bin/sleep", "infinity"], environment={}, stdout=stdout, stderr=stdout)

asyncio.run(main())
"""


@pytest.mark.parametrize("point", ["listen", "_on_info", "release_command"])
def test_nothing_outlives_a_server_that_is_killed_as_it_starts_a_sandbox(point: str, tmp_path: Path) -> None:
    usable("namespace")
    reading, writing = os.pipe()
    server = subprocess.run(
        [sys.executable, "-c", SERVER, point, str(tmp_path), str(writing)],
        pass_fds=[writing],
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(writing)
    assert server.returncode == -signal.SIGKILL
    _read_end(reading)


def test_who_is_named_is_ended_and_who_is_struck_is_spared_though_a_first_shell_was_killed() -> None:
    will = OrphanReaper()
    nobody, will._line = os.pipe()
    os.close(nobody)
    reading, writing = os.pipe()
    pausing = [sys.executable, "-c", "import signal; signal.pause()"]
    named, struck = (
        subprocess.Popen(pausing, stdout=writing, start_new_session=True, pass_fds=[writing]) for _ in range(2)
    )
    os.close(writing)
    will.register(-named.pid)
    will.register(-struck.pid)
    will.unregister(-struck.pid)
    will.unregister(-struck.pid)
    # As if the server had died: its end of the line is closed.
    os.close(will._line or -1)
    assert named.wait(DEADLINE_S) == -signal.SIGKILL
    assert struck.poll() is None
    struck.kill()
    struck.wait()
    _read_end(reading)


def _read_end(reading: int) -> None:
    """Everyone who had the other end is gone."""
    watch = subprocess.run(["/bin/cat"], stdin=reading, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    os.close(reading)
    assert watch.stdout == b""
