"""One control group, in the v1 or the v2 hierarchy: limited, joined, read, killed, removed.

`server_groups.py` makes the groups of a server's sandboxes; `enforcement.py` says what limits there are and reports
which were hit.
"""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from belljar.sandboxes.base import Limits
from belljar.sandboxes.child import open_pidfd
from belljar.sandboxes.limits.table import CONTROLLERS, GroupFiles

TIMEOUT_S = 2.0
"""How long to wait until a killed group is empty."""
RETRY_S = 0.002


@dataclass(slots=True)
class ControlGroup(ABC):
    """The control group of one sandbox, with what both hierarchies do alike."""

    is_unified: ClassVar[bool]
    folders: dict[str, Path]
    """By controller. Only controllers with a limit are here."""
    _open: dict[str, int] = field(default_factory=dict[str, int])

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers that the group has."""
        for name, folder in self.folders.items():
            limit, files = CONTROLLERS[name], self.files(name)
            most = round(getattr(limits, limit.field) * limit.unit)
            for file, text in files.limits.items():
                try:
                    write(folder / file, text.format(most))
                except FileNotFoundError:
                    if file != files.optional:
                        raise

    def files(self, controller: str) -> GroupFiles:
        """Return the names of a controller's files."""
        return CONTROLLERS[controller].v2 if self.is_unified else CONTROLLERS[controller].v1

    def hits(self, controller: str) -> int:
        """Return how often the kernel ever enforced its limit of this controller, as by a kill or a refused fork."""
        return self.entry(controller, *self.files(controller).hits)

    @abstractmethod
    def procs_files(self) -> list[str]:
        """Return the files that a process with one thread writes `0` to when it wants to join."""

    @abstractmethod
    def own_shortages(self) -> int | None:
        """Return how often its own limit of memory, not one above it, left no room; None where that is not counted."""

    @abstractmethod
    def take_peak_bytes(self) -> int:
        """Return the most memory that was charged since the last call; 0 when unknown."""

    @abstractmethod
    def cached_bytes(self) -> int:
        """Return how much of the charged memory is page cache of files, which the kernel can reclaim."""

    def read(self, controller: str, file: str) -> bytes:
        """Return the content of a controller's file. It stays open: opening takes 20 of 21 µs."""
        if (folder := self.folders.get(controller)) is None:
            return b""
        try:
            if file not in self._open:
                self._open[file] = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._open[file], 16_384, 0)
        except OSError:
            return b""

    def reset(self, controller: str, file: str) -> None:
        """Write a zero into a controller's file. It stays open like those that are read."""
        if (folder := self.folders.get(controller)) is None:
            return
        with contextlib.suppress(OSError):
            if (name := f"{file} to reset") not in self._open:
                self._open[name] = os.open(folder / file, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._open[name], b"0", 0)

    def entry(self, controller: str, file: str, name: bytes) -> int:
        """Return the number after a name, in a file of `name number` lines; 0 where the name is missing."""
        return self.entries(controller, file, name)[0]

    def entries(self, controller: str, file: str, *names: bytes) -> list[int]:
        """Return the numbers after several names, all from the same moment."""
        lines = b"\n" + self.read(controller, file)
        return [int(lines.partition(b"\n%b " % name)[2].partition(b"\n")[0] or 0) for name in names]

    def members(self) -> set[int]:
        """Return the processes in it now."""
        return {pid for folder in set(self.folders.values()) for pid in numbers(folder / "cgroup.procs")}

    def has(self, pid: int) -> bool:
        """Return whether a process is in it, in every controller's tree."""
        return all(pid in numbers(folder / "cgroup.procs") for folder in set(self.folders.values()))

    def join(self, pid: int) -> None:
        """Move a process into it; `ProcessLookupError` when the process is gone."""
        for folder in set(self.folders.values()):
            write(folder / "cgroup.procs", pid)

    def allow_processes(self, count: int) -> None:
        """Change the limit on the number of processes, if it has one; existing processes stay."""
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", count)

    def kill(self) -> None:
        """Kill every process in it, without waiting."""
        for pid in self.members():
            # By a pidfd, and only if the pid is still in here, because the number may belong to another process by now.
            if (pidfd := open_pidfd(pid)) is None:
                continue
            try:
                if pid in self.members():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def release(self) -> None:
        """Close the files of it that are open; may be called twice."""
        while self._open:
            os.close(self._open.popitem()[1])

    def remove(self) -> bool:
        """Remove it if no process is in it any more; return whether it is gone."""
        self.release()
        self.folders = {name: folder for name, folder in self.folders.items() if not try_removal(folder)}
        return not self.folders


