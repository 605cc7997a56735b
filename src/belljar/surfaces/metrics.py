"""The text that Prometheus reads: what this process has counted, and what the engine holds at the moment.

Knows nothing of who may read it.
"""

from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from belljar import measures
from belljar.runtime import Runtime

if TYPE_CHECKING:
    from prometheus_client import Metric

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Gauge:
    """What there is now, by the value of its one label or without any."""

    name: str
    meaning: str
    values: dict[str, float]
    label: str = ""


def gauges(runtime: Runtime) -> list[Gauge]:
    """The engine as it is. Quick, and called where sessions are: on the event loop's thread."""
    sessions = runtime.sessions.all()
    states = Tally(session.state for session in sessions)
    unfinished = [execution for session in sessions for execution in session.queue.running()]
    running = sum(execution.has_started for execution in unfinished)
    memory = [session.life.kernel.memory_mb() * MEBIBYTE for session in sessions if session.life.kernel]
    kept = sum(session.life.checkpoints.count for session in sessions)
    pool, settings = runtime.sessions.pool, runtime.settings
    ready = runtime.preparation
    return [
        Gauge("belljar_info", "What serves", {version("belljar"): 1}, "version"),
        Gauge(
            "belljar_sessions",
            "Sessions of this server, by what they do",
            {state: states[state] for state in ("fresh", "idle", "running")},
            "state",
        ),
        Gauge("belljar_sessions_limit", "The most sessions that max_sessions allows", {"": settings.max_sessions}),
        Gauge(
            "belljar_sessions_asleep",
            "Sessions on disk, of all servers that share the data directory",
            {"": runtime.sessions.roll.count_asleep()},
        ),
        Gauge(
            "belljar_executions_unfinished",
            "Executions that run, or wait for their turn",
            {"running": running, "waiting": len(unfinished) - running},
            "state",
        ),
        Gauge("belljar_sessions_memory_bytes", "Resident memory of all kernels in use", {"": sum(memory)}),
        Gauge("belljar_session_memory_max_bytes", "The same of the largest one", {"": max(memory, default=0)}),
        Gauge("belljar_pool_ready", "Sessions that are ready before anyone asked", {"": len(pool)}),
        Gauge("belljar_pool_target", "How many pool_size keeps ready", {"": settings.pool_size}),
        Gauge("belljar_checkpoints", "Earlier states that sessions can be rewound to", {"": kept}),
        Gauge("belljar_environment_ready", "Whether the configured environment is", {"": ready.environment == "ready"}),
        Gauge("belljar_zygote_warm", "Whether sessions were forked from the start on", {"": ready.zygote == "warm"}),
    ]


def render(current: list[Gauge], accept: str) -> tuple[bytes, str]:
    """The text in the form that the reader accepts, and its media type. For a thread: its first import takes 40 ms."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    class Ours(Collector):
        def collect(self) -> "Iterator[Metric]":
            return _families(current)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Ours())
    ProcessCollector(registry=registry)
    encoder, media_type = choose_encoder(accept)
    return encoder(registry), media_type


def _families(current: list[Gauge]) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for gauge in current:
        family = GaugeMetricFamily(gauge.name, gauge.meaning, labels=[gauge.label] if gauge.label else [])
        for label, value in gauge.values.items():
            family.add_metric([label] if gauge.label else [], value)
        yield family
    for counter in measures.COUNTERS:
        family = CounterMetricFamily(counter.name, counter.meaning, labels=counter.labels)
        # Copied at once: the event loop goes on counting.
        for labels, count in counter.values.copy().items():
            family.add_metric(labels, count)
        yield family
    for histogram in measures.HISTOGRAMS:
        family = HistogramMetricFamily(histogram.name, histogram.meaning, labels=histogram.labels)
        for labels, series in histogram.series.copy().items():
            family.add_metric(labels, _buckets(histogram.bounds, series.counts[:]), series.sum)
        yield family


def _buckets(bounds: tuple[float, ...], counts: list[int]) -> list[Any]:
    """Each bound with the number of all observations up to it."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", total))
    return buckets
