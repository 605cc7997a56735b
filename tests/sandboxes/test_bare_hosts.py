"""Hosts that lack what most have: no shared memory, nothing that can be written, hardly any memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cgroup_discovery import unified

from belljar.sandboxes.limits.host_memory import memory_allowance_mb, memory_shortage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts file systems")

WITHOUT_SHARED_MEMORY = """
mount -t tmpfs dev /mnt
for name in null zero full random urandom tty; do touch /mnt/$name; mount --bind /dev/$name /mnt/$name; done
mkdir /mnt/pts; mount --bind /dev/pts /mnt/pts; ln -s pts/ptmx /mnt/ptmx; ln -s /proc/self/fd /mnt/fd
mount --move /mnt /dev
test ! -e /dev/shm && exec "$@"
"""
READ_ONLY = """
mount -o bind,ro,remount / && mount -t tmpfs tmpfs /tmp || exit 77
for place in /var/tmp /tmp; do test $KEEP = $place || mount -t tmpfs -o ro tmpfs $place; done
cd / && exec "$@"
"""
SHARE = """
import asyncio, os, sys, tempfile
from pathlib import Path
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import SandboxSpec
from belljar.settings import Settings
code = "from multiprocessing.shared_memory import *; x = SharedMemory(create=True, size=9); x.unlink(); print(x.size)"
async def main():
    with tempfile.TemporaryDirectory() as folder:
        spec = SandboxSpec("s", *[Path(folder)] * 3, readable=[Path(sys.prefix), Path(sys.base_prefix)])
        sandbox = await open_provider(Settings()).open(spec)
        command = [os.path.realpath(sys.executable), "-c", code]
        process = await sandbox.spawn(command, environment={}, stdout=1, stderr=2)
        status = await process.wait()
        await sandbox.aclose()
        return status
sys.exit(asyncio.run(main()))
"""
OPEN = "from belljar.cli import main; main()"


def _run(mounts: str, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a mount namespace of its own that is changed first."""
    alone = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    command = [*alone, "sh", "-c", mounts, "sh", sys.executable, *words]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    environment = {name: value for name, value in environment.items() if name != "TMPDIR"}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    if "unshare failed" in outcome.stderr or outcome.returncode == 77:
        pytest.skip(outcome.stderr)
    return outcome


def test_a_container_without_shared_memory_has_sessions_with_it() -> None:
    outcome = _run(WITHOUT_SHARED_MEMORY, "-c", SHARE)
    assert (outcome.returncode, outcome.stdout) == (0, "9\n"), outcome.stderr


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("/tmp", ("data_directory /data cannot be used: Read-only file system", "hint: Make room there, or set data")),
        ("none", ("there is no folder for temporary files", "docker run --tmpfs /tmp")),
    ],
)
def test_a_read_only_root_is_told_with_what_to_do(kept: str, words: tuple[str, ...]) -> None:
    if any(Path(sys.executable).is_relative_to(place) for place in ("/tmp", "/var/tmp")):
        pytest.skip(f"{sys.executable} would be covered")
    outcome = _run(
        READ_ONLY, "-c", OPEN, "run", "-c", "1", KEEP=kept, BELLJAR_DATA_DIRECTORY="/data", BELLJAR_ENVIRONMENT="python"
    )
    assert outcome.returncode != 0
    assert "Traceback" not in outcome.stderr
    assert [word for word in words if word not in outcome.stderr] == [], outcome.stderr


def test_a_container_with_64_mb_is_told_that_it_may_be_killed(tmp_path: Path) -> None:
    own, process = unified(tmp_path, controllers="")
    (process.parent / "meminfo").write_text("MemTotal:       24682416 kB\n")
    (own.parent.parent / "memory.max").write_text("max\n")
    assert memory_allowance_mb(process) == 24_103
    assert memory_shortage(process) == ""
    (own.parent / "memory.max").write_text(f"{64 << 20}\n")
    (own / "memory.max").write_text(f"{512 << 20}\n")
    assert memory_allowance_mb(process) == 64
    assert "has 64 MB of memory" in memory_shortage(process)
    assert "docker run -m 512m" in memory_shortage(process)
