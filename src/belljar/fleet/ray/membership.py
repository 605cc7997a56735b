"""What the controller knows of the machines of a fleet, and what it decides by it; knows nothing of Ray.

It keeps nothing: what it knows is in the names of nodes, in the answers of their agents, and in the lists that these
have, from which the next controller learns which machines there were.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Final, Literal

MOST_HOSTS: Final = 128
"""As many as servers read of a list."""
MISSING_S: Final = 60.0
"""After how long a machine that an earlier cluster had counts as dead, where this one has never seen it."""
IDLE_S: Final = 600
"""For how long a fleet needs fewer machines before one of them is drained."""

State = Literal["starting", "ready", "draining", "left"]


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What the agent of a node tells of its machine."""

    state: State
    sessions: int
    """That are open."""
    capacity: int
    """How many may be."""
    may_go: bool
    """Whether no session would be lost with the machine: it has none, or what sleeps there is in a store."""
    peers: tuple[str, ...] = ()
    """The lines of its list."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "MachineReport":
        """Return what an agent has told, which may be of another version; raise TypeError where too little is said."""
        return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})


@dataclass(slots=True)
class Host:
    """A machine that belongs to the fleet."""

    seen_at: float
    is_gone: bool = False


class Membership:
    """The machines of a fleet."""

    def __init__(self, spare: int = 0, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._spare, self._idle_s = spare, idle_s
        self._clock = clock
        self.hosts: dict[str, Host] = {}
        """By their addresses."""
        self.reports: dict[str, MachineReport] = {}
        """The last one of each living node."""
        self._idle_since: float | None = None

    def learn(self, reports: Mapping[str, MachineReport], living: Mapping[str, str], dead: Collection[str]) -> None:
        """Take what agents report, the addresses of living nodes, and those of machines whose nodes have died."""
        now = self._clock()
        for node in reports.keys() - self.reports.keys():
            for line in reports[node].peers:
                url, _, mark = line.partition(" ")
                self.hosts.setdefault(url, Host(now, is_gone=bool(mark)))
        self.reports = {node: report for node, report in {**self.reports, **reports}.items() if node in living}
        # One that has ended in good order is nobody's to wait for.
        left = {living[node] for node in self.left()}
        here = {url for url in living.values() if url not in left}
        for url in here:
            self.hosts[url] = Host(now)
        for url in left:
            self.hosts.pop(url, None)
        for url, host in self.hosts.items():
            host.is_gone |= url not in here and (url in dead or now - host.seen_at > MISSING_S)
        gone = sorted((host.seen_at, url) for url, host in self.hosts.items() if host.is_gone)
        for _, url in gone[: max(0, len(self.hosts) - MOST_HOSTS)]:
            del self.hosts[url]

    def lines(self) -> list[str]:
        """Return the list as every machine gets it."""
        return [f"{url} gone" if host.is_gone else url for url, host in sorted(self.hosts.items())]

    def wanted(self) -> int:
        """Return how many machines the open sessions need, with some to spare; at least one."""
        capacity = sum(report.capacity for report in self.reports.values()) / max(1, len(self.reports))
        sessions = sum(report.sessions for report in self.reports.values())
        return max(1, ceil((sessions + self._spare) / capacity)) if capacity else 1

    def to_drain(self, kept: Collection[str]) -> str | None:
        """Return the node whose machine is drained now, one after another; never one of those that are kept."""
        running = {node: report for node, report in self.reports.items() if node not in self.left()}
        now = self._clock()
        if len(running) <= self.wanted() or any(report.state != "ready" for report in running.values()):
            self._idle_since = None
            return None
        self._idle_since = self._idle_since or now
        found = [(each.sessions, node) for node, each in running.items() if each.may_go and node not in kept]
        if now - self._idle_since < self._idle_s or not found:
            return None
        self._idle_since = None
        return min(found)[1]

    def left(self) -> set[str]:
        """Return the living nodes whose machines have ended in good order."""
        return {node for node, report in self.reports.items() if report.state == "left"}

    def to_return(self) -> list[str]:
        """Return those of them that are needed after all."""
        left = sorted(self.left())
        return left[: max(0, self.wanted() - (len(self.reports) - len(left)))]
