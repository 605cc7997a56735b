"""A stream of 2025's protocol that breaks, and is gone on with at another connection."""

import json
from typing import Any

import httpx2
from calls import Caller, held
from wires import HELLO, tool_call

_ACCEPTED = {"accept": "application/json, text/event-stream"}


async def begin(http: httpx2.AsyncClient, url: str) -> dict[str, str]:
    """Begin an MCP session, and return the headers that its messages have."""
    greeted = await http.post(f"{url}/mcp", json=HELLO, headers=_ACCEPTED)
    own = {"mcp-session-id": greeted.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
    headers = {**_ACCEPTED, **own}
    await http.post(f"{url}/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
    return headers


async def new_session(http: httpx2.AsyncClient, url: str, headers: dict[str, str]) -> str:
    """A session that is made where the MCP session is."""
    answer = await http.post(f"{url}/mcp", json=tool_call("new", "new_session"), headers=headers)
    message = next(json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {"))
    return message["result"]["structuredContent"]["session_id"]


async def broken_and_resumed(
    http: httpx2.AsyncClient,
    urls: tuple[str, str],
    headers: dict[str, str],
    session_id: str,
    watcher: Caller,
    turn: int,
) -> dict[str, Any]:
    """The answer to a call whose connection breaks at the first address, and is resumed at the second."""
    last, name = "", f"go-{turn}"
    call = tool_call(turn, "execute_code", code=held(name) + f"'{name}'", session_id=session_id)
    async with http.stream("POST", f"{urls[0]}/mcp", json=call, headers=headers) as stream:
        has_begun = False
        async for line in stream.aiter_lines():
            last = line.removeprefix("id: ") if line.startswith("id: ") else last
            has_begun = has_begun or '"held"' in line
            if has_begun and not line:
                break
    await watcher.release(session_id, name)
    own = {**headers, "last-event-id": last}
    async with http.stream("GET", f"{urls[1]}/mcp", headers=own) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            message = json.loads(line[6:]) if line.startswith("data: {") else {}
            if message.get("id") == turn:
                return message["result"]
    raise AssertionError("the stream ended before the answer")
