"""Connects to an MCP server over HTTP: the SDK's streamable HTTP with a client that bounds the size of answers.

The SDK ends the whole connection if one request cannot be sent, and says little about an HTTP status. This client turns
both into an error of that request alone. It knows HTTP, not what the messages say.
"""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
from mcp.client.streamable_http import streamable_http_client

from belljar.toolbox.answers import SESSION_GONE, TOO_LARGE, UNREACHABLE
from belljar.toolbox.message_memory import LARGE_BYTES, MemoryShare, MessageMemory
from belljar.toolbox.server_config import HttpServer

_SESSION: Final = "mcp-session-id"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_CONNECT_S: Final = 30.0
# What a current client gets at the address of a server with the older transport (SSE).
_ADVICE: Final = {
    405: ": it may speak SSE, a transport that MCP has given up; "
    "give its streamable HTTP address, which often ends in /mcp"
}
NOWHERE: Final = "it answered with HTTP 404 Not Found: there is no MCP server at its address, whose path often is /mcp"
_EVENT_END: Final = re.compile(rb"\n\r?\n")


@asynccontextmanager
async def open_address(server: HttpServer, *, limit_bytes: int, memory: MessageMemory) -> AsyncGenerator[Any]:
    """Yield the streams that the SDK's client wants; nothing is sent before the client asks."""
    # No read timeout, because `connection.py` limits the time of each call.
    timeout = httpx2.Timeout(_CONNECT_S, read=None)
    # An uncompressed answer cannot expand to more than was counted.
    headers = {"accept-encoding": "identity", **server.headers}
    async with (
        BoundedClient(limit_bytes, memory, headers=headers, timeout=timeout) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=limit_bytes) as streams,
    ):
        yield streams


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client that returns failures as JSON-RPC errors and bounds the size of answers."""

    def __init__(self, limit_bytes: int, memory: MessageMemory, **chosen: Any) -> None:
        super().__init__(**chosen)
        self._limit_bytes = limit_bytes
        self._memory = memory

    async def send(self, request: httpx2.Request, **chosen: Any) -> httpx2.Response:
        """Send a request as httpx does; if it cannot be sent, return an error response of our own."""
        try:
            response = await super().send(request, **chosen)
        except httpx2.TransportError as error:
            # The error's own text may name the address, which sessions should not know.
            return _refusal(request, UNREACHABLE, f"it cannot be reached: {type(error).__name__}", detail=str(error))
        if request.method != "POST":
            return response
        if (fault := self._fault(request, response)) is not None:
            await response.aclose()
            return _refusal(request, *fault)
        is_events = _type_of(response).startswith(_EVENTS)
        response.stream = _Bounded(response.stream, self._limit_bytes, self._memory, is_events=is_events)
        return response

    def _fault(self, request: httpx2.Request, response: httpx2.Response) -> tuple[int, str] | None:
        """Return what is wrong with an answer, judged before its body is read."""
        status = response.status_code
        if status == 404 and _SESSION in request.headers:
            return SESSION_GONE, "it has forgotten our session"
        # Some servers answer an unknown method with 404 without a session; the SDK handles that.
        if status >= 400 and status != 404 and not _type_of(response).startswith(_JSON):
            return UNREACHABLE, f"it answered with HTTP {status} {response.reason_phrase}{_ADVICE.get(status, '')}"
        if response.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            return UNREACHABLE, "it compressed its answer, though it was asked not to"
        length = response.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit_bytes:
            return TOO_LARGE, f"it answered with {int(length):,} bytes, more than {self._limit_bytes:,}"
        return None


class _Bounded(httpx2.AsyncByteStream):
    """A response body that waits for memory if it is large, and raises an error if it gets too long.

    In an event stream each event is a message of its own, whose length the SDK limits. Other errors are raised in a
    form that the SDK expects.
    """

    def __init__(self, stream: Any, limit_bytes: int, memory: MessageMemory, *, is_events: bool) -> None:
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._memory = memory
        self._is_events = is_events
        self._share: MemoryShare | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if size > self._limit_bytes and not self._is_events:
                    raise httpx2.StreamError(f"it answered with more than {self._limit_bytes:,} bytes")
                if size > LARGE_BYTES and self._share is None:
                    self._share = await self._memory.acquire(self._limit_bytes)
                yield chunk
                if self._is_events and _EVENT_END.search(chunk):
                    size = 0
                    self._free()
        except httpx2.TransportError as error:
            if self._is_events:
                raise
            raise httpx2.StreamError(f"the answer broke off: {type(error).__name__}") from error
        finally:
            self._free()

    def _free(self) -> None:
        if self._share is not None:
            self._share.release()
            self._share = None

    async def aclose(self) -> None:
        self._free()
        await self._stream.aclose()


def _type_of(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").lower()


def _refusal(request: httpx2.Request, code: int, message: str, detail: str = "") -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message, "data": detail}}
    return httpx2.Response(503, headers={"content-type": _JSON}, content=json.dumps(error).encode(), request=request)
