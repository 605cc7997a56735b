"""Control groups of sessions: made with their limits, joined, read, killed and removed. Both worlds, v1 and v2.

A server makes one group for itself, `belljar-<pid>-<token>`, held by a lock that ends with it (`locks.py`), and below
that one for each sandbox (`groups.py`). A group is what `base.py` says, in the old hierarchy (`old.py`) or in the
unified one (`unified.py`). Where groups may be made is `hierarchy.py`'s; what is said about a limit that was hit,
`limits.py`'s.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from belljar.sandboxes.base import Limits
from belljar.sandboxes.cgroup_discovery import LEAF, ControlGroups
from belljar.sandboxes.child import open_pidfd
from belljar.supervisor import Deposit, NoSupervisor, SupervisorClient

__all__ = ["MEBIBYTE", "PREFIX", "ControlGroup", "GroupV1", "ServerGroups", "adopt"]


# What a control group of one sandbox can do, whichever hierarchy it is in.


class ControlGroup(Protocol):
    """The control group of one sandbox."""

    folders: dict[str, Path]
    """By controller: those with a limit, and no others."""

    def entrances(self) -> list[str]:
        """Files that a process with one thread writes `0` to when it wants to come in."""
        ...

    def oom_kills(self) -> int:
        """How many processes were killed for want of memory, ever."""
        ...

    def refused_forks(self) -> int:
        """How many processes and threads were refused, ever."""
        ...

    def take_peak_bytes(self) -> int:
        """The most that was charged since the last call; 0 when unknown."""
        ...

    def cached_bytes(self) -> int:
        """What of it is copies of files on disk, which the kernel takes back when it needs room."""
        ...

    def members(self) -> set[int]:
        """The processes in it now."""
        ...

    def has(self, pid: int) -> bool:
        """Whether a process is in all of it."""
        ...

    def join(self, pid: int) -> None:
        """Move a process in; `ProcessLookupError` when it is gone."""
        ...

    def allow_processes(self, count: int) -> None:
        """Change how many there may be, where they are counted; those that are there stay."""
        ...

    def kill(self) -> None:
        """Kill everybody inside, without waiting."""
        ...

    def release(self) -> None:
        """Close what is open of it; may be called twice."""
        ...

    def remove(self) -> bool:
        """Remove it, if nobody is in it any more; whether it is gone."""
        ...


# A group as the folders it is made of: what both hierarchies do alike, and how their files are read and written.
# Knows no limits.

MEBIBYTE = 1024 * 1024
PERIOD_US = 100_000
"""What shares of a processor are counted in."""
PATIENCE_S = 2.0
"""How long a group is waited for that was killed."""
RETRY_S = 0.002


@dataclass(slots=True)
class GroupFolders:
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
    group = GroupFolders({"": folder})
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


# A server's own group, held by a lock on its folder: whose lock nobody holds was killed, and its groups go.

PREFIX = "belljar-"


def make_locked(folder: Path) -> int:
    """Make a server's group and hold its lock; one that is not locked yet may be taken for abandoned meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def remove_abandoned(place: Path) -> None:
    """Groups of servers that were killed: nobody holds their lock."""
    for run in folders_below(place):
        if not run.name.startswith(PREFIX) or run.name == LEAF:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in folders_below(run):
                    clear(folder)
                try_removal(run)
            finally:
                os.close(descriptor)


# Groups of the old hierarchy, v1: a tree for each controller.


