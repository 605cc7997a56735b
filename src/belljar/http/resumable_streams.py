"""Streams of 2025's streamable HTTP that a client can resume after its connection broke.

What was sent is kept in memory, for each caller within a budget, as long as the MCP session lives: a client that comes
back with the id of the last event it has gets what followed, without a gap, or is told that this is not possible.
Requests with the id of one that is not answered yet are refused, and those that are cancelled before they come, which
cancels on a connection of its own may do, never run. Protocol 2026-07-28 has no such streams.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar
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
from starlette.types import Message, Receive, Scope, Send

from belljar.http.early_cancellations import EarlyCancellations
from belljar.http.jsonrpc import cancelled, cancelled_id, id_in_use, parse_message, unread

KEPT_BYTES: Final = 32 * 1024 * 1024
"""Bytes kept for one caller, in all its MCP sessions together; beyond them the oldest events are forgotten."""
LARGE_BYTES: Final = 1024 * 1024
SESSIONS: Final = 1_000
"""MCP sessions that one caller may have open, of the ten thousand that there may be."""
LEAVING_S: Final = 2.0
"""How long after its end an MCP session hears that calls under way are cancelled, which a client may send beside it."""
EVENT_BYTES: Final = 512
"""Bytes that an event takes beside its message."""
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    stream_id: str
    place: int
    """Among the events of its stream."""
    message: JSONRPCMessage | None

    @property
    def is_answer(self) -> bool:
        return isinstance(self.message, JSONRPCResponse | JSONRPCError)


class _Stream:
    """The kept events of one stream, by their place, so that who follows it goes from one to the next."""

    def __init__(self) -> None:
        self.events: dict[int, _Event] = {}
        self.count = 0
        self.is_closed = False
        self.has_changed = asyncio.Event()

    def add(self, event: _Event) -> None:
        self.events[event.place] = event
        self.count += 1
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        self.has_changed.set()
        self.has_changed = asyncio.Event()


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
        self._streams: dict[str, _Stream] = {}
        self._count = 0
        self.open_requests: set[str] = set()
        """Ids of requests that are not answered yet, whether anybody still listens or not."""
        self.all_answered = asyncio.Event()
        """Set when the last one is answered, for who began to wait before."""

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep one event of a stream and return its id."""
        self._count += 1
        stream = self._streams.setdefault(stream_id, _Stream())
        event = _Event(self._count, stream_id, stream.count, message)
        self._events[event.number] = event
        stream.add(event)
        size = len(message.model_dump_json(by_alias=True, exclude_unset=True)) if message is not None else 0
        self._budget.add(self, event.number, size + EVENT_BYTES)
        if event.is_answer:
            self.open_requests.discard(stream_id)
            if not self.open_requests:
                self.all_answered.set()
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
        last, stream = event, self._streams.get(event.stream_id)
        while stream is not None and not last.is_answer and not stream.is_closed:
            if last.place + 1 == stream.count:
                await stream.has_changed.wait()
            elif (later := stream.events.get(last.place + 1)) is not None:
                last = later
                yield last
            else:
                return  # it is forgotten, and no answer is better than one with a gap

    def forget(self, number: int) -> None:
        """Drop an event that no longer fits into the budget."""
        event = self._events.pop(number, None)
        if event is None:
            return
        stream = self._streams[event.stream_id]
        del stream.events[event.place]
        if not stream.events:
            del self._streams[event.stream_id]
            stream.close()

    def close(self) -> None:
        """Forget all events, because the MCP session has ended."""
        self._budget.drop(self, iter([*self._events]))
        self._events.clear()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


