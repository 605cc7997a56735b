"""Control groups of sessions, in the v1 and the v2 hierarchy: made with their limits, joined, read, killed, removed.

A server makes one group for itself, `belljar-<pid>-<token>`, and holds a lock on its folder that ends with the server,
and below that one group for each sandbox. `cgroup_discovery.py` finds where groups may be made; `limits.py` says what
limits there are and reports which were hit.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from belljar.sandboxes.base import Limits
from belljar.sandboxes.cgroup_discovery import LEAF, ControlGroups
from belljar.sandboxes.child import open_pidfd
from belljar.supervisor import Deposit, NoSupervisor, SupervisorClient

__all__ = ["MEBIBYTE", "PREFIX", "ControlGroup", "GroupV1", "ServerGroups", "adopt"]


# What a control group can do, in either hierarchy


class ControlGroup(Protocol):
    """The control group of one sandbox."""

    folders: dict[str, Path]
    """By controller. Only controllers with a limit are here."""

    def entrances(self) -> list[str]:
        """Return the files that a process with one thread writes `0` to when it wants to join."""
        ...

    def oom_kills(self) -> int:
        """Return how many processes the kernel ever killed in it because memory ran out."""
        ...

    def refused_forks(self) -> int:
        """Return how many processes and threads the kernel ever refused in it."""
        ...

    def throttled_periods(self) -> int:
        """Return in how many periods its processes ever had to wait because their share of the processors was used."""
        ...

    def take_peak_bytes(self) -> int:
        """Return the most memory that was charged since the last call; 0 when unknown."""
        ...

    def cached_bytes(self) -> int:
        """Return how much of the charged memory is page cache of files, which the kernel can reclaim."""
        ...

    def members(self) -> set[int]:
        """Return the processes in it now."""
        ...

    def has(self, pid: int) -> bool:
        """Return whether a process is in it, in every controller's tree."""
        ...

    def join(self, pid: int) -> None:
        """Move a process into it; `ProcessLookupError` when the process is gone."""
        ...

    def allow_processes(self, count: int) -> None:
        """Change the limit on the number of processes, if it has one; existing processes stay."""
        ...

    def kill(self) -> None:
        """Kill every process in it, without waiting."""
        ...

    def release(self) -> None:
        """Close the files of it that are open; may be called twice."""
        ...

    def remove(self) -> bool:
        """Remove it if no process is in it any more; return whether it is gone."""
        ...


# What both hierarchies do alike

MEBIBYTE = 1024 * 1024
PERIOD_US = 100_000
"""The period in which shares of a processor are counted."""
PATIENCE_S = 2.0
"""How long to wait until a killed group is empty."""
RETRY_S = 0.002
_MOVES = 20

log = logging.getLogger(__name__)


@dataclass(slots=True)
class GroupFolders:
    """A group as its folders, with what v1 and v2 do alike. Knows no limits."""

    folders: dict[str, Path]
    _open: dict[str, int] = field(default_factory=dict[str, int])

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

    def throttled_periods(self) -> int:
        """See `ControlGroup`."""
        return self.entry("cpu", "cpu.stat", b"nr_throttled")

    def members(self) -> set[int]:
        """See `ControlGroup`."""
        return {pid for folder in set(self.folders.values()) for pid in _numbers(folder / "cgroup.procs")}

    def has(self, pid: int) -> bool:
        """See `ControlGroup`."""
        return all(pid in _numbers(folder / "cgroup.procs") for folder in set(self.folders.values()))

    def join(self, pid: int) -> None:
        """See `ControlGroup`."""
        for folder in set(self.folders.values()):
            write(folder / "cgroup.procs", pid)

    def allow_processes(self, count: int) -> None:
        """See `ControlGroup`."""
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", count)

    def kill(self) -> None:
        """See `ControlGroup`."""
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
        """See `ControlGroup`."""
        while self._open:
            os.close(self._open.popitem()[1])

    def remove(self) -> bool:
        """See `ControlGroup`."""
        self.release()
        self.folders = {name: folder for name, folder in self.folders.items() if not try_removal(folder)}
        return not self.folders


def clear(folder: Path) -> None:
    """Kill every process in a group that no sandbox uses any more, and remove the group."""
    group = GroupFolders({"": folder})
    deadline = time.monotonic() + PATIENCE_S
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


def pass_on(folder: Path, controllers: Sequence[str]) -> list[str]:
    """Have a v2 group pass controllers on to the groups below it; return those that it does, `OSError` if none."""
    file = folder / "cgroup.subtree_control"
    try:
        write(file, " ".join(f"+{name}" for name in controllers))
    except OSError as error:
        # All are refused if one is.
        passed = [name for name in controllers if _is_written(file, f"+{name}")]
        if not passed:
            raise
        refused = [name for name in controllers if name not in passed]
        log.warning("%s does not pass on its controllers %s: %s", folder, ", ".join(refused), error.strerror)
        return passed
    return [*controllers]


