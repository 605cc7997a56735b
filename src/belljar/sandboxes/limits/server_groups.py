"""The control groups of one server: where they are made, kept, handed on to the next server, and removed.

A server makes one group for itself, `belljar-<pid>-<token>`, and holds a lock on its folder that ends with the server,
and below that one group for each sandbox. `cgroup_discovery.py` finds where groups may be made; `cgroups.py` is one
group.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Limits
from belljar.sandboxes.limits.cgroup_discovery import LEAF, ControlGroups
from belljar.sandboxes.limits.cgroups import (
    RETRY_S,
    TIMEOUT_S,
    ControlGroup,
    GroupV1,
    GroupV2,
    adopt,
    clear,
    folders_below,
    numbers,
    try_removal,
    write,
)
from belljar.sandboxes.limits.table import CONTROLLERS
from belljar.supervisor import Deposit, NoSupervisor, SupervisorClient

KEY = "groups"
_MOVES = 20

log = logging.getLogger(__name__)

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


# All groups of one server


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
        if not self._supervisor.has(KEY):
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
        return {name: place for name, place in self._places.items() if getattr(limits, CONTROLLERS[name].field)}

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

    def move_to(self, offer: ControlGroups) -> None:
        """Make the groups of later sandboxes elsewhere, because another process than this server starts those."""
        self.offer = offer
        if not self._locks:
            self._places = offer.usable()

    def keep_with(self, supervisor: SupervisorClient) -> None:
        """Have the supervisor hold the lock beyond the end of this server; take over an earlier server's groups."""
        self._supervisor = supervisor
        if not supervisor.has(KEY):
            return
        try:
            deposit = supervisor.take(KEY)
        except SandboxUnavailable as error:
            log.warning("the control groups of an earlier server are not taken over: %s", error.message)
            supervisor.drop(KEY)
            return
        self._run, self._locks = deposit.fields["run"], deposit.descriptors
        # A scope of systemd's is that server's own, and goes on with its supervisor, which starts the sandboxes.
        if places := deposit.fields["places"]:
            self._places = {name: Path(place) for name, place in places.items()}
        names = [folder.name for folder in self._left_there()]
        self._made = max((int(name.rpartition("-")[2]) for name in names), default=0)
        self._deposit()  # in this version's format

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
        folders = [str(place / self._run) for place in set(self._places.values())]
        places = {name: str(place) for name, place in self._places.items()}
        self._supervisor.store(KEY, Deposit({"run": self._run, "places": places}, self._locks, folders=folders))

    async def remove(self, group: ControlGroup) -> None:
        """Kill every process left in a group of this server, and remove the group."""
        deadline = time.monotonic() + TIMEOUT_S
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
            if not (pids := numbers(place / "cgroup.procs")):
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
