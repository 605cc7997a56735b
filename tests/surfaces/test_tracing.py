"""Spans of calls and executions, as an exporter in this process gets them."""

import json
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from calls import ERAS, MODERN, Caller, connected, held
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tool_cells import runtime_with_tools

from belljar import tracing
from belljar.environments import Environment
from belljar.http.app import serve_http
from belljar.mcp.server import build_http_app
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACE_PARENT = f"00-{TRACE}-{PARENT}-01"
OTHER_PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
SECRET = "hush4711"


class Exported:
    """The spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.all() if span.name == name)
        return span


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Generator[Exported]:
    exported = Exported()
    monkeypatch.setattr(tracing, "_tracer", exported.provider.get_tracer("belljar"))
    yield exported
    exported.provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids(span: ReadableSpan) -> tuple[str, str]:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def parent_id(span: ReadableSpan) -> str | None:
    return f"{span.parent.span_id:016x}" if span.parent else None


@pytest.mark.parametrize("era", ERAS)
async def test_an_execution_is_a_child_of_the_call_that_submitted_it(
    runtime: Runtime, exported: Exported, era: str
) -> None:
    async with connected(runtime, era) as caller:
        answer = await caller.client.call_tool(
            "execute_code", {"code": "print(1)\nopen('f', 'w').close()"}, meta={"traceparent": TRACE_PARENT}
        )
    call, execution = exported.one("tools/call execute_code"), exported.one("belljar.execution")
    assert answer.structured_content is not None
    assert (ids(call)[0], parent_id(call)) == (TRACE, PARENT)
    assert (ids(execution)[0], parent_id(execution)) == (TRACE, ids(call)[1])
    told = attributes(execution)
    assert told["belljar.session_id"] == answer.structured_content["session_id"]
    assert told["belljar.execution_id"] == answer.structured_content["execution_id"]
    assert (told["belljar.status"], told["belljar.files"], told["belljar.execution_number"]) == ("ok", 1, 1)
    assert told["belljar.wall_s"] > 0
    assert [event.name for event in execution.events] == ["turn"]
    assert execution.status.status_code == StatusCode.UNSET
    assert attributes(call)["gen_ai.tool.name"] == "execute_code"
    assert attributes(call)["belljar.execution_id"] == told["belljar.execution_id"]


async def test_an_execution_outlives_its_call_and_later_calls_are_linked_to_it(
    runtime: Runtime, exported: Exported
) -> None:
    async with connected(runtime) as caller:
        started = await caller.execute(held(), wait_s=0)
        call = exported.one("tools/call execute_code")
        assert not any(span.name == "belljar.execution" for span in exported.all())
        await caller.release(started.session_id)
        await caller.ended(started.execution_id)
    execution, later = exported.one("belljar.execution"), exported.one("tools/call get_execution")
    assert parent_id(execution) == ids(call)[1]
    assert execution.end_time is not None
    assert call.end_time is not None
    assert execution.end_time > call.end_time
    (link,) = later.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == ids(execution)
    assert parent_id(later) is None


async def test_one_that_never_ran_has_a_span_too(runtime: Runtime, exported: Exported) -> None:
    async with connected(runtime) as caller:
        first = await caller.execute(held(), wait_s=0)
        queued = await caller.execute("1", first.session_id, wait_s=0)
        await caller.fields("interrupt_execution", execution_id=queued.execution_id)
        span = exported.one("belljar.execution")
        await caller.fields("interrupt_execution", session_id=first.session_id)
    assert attributes(span)["belljar.execution_id"] == queued.execution_id
    assert attributes(span)["error.type"] == "interrupted"
    assert list(span.events) == []


async def test_a_call_of_another_servers_tool_is_a_child_of_its_execution(
    default_environment: Environment, exported: Exported, tmp_path: Path
) -> None:
    async with runtime_with_tools(default_environment, tmp_path) as runtime, connected(runtime) as caller:
        session = await caller.new_session()
        await caller.client.call_tool(
            "execute_code",
            {"session_id": session, "code": "from servers.awkward import add\nadd(1, 2)"},
            meta={"traceparent": TRACE_PARENT},
        )
    (execution,) = (span for span in exported.all() if span.name == "belljar.execution" and ids(span)[0] == TRACE)
    call = exported.one("MCP send tools/call add")
    assert (ids(call)[0], parent_id(call)) == ids(execution)


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", 7], ids=str)
async def test_what_is_no_trace_is_left_alone(runtime: Runtime, exported: Exported, traceparent: Any) -> None:
    async with connected(runtime) as caller:
        await caller.client.call_tool("list_sessions", {}, meta={"traceparent": traceparent})
    assert parent_id(exported.one("tools/call list_sessions")) is None


@asynccontextmanager
async def over_http(runtime: Runtime, headers: dict[str, str]) -> AsyncGenerator[Caller]:
    urls: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as tasks:
        serving = serve_http(build_http_app(runtime), "127.0.0.1", 0, on_ready=on_ready, log_level="ERROR")
        tasks.start_soon(lambda: serving)
        await ready.wait()
        async with (
            httpx2.AsyncClient(headers=headers, timeout=30) as http,
            Client(streamable_http_client(f"{urls[0]}/mcp", http_client=http), mode=MODERN) as client,
        ):
            yield Caller(client)
        tasks.cancel_scope.cancel()


async def test_a_trace_in_the_headers_is_honoured_and_one_in_the_message_before_it(
    runtime: Runtime, exported: Exported
) -> None:
    async with over_http(runtime, {"traceparent": TRACE_PARENT}) as caller:
        await caller.fields("list_sessions")
        await caller.client.call_tool("execute_code", {"code": "1"}, meta={"traceparent": OTHER_PARENT})
    listed, executed = exported.one("tools/call list_sessions"), exported.one("tools/call execute_code")
    assert (ids(listed)[0], parent_id(listed)) == (TRACE, PARENT)
    assert (ids(executed)[0], parent_id(executed)) == ("a" * 32, "b" * 16)
    assert ids(exported.one("belljar.execution"))[0] == "a" * 32


async def test_a_refusal_is_told_by_its_code(runtime: Runtime, exported: Exported) -> None:
    async with connected(runtime) as caller:
        await caller.refusal("clear_session", session_id="nobody")
        await caller.execute("1", "nobody")
        await caller.execute("1 / 0")
    clear = exported.one("tools/call clear_session")
    assert (clear.status.status_code, clear.status.description) == (StatusCode.ERROR, None)
    assert attributes(clear)["error.type"] == "session-not-found"
    refused, raised = (span for span in exported.all() if span.name == "tools/call execute_code")
    assert attributes(refused)["error.type"] == "session-not-found"
    assert attributes(raised)["error.type"] == "tool_error"
    assert attributes(exported.one("belljar.execution"))["error.type"] == "error"


async def test_no_span_holds_what_a_caller_sent_or_got(runtime: Runtime, exported: Exported) -> None:
    async with connected(runtime) as caller:
        code = f"{SECRET} = '{SECRET}'\nprint({SECRET})\nopen('{SECRET}.txt', 'w').close()"
        session = (await caller.execute(code, filename=f"{SECRET}.py")).session_id
        await caller.execute(f"raise ValueError('{SECRET}')", session)
        await caller.execute(f"import os; os.environ['{SECRET}'] = '{SECRET}'; os._exit(3)", session)
        await caller.call("upload_file", session_id=session, name=f"../{SECRET}", text=SECRET)
        await caller.call("download_file", session_id=session, name=SECRET)
        await caller.call("execute_code", code=[SECRET])
        await caller.call(SECRET)
        await caller.read(f"kernel://{session}/{SECRET}.txt")
        with pytest.raises(MCPError):
            await caller.read(f"kernel://{session}/{SECRET}-is-not-there")
    told = json.dumps([json.loads(span.to_json()) for span in exported.all()])
    assert "resources/read" in told
    assert "tools/call unknown" in told
    assert SECRET not in told


async def test_filling_the_pool_is_no_part_of_the_call_that_emptied_it(runtime: Runtime, exported: Exported) -> None:
    traces: list[dict[str, str]] = []
    start = runtime.starter.start

    async def noticing(*args: Any, **options: Any) -> Any:
        if options.get("is_ahead"):
            traces.append(tracing.current_ids())
        return await start(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.starter, "start", noticing)
        async with connected(runtime) as caller:
            await caller.new_session()
            if not await runtime.starter.wait_until_warm(runtime.settings.environment):
                pytest.skip("sessions cannot be forked here, so there is no pool")
            await caller.new_session()
            await until(lambda: traces)
    assert traces[0] == {}


async def test_without_an_sdk_nothing_happens(runtime: Runtime) -> None:
    async with connected(runtime) as caller:
        assert (await caller.execute("1 + 1")).result == "2"
    assert tracing.current_ids() == {}
