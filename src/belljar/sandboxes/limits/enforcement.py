"""Enforces what a session may use: by a control group where there is one, by limits of each process where not.

Reports the limits that were hit as incidents. Starts no process, knows no namespaces; `cgroups.py` writes the
groups.
"""

import asyncio
import contextlib
import math
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import HostCheck, Incident, Limits
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups, read_control_groups
from belljar.sandboxes.limits.cgroups import ControlGroup
from belljar.sandboxes.limits.server_groups import ServerGroups
from belljar.sandboxes.limits.systemd_scope import find_control_groups, groups_advice, request_scope, supervisor_groups
from belljar.sandboxes.limits.table import CONTROLLERS, LIMITS
from belljar.settings import MEBIBYTE
from belljar.supervisor import SupervisorClient

OOM_SCORE = "500"
"""How soon Linux kills a session when memory runs out: the server has 0, checkpoints have 1000."""
# This shell moves itself into the control groups, then becomes the command: a process that moves itself costs 1 ms, one
# that is moved by another up to 15. With `_WAIT` it first waits for a line, so that the server can set its limits
# before it is the command, or another user's process. End of file instead of a line means the server died: it exits.
_NEARLY_ALL = 0.95
"""The share of its limit that a group holds when the kernel kills for it: what is asked for at once has no room."""
_WAIT = "read -r _ || exit 125; "
_JOIN_GROUPS = (
    'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; unset PWD OLDPWD SHLVL; exec "$@"'
)


class Enforcer:
    """What a provider can limit on this host, and for which sandboxes."""

    def __init__(self, offer: ControlGroups | None = None, *, asks_systemd: bool = False) -> None:
        self._given = offer
        self.asks_systemd = asks_systemd
        self._pinned: Counter[int] = Counter()

    @cached_property
    def groups(self) -> ServerGroups:
        """The server's control groups, found when first needed because `belljar --help` makes providers too."""
        return ServerGroups(self._given or (find_control_groups() if self.asks_systemd else read_control_groups()))

    def keep_with(self, supervisor: SupervisorClient) -> None:
        """Have the groups outlive this server, with the supervisor."""
        if self._given is None:
            supervisor.when_started(self._move_beside)
        self.groups.keep_with(supervisor)

    def _move_beside(self, pid: int) -> None:
        if offer := supervisor_groups(pid, asks_systemd=self.asks_systemd):
            self.groups.move_to(offer)

    def check(self) -> HostCheck:
        """Return the line for `doctor`. It never fails, because a session without a group has weaker limits."""
        offered = self.groups.controllers
        lacking = [limit.noun for name, limit in CONTROLLERS.items() if name not in offered]
        if not lacking:
            bound = _listed([CONTROLLERS[name].noun for name in offered])
            return HostCheck("limits", is_ok=True, detail=f"control groups bound the {bound} of a session")
        return HostCheck("limits", is_ok=True, detail=f"{_listed(lacking)}: {self.warning}", hint=self.advice)

    @property
    def warning(self) -> str:
        """What to warn of at start-up where control groups cannot be written; empty where they can."""
        lacking = [name for name in CONTROLLERS if name not in self.groups.controllers]
        if "memory" in lacking or "pids" in lacking:
            warning = (
                "Control groups cannot be written here: memory is limited per process only, not for a whole session"
            )
            return f"{warning} ({self._scope_refusal})" if self._scope_refusal else warning
        return "CPU time is not limited here: sessions are only placed on as many processors" if lacking else ""

    @property
    def advice(self) -> str:
        """What gets this host's control groups for sessions."""
        return groups_advice(self._scope_refusal)

    @property
    def _scope_refusal(self) -> str:
        return request_scope() if self.asks_systemd and self._given is None else ""

    def enforce(self, session_id: str, limits: Limits) -> "Enforcement":
        """Prepare the limits of a sandbox; `Enforcement.release` undoes it."""
        try:
            group = self.groups.make(session_id, limits)
        except OSError as error:
            raise SandboxUnavailable(
                f"The control group of a session cannot be made: {error.filename}: {error.strerror}",
                hint="`belljar doctor` says which groups can be written",
            ) from error
        return Enforcement(self.groups, group, limits, self._choose_processors(limits.cpus))

    def restore(self, fields: dict[str, Any], limits: Limits) -> "Enforcement":
        """Return the limits that an earlier server put into force, from its `Enforcement.handover_fields`."""
        folders = {name: Path(folder) for name, folder in fields["folders"].items()}
        group = self.groups.restore(folders) if folders else None
        processors = Processors(frozenset(fields["processors"]), self._pinned) if fields["processors"] else None
        enforcement = Enforcement(self.groups, group, limits, processors)
        # That server reported its incidents, or they are lost with it; they do not belong to the next cell.
        enforcement.incidents()
        return enforcement

    def _choose_processors(self, cpus: float) -> "Processors | None":
        """Return the processors that the fewest of this server's sessions run on."""
        if sys.platform != "linux":
            return None
        available = os.sched_getaffinity(0)
        wanted = math.ceil(cpus)
        if not 0 < wanted < len(available):
            return None
        chosen = frozenset(sorted(available, key=lambda number: (self._pinned[number], number))[:wanted])
        return Processors(chosen, self._pinned)


