"""Streams of 2025's streamable HTTP that a client can resume after its connection broke.

What was sent is kept in memory, for each caller within a budget, as long as the MCP session lives: a client that comes
back with the id of the last event it has gets what followed, without a gap, or is told that this is not possible.
Requests with the id of one that is not answered yet are refused. Protocol 2026-07-28 has no such streams.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.streamable_http import (
    MCP_SESSION_ID_HEADER,
    EventCallback,
    EventMessage,
    EventStore,
    StreamableHTTPServerTransport,
)
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse, RequestId
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from belljar.surfaces.jsonrpc import id_in_use, read_message

KEPT_BYTES: Final = 32 * 1024 * 1024
"""Bytes kept for one caller, in all its MCP sessions together; beyond them the oldest events are forgotten."""
LARGE_BYTES: Final = 1024 * 1024
SESSIONS: Final = 1_000
"""MCP sessions that one caller may have open, of the ten thousand that there may be."""
EVENT_BYTES: Final = 512
"""Bytes that an event takes beside its message."""


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    stream_id: str
    message: JSONRPCMessage | None

    @property
    def is_answer(self) -> bool:
        return isinstance(self.message, JSONRPCResponse | JSONRPCError)


class EventBudgetBytes:
    """The events kept for one caller, and the limit on their size."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit = limit_bytes
        self._total = 0
        self._kept: OrderedDict[tuple[Events, int], int] = OrderedDict()

    def add(self, events: "Events", number: int, size_bytes: int) -> None:
        """Count one more event, and make their MCP sessions forget the oldest ones, which no longer fit."""
        self._kept[events, number] = size_bytes
        self._total += size_bytes
        while self._total > self._limit:
            (owner, oldest), size = self._kept.popitem(last=False)
            self._total -= size
            owner.forget(oldest)

    def drop(self, events: "Events", numbers: Iterator[int]) -> None:
        """Stop counting events of an MCP session that has ended."""
        for number in numbers:
            self._total -= self._kept.pop((events, number), 0)


class Events(EventStore):
    """The events of one MCP session, numbered; their ids mean nothing to another session."""

    def __init__(self, budget: EventBudgetBytes) -> None:
        self._budget = budget
        self._prefix = secrets.token_hex(8)
        self._events: dict[int, _Event] = {}
        self._count = 0
        self._forgotten = 0
        """The number of the latest event that was forgotten because it no longer fitted."""
        self._has_changed = asyncio.Event()
        self._is_closed = False
        self.open_requests: set[str] = set()
        """Ids of requests that are not answered yet, whether anybody still listens or not."""

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep one event of a stream and return its id."""
        self._count += 1
        event = _Event(self._count, stream_id, message)
        self._events[event.number] = event
        size = len(message.model_dump_json(by_alias=True, exclude_unset=True)) if message is not None else 0
        self._budget.add(self, event.number, size + EVENT_BYTES)
        if event.is_answer:
            self.open_requests.discard(stream_id)
        self._has_changed.set()
        self._has_changed = asyncio.Event()
        return self.id_of(event)

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Raise: never called, because `Transport` reads `following`, which leaves no gap before live events."""
        raise NotImplementedError

    def id_of(self, event: _Event) -> str:
        """Return the id that clients know an event by."""
        return f"{self._prefix}-{event.number}"

    def find(self, event_id: str) -> _Event | None:
        """Return the event with this id, if it is kept; then all that followed it is kept, too."""
        prefix, _, number = event_id.partition("-")
        is_ours = prefix == self._prefix and number.isascii() and number.isdigit() and len(number) < 19
        return self._events.get(int(number)) if is_ours else None

    async def following(self, event: _Event) -> AsyncGenerator[_Event]:
        """Yield the events that follow one on its stream, including those still to come, up to the answer."""
        last = event
        while not last.is_answer:
            if self._is_closed:
                return
            has_changed = self._has_changed
            later = [each for each in self._events.values() if each.number > last.number]
            if last.number < self._forgotten:
                return  # the next event may be forgotten as well, and no answer is better than one with a gap
            for each in later:
                if each.stream_id == event.stream_id:
                    last = each
                    yield each
                    if each.is_answer:
                        return
            await has_changed.wait()

    def forget(self, number: int) -> None:
        """Drop an event that no longer fits into the budget."""
        self._events.pop(number, None)
        self._forgotten = number

    def close(self) -> None:
        """Forget all events, because the MCP session has ended."""
        self._budget.drop(self, iter([*self._events]))
        self._events.clear()
        self._is_closed = True
        self._has_changed.set()


