"""OpenTelemetry spans, for processes that have an OpenTelemetry SDK; without one, next to nothing happens.

A span says which session and execution, how it ended, how many and how long. It never holds code, values, the names of
variables or files, or the text of an error: all of those are the caller's.
"""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACE_PARENT: Final = "traceparent"
_PREFIX: Final = "belljar."
_METHOD: Final = re.compile(r"[A-Za-z_/]{1,64}")
_tracer = trace.get_tracer("belljar")
# W3C's format, whatever the process propagates otherwise, because that is what MCP has in `_meta`.
_trace_context = TraceContextTextMapPropagator()

Value = str | int | float | bool


@contextmanager
def request_span(method: str, tool: str | None, parents: tuple[Mapping[str, object], ...]) -> Generator[Span]:
    """Open a span around one request; its parent is in the first carrier that has one, or else the current span."""
    parent = _parent(parents)
    if parent is None and not _is_listening():
        yield trace.INVALID_SPAN
        return
    # The method comes from the caller, and may be anything.
    name = method if _METHOD.fullmatch(method) else "unknown"
    attributes: dict[str, Value] = {"mcp.method.name": name}
    if tool is not None:
        attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
    with _tracer.start_as_current_span(
        f"{name} {tool}" if tool else name,
        context=parent,
        kind=SpanKind.SERVER,
        attributes=attributes,
        # Both would put the text of the exception into the span.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, type(error).__name__)
            raise


@contextmanager
def outgoing_span(method: str, target: str, request_id: int) -> Generator[dict[str, str]]:
    """Hold a span open around one request to another server; yields the trace context for the request's `_meta`.

    Name and attributes are those of the MCP SDK's client, because requests over HTTP have that client's spans.
    """
    carrier: dict[str, str] = {}
    if not _is_listening():
        yield carrier
        return
    with _tracer.start_as_current_span(
        f"MCP send {method} {target}",
        kind=SpanKind.CLIENT,
        attributes={"mcp.method.name": method, "jsonrpc.request.id": str(request_id)},
        # Both would put the text of the exception into the span.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        _trace_context.inject(carrier)
        try:
            yield carrier
        except BaseException as error:
            code: object = getattr(error, "code", None)
            if isinstance(code, int):  # the protocol's code of an error that the other server answered with
                span.set_attribute("rpc.response.status_code", str(code))
            fail(span, str(code) if isinstance(code, int) else type(error).__name__)
            raise


def _is_listening() -> bool:
    """Return whether there is an SDK, or a current span from a caller: spans that nobody reads take 40 µs a request."""
    has_sdk = not isinstance(_tracer, trace.ProxyTracer) or not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )
    return has_sdk or trace.get_current_span() is not trace.INVALID_SPAN


def _parent(carriers: tuple[Mapping[str, object], ...]) -> Context | None:
    for carrier in carriers:
        header = carrier.get(TRACE_PARENT)
        if isinstance(header, str):
            state = carrier.get("tracestate")
            fields = {TRACE_PARENT: header, **({"tracestate": state} if isinstance(state, str) else {})}
            context = _trace_context.extract(fields, Context())
            if trace.get_current_span(context).get_span_context().is_valid:
                return context
    return None


def fail(span: Span, kind: str) -> None:
    """Mark a span as failed, with one of our own names for the failure and no other text."""
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def fail_if_unset(span: Span, kind: str) -> None:
    """Mark a span as failed, unless it has a more precise failure already."""
    attributes: object = getattr(span, "attributes", None)
    if not isinstance(attributes, Mapping) or "error.type" not in attributes:
        fail(span, kind)


def annotate(**ids: str) -> None:
    """Add ids to the span of the current request."""
    span = trace.get_current_span()
    if span.is_recording():
        for name, value in ids.items():
            span.set_attribute(f"{_PREFIX}{name}", value)


def note_failure(kind: str) -> None:
    """Mark the current request as refused; `kind` is the error's code."""
    fail(trace.get_current_span(), kind)


class ExecutionSpan:
    """The span of one execution, from its submission to its end; its parent, the submitting request, may be over."""

    def __init__(self, session_id: str, execution_id: str, number: int) -> None:
        self._span = trace.INVALID_SPAN
        if not _is_listening():
            return
        annotate(session_id=session_id, execution_id=execution_id)
        attributes: dict[str, Value] = {
            f"{_PREFIX}session_id": session_id,
            f"{_PREFIX}execution_id": execution_id,
            f"{_PREFIX}execution_number": number,
        }
        self._span = _tracer.start_span("belljar.execution", attributes=attributes)

    def start(self) -> None:
        """Record that the execution's turn has come, and make this the current span of the task, which is its own."""
        if self._span is trace.INVALID_SPAN:
            return
        attach(trace.set_span_in_context(self._span))
        self._span.add_event("turn")

    def finish(self, status: str, *, is_failure: bool, **numbers: float) -> None:
        """End the span, with how the execution ended."""
        span = self._span
        if span.is_recording():
            span.set_attribute(f"{_PREFIX}status", status)
            for name, value in numbers.items():
                span.set_attribute(f"{_PREFIX}{name}", value)
            if is_failure:
                fail(span, status)
        span.end()

    def link(self) -> None:
        """Link the current request, which waits for the execution, answers it or stops it, to this span."""
        current = trace.get_current_span()
        mine = self._span.get_span_context()
        if current.is_recording() and mine.is_valid:
            current.add_link(mine)


def current_trace() -> Context:
    """Return what `within_trace` needs to make spans children of the current one in another task."""
    return get_current()


@contextmanager
def within_trace(context: Context) -> Generator[None]:
    """Make the span of that context the current one, for as long as the block runs."""
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


def current_ids() -> dict[str, str]:
    """Return the ids of the current trace and span, for log lines; empty where there is none."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