class Processors:
    """The processors one sandbox runs on, counted until `release`."""

    def __init__(self, numbers: frozenset[int], counts: "Counter[int]") -> None:
        self.numbers = numbers
        self._counts = counts
        counts.update(numbers)

    def release(self) -> None:
        """Stop counting, because the sandbox is gone."""
        self._counts.subtract(self.numbers)


class Enforcement:
    """The limits of one sandbox, in force."""

    def __init__(
        self, groups: ServerGroups, group: ControlGroup | None, limits: Limits, processors: Processors | None
    ) -> None:
        self.group = group
        self.limits = limits
        self.groups = groups
        self._processors = processors
        self._hits = dict.fromkeys(CONTROLLERS, 0)
        self._own_shortages = 0
        self._shortages_in_peaks = 0
        self._peak_bytes = 0
        self._reported_bytes = 0

    def handover_fields(self) -> dict[str, Any]:
        """Return what a later server needs for `Enforcer.restore`."""
        folders = {name: str(folder) for name, folder in self.group.folders.items()} if self.group else {}
        return {"folders": folders, "processors": sorted(self._processors.numbers) if self._processors else []}

    def detach(self) -> None:
        """Close the files of the group, and leave the limits in force."""
        if self.group is not None:
            self.group.release()

    def limited_command(self, command: Sequence[str], *, waits: bool = False) -> list[str]:
        """Return the command, wrapped so that it is in the group before its first instruction.

        With `waits` it starts only after a line came on its standard input.
        """
        if self.group is None and not waits:
            return [*command]
        procs_files = self.group.procs_files() if self.group else []
        return ["/bin/sh", "-c", _WAIT * waits + _JOIN_GROUPS, "belljar", *procs_files, "--", *command]

    def open_procs_files(self) -> list[int]:
        """Return descriptors by which a process can join the group itself, as the command does."""
        procs_files = self.group.procs_files() if self.group else []
        return [os.open(entry, os.O_WRONLY | os.O_CLOEXEC) for entry in procs_files]

    async def admit(self, pid: int, *, is_alone: bool) -> None:
        """Put a process with one thread, which started elsewhere with other limits, under this sandbox's limits."""
        with contextlib.suppress(ProcessLookupError):
            if self.group is not None and not self.group.has(pid):
                # Linux moves a process only while none is started or ends, and to wait for that takes milliseconds.
                await asyncio.to_thread(self.group.join, pid)
            if self._processors is not None:
                os.sched_setaffinity(pid, self._processors.numbers)
            most = self.process_limits(is_alone=is_alone).get(resource.RLIMIT_NPROC)
            if most is not None:
                with contextlib.suppress(PermissionError):
                    resource.prlimit(pid, resource.RLIMIT_NPROC, (most, most))

    def bind(self, pid: int, *, is_alone: bool) -> None:
        """Set what a process and its children inherit. `is_alone` means that only the session has this user."""
        if sys.platform != "linux":
            return
        with contextlib.suppress(ProcessLookupError):
            for kind, most in self.process_limits(is_alone=is_alone).items():
                _, hard = resource.prlimit(pid, kind)
                most = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.prlimit(pid, kind, (most, most))
            self.place(pid)

    def place(self, pid: int) -> None:
        """Set the processors of a process and its children. Part of `bind`."""
        if sys.platform == "linux" and self._processors is not None:
            os.sched_setaffinity(pid, self._processors.numbers)

    def process_limits(self, *, is_alone: bool) -> dict[int, int]:
        """Return the limits of each process, by the numbers of setrlimit(2). Part of `bind`."""
        governed = self.group.folders if self.group else {}
        chosen = {resource.RLIMIT_CORE: 0}
        for limit in LIMITS:
            is_kept = limit.controller not in governed and (is_alone or not limit.counts_user)
            if limit.rlimit and is_kept and (most := getattr(self.limits, limit.field)):
                chosen[getattr(resource, limit.rlimit)] = most * limit.unit
        if resource.RLIMIT_FSIZE in chosen:
            # One file may fill a temporary folder, which may be larger than the session folder.
            most = self.limits.temporary_mb * MEBIBYTE
            chosen[resource.RLIMIT_FSIZE] = max(chosen[resource.RLIMIT_FSIZE], most)
        return chosen

    @contextlib.contextmanager
    def without_forks(self) -> Generator[None]:
        """Let nobody in the group start a process during the block; without a group, change nothing."""
        if self.group is None or not self.limits.processes:
            yield
            return
        group, before = self.group, self.group.hits("pids")
        with contextlib.suppress(OSError):
            group.allow_processes(0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                group.allow_processes(self.limits.processes)
            # The forks refused meanwhile did not hit the session's own limit.
            self._hits["pids"] += group.hits("pids") - before

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        if self.group is None:
            return []
        found: list[Incident] = []
        for name, limit in CONTROLLERS.items():
            if limit.incident is None:
                continue
            before, self._hits[name] = self._hits[name], self.group.hits(name)
            if self._hits[name] > before:
                detail = limit.detail.format(getattr(self.limits, limit.field)) or self._describe_shortage(self.group)
                found.append(Incident(limit.incident, detail))
        return found

    def _describe_shortage(self, group: ControlGroup) -> str:
        """Return what was used when the kernel killed a process of the group, and which limit that was."""
        self._take_peak(group)
        limit, used = self.limits.memory_mb, round(max(self._peak_bytes, self._reported_bytes) / MEBIBYTE)
        shortages = group.own_shortages()
        # v1 does not count them, but its peak can be reset, so it is that of the kill.
        is_own = shortages > self._own_shortages if shortages is not None else used >= limit * _NEARLY_ALL
        self._own_shortages = shortages or 0
        if is_own:
            return f"used {limit:,} MB, the limit is {limit:,} MB"
        return f"used {used:,} MB of its {limit:,} MB, and what it runs in (service, container, machine) had no more"

    def _take_peak(self, group: ControlGroup) -> None:
        """Keep the most memory that was charged since the last call: all of it, if the limit was hit meanwhile."""
        self._peak_bytes = max(self._peak_bytes, group.take_peak_bytes())
        # Before Linux 6.12 v2's peak is that of the group's whole life, and what is charged after a kill is little.
        if (shortages := group.own_shortages() or 0) > self._shortages_in_peaks:
            self._peak_bytes, self._shortages_in_peaks = self.limits.memory_mb * MEBIBYTE, shortages

    def oom_kills(self) -> int:
        """Return how many processes were killed because memory ran out; 0 where that is not counted."""
        return self.group.hits("memory") if self.group else 0

    def memory_peak_mb(self) -> float:
        """Return the most memory that all processes together held since the last call, less the page cache."""
        if self.group is None:
            return 0.0
        self._take_peak(self.group)
        self._reported_bytes, self._peak_bytes = self._peak_bytes, 0
        return max(0, self._reported_bytes - self.group.cached_bytes()) / MEBIBYTE

    def kill(self) -> None:
        """Kill every process in the group."""
        if self.group is not None:
            self.group.kill()

    async def release(self) -> None:
        """Kill every process left in the group, and remove the group; may be called twice."""
        if self.group is not None:
            group, self.group = self.group, None
            await self.groups.remove(group)
        if self._processors is not None:
            self._processors.release()
            self._processors = None


def rank_for_oom_killer(pid: int) -> None:
    """Let Linux kill this process, and what it starts, before the server when the machine runs out of memory."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(OOM_SCORE)


def counts_processes_of_namespace() -> bool:
    """Return whether RLIMIT_NPROC counts a user namespace's processes, not all of the user's: from Linux 5.14 on."""
    major, _, rest = platform.release().partition(".")
    minor = rest.partition(".")[0]
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) >= (5, 14)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
