"""A group as the folders it is made of: what both hierarchies do alike, and how their files are read and written.

Knows no limits.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from belljar.sandboxes.child import open_pidfd

MEBIBYTE = 1024 * 1024
PERIOD_US = 100_000
"""What shares of a processor are counted in."""
PATIENCE_S = 2.0
"""How long a group is waited for that was killed."""
RETRY_S = 0.002


@dataclass(slots=True)
class Folders:
    """What both worlds do alike."""

    folders: dict[str, Path]
    _open: dict[str, int] = field(default_factory=dict[str, int])

    def read(self, controller: str, file: str) -> bytes:
        """A file of a controller. It stays open: it is read after every cell, and opening takes 20 µs of 21."""
        if (folder := self.folders.get(controller)) is None:
            return b""
        try:
            if file not in self._open:
                self._open[file] = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._open[file], 16_384, 0)
        except OSError:
            return b""

    def reset(self, controller: str, file: str) -> None:
        """Write a zero into a file of a controller. It stays open like those that are read."""
        if (folder := self.folders.get(controller)) is None:
            return
        with contextlib.suppress(OSError):
            if (name := f"{file} to reset") not in self._open:
                self._open[name] = os.open(folder / file, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._open[name], b"0", 0)

    def entry(self, controller: str, file: str, name: bytes) -> int:
        """The number behind a name, in a file of `name number` lines; 0 where there is none."""
        return self.entries(controller, file, name)[0]

    def entries(self, controller: str, file: str, *names: bytes) -> list[int]:
        """The same of several names, as they were at one moment."""
        lines = b"\n" + self.read(controller, file)
        return [int(lines.partition(b"\n%b " % name)[2].partition(b"\n")[0] or 0) for name in names]

    def members(self) -> set[int]:
        """See the contract."""
        return {pid for folder in set(self.folders.values()) for pid in _numbers(folder / "cgroup.procs")}

    def has(self, pid: int) -> bool:
        """See the contract."""
        return all(pid in _numbers(folder / "cgroup.procs") for folder in set(self.folders.values()))

    def join(self, pid: int) -> None:
        """See the contract."""
        for folder in set(self.folders.values()):
            write(folder / "cgroup.procs", pid)

    def allow_processes(self, count: int) -> None:
        """See the contract."""
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", count)

    def kill(self) -> None:
        """See the contract."""
        for pid in self.members():
            # Through a descriptor, and only if it is still in here: the number may be a stranger's by now.
            if (pidfd := open_pidfd(pid)) is None:
                continue
            try:
                if pid in self.members():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def release(self) -> None:
        """See the contract."""
        while self._open:
            os.close(self._open.popitem()[1])

    def remove(self) -> bool:
        """See the contract."""
        self.release()
        self.folders = {name: folder for name, folder in self.folders.items() if not try_removal(folder)}
        return not self.folders


def clear(folder: Path) -> None:
    """Kill everybody in a group that is no sandbox's any more, and remove it."""
    group = Folders({"": folder})
    deadline = time.monotonic() + PATIENCE_S
    while not group.remove() and time.monotonic() < deadline:
        group.kill()
        time.sleep(RETRY_S)


def folders_below(folder: Path) -> list[Path]:
    """The groups directly below one; none where there is no such group."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def try_removal(folder: Path) -> bool:
    """Whether the group is gone now: one with members or groups below it stays."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def write(path: Path, value: int | str) -> None:
    """Write one value to a file of a group; `FileNotFoundError` where this kernel has no such file."""
    # Without O_CREAT and O_TRUNC: a file that a kernel lacks must be missed, not made.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"{value}".encode())
    finally:
        os.close(descriptor)


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
