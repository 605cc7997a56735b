"""What this process has done, in numbers: counters and histograms that the other packages add to.

Plain numbers in memory, always on: adding takes half a microsecond. `http/health.py` shows them; what can be
counted when it is asked for (sessions, memory) is not kept here. A label takes one of a few known values: never an id,
a principal, a name from a call or anything else without bounds.

`prometheus_client` writes the text, but does not count. Its own counters would load it at start-up (40 ms), take two to
three times as long for each count, write bounds as `le="1.0"` where ours are `le="1"`, and add a `_created` series to
each metric, which can be turned off only for the whole process, a host program's metrics included.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

Labels = tuple[str, ...]

CALL_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
EXECUTION_BOUNDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600, 3600)


class Counter:
    """How often something happened, by its labels. `known` ones are shown from the start, as 0."""

    def __init__(self, name: str, meaning: str, labels: Labels = (), known: Iterable[str] = ()) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = labels
        self.values: dict[Labels, int] = {(value,): 0 for value in known} if labels else {(): 0}

    def add(self, *labels: str) -> None:
        """Count one more event with these labels."""
        self.values[labels] = self.values.get(labels, 0) + 1


class Series:
    """The observations of one set of labels: how many up to each bound, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.sum = 0.0


class Histogram:
    """How long something took, by its labels; `known` ones are shown from the start."""

    def __init__(
        self, name: str, meaning: str, labels: Labels = (), known: Iterable[str] = (), *, bounds: Sequence[float]
    ) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = labels
        self.bounds = tuple(bounds)
        names: Iterable[Labels] = [(value,) for value in known] if labels else [()]
        self.series: dict[Labels, Series] = {each: Series(len(self.bounds)) for each in names}

    def observe(self, seconds: float, *labels: str) -> None:
        """Record how long one event with these labels took."""
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = Series(len(self.bounds))
        series.counts[bisect_left(self.bounds, seconds)] += 1
        series.sum += seconds


tool_calls = Histogram(
    "belljar_tool_call_seconds",
    "Tool calls, from the request to its answer",
    ("tool", "outcome"),
    bounds=CALL_BOUNDS,
)
executions = Counter(
    "belljar_executions",
    "Executions that ended",
    ("status",),
    ("ok", "error", "timeout", "interrupted", "out_of_memory", "died", "rejected"),
)
execution_queue = Histogram(
    "belljar_execution_queue_seconds", "Time that executions waited for their turn", bounds=EXECUTION_BOUNDS
)
execution_wall = Histogram(
    "belljar_execution_wall_seconds", "Time from an execution's turn to its end", bounds=EXECUTION_BOUNDS
)
kernel_starts = Histogram(
    "belljar_kernel_start_seconds",
    "Kernel starts: cold, forked, jupyter, in an Azure pool, taken from our own, or made ahead to refill it",
    ("kind",),
    ("cold", "forked", "jupyter", "azure", "pool", "refill"),
    bounds=CALL_BOUNDS,
)
kernel_start_failures = Counter("belljar_kernel_start_failures", "Kernels that could not be started")
sessions_opened = Counter(
    "belljar_sessions_opened",
    "Sessions made, forked from another one, woken from disk, or taken over from an earlier server",
    ("origin",),
    ("new", "fork", "woken", "kept"),
)
hibernations = Counter(
    "belljar_hibernations",
    "Sessions put to sleep on disk: with all variables, with some, or with files alone",
    ("kept",),
    ("all", "some", "files"),
)
bundles = Counter(
    "belljar_bundles",
    "Sessions put into the store, brought from it, not put for a moment, or too large to be put",
    ("outcome",),
    ("put", "fetched", "failed", "too_large"),
)
checkpoints = Counter("belljar_checkpoints_taken", "Earlier states of sessions that were kept")
rewinds = Counter("belljar_rewinds", "Sessions taken back to an earlier state, on request or after a death")
refusals = Counter(
    "belljar_refusals",
    "What was refused: connections of sessions, work beyond a limit, credentials, foreign hosts or peers",
    ("kind",),
    ("egress", "admission", "auth", "host"),
)
journal_failures = Counter("belljar_journal_failures", "Times that the journal could not be written")
outputs_dropped = Counter("belljar_outputs_dropped", "Executions whose output was dropped to keep within journal_mb")
webhooks = Counter(
    "belljar_webhooks",
    "Questions that inbox_webhook was told of, that it did not take, or that found no room to wait",
    ("outcome",),
    ("sent", "failed", "dropped"),
)

fleet_placements = Counter(
    "belljar_fleet_placements",
    "New sessions of a server that is not alone: made here, at another worker, at another machine",
    ("where",),
    ("here", "worker", "host"),
)
fleet_relays = Counter(
    "belljar_fleet_relays", "Requests passed on to another worker or machine", ("to",), ("worker", "host")
)
fleet_losses = Counter("belljar_fleet_losses", "Machines that were given up")
fleet_moves = Counter("belljar_fleet_moves", "Sessions of lost machines that went on here, from the store")
fleet_held = Counter("belljar_fleet_held", "Requests that waited for a server that was away")

COUNTERS: Final = (
    executions,
    kernel_start_failures,
    sessions_opened,
    hibernations,
    bundles,
    checkpoints,
    rewinds,
    refusals,
    journal_failures,
    outputs_dropped,
    webhooks,
    fleet_placements,
    fleet_relays,
    fleet_losses,
    fleet_moves,
    fleet_held,
)
HISTOGRAMS: Final = (tool_calls, execution_queue, execution_wall, kernel_starts)