@dataclass(slots=True)
class GroupV1(GroupFolders):
    """A group of the v1 hierarchy: a folder in each controller's tree."""

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers it has."""
        if folder := self.folders.get("memory"):
            size = limits.memory_mb * MEBIBYTE
            write(folder / "memory.limit_in_bytes", size)
            # Hosts without swap accounting have no such file; with no swap to use, nothing is lost.
            with contextlib.suppress(FileNotFoundError):
                write(folder / "memory.memsw.limit_in_bytes", size)
        if folder := self.folders.get("cpu"):
            write(folder / "cpu.cfs_period_us", PERIOD_US)
            write(folder / "cpu.cfs_quota_us", round(limits.cpus * PERIOD_US))
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", limits.processes)

    def entrances(self) -> list[str]:
        """`tasks` and not `cgroup.procs`: moving only itself, a process need not stop all others (1 ms for 15)."""
        return [str(folder / "tasks") for folder in self.folders.values()]

    def oom_kills(self) -> int:
        """`memory.failcnt` stays 0 when memory and swap have the same limit: only `oom_kill` tells."""
        return self.entry("memory", "memory.oom_control", b"oom_kill")

    def refused_forks(self) -> int:
        """See the contract."""
        return self.entry("pids", "pids.events", b"max")

    def take_peak_bytes(self) -> int:
        """See the contract."""
        peak = int(self.read("memory", "memory.max_usage_in_bytes") or 0)
        self.reset("memory", "memory.max_usage_in_bytes")
        return peak

    def cached_bytes(self) -> int:
        """See the contract."""
        cache, shared = self.entries("memory", "memory.stat", b"total_cache", b"total_shmem")
        return max(0, cache - shared)


# Groups of the unified hierarchy, v2: one tree for all controllers.


@dataclass(slots=True)
class GroupV2(GroupFolders):
    """A group of the v2 hierarchy: one folder."""

    _peak: int = -1

    @property
    def _folder(self) -> Path | None:
        return next(iter(self.folders.values()), None)

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers it has."""
        if folder := self.folders.get("memory"):
            write(folder / "memory.max", limits.memory_mb * MEBIBYTE)
            with contextlib.suppress(FileNotFoundError):
                write(folder / "memory.swap.max", 0)
            self.open_peak(folder / "memory.peak")
        if folder := self.folders.get("cpu"):
            write(folder / "cpu.max", f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", limits.processes)

    def open_peak(self, path: Path) -> None:
        """From Linux 6.12 on a peak is reset for the descriptor that wrote to it; before, it cannot be."""
        with contextlib.suppress(OSError):
            self._peak = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def entrances(self) -> list[str]:
        """See the contract."""
        folder = self._folder
        return [str(folder / "cgroup.procs")] if folder else []

    def oom_kills(self) -> int:
        """See the contract."""
        return self.entry("memory", "memory.events", b"oom_kill")

    def refused_forks(self) -> int:
        """See the contract."""
        return self.entry("pids", "pids.events", b"max")

    def take_peak_bytes(self) -> int:
        """See the contract."""
        if self._peak < 0:
            return 0
        try:
            peak = int(os.pread(self._peak, 64, 0))
            os.pwrite(self._peak, b"0\n", 0)
        except (OSError, ValueError):
            return 0
        return peak

    def cached_bytes(self) -> int:
        """See the contract."""
        cache, shared = self.entries("memory", "memory.stat", b"file", b"shmem")
        return max(0, cache - shared)

    def kill(self) -> None:
        """`cgroup.kill` (Linux 5.14) leaves no moment for a fork to slip away."""
        folder = self._folder
        try:
            if folder is not None:
                write(folder / "cgroup.kill", 1)
        except OSError:
            GroupFolders.kill(self)

    def release(self) -> None:
        """See the contract."""
        if self._peak >= 0:
            os.close(self._peak)
            self._peak = -1
        GroupFolders.release(self)


# The groups of one server: its own, and one for each sandbox below that.

KEY = "groups"

log = logging.getLogger(__name__)


def adopt(folders: dict[str, Path], *, is_unified: bool) -> ControlGroup:
    """A group that somebody else made and limited, to be read; `release` it, never remove it."""
    if not is_unified:
        return GroupV1(folders)
    group = GroupV2(folders)
    if "memory" in folders:
        group.open_peak(folders["memory"] / "memory.peak")
    return group


class ServerGroups:
    """The groups of one server. The server's own is made with the first and removed with the last."""

    def __init__(self, offer: ControlGroups) -> None:
        self._offer = offer
        self._places = offer.usable()
        self._run = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._locks: list[int] = []
        self._living = 0
        self._made = 0
        self._supervisor: SupervisorClient | NoSupervisor = NoSupervisor()
        self._readopted: set[Path] = set()

    @property
    def controllers(self) -> list[str]:
        """What can be limited here."""
        return [*self._places]

    def make(self, session_id: str, limits: Limits) -> ControlGroup | None:
        """A group with these limits; None when there is none to set, or no controller to set it with."""
        wanted = {"memory": limits.memory_mb, "cpu": limits.cpus, "pids": limits.processes}
        places = {name: folder for name, folder in self._places.items() if wanted[name]}
        if not places:
            return None
        if not self._locks and not self._is_opened():
            return None
        self._deposit()
        self._made += 1
        name = f"{''.join(filter(str.isalnum, session_id))[:32]}-{self._made}"
        folders = {controller: place / self._run / name for controller, place in places.items()}
        group = (GroupV2 if self._offer.is_unified else GroupV1)(folders)
        self._living += 1
        try:
            for folder in set(folders.values()):
                folder.mkdir()
            group.limit(limits)
        except BaseException:
            group.remove()
            self._forget()
            raise
        return group

    # Groups that outlive their server

    def keep_with(self, supervisor: SupervisorClient) -> None:
        """Have the lock held beyond the end of this server; take over what an earlier one has left there."""
        self._supervisor = supervisor
        if supervisor.has(KEY):
            deposit = supervisor.take(KEY)
            self._run, self._locks = deposit.words["run"], deposit.descriptors
            names = [folder.name for folder in self._left_there()]
            self._made = max((int(name.rpartition("-")[2]) for name in names), default=0)

    def restore(self, folders: dict[str, Path]) -> ControlGroup:
        """A group of an earlier server's, which is ours to remove now."""
        self._living += 1
        self._readopted.update(folders.values())
        return adopt(folders, is_unified=self._offer.is_unified)

    def remove_unclaimed(self) -> None:
        """All that was kept is readopted: what else an earlier server left there goes."""
        for folder in self._left_there():
            if folder not in self._readopted:
                clear(folder)
        if self._locks and self._living == 0:
            self._close()

    def _left_there(self) -> list[Path]:
        return [folder for place in set(self._places.values()) for folder in folders_below(place / self._run)]

    def _deposit(self) -> None:
        if not self._supervisor.has(KEY):
            folders = [str(place / self._run) for place in set(self._places.values())]
            self._supervisor.store(KEY, Deposit({"run": self._run}, self._locks, folders=folders))

    async def remove(self, group: ControlGroup) -> None:
        """Kill whoever is left in a group of ours, and remove it."""
        deadline = time.monotonic() + PATIENCE_S
        # A killed process leaves its group some moments later, and the old hierarchy has nothing that tells when.
        while not group.remove():
            if time.monotonic() > deadline:
                log.warning("control group was not removed: %s", next(iter(group.folders.values())))
                break
            group.kill()
            await asyncio.sleep(RETRY_S)
        self._forget()

    def _forget(self) -> None:
        self._living -= 1
        if self._living == 0:
            self._close()

    def _is_opened(self) -> bool:
        """Make the server's own group. A host that refuses is one without groups from then on."""
        try:
            self._open()
        except OSError as error:
            log.warning("control groups cannot be used, limits hold per process only: %s", error)
            self._close()
            self._places = {}
            return False
        return True

    def _open(self) -> None:
        places = set(self._places.values())
        for place in places:
            remove_abandoned(place)
        if self._offer.tenants:
            self._move_out()
        for place in places:
            self._locks.append(make_locked(place / self._run))
            if self._offer.is_unified:
                write(place / self._run / "cgroup.subtree_control", self._enabling)

    def _move_out(self) -> None:
        """A unified group that passes controllers on holds no process: who is in ours moves into a leaf of it."""
        place = next(iter(self._places.values()))
        leaf = place / LEAF
        leaf.mkdir(exist_ok=True)
        for pid in self._offer.tenants:
            with contextlib.suppress(ProcessLookupError):
                write(leaf / "cgroup.procs", pid)
        write(place / "cgroup.subtree_control", self._enabling)

    @property
    def _enabling(self) -> str:
        return " ".join(f"+{controller}" for controller in self._places)

    def _close(self) -> None:
        for place in set(self._places.values()):
            try_removal(place / self._run)
        for lock in self._locks:
            os.close(lock)
        self._locks = []
        self._supervisor.drop(KEY)
