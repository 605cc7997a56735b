"""Calls that a client gives up: cancelled means stopped, a lost connection does not."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest
from calls import FORKS, LEGACY, MODERN, Caller, connected, held, opened_runtime, served_over_http, until_said
from mcp import Client

from belljar.environments import Environment
from belljar.executions.execution import Execution
from belljar.mcp.server import build_server
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio
CANCELLED = "by its client, which cancelled the call"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **FORKS) as runtime:
        yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    """Of the era that cancels with a notification in memory too."""
    async with connected(runtime, LEGACY) as caller:
        yield caller


@asynccontextmanager
async def calling(caller: Caller, tool: str, **arguments: Any) -> AsyncGenerator[None]:
    """A call that is made while the block runs, and is cancelled at its end."""

    async def call() -> None:
        await caller.client.call_tool(tool, arguments)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        yield
        tasks.cancel_scope.cancel()


async def latest(runtime: Runtime, session_id: str, number: int) -> Execution:
    """The session's execution with this number, once it has been submitted."""
    session = runtime.sessions.get(session_id, "local")
    await until(lambda: session.count >= number and session.queue.latest())
    execution = session.queue.latest()
    assert execution is not None
    return execution


async def test_a_cancelled_call_stops_its_cell_and_the_record_says_who_did(runtime: Runtime, caller: Caller) -> None:
    session_id = (await caller.execute("kept = 1")).session_id
    async with calling(caller, "execute_code", code=held(), session_id=session_id):
        execution = await latest(runtime, session_id, 2)
        await until_said(runtime, execution.id, "held")
    result = await caller.ended(execution.id)
    assert (result.status, result.cause) == ("interrupted", f"interrupted {CANCELLED}; variables are kept")
    assert (await caller.execute("kept", session_id)).result == "1"


async def test_a_cancelled_call_in_the_queue_never_runs_and_the_one_before_it_goes_on(
    runtime: Runtime, caller: Caller
) -> None:
    running = await caller.execute(held(), wait_s=0)
    async with calling(caller, "execute_code", code="ran = True", session_id=running.session_id):
        waiting = await latest(runtime, running.session_id, 2)
    result = await caller.ended(waiting.id)
    assert (result.status, result.cause) == (
        "interrupted",
        f"interrupted {CANCELLED} before its turn came; it never ran",
    )
    await caller.release(running.session_id)
    assert (await caller.ended(running.execution_id)).status == "ok"
    assert (await caller.execute("'ran' in dir()", running.session_id)).result == "False"


async def test_cancelling_a_call_that_only_looks_stops_nothing(runtime: Runtime, caller: Caller) -> None:
    running = await caller.execute(held() + "'done'", wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    async with calling(caller, "get_execution", execution_id=running.execution_id, wait_s=60):
        await caller.call("list_sessions")  # which is answered after the other was begun
    await caller.release(running.session_id)
    assert (await caller.ended(running.execution_id)).result == "'done'"


def with_setting(runtime: Runtime, interrupt_on: str) -> Runtime:
    """The same engine behind other surfaces, which are what the setting is for."""
    return replace(runtime, settings=runtime.settings.model_copy(update={"interrupt_on": interrupt_on}))


async def test_an_operator_can_have_cells_outlive_a_cancelled_call(runtime: Runtime) -> None:
    async with Client(build_server(with_setting(runtime, "nothing"), ["interpreter"]), mode=LEGACY) as client:
        caller = Caller(client)
        session_id = await caller.new_session()
        async with calling(caller, "execute_code", code=held() + "'done'", session_id=session_id):
            execution = await latest(runtime, session_id, 1)
            await until_said(runtime, execution.id, "held")
        await caller.release(session_id)
        assert (await caller.ended(execution.id)).result == "'done'"


@pytest.mark.parametrize("era", [LEGACY, MODERN])
async def test_an_operator_can_have_a_lost_connection_stop_the_cell(runtime: Runtime, caller: Caller, era: str) -> None:
    session_id = await caller.new_session()
    async with (
        served_over_http(with_setting(runtime, "disconnect")) as url,
        httpx.AsyncClient(timeout=60) as http,
    ):
        call_and_leave = _modern if era == MODERN else _legacy
        await call_and_leave(http, f"{url}/mcp", held(), session_id)
        # The next cell has its turn only when that one has ended.
        assert (await caller.execute("1", session_id)).status == "ok"
    sessions = {info["session_id"]: info for info in (await caller.fields("list_sessions"))["sessions"]}
    assert sessions[session_id]["last_cause"] == "interrupted because its client went away; variables are kept"


async def _legacy(http: httpx.AsyncClient, url: str, code: str, session_id: str) -> None:
    """Call and go away once the cell speaks, as a client whose machine was closed."""
    headers = {"accept": "application/json, text/event-stream"}
    info = {"name": "raw", "version": "0"}
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    greeted = await http.post(url, json=_request("initialize", hello), headers=headers)
    headers |= {"mcp-session-id": greeted.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
    await http.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
    await _until_held(http, url, _call(code, session_id, {}), headers)


async def _modern(http: httpx.AsyncClient, url: str, code: str, session_id: str) -> None:
    prefix = "io.modelcontextprotocol"
    meta: dict[str, Any] = {f"{prefix}/protocolVersion": MODERN, f"{prefix}/clientCapabilities": {}}
    headers = {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": MODERN,
        "mcp-method": "tools/call",
        "mcp-name": "execute_code",
    }
    await _until_held(http, url, _call(code, session_id, meta), headers)


async def _until_held(http: httpx.AsyncClient, url: str, request: dict[str, Any], headers: dict[str, str]) -> None:
    async with http.stream("POST", url, json=request, headers=headers) as response:
        async for line in response.aiter_lines():
            if "held" in line:
                return
    pytest.fail("the call ended by itself")


def _call(code: str, session_id: str, meta: dict[str, Any]) -> dict[str, Any]:
    arguments = {"code": code, "session_id": session_id}
    return _request(
        "tools/call", {"name": "execute_code", "arguments": arguments, "_meta": {"progressToken": "p", **meta}}
    )


def _request(method: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