class Transport(StreamableHTTPServerTransport):
    """The SDK's transport, with one request an id at a time, errors for invalid messages, and streams without gaps."""

    def __init__(self, events: Events, **options: Any) -> None:
        super().__init__(event_store=events, **options)
        self._events = events
        self._early = EarlyCancellations()
        self._is_leaving = False
        self.client: dict[str, Any] = {}
        """What the client said of itself when it began."""

    async def _handle_post_request(self, scope: Scope, request: Request, receive: Receive, send: Send) -> None:
        message = await _off_loop(parse_message, await request.body())
        if isinstance(message, JSONRPCRequest) and message.method == "initialize":
            self.client = dict(message.params or {})
        given_up = cancelled_id(message)
        if self._is_leaving and not given_up:
            await self._tell_terminated(request, send)
            return
        if given_up and given_up not in self._events.open_requests:
            self._early.add(given_up)
        if isinstance(message, JSONRPCRequest) and str(message.id) in self._events.open_requests:
            message = [id_in_use(message)]
        elif isinstance(message, JSONRPCRequest) and self._early.take(str(message.id)):
            message = [cancelled(message)]
        if isinstance(message, list) and message:
            await _refuse(message[0], scope, receive, send)
            return
        await super()._handle_post_request(scope, request, receive, send)

    async def _handle_get_request(self, request: Request, send: Send) -> None:
        if self._is_leaving:
            await self._tell_terminated(request, send)
            return
        await super()._handle_get_request(request, send)

    async def _handle_delete_request(self, request: Request, send: Send) -> None:
        """End the MCP session, at once if no call is under way: else its cancellation may still be on the way."""
        if self._is_leaving:
            await self._tell_terminated(request, send)
            return
        if not self._events.open_requests:
            await super()._handle_delete_request(request, send)
            return
        if not await self._validate_request_headers(request, send):
            return
        self._is_leaving = True
        self._events.all_answered.clear()
        await Response(status_code=HTTPStatus.OK)(request.scope, request.receive, send)
        with anyio.move_on_after(LEAVING_S):
            await self._events.all_answered.wait()
        await self.terminate()

    async def _tell_terminated(self, request: Request, send: Send) -> None:
        answer = self._create_error_response("Not Found: Session has been terminated", HTTPStatus.NOT_FOUND)
        await answer(request.scope, request.receive, send)

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


async def _off_loop(read: Callable[[bytes], _Read], body: bytes) -> _Read:
    """Read a message; a large one in a thread, because an upload of a hundred megabytes takes a while."""
    return await anyio.to_thread.run_sync(read, body) if len(body) > LARGE_BYTES else read(body)


async def _refuse(error: JSONRPCError, scope: Scope, receive: Receive, send: Send) -> None:
    text = error.model_dump_json(by_alias=True, exclude_unset=True)
    answer = Response(text, status_code=HTTPStatus.BAD_REQUEST, media_type="application/json")
    await answer(scope, receive, send)


class SessionManager(StreamableHTTPSessionManager):
    """The SDK's session manager, with our transport for each MCP session, before which no body is parsed unbounded.

    The ids of its MCP sessions begin with `mark`, by which other servers know whose they are.
    """

    def __init__(self, mark: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._mark = mark
        self._budgets: dict[str, EventBudgetBytes] = {}

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Both of the SDK's transports, that of 2025 and that of 2026, parse what they get.
        if scope["method"] != "POST":
            await super()._handle_request(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        if refused := await _off_loop(unread, body):
            await _refuse(refused, scope, receive, send)
            return
        begin: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return begin.pop() if begin else await receive()

        await super()._handle_request(scope, again, send)

    def opened(self, session_id: str, requestor: AuthorizationContext | None) -> Transport | None:
        """Return an MCP session of this caller's; None where there is none, or it is somebody else's."""
        transport = self._server_instances.get(session_id)
        is_theirs = self._session_owners.get(session_id) == requestor
        return transport if is_theirs and isinstance(transport, Transport) else None

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            return None
        if requestor is not None and [*self._session_owners.values()].count(requestor) >= SESSIONS:
            return None
        budget = self._budgets.setdefault(repr(requestor), EventBudgetBytes())
        session_id = self._mark + uuid4().hex
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
