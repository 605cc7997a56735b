"""Calls of a server on pipes, traced and not: the same messages, and a span that the server is told of."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from mcp.types import INVALID_PARAMS
from mcp_servers import awkward
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from upstream_calls import Person, call, connected, said, told

from belljar import tracing
from belljar.toolbox.direct_calls import FIRST_NUMBER
from belljar.toolbox.server_config import StdioServer

pytestmark = pytest.mark.anyio

PLAIN = StdioServer("plain", sys.executable, (str(Path(__file__).with_name("plain_server.py")), "tells-meta"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Generator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("belljar"))
    yield exporter
    provider.shutdown()


def one_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_without_tracing_a_call_takes_no_trace_along() -> None:
    async with connected(PLAIN) as upstreams:
        assert await told(upstreams, "do", server="plain") == {"progressToken": FIRST_NUMBER}


async def test_with_tracing_the_same_call_has_a_span_and_tells_the_server_of_it(
    exporter: InMemorySpanExporter,
) -> None:
    async with connected(PLAIN) as upstreams:
        meta = await told(upstreams, "do", server="plain")
    span = one_span(exporter)
    context = span.get_span_context()
    assert context is not None
    assert meta == {
        "progressToken": FIRST_NUMBER,
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
    }
    assert (span.name, span.kind, span.status.status_code) == (
        "MCP send tools/call do",
        SpanKind.CLIENT,
        StatusCode.UNSET,
    )
    assert dict(span.attributes or {}) == {"mcp.method.name": "tools/call", "jsonrpc.request.id": str(FIRST_NUMBER)}


async def test_the_span_of_a_refused_call_has_the_code_of_the_error_and_not_its_text(
    exporter: InMemorySpanExporter,
) -> None:
    async with connected(awkward("modern")) as upstreams:
        assert (await call(upstreams, "refuse")).is_error
    span = one_span(exporter)
    assert (span.status.status_code, span.status.description, span.events) == (StatusCode.ERROR, None, ())
    attributes = dict(span.attributes or {})
    assert (attributes["error.type"], attributes["rpc.response.status_code"]) == (str(INVALID_PARAMS),) * 2


async def test_a_question_in_the_middle_of_a_traced_call_is_asked_as_in_any_other(
    exporter: InMemorySpanExporter,
) -> None:
    person = Person(name="Ann", age=7)
    async with connected(awkward("modern")) as upstreams:
        assert await said(upstreams, "ask_name", ask=person.ask) == 'accept {"name": "Ann", "age": 7}'
    assert [question.message for question in person.asked] == ["Who are you?"]
    assert one_span(exporter).name == "MCP send tools/call ask_name"
