"""Middleware that records every request for operators: a span, its time in a histogram, and ids for log lines.

It replaces the SDK's own span, which would hold the text of errors: names of files, for instance.
"""

import time
from collections.abc import Mapping
from typing import Any, Final, cast

from mcp.server._otel import OpenTelemetryMiddleware
from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from starlette.requests import Request

from belljar import logs, measures, spans
from belljar.errors import BelljarError, Busy
from belljar.surfaces.auth import current_principal

_CALL: Final = "tools/call"
_UNKNOWN: Final = "unknown"


class RequestTracing(ServerMiddleware[Any]):
    """Middleware around each request to a server with these tools."""

    def __init__(self, tools: frozenset[str]) -> None:
        self._tools = tools

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Pass the request on, and record how it ended."""
        if ctx.request_id is None:  # a notification
            return await call_next(ctx)
        tool = self._tool(ctx)
        began_at = time.perf_counter()
        outcome = "error"
        with logs.about(principal=current_principal()), spans.request_span(ctx.method, tool, _carriers(ctx)) as span:
            try:
                answer = await call_next(ctx)
                if _is_error(answer):
                    spans.fail_if_unset(span, "tool_error")
                else:
                    outcome = "ok"
                return answer
            finally:
                if tool is not None:
                    measures.tool_calls.observe(time.perf_counter() - began_at, tool, outcome)

    def _tool(self, ctx: ServerRequestContext[Any, Any]) -> str | None:
        """Return the tool that is called, or `_UNKNOWN`: names that a caller makes up are not recorded."""
        if ctx.method != _CALL:
            return None
        name = ctx.params.get("name") if ctx.params else None
        return name if name in self._tools else _UNKNOWN


def _is_error(answer: HandlerResult) -> bool:
    """Return whether a tool refused or failed; by now answers have the form in which they are sent."""
    return isinstance(answer, dict) and answer.get("isError") is True


def in_place_of_sdk_spans(middleware: list[ServerMiddleware[Any]], calls: RequestTracing) -> None:
    """Replace the SDK's tracing middleware by ours, as the outermost."""
    middleware[:] = [calls, *(each for each in middleware if not isinstance(each, OpenTelemetryMiddleware))]


def _carriers(ctx: ServerRequestContext[Any, Any]) -> tuple[Mapping[str, object], ...]:
    """Return where a caller's trace may be: in the message, which is nearer to the call, or in the HTTP headers."""
    meta = cast("Mapping[str, object]", ctx.meta or {})
    request: object = ctx.request
    return (meta, cast("Request[Any]", request).headers) if isinstance(request, Request) else (meta,)


def note_refusal(error: BelljarError) -> None:
    """Record that the current request is refused."""
    spans.note_failure(error.code)
    if isinstance(error, Busy):
        measures.refusals.add("admission")
