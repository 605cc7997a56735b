"""What a session may use, put into force: a control group where there is one, limits of each process where not.

Tells what was hit, as incidents. Makes no process and knows no namespaces; `cgroups/` writes the groups.
"""

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
from belljar.sandboxes.cgroup_discovery import ControlGroups, read_control_groups
from belljar.sandboxes.cgroups import MEBIBYTE, ControlGroup, ServerGroups

_NAMES = {"memory": "memory", "cpu": "CPU", "pids": "processes"}
# Walks into its groups, then becomes the command: what moves itself costs 1 ms, what is moved by another up to 15.
# On demand it waits for a line first, so that it can be bound before it is the command, or another user's.
# Its end instead of a line: the server has died, and what it wanted is wanted no more.
_WAIT = "read -r _ || exit 125; "
_DOORMAN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; unset PWD OLDPWD SHLVL; exec "$@"'


class Enforcer:
    """A provider's view of this host: what can be limited, and for whom."""

    def __init__(self, offer: ControlGroups | None = None) -> None:
        self._given = offer
        self._pinned: Counter[int] = Counter()

    @cached_property
    def groups(self) -> ServerGroups:
        """Read when first needed: `belljar --help` makes providers too."""
        return ServerGroups(self._given or read_control_groups())

    def check(self) -> HostCheck:
        """For `doctor`. Never a failure: a session without a group has limits too, though weaker ones."""
        offered = [_NAMES[name] for name in self.groups.controllers]
        lacking = [name for name in _NAMES.values() if name not in offered]
        if not lacking:
            return HostCheck("limits", is_ok=True, detail=f"control groups bound the {_listed(offered)} of a session")
        detail = f"{_listed(lacking)}: {self.warning}"
        return HostCheck("limits", is_ok=True, detail=detail, hint=DELEGATE)

    @property
    def warning(self) -> str:
        """What to say at start-up where control groups cannot be written; empty where they can."""
        lacking = [name for name in _NAMES if name not in self.groups.controllers]
        if "memory" in lacking or "pids" in lacking:
            return "Control groups cannot be written here: memory is limited per process only, not for a whole session"
        return "CPU time is not limited here: sessions are only placed on as many processors" if lacking else ""

    def enforce(self, session_id: str, limits: Limits) -> "Enforcement":
        """Make ready what a sandbox needs; released by `Enforcement.release`."""
        try:
            group = self.groups.make(session_id, limits)
        except OSError as error:
            raise SandboxUnavailable(
                f"The control group of a session cannot be made: {error.filename}: {error.strerror}",
                hint="`belljar doctor` says which groups can be written",
            ) from error
        return Enforcement(self.groups, group, limits, self._choose_processors(limits.cpus))

    def restore(self, words: dict[str, Any], limits: Limits) -> "Enforcement":
        """What an earlier server has put into force, as it said in `Enforcement.words`."""
        folders = {name: Path(folder) for name, folder in words["folders"].items()}
        group = self.groups.restore(folders) if folders else None
        processors = Processors(frozenset(words["processors"]), self._pinned) if words["processors"] else None
        enforcement = Enforcement(self.groups, group, limits, processors)
        # Told by that server, or lost with it: they are not the next cell's.
        enforcement.incidents()
        return enforcement

    def _choose_processors(self, cpus: float) -> "Processors | None":
        """The processors that the fewest of our sessions are on."""
        if sys.platform != "linux":
            return None
        available = os.sched_getaffinity(0)
        wanted = math.ceil(cpus)
        if not 0 < wanted < len(available):
            return None
        chosen = frozenset(sorted(available, key=lambda number: (self._pinned[number], number))[:wanted])
        return Processors(chosen, self._pinned)


DELEGATE = "Have a control group delegated: `systemd-run --user --scope -p Delegate=yes belljar serve`"


class Processors:
    """Where one sandbox runs, counted until it is released."""

    def __init__(self, numbers: frozenset[int], counts: "Counter[int]") -> None:
        self.numbers = numbers
        self._counts = counts
        counts.update(numbers)

    def release(self) -> None:
        """The sandbox is gone."""
        self._counts.subtract(self.numbers)


