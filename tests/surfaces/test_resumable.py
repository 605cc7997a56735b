"""Streams over HTTP that break and are gone on with, and requests that cannot be told apart, over the bare wire."""

import json
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from calls import held
from mcp.types import JSONRPCNotification, JSONRPCResponse
from wires import HELLO, tool_call

from belljar.environments import Environment
from belljar.http.resumable_streams import EventBudgetBytes, Events
from serving_process import COLD, http_server, serve_over_http

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with http_server(serve_over_http(default_environment), tmp_path_factory.mktemp("http"), **COLD) as (url, _):
        yield url


@pytest.fixture
async def http(url: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of 2025's protocol that has shaken hands."""
    accepted = {"accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient(timeout=60, headers=accepted, base_url=url) as client:
        greeted = await client.post("/mcp", json=HELLO)
        client.headers["mcp-session-id"] = greeted.headers["mcp-session-id"]
        client.headers["mcp-protocol-version"] = "2025-11-25"
        await client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        yield client


class Stream:
    """The events of one response, as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.last_id = ""

    async def next(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        async for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = value
            elif name == "data" and value:
                message = json.loads(value)
                # The id may stand after the data of its event.
                async for rest in self._lines:
                    if rest.startswith("id: "):
                        self.last_id = rest.removeprefix("id: ")
                    if not rest:
                        break
                return message
        return None

    async def until(self, text: str) -> dict[str, Any]:
        while message := await self.next():
            if text in json.dumps(message):
                return message
        raise AssertionError(f"the stream ended before {text}")


@asynccontextmanager
async def opened(http: httpx.AsyncClient, method: str = "POST", **options: Any) -> AsyncGenerator[Stream]:
    async with http.stream(method, "/mcp", **options) as response:
        yield Stream(response)


def fields_of(message: dict[str, Any] | None) -> dict[str, Any]:
    assert message is not None
    return message["result"]["structuredContent"]


async def called(http: httpx.AsyncClient, request_id: int, tool: str, **arguments: Any) -> dict[str, Any]:
    async with opened(http, json=tool_call(request_id, tool, **arguments)) as stream:
        while (message := await stream.next()) is not None and "result" not in message:
            pass
        return fields_of(message)


async def test_a_broken_stream_goes_on_after_its_last_event_without_gap_or_repeat(http: httpx.AsyncClient) -> None:
    session_id = (await called(http, 1, "new_session"))["session_id"]
    code = f"{held('one')}print('second')\n{held('two')}print('third')"
    async with opened(http, json=tool_call(2, "execute_code", code=code, session_id=session_id)) as stream:
        first = await stream.until("held")
        last_id = stream.last_id
    # It goes on speaking while nobody listens.
    await called(http, 3, "upload_file", session_id=session_id, name="one", text="")
    missed: list[dict[str, Any]] = []
    async with opened(http, "GET", headers={"last-event-id": last_id}) as stream:
        missed.append(await stream.until("held"))
        await called(http, 4, "upload_file", session_id=session_id, name="two", text="")
        while message := await stream.next():
            missed.append(message)
        last_of_all = stream.last_id
    numbers = [each["params"]["progress"] for each in missed if "params" in each]
    assert numbers == [*range(first["params"]["progress"] + 1, first["params"]["progress"] + 1 + len(numbers))]
    assert missed[-1]["id"] == 2
    assert "".join(fields_of(missed[-1])["output"]).startswith("held\nsecond\nheld\nthird\n")
    # From where it was before, it is the same again, and after its end there is nothing.
    async with opened(http, "GET", headers={"last-event-id": last_id}) as stream:
        assert [message async for message in _all(stream)] == missed
    async with opened(http, "GET", headers={"last-event-id": last_of_all}) as stream:
        assert await stream.next() is None


async def _all(stream: Stream) -> AsyncGenerator[dict[str, Any]]:
    while message := await stream.next():
        yield message


async def test_an_event_of_another_session_or_none_at_all_is_not_gone_on_with(
    http: httpx.AsyncClient, url: str
) -> None:
    async with opened(http, json=tool_call(1, "list_sessions")) as stream:
        await stream.until("result")
        event_id = stream.last_id
    async with httpx.AsyncClient(headers={"accept": "application/json, text/event-stream"}, base_url=url) as other:
        greeted = await other.post("/mcp", json=HELLO)
        for unknown in (event_id, "nonsense", f"{event_id}9", "-1", ""):
            chosen = {"mcp-session-id": greeted.headers["mcp-session-id"], "last-event-id": unknown or "-"}
            refused = await other.get("/mcp", headers=chosen)
            assert (refused.status_code, "get_execution" in refused.text) == (404, True), unknown


async def test_an_id_in_use_is_refused_and_the_first_request_gets_its_own_answer(http: httpx.AsyncClient) -> None:
    session_id = (await called(http, 1, "new_session"))["session_id"]
    run = tool_call(2, "execute_code", code=held() + "'first'", session_id=session_id)
    async with opened(http, json=run) as stream:
        await stream.until("held")
        twin = await http.post("/mcp", json=tool_call(2, "list_sessions"))
        assert (twin.status_code, twin.json()["id"], twin.json()["error"]["code"]) == (400, 2, -32600)
        await called(http, 3, "upload_file", session_id=session_id, name="go", text="")
        assert fields_of(await stream.until("result"))["result"] == "'first'"
    # Once it is answered, its id is free.
    assert "sessions" in await called(http, 2, "list_sessions")


@pytest.mark.parametrize(
    ("body", "request_id"),
    [
        (b'{"jsonrpc": "2.0", "id": 5, "method": "ping", "params": {"a": "\\ud800"}}', 5),
        (b'{"jsonrpc": "2.0", "id": 5.5, "method": "ping"}', None),
        (b'[{"jsonrpc": "2.0", "id": 6, "method": "ping"}]', None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": []}', 7),
        (b'{"jsonrpc": "2.0", "id": 8', 8),
    ],
    ids=["surrogate", "fraction", "batch", "list", "broken"],
)
async def test_a_body_that_cannot_be_read_is_answered_with_its_id(
    http: httpx.AsyncClient, body: bytes, request_id: int | None
) -> None:
    answer = await http.post("/mcp", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["id"]) == (400, request_id)


def progress(number: int, text: str = "") -> JSONRPCNotification:
    return JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params={"n": number, "text": text})


async def test_the_oldest_events_of_a_caller_are_forgotten_first_and_nothing_is_resumed_across_a_gap() -> None:
    budget = EventBudgetBytes(limit_bytes=8_000)
    one, other = Events(budget), Events(budget)
    ids = [await one.store_event("1", progress(number)) for number in range(4)]
    kept = one.find(ids[1])
    assert kept is not None
    following = one.following(kept)
    assert (await anext(following)).message == progress(2)
    # Another MCP session of the same caller takes what there is, up to the last event.
    await other.store_event("1", progress(0, "x" * 6_500))
    assert [one.find(event_id) is not None for event_id in ids] == [False, False, False, True]
    last = one.find(ids[3])
    assert last is not None
    assert [each.message async for each in one.following(kept)] == []
    # Whoever was reading already goes on with what it had in hand.
    assert (await anext(following)).message == progress(3)
    # Whoever has the last one goes on from it.
    await one.store_event("1", JSONRPCResponse(jsonrpc="2.0", id=1, result={}))
    assert [each.is_answer async for each in one.following(last)] == [True]
    # What a session that has ended took is free again.
    other.close()
    ids = [await one.store_event("2", progress(number, "x" * 1_500)) for number in range(2)]
    assert all(one.find(event_id) is not None for event_id in ids)


async def test_an_event_takes_as_long_for_who_follows_whatever_else_is_kept() -> None:
    async def taken_s(kept: int) -> float:
        events = Events(EventBudgetBytes())
        first = events.find(await events.store_event("1", progress(0)))
        for number in range(kept):
            await events.store_event("another", progress(number))
        assert first is not None
        following = events.following(first)
        began = time.thread_time()
        for number in range(100):
            await events.store_event("1", progress(number))
            assert (await anext(following)).message == progress(number)
        return time.thread_time() - began

    assert min([await taken_s(20_000) for _ in range(3)]) < 3 * min([await taken_s(2_000) for _ in range(3)])
