"""Memory and processor time of live sessions over the last minutes, read by one task for all of them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from belljar import metrics
from belljar.change_signal import ChangeLog
from belljar.sessions.session import Session

INTERVAL_S = 5.0
KEPT_S = 15 * 60.0
SHOWN_POINTS = 60
# Less than this is no change that a reader need be told of.
LEAST_MB = 1.0
LEAST_PERCENT = 1.0


@dataclass(slots=True)
class OwnerTotals:
    """What the sessions of one owner used at one moment."""

    running: int = 0
    idle: int = 0
    fresh: int = 0
    waiting: int = 0
    """Executions that wait for their turn."""
    memory_mb: float = 0.0
    cpu_percent: float = 0.0

    def add(self, other: "OwnerTotals") -> None:
        """Add what another owner used."""
        for name in GAUGES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


GAUGES = ("running", "idle", "fresh", "waiting", "memory_mb", "cpu_percent")
LATENCY = "cell_seconds"
"""The gauge that is a mean: of several servers it is no sum."""


class WorkSampler:
    """What the process has done since it was last asked, by its counters: they know no owners."""

    def __init__(self) -> None:
        self._last = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        cells, seconds, calls = 0, 0.0, 0
        for series in metrics.execution_wall.series.values():
            cells, seconds = cells + sum(series.counts), seconds + series.sum
        for series in metrics.tool_calls.series.values():
            calls += sum(series.counts)
        return cells, seconds, calls

    def sample(self) -> dict[str, float]:
        """Return the cells and tool calls a minute, and how long a cell took on average."""
        before, self._last = self._last, self._read()
        cells, seconds, calls = (now - then for now, then in zip(self._last, before, strict=True))
        a_minute = 60 / INTERVAL_S
        return {
            "cells_a_minute": cells * a_minute,
            "calls_a_minute": calls * a_minute,
            LATENCY: round(seconds / cells, 3) if cells else 0.0,
        }


@dataclass(slots=True)
class SessionUsage:
    """The samples of one session, oldest first."""

    memory_mb: deque[float] = field(default_factory=lambda: deque(maxlen=int(KEPT_S / INTERVAL_S)))
    cpu_percent: deque[float] = field(default_factory=lambda: deque(maxlen=int(KEPT_S / INTERVAL_S)))
    cpu_s: float = 0.0
    read_at: float = 0.0


class UsageSampler:
    """Samples the sessions that `sessions` returns, every `INTERVAL_S`, until it is closed."""

    def __init__(self, sessions: Callable[[], list[Session]], changes: ChangeLog) -> None:
        self._sessions = sessions
        self._changes = changes
        self._usage: dict[str, SessionUsage] = {}
        self._totals: deque[dict[str, OwnerTotals]] = deque(maxlen=int(KEPT_S / INTERVAL_S))
        """What each owner's sessions used, oldest first. Kept apart, because sessions end."""
        self._sampler = WorkSampler()
        self._work: deque[dict[str, float]] = deque(maxlen=int(KEPT_S / INTERVAL_S))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample, unless it does already."""
        if self._task is not None:
            return
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stop; may be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Read all sessions once."""
        sessions = self._sessions()
        living = {session.id for session in sessions}
        for gone in self._usage.keys() - living:
            del self._usage[gone]
        totals: dict[str, OwnerTotals] = {}
        for session in sessions:
            self._sample(session)
            used, state = self._usage[session.id], session.state
            totals.setdefault(session.principal, OwnerTotals()).add(
                OwnerTotals(
                    running=state == "running",
                    idle=state == "idle",
                    fresh=state == "fresh",
                    waiting=sum(not one.has_started for one in session.queue.running()),
                    memory_mb=used.memory_mb[-1],
                    cpu_percent=used.cpu_percent[-1],
                )
            )
        self._totals.append(totals)
        self._work.append(self._sampler.sample())

    def _sample(self, session: Session) -> None:
        kernel = session.session_kernel.kernel
        memory_mb = kernel.memory_mb() if kernel else 0.0
        cpu_s, now = (kernel.cpu_s() if kernel else 0.0), time.monotonic()
        known = self._usage.setdefault(session.id, SessionUsage())
        elapsed_s = now - known.read_at
        # A kernel that started again counts from zero.
        percent = max(0.0, cpu_s - known.cpu_s) / elapsed_s * 100 if known.read_at and elapsed_s > 0 else 0.0
        before = (known.memory_mb[-1], known.cpu_percent[-1]) if known.memory_mb else (0.0, 0.0)
        known.cpu_s, known.read_at = cpu_s, now
        known.memory_mb.append(round(memory_mb, 1))
        known.cpu_percent.append(round(percent, 1))
        if abs(before[0] - memory_mb) >= LEAST_MB or abs(before[1] - percent) >= LEAST_PERCENT:
            self._changes.publish("usage", "sampled", session.id, session.principal)

    def of(self, session_id: str) -> tuple[list[float], list[float]]:
        """Return the memory and the processor share of a session over the last minutes, at most `SHOWN_POINTS`."""
        known = self._usage.get(session_id)
        if known is None:
            return [], []
        return _thinned([*known.memory_mb]), _thinned([*known.cpu_percent])

    def gauges(self, may_see: Callable[[str], bool], *, is_operator: bool) -> dict[str, list[float]]:
        """Return what the sessions of all owners that somebody may see used over the last minutes, oldest first.

        What the server as a whole did is for operators.
        """
        sums: list[OwnerTotals] = []
        for totals in self._totals:
            total = OwnerTotals()
            for owner, used in totals.items():
                if may_see(owner):
                    total.add(used)
            sums.append(total)
        used = {name: [round(float(getattr(one, name)), 1) for one in sums] for name in GAUGES}
        names = self._work[-1] if is_operator and self._work else {}
        return used | {name: [one[name] for one in self._work] for name in names}


def _thinned(values: list[float]) -> list[float]:
    """Return at most `SHOWN_POINTS` values, each the largest of those that it stands for."""
    step = -(-len(values) // SHOWN_POINTS)
    return [max(values[start : start + step]) for start in range(0, len(values), step)] if step > 1 else values