def clear(folder: Path) -> None:
    """Kill every process in a group that no sandbox uses any more, and remove the group."""
    group = GroupV1({"": folder})  # which kills one by one, as either hierarchy can
    deadline = time.monotonic() + TIMEOUT_S
    while not group.remove() and time.monotonic() < deadline:
        group.kill()
        time.sleep(RETRY_S)


def folders_below(folder: Path) -> list[Path]:
    """Return the groups directly below one; none where there is no such group."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def try_removal(folder: Path) -> bool:
    """Remove a group and return whether it is gone; one with members or with groups below it stays."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def write(path: Path, value: int | str) -> None:
    """Write one value to a file of a group; `FileNotFoundError` where this kernel has no such file."""
    # Without O_CREAT and O_TRUNC, because a file that this kernel lacks must raise an error, not be made.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"{value}".encode())
    finally:
        os.close(descriptor)


def numbers(path: Path) -> list[int]:
    """Return the numbers in a file of a group; none where they cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # in a third of the time that `read_text` takes
    except OSError:
        return []
    words = b""
    try:
        while piece := os.read(descriptor, 65_536):
            words += piece
        return [int(word) for word in words.split()]
    except (OSError, ValueError):
        return []
    finally:
        os.close(descriptor)


# v1


@dataclass(slots=True)
class GroupV1(ControlGroup):
    """A group of the v1 hierarchy: a folder in each controller's tree."""

    is_unified: ClassVar[bool] = False

    def procs_files(self) -> list[str]:
        """Return the `tasks` files, not `cgroup.procs`: moving only itself stops no others (1 ms for 15)."""
        return [str(folder / "tasks") for folder in self.folders.values()]

    def own_shortages(self) -> int | None:
        """See `ControlGroup`."""
        return None

    def take_peak_bytes(self) -> int:
        """See `ControlGroup`."""
        peak = int(self.read("memory", "memory.max_usage_in_bytes") or 0)
        self.reset("memory", "memory.max_usage_in_bytes")
        return peak

    def cached_bytes(self) -> int:
        """See `ControlGroup`."""
        cache, shared = self.entries("memory", "memory.stat", b"total_cache", b"total_shmem")
        return max(0, cache - shared)


# v2


@dataclass(slots=True)
class GroupV2(ControlGroup):
    """A group of the v2 hierarchy: one folder."""

    is_unified: ClassVar[bool] = True
    _peak: int = -1
    _highest: int = 0
    """The highest peak that was read, for kernels that cannot reset it."""

    @property
    def _folder(self) -> Path | None:
        return next(iter(self.folders.values()), None)

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers that the group has."""
        ControlGroup.limit(self, limits)
        if folder := self.folders.get("memory"):
            self.open_peak(folder / "memory.peak")

    def open_peak(self, path: Path) -> None:
        """Open the peak for `take_peak_bytes`, which resets it per descriptor from Linux 6.12 on; before, it cannot."""
        for mode in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(OSError):
                self._peak = os.open(path, mode | os.O_CLOEXEC)
                return

    def procs_files(self) -> list[str]:
        """See `ControlGroup`."""
        folder = self._folder
        return [str(folder / "cgroup.procs")] if folder else []

    def own_shortages(self) -> int | None:
        """See `ControlGroup`."""
        return self.entry("memory", "memory.events", b"oom")

    def take_peak_bytes(self) -> int:
        """See `ControlGroup`. Where the kernel cannot reset it, a peak below an earlier one is told as what is used."""
        if self._peak < 0:
            return 0
        try:
            peak = int(os.pread(self._peak, 64, 0))
        except (OSError, ValueError):
            return 0
        try:
            os.pwrite(self._peak, b"0\n", 0)
        except OSError:
            if peak <= self._highest:
                return int(self.read("memory", "memory.current") or 0)
            self._highest = peak
        return peak

    def cached_bytes(self) -> int:
        """See `ControlGroup`."""
        cache, shared = self.entries("memory", "memory.stat", b"file", b"shmem")
        return max(0, cache - shared)

    def kill(self) -> None:
        """See `ControlGroup`. With `cgroup.kill` (Linux 5.14) no process can escape by a fork meanwhile."""
        folder = self._folder
        try:
            if folder is not None:
                write(folder / "cgroup.kill", 1)
        except OSError:
            ControlGroup.kill(self)

    def release(self) -> None:
        """See `ControlGroup`."""
        if self._peak >= 0:
            os.close(self._peak)
            self._peak = -1
        ControlGroup.release(self)


def adopt(folders: dict[str, Path], *, is_unified: bool) -> ControlGroup:
    """Return a group that another process made and limited, for reading; `release` it, never remove it."""
    if not is_unified:
        return GroupV1(folders)
    group = GroupV2(folders)
    if "memory" in folders:
        group.open_peak(folders["memory"] / "memory.peak")
    return group