def _is_written(path: Path, value: str) -> bool:
    try:
        write(path, value)
    except OSError:
        return False
    return True


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


# A server's own group: its lock ends with the server, and groups without a locked one above are abandoned

PREFIX = "belljar-"


def make_locked(folder: Path) -> int:
    """Make a server's group and lock it. Retry if another server took it for abandoned before it was locked."""
    while True:
        # Without this, a place that is gone would be tried for ever.
        folder.parent.stat()
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def remove_abandoned(place: Path) -> None:
    """Remove the groups of servers that were killed, which are those whose lock nobody holds."""
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


# v1


@dataclass(slots=True)
class GroupV1(GroupFolders):
    """A group of the v1 hierarchy: a folder in each controller's tree."""

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers that the group has."""
        if folder := self.folders.get("memory"):
            size = limits.memory_mb * MEBIBYTE
            write(folder / "memory.limit_in_bytes", size)
            # Hosts without swap accounting have no such file.
            with contextlib.suppress(FileNotFoundError):
                write(folder / "memory.memsw.limit_in_bytes", size)
        if folder := self.folders.get("cpu"):
            write(folder / "cpu.cfs_period_us", PERIOD_US)
            write(folder / "cpu.cfs_quota_us", round(limits.cpus * PERIOD_US))
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", limits.processes)

    def entrances(self) -> list[str]:
        """Return the `tasks` files, not `cgroup.procs`: moving only itself stops no others (1 ms for 15)."""
        return [str(folder / "tasks") for folder in self.folders.values()]

    def oom_kills(self) -> int:
        """See `ControlGroup`. `memory.failcnt` stays 0 when memory and swap have the same limit; `oom_kill` counts."""
        return self.entry("memory", "memory.oom_control", b"oom_kill")

    def refused_forks(self) -> int:
        """See `ControlGroup`."""
        return self.entry("pids", "pids.events", b"max")

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
class GroupV2(GroupFolders):
    """A group of the v2 hierarchy: one folder."""

    _peak: int = -1
    _highest: int = 0
    """The highest peak that was read, for kernels that cannot reset it."""

    @property
    def _folder(self) -> Path | None:
        return next(iter(self.folders.values()), None)

    def limit(self, limits: Limits) -> None:
        """Write the limits of the controllers that the group has."""
        if folder := self.folders.get("memory"):
            write(folder / "memory.max", limits.memory_mb * MEBIBYTE)
            with contextlib.suppress(FileNotFoundError):
                write(folder / "memory.swap.max", 0)
            # `memory.oom.group` stays 0: the kernel then kills the largest process, and not the earlier states of the
            # session with it, nor the session for the sake of a program that it started.
            self.open_peak(folder / "memory.peak")
        if folder := self.folders.get("cpu"):
            write(folder / "cpu.max", f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
        if folder := self.folders.get("pids"):
            write(folder / "pids.max", limits.processes)

    def open_peak(self, path: Path) -> None:
        """Open the peak for `take_peak_bytes`, which resets it per descriptor from Linux 6.12 on; before, it cannot."""
        for mode in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(OSError):
                self._peak = os.open(path, mode | os.O_CLOEXEC)
                return

    def entrances(self) -> list[str]:
        """See `ControlGroup`."""
        folder = self._folder
        return [str(folder / "cgroup.procs")] if folder else []

    def oom_kills(self) -> int:
        """See `ControlGroup`."""
        return self.entry("memory", "memory.events", b"oom_kill")

    def refused_forks(self) -> int:
        """See `ControlGroup`."""
        return self.entry("pids", "pids.events", b"max")

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
            GroupFolders.kill(self)

    def release(self) -> None:
        """See `ControlGroup`."""
        if self._peak >= 0:
            os.close(self._peak)
            self._peak = -1
        GroupFolders.release(self)


# All groups of one server

KEY = "groups"


def adopt(folders: dict[str, Path], *, is_unified: bool) -> ControlGroup:
    """Return a group that another process made and limited, for reading; `release` it, never remove it."""
    if not is_unified:
        return GroupV1(folders)
    group = GroupV2(folders)
    if "memory" in folders:
        group.open_peak(folders["memory"] / "memory.peak")
    return group


class ServerGroups:
    """The groups of one server. The server's own group is made with the first sandbox's and removed with the last."""

    def __init__(self, offer: ControlGroups) -> None:
        self.offer = offer
        self._places = offer.usable()
        self._run = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._locks: list[int] = []
        self._group_count = 0
        self._made = 0
        self._supervisor: SupervisorClient | NoSupervisor = NoSupervisor()
        self._restored: set[Path] = set()

    @property
    def controllers(self) -> list[str]:
        """The controllers that can be used here."""
        return [*self._places]

    def make(self, session_id: str, limits: Limits) -> ControlGroup | None:
        """Make a group with these limits; return None when there is no limit or no controller for it."""
        if not self._governed(limits):
            return None
        if not self._locks and not self._is_opened():
            return None
        # Opening may have found that the host does not give what it seemed to.
        if not self._governed(limits):
            return None
        self._deposit()
        self._made += 1
        name = f"{''.join(filter(str.isalnum, session_id))[:32]}-{self._made}"
        self._group_count += 1
        try:
            try:
                return self._make_limited(name, limits)
            except FileNotFoundError:
                # Somebody has removed our group, or taken its controllers away.
                self._renew()
                return self._make_limited(name, limits)
        except BaseException:
            self._forget()
            raise

    def _governed(self, limits: Limits) -> dict[str, Path]:
        """Return the places of the controllers for which there is a limit."""
        wanted = {"memory": limits.memory_mb, "cpu": limits.cpus, "pids": limits.processes}
        return {name: place for name, place in self._places.items() if wanted[name]}

    def _make_limited(self, name: str, limits: Limits) -> ControlGroup:
        folders = {controller: place / self._run / name for controller, place in self._governed(limits).items()}
        group = (GroupV2 if self.offer.is_unified else GroupV1)(folders)
        try:
            for folder in set(folders.values()):
                folder.mkdir()
            group.limit(limits)
        except BaseException:
            group.remove()
            raise
        return group

    def _renew(self) -> None:
        """Make the server's own group again. What is left of it stays, with the sessions that are in there."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []
        if gone := next((place for place in self._places.values() if not place.is_dir()), None):
            if not (left := self.offer.usable()):
                raise FileNotFoundError(errno.ENOENT, "it was removed", str(gone))
            self._places = left
        for place in set(self._places.values()):
            self._lock(place)

    # Groups that outlive their server

    def keep_with(self, supervisor: SupervisorClient) -> None:
        """Have the supervisor hold the lock beyond the end of this server; take over an earlier server's groups."""
        self._supervisor = supervisor
        if supervisor.has(KEY):
            deposit = supervisor.take(KEY)
            self._run, self._locks = deposit.words["run"], deposit.descriptors
            # A scope of systemd's is that server's own, and goes on with its supervisor, which starts the sandboxes.
            if places := deposit.words.get("places"):
                self._places = {name: Path(place) for name, place in places.items()}
            names = [folder.name for folder in self._left_there()]
            self._made = max((int(name.rpartition("-")[2]) for name in names), default=0)

    def restore(self, folders: dict[str, Path]) -> ControlGroup:
        """Return an earlier server's group, which is now for this server to remove."""
        self._group_count += 1
        self._restored.update(folders.values())
        return adopt(folders, is_unified=self.offer.is_unified)

    def remove_unclaimed(self) -> None:
        """Remove the groups of an earlier server that were not restored. Called after the last `restore`."""
        for folder in self._left_there():
            if folder not in self._restored:
                clear(folder)
        if self._locks and self._group_count == 0:
            self._close()

    def _left_there(self) -> list[Path]:
        return [folder for place in set(self._places.values()) for folder in folders_below(place / self._run)]

    def _deposit(self) -> None:
        if not self._supervisor.has(KEY):
            folders = [str(place / self._run) for place in set(self._places.values())]
            places = {name: str(place) for name, place in self._places.items()}
            self._supervisor.store(KEY, Deposit({"run": self._run, "places": places}, self._locks, folders=folders))

    async def remove(self, group: ControlGroup) -> None:
        """Kill every process left in a group of this server, and remove the group."""
        deadline = time.monotonic() + PATIENCE_S
        # A killed process leaves its group a little later, and v1 has nothing that tells when.
        while not group.remove():
            if time.monotonic() > deadline:
                log.warning("control group was not removed: %s", next(iter(group.folders.values())))
                break
            group.kill()
            await asyncio.sleep(RETRY_S)
        self._forget()

    def _forget(self) -> None:
        self._group_count -= 1
        if self._group_count == 0:
            self._close()

    def _is_opened(self) -> bool:
        """Make the server's own group; if the host refuses, use no control groups from then on."""
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
        if self.offer.has_tenants:
            self._move_out()
        if self.offer.is_unified:
            for place in places:
                self._places = dict.fromkeys(pass_on(place, [*self._places]), place)
        for place in set(self._places.values()):
            self._lock(place)

    def _lock(self, place: Path) -> None:
        self._locks.append(make_locked(place / self._run))
        if self.offer.is_unified:
            pass_on(place, [*self._places])
            pass_on(place / self._run, [*self._places])

    def _move_out(self) -> None:
        """Move the processes of our v2 group into a leaf of it: a group that passes controllers on holds no process."""
        place = next(iter(self._places.values()))
        leaf = place / LEAF
        leaf.mkdir(exist_ok=True)
        # Read again until it is empty, because those that have not moved yet may start others.
        for _ in range(_MOVES):
            if not (pids := _numbers(place / "cgroup.procs")):
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    write(leaf / "cgroup.procs", pid)

    def _close(self) -> None:
        for place in set(self._places.values()):
            try_removal(place / self._run)
        for lock in self._locks:
            os.close(lock)
        self._locks = []
        self._supervisor.drop(KEY)
