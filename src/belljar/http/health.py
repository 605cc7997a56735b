"""HTTP endpoints for operators: `/`, `/health`, `/ready` and `/metrics`, and the middleware in front of them.

`/`, `/health` and `/ready` ask for no credentials, and say no more than they have to. Who may read `/metrics` is the
operator's choice. None of them names sessions or callers.
"""

import asyncio
import contextlib
import ipaddress
import re
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar import metrics
from belljar.distribution import own_version
from belljar.http.auth import is_loopback
from belljar.http.forwarded import FORWARDED
from belljar.kernels.base import pid_of
from belljar.request_headers import FLEET_HEADERS, SPEAKER_HEADERS
from belljar.runtime import Runtime
from belljar.sandboxes.gpus import Gpu
from belljar.settings import MEBIBYTE

if TYPE_CHECKING:
    from prometheus_client import Metric

_OK: Final = "ok"
_SPEAKER_HEADERS: Final = frozenset(name.lower().encode() for name in (*SPEAKER_HEADERS, *FLEET_HEADERS))
_FRESH_S: Final = 1.0


async def health(_: Request) -> Response:
    """Answer that the process lives, with its version."""
    return JSONResponse({"status": _OK, "version": own_version()})


def signpost(
    paths: Collection[str], *, asks_for_credentials: bool, has_data_plane: bool
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return what answers `/`: one line that says where the MCP endpoint is, for people who open the bare address."""
    main, *others = paths or ("/mcp",)
    credentials = ", with `Authorization: Bearer KEY`" if asks_for_credentials else ""
    parts = [f"belljar serves MCP (streamable HTTP) at {main} of this address{credentials}"]
    if len(others) > 1:
        parts.append(f"single surfaces at {', '.join(others)}")
    if has_data_plane:
        parts.append("REST as described by /openapi.json")
    line = "; ".join(parts) + ".\n"

    async def answer(_: Request) -> Response:
        return PlainTextResponse(line)

    return answer


class Operations:
    """The endpoints that need a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._checks_lock = asyncio.Lock()
        self._checked_at = -_FRESH_S
        self._checks: dict[str, str] = {}

    async def ready(self, _: Request) -> Response:
        """Answer 200 if a session that is asked for now would start as it should, or 503 with what is missing."""
        checks = await self.checks()
        reasons = [f"{name}: {state}" for name, state in checks.items() if state != _OK]
        toolbox = self._runtime.toolbox
        # For information only: an MCP server of the toolbox that hangs is no reason to send callers elsewhere.
        servers = {"servers": toolbox.states()} if toolbox else {}
        return JSONResponse(
            {"status": "not ready" if reasons else "ready", "checks": checks, "reasons": reasons, **servers},
            status_code=503 if reasons else 200,
        )

    async def startup(self, request: Request) -> Response:
        """Answer 200 once a session can start: the probes of container platforms look at the status alone."""
        return await self.ready(request)

    async def checks(self) -> dict[str, str]:
        """Return the state of each part; `ok` is what it should be."""
        # Anyone can ask, and the checks write to the disk, so they run once a second for all callers together.
        async with self._checks_lock:
            if time.monotonic() - self._checked_at >= _FRESH_S:
                self._checks = {
                    "environment": self._environment(),
                    "sandbox": await asyncio.to_thread(self._sandbox),
                    "journal": await asyncio.to_thread(self._journal),
                    "zygote": "warming up" if self._runtime.preparation.zygote == "pending" else _OK,
                    **({"server": "is being stopped"} if self._runtime.sessions.draining else {}),
                    **{part: fault or _OK for part, fault in (await self._runtime.handover.faults()).items()},
                }
                self._checked_at = time.monotonic()
            return self._checks

    def _environment(self) -> str:
        # The reason is in the log only, because it has paths in it.
        states = {"pending": "being prepared", "broken": "cannot be prepared, see the log"}
        return states.get(self._runtime.preparation.environment, _OK)

    def _sandbox(self) -> str:
        failed = [check.name for check in self._runtime.provider.check() if not check.is_ok]
        return f"{', '.join(failed)} does not work" if failed else _OK

    def _journal(self) -> str:
        return self._runtime.sessions.journal.fault() or _OK

    async def metrics(self, request: Request) -> Response:
        """Answer with the metrics, as Prometheus reads them."""
        current, accept = gauges(self._runtime), request.headers.get("accept", "text/plain")
        if self._runtime.starter.gpus.is_on:
            current += await asyncio.to_thread(gpu_gauges, self._runtime, _kernel_pids(self._runtime))
        text, media_type = await asyncio.to_thread(render, current, accept)
        return Response(text, media_type=media_type)


class LocalOnly:
    """Middleware that lets only callers on this machine through to `app`, and none through a proxy that runs here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        request = Request(scope)
        is_forwarded = any(name in request.headers for name in FORWARDED)
        if request.client is not None and _is_here(request.client.host) and not is_forwarded:
            await self._app(scope, receive, send)
            return
        refusal = {
            "error": "metrics are for callers on this machine only",
            "hint": 'Ask from the machine itself and not through a proxy, or set metrics = "open" on the server',
        }
        await JSONResponse(refusal, status_code=403)(scope, receive, send)


def _is_here(peer: str) -> bool:
    """Return whether a peer is this machine; a socket of both families has IPv4 addresses in IPv6's form."""
    with contextlib.suppress(ValueError):
        mapped = ipaddress.IPv6Address(peer).ipv4_mapped
        return is_loopback(str(mapped) if mapped else peer)
    return is_loopback(peer)


class HostCheckMiddleware:
    """Middleware that refuses foreign Host and Origin headers, as the SDK does on the MCP paths."""

    def __init__(self, app: ASGIApp, allowed: TransportSecuritySettings) -> None:
        self._app = app
        self._security = TransportSecurityMiddleware(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        refusal = await self._security.validate_request(Request(scope))
        await (refusal or self._app)(scope, receive, send)


class SpeakerRefusal:
    """Middleware that refuses requests that say for whom they ask, as those over a server's own socket do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        answer = self._app
        if scope["type"] == "http" and any(name in _SPEAKER_HEADERS for name, _ in scope["headers"]):
            said = "Headers that say for whom you ask are for the server's own socket; here, credentials say it"
            answer = JSONResponse({"error": {"code": "forged-speaker", "message": said, "hint": ""}}, status_code=400)
        await answer(scope, receive, send)


def exact(route: Route) -> Route:
    """Return the route so that it takes a path whole: names of files may have newlines, which `.` and `$` pass over."""
    route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)
    return route


class CountedRefusals:
    """Middleware that counts what `app` refuses: callers without credentials, and foreign hosts, origins and peers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count its answer if that is a refusal."""

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (401, 403, 421):
                is_challenge = any(name == b"www-authenticate" for name, _ in message["headers"])
                metrics.refusals.add("auth" if is_challenge else "host")
            await send(message)

        await self._app(scope, receive, send_and_count)


# The text that Prometheus reads: what this process has counted, and what the runtime holds at the moment


@dataclass(frozen=True, slots=True)
class Gauge:
    """A current value, or one for each value of its label."""

    name: str
    meaning: str
    values: dict[str, float]
    label: str = ""


def gauges(runtime: Runtime) -> list[Gauge]:
    """Return the current values. Quick, and called on the event loop's thread, because sessions live there."""
    sessions = runtime.sessions.all()
    states = Tally(session.state for session in sessions)
    unfinished = [execution for session in sessions for execution in session.queue.running()]
    running = sum(execution.has_started for execution in unfinished)
    memory = [
        session.session_kernel.kernel.memory_mb() * MEBIBYTE for session in sessions if session.session_kernel.kernel
    ]
    kept = sum(session.session_kernel.checkpoints.count for session in sessions)
    pool, settings = runtime.sessions.pool, runtime.settings
    ready = runtime.preparation
    return [
        Gauge("belljar_info", "What serves", {own_version(): 1}, "version"),
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
            {"": runtime.sessions.records.count_asleep()},
        ),
        Gauge(
            "belljar_executions_unfinished",
            "Executions that run, or wait for their turn",
            {"running": running, "waiting": len(unfinished) - running},
            "state",
        ),
        *_store_gauges(runtime),
        Gauge("belljar_sessions_memory_bytes", "Resident memory of all kernels in use", {"": sum(memory)}),
        Gauge("belljar_session_memory_max_bytes", "The same of the largest one", {"": max(memory, default=0)}),
        Gauge("belljar_pool_ready", "Sessions that are ready before anyone asked", {"": len(pool)}),
        Gauge("belljar_pool_target", "How many pool_size keeps ready", {"": settings.pool_size}),
        Gauge("belljar_checkpoints", "Earlier states that sessions can be rewound to", {"": kept}),
        Gauge("belljar_environment_ready", "Whether the configured environment is", {"": ready.environment == "ready"}),
        Gauge("belljar_zygote_warm", "Whether sessions were forked from the start on", {"": ready.zygote == "warm"}),
        *(Gauge(*known) for part in runtime.parts.values() if hasattr(part, "gauges") for known in part.gauges()),
    ]


def _store_gauges(runtime: Runtime) -> list[Gauge]:
    stored = runtime.sessions.stored
    if stored is None:
        return []
    meaning = "Sessions that sleep on this disk only: not put yet, not put because the store fails, or too large"
    return [Gauge("belljar_sessions_unstored", meaning, {**stored.waiting()}, "reason")]


def _kernel_pids(runtime: Runtime) -> dict[str, int]:
    return {session.id: pid_of(session.session_kernel.kernel) for session in runtime.sessions.all()}


def gpu_gauges(runtime: Runtime, pids: dict[str, int]) -> list[Gauge]:
    """Return the current values of GPUs, by their index. Call it in a thread, because the driver may take its time."""
    gpus = runtime.starter.gpus
    memory, sessions = gpus.monitor.memory(), Tally(gpu.uuid for session_id in pids for gpu in gpus.of(session_id))
    found = {_gpu_label(gpu): gpu for gpu in gpus.found()}
    used = {label: memory[gpu.uuid].used_mb * MEBIBYTE for label, gpu in found.items() if gpu.uuid in memory}
    total = {label: memory[gpu.uuid].total_mb * MEBIBYTE for label, gpu in found.items() if gpu.uuid in memory}
    held = sum(gpus.memory_mb(session_id, pid) for session_id, pid in pids.items()) * MEBIBYTE
    return [
        Gauge("belljar_gpu_memory_used_bytes", "Memory of a GPU that is in use, by whomever", used, "gpu"),
        Gauge("belljar_gpu_memory_bytes", "All of its memory", total, "gpu"),
        Gauge(
            "belljar_gpu_sessions",
            "Sessions that are placed on a GPU",
            {label: sessions[gpu.uuid] for label, gpu in found.items()},
            "gpu",
        ),
        Gauge("belljar_sessions_gpu_memory_bytes", "GPU memory that all sessions hold together", {"": held}),
    ]


def _gpu_label(gpu: Gpu) -> str:
    return gpu.uuid if gpu.parent else str(gpu.index)


def render(current: list[Gauge], accept: str) -> tuple[bytes, str]:
    """Return the metrics in the form that the reader accepts, and its media type.

    Call it in a thread, because its first import takes 40 ms.
    """
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
    for counter in metrics.COUNTERS:
        family = CounterMetricFamily(counter.name, counter.meaning, labels=counter.labels)
        # Copied first, because the event loop goes on counting.
        for labels, count in counter.values.copy().items():
            family.add_metric(labels, count)
        yield family
    for histogram in metrics.HISTOGRAMS:
        family = HistogramMetricFamily(histogram.name, histogram.meaning, labels=histogram.labels)
        for labels, series in histogram.series.copy().items():
            family.add_metric(labels, _buckets(histogram.bounds, series.counts[:]), series.sum)
        yield family


def _buckets(bounds: tuple[float, ...], counts: list[int]) -> list[Any]:
    """Return each bound with the number of all observations up to it."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", total))
    return buckets
