"""Clients of 2025's protocol that cancel and leave at once: each message has a connection of its own, in any order."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
import under_test
from calls import Caller, held, opened_runtime, served_over_http, until_said

from belljar.environments import Environment
from belljar.executions.execution import Execution
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio
BY_CLIENT = "interrupted by its client, which cancelled the call; variables are kept"
LEFT = "interrupted because its client went away; variables are kept"
CALL = 7
"""The id of the call that is cancelled."""


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """Here a lost connection stops a cell, too."""
    folder = tmp_path_factory.mktemp("belljar")
    async with opened_runtime(default_environment, folder, interrupt_on="disconnect") as runtime:
        yield runtime


class RawClient:
    """An MCP session whose messages are sent as the test likes."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    async def begin(self) -> None:
        self._http.headers["accept"] = "application/json, text/event-stream"
        capabilities: dict[str, Any] = {"elicitation": {"form": {}}}
        hello = {
            "protocolVersion": "2025-11-25",
            "capabilities": capabilities,
            "clientInfo": {"name": "raw", "version": "0"},
        }
        greeted = await self.send(method="initialize", params=hello, id=0)
        self._http.headers["mcp-session-id"] = greeted.headers["mcp-session-id"]
        self._http.headers["mcp-protocol-version"] = "2025-11-25"
        await self.send(method="notifications/initialized")

    async def send(self, **message: Any) -> httpx.Response:
        return await self._http.post(self._url, json={"jsonrpc": "2.0", **message})

    @asynccontextmanager
    async def calling(self, session_id: str, code: str) -> AsyncGenerator[httpx.Response]:
        """Call, and close the connection at the end of the block."""
        params = {"name": "execute_code", "arguments": {"code": code, "session_id": session_id}}
        message = {"jsonrpc": "2.0", "method": "tools/call", "id": CALL, "params": params}
        async with self._http.stream("POST", self._url, json=message) as answer:
            yield answer

    async def cancel(self) -> httpx.Response:
        return await self.send(method="notifications/cancelled", params={"requestId": CALL})

    async def end(self) -> httpx.Response:
        return await self._http.delete(self._url)


@asynccontextmanager
async def raw_client(runtime: Runtime) -> AsyncGenerator[RawClient]:
    front = under_test.fronts.get(runtime.name)
    async with httpx.AsyncClient(timeout=60) as http:
        if front is not None:
            client = RawClient(http, f"{front}/mcp")
            await client.begin()
            yield client
            return
        async with served_over_http(runtime) as url:
            client = RawClient(http, f"{url}/mcp")
            await client.begin()
            yield client


async def latest(runtime: Runtime, session_id: str, number: int) -> Execution:
    """The session's execution with this number, once it has been submitted."""
    session = runtime.sessions.get(session_id, "local")
    await until(lambda: session.count >= number and session.queue.latest())
    execution = session.queue.latest()
    assert execution is not None
    return execution


async def ended(caller: Caller, execution: Execution) -> str | None:
    """What ended an execution."""
    with anyio.fail_after(60):
        return (await caller.ended(execution.id)).cause


async def test_a_cancellation_that_overtakes_its_call_has_it_never_run(runtime: Runtime, caller: Caller) -> None:
    session_id = await caller.new_session()
    async with raw_client(runtime) as client:
        await client.cancel()
        async with client.calling(session_id, "print('ran')") as answer:
            assert "Request cancelled" in (await answer.aread()).decode()
        assert runtime.sessions.get(session_id, "local").count == 0
        # It was for one call: the id is free again.
        async with client.calling(session_id, "print('ran')") as answer:
            assert "ran" in (await answer.aread()).decode()


async def test_a_cancellation_that_comes_behind_the_end_of_the_mcp_session_stops_the_cell(
    runtime: Runtime, caller: Caller
) -> None:
    session_id = await caller.new_session()
    async with raw_client(runtime) as client:
        async with client.calling(session_id, held("never")):
            execution = await latest(runtime, session_id, 1)
            await until_said(runtime, execution.id, "held")
            assert (await client.end()).status_code == 200
            assert (await client.send(method="tools/list", id=9)).status_code == 404
            await client.cancel()
            assert await ended(caller, execution) == BY_CLIENT
        await until(lambda: _is_over(client))


async def _is_over(client: RawClient) -> bool:
    return (await client.cancel()).status_code == 404


async def test_a_call_whose_question_is_open_stops_when_it_is_cancelled(runtime: Runtime, caller: Caller) -> None:
    session_id = await caller.new_session()
    async with raw_client(runtime) as client, client.calling(session_id, "input('who?')") as answer:
        async for line in answer.aiter_lines():
            if "who?" in line:
                break
        execution = await latest(runtime, session_id, 1)
        assert (await client.cancel()).status_code == 202
        assert await ended(caller, execution) == BY_CLIENT


async def test_a_client_that_only_goes_stops_its_cell_where_settings_want_it(runtime: Runtime, caller: Caller) -> None:
    session_id = await caller.new_session()
    async with raw_client(runtime) as client:
        async with client.calling(session_id, held("never")):
            execution = await latest(runtime, session_id, 1)
            await until_said(runtime, execution.id, "held")
        assert await ended(caller, execution) == LEFT