class Transport(StreamableHTTPServerTransport):
    """The SDK's transport, with one request an id at a time, errors for invalid messages, and streams without gaps."""

    def __init__(self, events: Events, **options: Any) -> None:
        super().__init__(event_store=events, **options)
        self._events = events

    async def _handle_post_request(self, scope: Scope, request: Request, receive: Receive, send: Send) -> None:
        body = await request.body()
        # Large messages are parsed in a thread, because an upload of a hundred megabytes takes a while.
        message = await anyio.to_thread.run_sync(read_message, body) if len(body) > LARGE_BYTES else read_message(body)
        if isinstance(message, JSONRPCRequest) and str(message.id) in self._events.open_requests:
            message = [id_in_use(message)]
        if isinstance(message, list) and message:
            text = message[0].model_dump_json(by_alias=True, exclude_unset=True)
            answer = Response(text, status_code=HTTPStatus.BAD_REQUEST, media_type="application/json")
            await answer(scope, receive, send)
            return
        await super()._handle_post_request(scope, request, receive, send)

    def _create_session_message(
        self, message: JSONRPCRequest, request: Request, request_id: RequestId, protocol_version: str
    ) -> SessionMessage:
        self._events.open_requests.add(str(request_id))
        return super()._create_session_message(message, request, request_id, protocol_version)

    async def _replay_events(self, last_event_id: str, request: Request, send: Send) -> None:
        last = self._events.find(last_event_id)
        if last is None:
            why = (
                "Last-Event-ID is not known any more: events are kept in memory, the latest of each caller, while the "
                "MCP session lives. Call get_execution for what an execution gave"
            )
            await self._create_error_response(why, HTTPStatus.NOT_FOUND)(request.scope, request.receive, send)
            return
        # The client has left its earlier connection, even if the network has not reported that yet.
        self.close_sse_stream(last.stream_id)
        events = self._events.following(last)

        async def lines() -> AsyncGenerator[dict[str, Any]]:
            async for event in events:
                if event.message is not None:
                    yield self._create_event_data(EventMessage(event.message, self._events.id_of(event)))

        headers = {"Cache-Control": "no-cache, no-transform", MCP_SESSION_ID_HEADER: self.mcp_session_id or ""}
        await EventSourceResponse(content=lines(), headers=headers)(request.scope, request.receive, send)

    async def terminate(self) -> None:
        """End the MCP session as the SDK does, and its streams, which cannot be resumed any more."""
        self._events.close()
        await super().terminate()


class SessionManager(StreamableHTTPSessionManager):
    """The SDK's session manager, with our transport for each MCP session."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._budgets: dict[str, EventBudgetBytes] = {}

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            return None
        if requestor is not None and [*self._session_owners.values()].count(requestor) >= SESSIONS:
            return None
        budget = self._budgets.setdefault(repr(requestor), EventBudgetBytes())
        session_id = uuid4().hex
        transport = Transport(
            Events(budget),
            mcp_session_id=session_id,
            security_settings=self.security_settings,
            idle_timeout=self.session_idle_timeout,
        )
        if requestor is not None:
            self._session_owners[session_id] = requestor
        self._server_instances[session_id] = transport
        return transport
