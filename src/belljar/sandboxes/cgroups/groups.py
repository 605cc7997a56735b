"""The groups of one server: its own, and one for each sandbox below that."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from belljar.sandboxes.base import Limits
from belljar.sandboxes.cgroups.base import Group
from belljar.sandboxes.cgroups.folders import PATIENCE_S, RETRY_S, clear, folders_below, try_removal, write
from belljar.sandboxes.cgroups.locks import PREFIX, make_locked, remove_abandoned
from belljar.sandboxes.cgroups.old import OldGroup
from belljar.sandboxes.cgroups.unified import UnifiedGroup
from belljar.sandboxes.hierarchy import LEAF, ControlGroups
from belljar.supervisor import Deposit, NoSupervisor, Supervisor

KEY = "groups"

log = logging.getLogger(__name__)


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
        self._supervisor: Supervisor | NoSupervisor = NoSupervisor()
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
                clear(folder)
        if self._locks and self._living == 0:
            self._close()

    def _left_there(self) -> list[Path]:
        return [folder for place in set(self._places.values()) for folder in folders_below(place / self._run)]

    def _deposit(self) -> None:
        if not self._supervisor.has(KEY):
            folders = [str(place / self._run) for place in set(self._places.values())]
            self._supervisor.keep(KEY, Deposit({"run": self._run}, self._locks, folders=folders))

    async def remove(self, group: Group) -> None:
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
