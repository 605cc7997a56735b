"""Control groups of sessions: made with their limits, joined, read, killed and removed. Both worlds, v1 and v2.

A server makes one group for itself, `belljar-<pid>-<token>`, held by a lock that ends with it, and below that one for
each sandbox. Where groups may be made is `hierarchy.py`'s; what is said about a limit that was hit, `limits.py`'s.
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
from belljar.sandboxes.child import open_pidfd
from belljar.sandboxes.hierarchy import LEAF, ControlGroups
from belljar.supervisor import Deposit, Supervisor

PREFIX = "belljar-"
KEY = "groups"
MEBIBYTE = 1024 * 1024

_PERIOD_US = 100_000
_PATIENCE_S = 2.0
_RETRY_S = 0.002

log = logging.getLogger(__name__)


class Group(Protocol):
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


@dataclass(slots=True)
class _Folders:
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

    def entry(self, controller: str, file: str, name: bytes) -> int:
        """The number behind a name, in a file of `name number` lines; 0 where there is none."""
        for line in self.read(controller, file).splitlines():
            key, _, number = line.partition(b" ")
            if key == name:
                return int(number)
        return 0

    def members(self) -> set[int]:
        return {pid for folder in set(self.folders.values()) for pid in _numbers(folder / "cgroup.procs")}

    def has(self, pid: int) -> bool:
        return all(pid in _numbers(folder / "cgroup.procs") for folder in set(self.folders.values()))

    def join(self, pid: int) -> None:
        for folder in set(self.folders.values()):
            _write(folder / "cgroup.procs", pid)

    def allow_processes(self, count: int) -> None:
        if folder := self.folders.get("pids"):
            _write(folder / "pids.max", count)

    def kill(self) -> None:
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
        while self._open:
            os.close(self._open.popitem()[1])

    def remove(self) -> bool:
        self.release()
        self.folders = {name: folder for name, folder in self.folders.items() if not _is_removed(folder)}
        return not self.folders


@dataclass(slots=True)
class OldGroup(_Folders):
    """A group of the v1 hierarchy: a folder in each controller's tree."""

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers it has."""
        if folder := self.folders.get("memory"):
            size = limits.memory_mb * MEBIBYTE
            _write(folder / "memory.limit_in_bytes", size)
            # Hosts without swap accounting have no such file; with no swap to use, nothing is lost.
            with contextlib.suppress(FileNotFoundError):
                _write(folder / "memory.memsw.limit_in_bytes", size)
        if folder := self.folders.get("cpu"):
            _write(folder / "cpu.cfs_period_us", _PERIOD_US)
            _write(folder / "cpu.cfs_quota_us", round(limits.cpus * _PERIOD_US))
        if folder := self.folders.get("pids"):
            _write(folder / "pids.max", limits.processes)

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
        if (folder := self.folders.get("memory")) is None:
            return 0
        peak = int(self.read("memory", "memory.max_usage_in_bytes") or 0)
        with contextlib.suppress(OSError):
            _write(folder / "memory.max_usage_in_bytes", 0)
        return peak

    def cached_bytes(self) -> int:
        """See the contract."""
        cache, shared = (self.entry("memory", "memory.stat", name) for name in (b"total_cache", b"total_shmem"))
        return max(0, cache - shared)


@dataclass(slots=True)
class UnifiedGroup(_Folders):
    """A group of the v2 hierarchy: one folder."""

    _peak: int = -1

    @property
    def _folder(self) -> Path | None:
        return next(iter(self.folders.values()), None)

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers it has."""
        if folder := self.folders.get("memory"):
            _write(folder / "memory.max", limits.memory_mb * MEBIBYTE)
            with contextlib.suppress(FileNotFoundError):
                _write(folder / "memory.swap.max", 0)
            self.open_peak(folder / "memory.peak")
        if folder := self.folders.get("cpu"):
            _write(folder / "cpu.max", f"{round(limits.cpus * _PERIOD_US)} {_PERIOD_US}")
        if folder := self.folders.get("pids"):
            _write(folder / "pids.max", limits.processes)

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
        return max(0, self.entry("memory", "memory.stat", b"file") - self.entry("memory", "memory.stat", b"shmem"))

    def kill(self) -> None:
        """`cgroup.kill` (Linux 5.14) leaves no moment for a fork to slip away."""
        folder = self._folder
        try:
            if folder is not None:
                _write(folder / "cgroup.kill", 1)
        except OSError:
            _Folders.kill(self)

    def release(self) -> None:
        """See the contract."""
        if self._peak >= 0:
            os.close(self._peak)
            self._peak = -1
        _Folders.release(self)