class Enforcement:
    """The limits of one sandbox in force."""

    def __init__(
        self, groups: ServerGroups, group: ControlGroup | None, limits: Limits, processors: Processors | None
    ) -> None:
        self.group = group
        self.limits = limits
        self.groups = groups
        self._processors = processors
        self._oom_kills = 0
        self._refused_forks = 0
        self._peak_bytes = 0
        self._told_bytes = 0

    def words(self) -> dict[str, Any]:
        """For a later server, which `Enforcer.readopt`s it."""
        folders = {name: str(folder) for name, folder in self.group.folders.items()} if self.group else {}
        return {"folders": folders, "processors": sorted(self._processors.numbers) if self._processors else []}

    def detach(self) -> None:
        """Let it stay in force without us."""
        if self.group is not None:
            self.group.release()

    def guarded(self, command: Sequence[str], *, waits: bool = False) -> list[str]:
        """The command, started so that it is in the group before its first instruction.

        `waits`: and that it starts only after a line came on its standard input.
        """
        if self.group is None and not waits:
            return [*command]
        entrances = self.group.entrances() if self.group else []
        return ["/bin/sh", "-c", _WAIT * waits + _DOORMAN, "belljar", *entrances, "--", *command]

    def open_entrances(self) -> list[int]:
        """Descriptors for a process to come in by itself, as the command does."""
        entrances = self.group.entrances() if self.group else []
        return [os.open(entrance, os.O_WRONLY | os.O_CLOEXEC) for entrance in entrances]

    def admit(self, pid: int, *, is_alone: bool) -> None:
        """Take in a process with one thread that has grown elsewhere, with limits of its own."""
        with contextlib.suppress(ProcessLookupError):
            if self.group is not None and not self.group.has(pid):
                self.group.join(pid)
            if self._processors is not None:
                os.sched_setaffinity(pid, self._processors.numbers)
            most = self.process_limits(is_alone=is_alone).get(resource.RLIMIT_NPROC)
            if most is not None:
                with contextlib.suppress(PermissionError):
                    resource.prlimit(pid, resource.RLIMIT_NPROC, (most, most))

    def bind(self, pid: int, *, is_alone: bool) -> None:
        """Set what a process and its children inherit. `is_alone`: its user has no processes but the session's."""
        if sys.platform != "linux":
            return
        with contextlib.suppress(ProcessLookupError):
            for kind, most in self.process_limits(is_alone=is_alone).items():
                _, hard = resource.prlimit(pid, kind)
                most = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.prlimit(pid, kind, (most, most))
            self.place(pid)

    def place(self, pid: int) -> None:
        """Choose the processors of a process and its children. Part of `bind`."""
        if sys.platform == "linux" and self._processors is not None:
            os.sched_setaffinity(pid, self._processors.numbers)

    def process_limits(self, *, is_alone: bool) -> dict[int, int]:
        """What each process may use, by the numbers of setrlimit(2). Part of `bind`."""
        limits = self.limits
        governed = self.group.folders if self.group else {}
        chosen = {resource.RLIMIT_CORE: 0}
        if limits.open_files:
            chosen[resource.RLIMIT_NOFILE] = limits.open_files
        if limits.disk_mb:
            chosen[resource.RLIMIT_FSIZE] = max(limits.disk_mb, limits.temporary_mb) * MEBIBYTE
        if limits.memory_mb and "memory" not in governed:
            # Not RLIMIT_AS: browsers and Arrow reserve far more addresses than they ever fill.
            chosen[resource.RLIMIT_DATA] = limits.memory_mb * MEBIBYTE
        if limits.processes and "pids" not in governed and is_alone:
            chosen[resource.RLIMIT_NPROC] = limits.processes
        return chosen

    @contextlib.contextmanager
    def without_forks(self) -> Generator[None]:
        """Nobody in the group can start a process meanwhile; where there is none, nothing is changed."""
        if self.group is None or not self.limits.processes:
            yield
            return
        group, before = self.group, self.group.refused_forks()
        with contextlib.suppress(OSError):
            group.allow_processes(0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                group.allow_processes(self.limits.processes)
            # Those were not the session's limit.
            self._refused_forks += group.refused_forks() - before

    def incidents(self) -> list[Incident]:
        """Limits that were hit since the last call."""
        if self.group is None:
            return []
        found: list[Incident] = []
        oom_kills, refused_forks = self.group.oom_kills(), self.group.refused_forks()
        if oom_kills > self._oom_kills:
            self._peak_bytes = max(self._peak_bytes, self.group.take_peak_bytes())
            used = round(max(self._peak_bytes, self._told_bytes) / MEBIBYTE)
            found.append(Incident("out_of_memory", f"used {used:,} MB, the limit is {self.limits.memory_mb:,} MB"))
        if refused_forks > self._refused_forks:
            detail = f"wanted more than {self.limits.processes:,} processes and threads, the limit"
            found.append(Incident("too_many_processes", detail))
        self._oom_kills, self._refused_forks = oom_kills, refused_forks
        return found

    def oom_kills(self) -> int:
        """How often want of memory has killed a process; 0 where that is not counted."""
        return self.group.oom_kills() if self.group else 0

    def memory_peak_mb(self) -> float:
        """The most that all processes together held since the last call, without what is only cached of files."""
        if self.group is None:
            return 0.0
        self._told_bytes = max(self._peak_bytes, self.group.take_peak_bytes())
        self._peak_bytes = 0
        return max(0, self._told_bytes - self.group.cached_bytes()) / MEBIBYTE

    def kill(self) -> None:
        """Kill whoever is in the group."""
        if self.group is not None:
            self.group.kill()

    async def release(self) -> None:
        """Kill whoever is left, and remove the group; may be called twice."""
        if self.group is not None:
            group, self.group = self.group, None
            await self.groups.remove(group)
        if self._processors is not None:
            self._processors.release()
            self._processors = None


def counts_processes_of_namespace() -> bool:
    """Whether RLIMIT_NPROC counts a user namespace's own processes, not all of the user's: from Linux 5.14 on."""
    major, _, rest = platform.release().partition(".")
    minor = rest.partition(".")[0]
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) >= (5, 14)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