def adopt(folders: dict[str, Path], *, is_unified: bool) -> Group:
    """A group that somebody else made and limited, to be read; `release` it, never remove it."""
    if not is_unified:
        return OldGroup(folders)
    group = UnifiedGroup(folders)
    if "memory" in folders:
        group.open_peak(folders["memory"] / "memory.peak")
    return group


class Groups:
    """The groups of one server. The server's own is made with the first and removed with the last."""

    def __init__(self, offer: ControlGroups) -> None:
        self._offer = offer
        self._places = offer.usable()
        self._run = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._locks: list[int] = []
        self._living = 0
        self._made = 0
        self._supervisor: Supervisor | None = None
        self._readopted: set[Path] = set()

    @property
    def controllers(self) -> list[str]:
        """What can be limited here."""
        return [*self._places]

    def make(self, session_id: str, limits: Limits) -> Group | None:
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
        group = (UnifiedGroup if self._offer.is_unified else OldGroup)(folders)
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

    def keep_with(self, supervisor: Supervisor) -> None:
        """Have the lock held beyond the end of this server; take over what an earlier one has left there."""
        self._supervisor = supervisor
        if supervisor.has(KEY):
            deposit = supervisor.take(KEY)
            self._run, self._locks = deposit.words["run"], deposit.descriptors
            names = [folder.name for folder in self._left_there()]
            self._made = max((int(name.rpartition("-")[2]) for name in names), default=0)

    def readopt(self, folders: dict[str, Path]) -> Group:
        """A group of an earlier server's, which is ours to remove now."""
        self._living += 1
        self._readopted.update(folders.values())
        return adopt(folders, is_unified=self._offer.is_unified)

    def settle(self) -> None:
        """All that was kept is readopted: what else an earlier server left there goes."""
        for folder in self._left_there():
            if folder not in self._readopted:
                _clear(_Folders({"": folder}))
        if self._locks and self._living == 0:
            self._close()

    def _left_there(self) -> list[Path]:
        return [folder for place in set(self._places.values()) for folder in _below(place / self._run)]

    def _deposit(self) -> None:
        if self._supervisor is not None and not self._supervisor.has(KEY):
            folders = [str(place / self._run) for place in set(self._places.values())]
            self._supervisor.keep(KEY, Deposit({"run": self._run}, self._locks, folders=folders))

    async def remove(self, group: Group) -> None:
        """Kill whoever is left in a group of ours, and remove it."""
        deadline = time.monotonic() + _PATIENCE_S
        # A killed process leaves its group some moments later, and the old hierarchy has nothing that tells when.
        while not group.remove():
            if time.monotonic() > deadline:
                log.warning("control group was not removed: %s", next(iter(group.folders.values())))
                break
            group.kill()
            await asyncio.sleep(_RETRY_S)
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
            _remove_abandoned(place)
        if self._offer.tenants:
            self._move_out()
        for place in places:
            self._locks.append(_make_locked(place / self._run))
            if self._offer.is_unified:
                _write(place / self._run / "cgroup.subtree_control", self._enabling)

    def _move_out(self) -> None:
        """A unified group that passes controllers on holds no process: who is in ours moves into a leaf of it."""
        place = next(iter(self._places.values()))
        leaf = place / LEAF
        leaf.mkdir(exist_ok=True)
        for pid in self._offer.tenants:
            with contextlib.suppress(ProcessLookupError):
                _write(leaf / "cgroup.procs", pid)
        _write(place / "cgroup.subtree_control", self._enabling)

    @property
    def _enabling(self) -> str:
        return " ".join(f"+{controller}" for controller in self._places)

    def _close(self) -> None:
        for place in set(self._places.values()):
            _is_removed(place / self._run)
        for lock in self._locks:
            os.close(lock)
        self._locks = []
        if self._supervisor is not None:
            self._supervisor.drop(KEY)


def _make_locked(folder: Path) -> int:
    """Make a server's group and hold its lock; one that is not locked yet may be taken for abandoned meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def _remove_abandoned(place: Path) -> None:
    """Groups of servers that were killed: nobody holds their lock."""
    for run in _below(place):
        if not run.name.startswith(PREFIX) or run.name == LEAF:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in _below(run):
                    _clear(_Folders({"": folder}))
                _is_removed(run)
            finally:
                os.close(descriptor)


def _clear(group: _Folders) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not group.remove() and time.monotonic() < deadline:
        group.kill()
        time.sleep(_RETRY_S)


def _below(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, value: int | str) -> None:
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
