"""Passes a request on to another server, by its socket or its address, and the answer back, byte by byte as they come.

Nothing is buffered beyond what one read gives, whoever reads slowly slows the other end, and a caller who leaves closes
the connection to the other server, which cancels the call there. A request that may have reached the other server is
never sent a second time. Knows nothing of what is in it.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import h11
from starlette.types import Message, Receive, Scope, Send

from belljar import ipc
from belljar.errors import EngineError

Headers = list[tuple[bytes, bytes]]
Sign = Callable[[bytes, bytes, Sequence[tuple[bytes, bytes]]], Headers]
"""Returns the headers, by method, target and headers, that let another machine believe a request."""
CONNECT_S: Final = 2.0
IDLE_S: Final = 60.0
"""How long a connection waits for the next request: less than servers keep one (`http/connections.py`)."""
_READ_BYTES: Final = 256 * 1024
_HEAD_BYTES: Final = 64 * 1024
_MOST_IDLE: Final = 64
# What belongs to one connection, and credentials, which the first server has checked and no other one needs.
_NOT_PASSED_ON: Final = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"authorization", b"x-ms-apikey")
)


class PeerAway(EngineError):
    """Another server cannot be reached: nothing was sent to it."""

    code = "peer-away"


class SessionLost(EngineError):
    """The server that has a session ended before it answered."""

    code = "session-lost"


def session_lost() -> SessionLost:
    """Return what callers are told of a request that reached a server which did not answer it."""
    return SessionLost(
        "the server of this session ended before it answered, and what was asked may have run",
        hint="It starts again by itself: look at the session with list_sessions and get_execution before you repeat it",
    )


class Connection:
    """One connection to a server's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether it can take another request."""
        is_fresh = time.monotonic() - self.idle_since < IDLE_S
        return is_fresh and not (self._reader.at_eof() or self._writer.transport.is_closing())

    async def send(self, *events: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        """Send parts of the request, all at once; `SessionLost` where the other end is gone."""
        data = b"".join(self._http.send(event) or b"" for event in events)
        try:
            if data:
                self._writer.write(data)
                await self._writer.drain()
        except OSError:
            raise session_lost() from None

    async def receive(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """Return the next part of the answer; `SessionLost` where none will come, or what comes is no HTTP."""
        try:
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response | h11.Data | h11.EndOfMessage):
                    return event
                elif not isinstance(event, h11.InformationalResponse):
                    raise session_lost()
        except (h11.RemoteProtocolError, OSError):
            raise session_lost() from None

    def rest(self) -> bool:
        """Make the connection ready for the next request; return False if it takes none."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self.idle_since = time.monotonic()
        return True

    def close(self) -> None:
        """Close it now; may be called twice."""
        self._writer.transport.abort()


class RelayedAnswer:
    """The answer of another server, while it comes."""

    def __init__(self, head: h11.Response, connection: Connection) -> None:
        self.status = head.status_code
        self.headers: Headers = [
            (name, value) for name, value in head.headers if name not in (b"connection", b"transfer-encoding")
        ]
        self._connection = connection

    def header(self, wanted: bytes) -> bytes:
        """Return the value of a header; empty without it."""
        return next((value for name, value in self.headers if name == wanted), b"")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while not isinstance(event := await self._connection.receive(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body, or `SessionLost` for one that is longer than a peer's may be."""
        found = bytearray()
        async for part in self.parts():
            found += part
            if len(found) > limit_bytes:
                raise session_lost()
        return bytes(found)


def _unsigned(_method: bytes, _target: bytes, _headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    return []


class Connections:
    """The connections to one other server: to its socket, or to the URL of one of another machine.

    A certificate there has to be for `name`, or for the URL's host.
    """

    def __init__(
        self, place: Path | str, sign: Sign = _unsigned, tls: ssl.SSLContext | None = None, name: str = ""
    ) -> None:
        self._place = place
        self._sign = sign
        self._tls = tls
        self._name = name
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def _take(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_usable:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(CONNECT_S):
                return Connection(*await self._connect())
        except (OSError, TimeoutError, ValueError):
            raise PeerAway("the server of this session cannot be reached") from None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._place, Path):
            with ipc.reachable(self._place) as address:
                return await asyncio.open_unix_connection(address, limit=_READ_BYTES)
        parts = urlsplit(self._place)
        tls = self._tls if parts.scheme == "https" else None
        name = (self._name or parts.hostname) if tls is not None else None
        return await asyncio.open_connection(
            parts.hostname, parts.port, limit=_READ_BYTES, ssl=tls, server_hostname=name
        )

    @asynccontextmanager
    async def ask(
        self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes | Receive = b""
    ) -> AsyncGenerator[RelayedAnswer]:
        """Send a request and return its answer; the connection is closed if the block ends before the answer does.

        A `body` that is `receive` of ASGI is sent while it arrives.
        """
        connection = await self._take()
        self._busy.add(connection)
        sending: asyncio.Task[None] | None = None
        try:
            signed = [*headers, *self._sign(method.encode(), target, headers)]
            request = h11.Request(method=method, target=target, headers=_framed(signed, body))
            if isinstance(body, bytes):
                await connection.send(request, h11.Data(data=body), h11.EndOfMessage())
            else:
                await connection.send(request)
                sending = asyncio.create_task(_send_body(connection, body))
            head = await connection.receive()
            if not isinstance(head, h11.Response):
                raise session_lost()
            yield RelayedAnswer(head, connection)
        except SessionLost:
            self._close_idle()  # those of a server that has ended may not show it yet
            raise
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            self._busy.discard(connection)
            if len(self._idle) < _MOST_IDLE and connection.rest():
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close all connections; who waits for an answer is told that the other server is gone."""
        self._close_idle()
        for connection in self._busy:
            connection.close()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _framed(headers: Sequence[tuple[bytes, bytes]], body: bytes | Receive) -> Headers:
    if not isinstance(body, bytes):
        # As long as the caller said, or in chunks as it came.
        has_length = any(name == b"content-length" for name, _ in headers)
        return [*headers] if has_length else [*headers, (b"transfer-encoding", b"chunked")]
    kept = [(name, value) for name, value in headers if name != b"content-length"]
    return [*kept, (b"content-length", str(len(body)).encode())] if body else kept


async def _send_body(connection: Connection, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            connection.close()
            return
        try:
            if part := message.get("body", b""):
                await connection.send(h11.Data(data=part))
            if not message.get("more_body"):
                await connection.send(h11.EndOfMessage())
                return
        except (SessionLost, h11.LocalProtocolError):
            return  # whoever reads the answer is told


def passed_on(scope: Scope) -> Headers:
    """Return the headers of a request that another server is to see."""
    return [(name, value) for name, value in scope["headers"] if name not in _NOT_PASSED_ON]


def target_of(scope: Scope) -> bytes:
    """Return the path of a request as it was sent, with its query."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path.partition(b"?")[0] + (b"?" + query if query else b"")


async def relay(
    connections: Connections,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Headers,
    body: bytes | None,
    *,
    last_event: bytes = b"",
) -> None:
    """Pass a request on with these headers, and its answer back. `body` is None where nobody has read it yet.

    Raise `PeerAway` if nothing was sent, and `SessionLost` if nothing came back. A stream of events that breaks off
    later ends with `last_event`, if there is one; any other answer that does breaks off for the caller too.
    """
    if body is None and not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
        body = b""
    is_sent = asyncio.Event()
    if body is not None:
        is_sent.set()

    async def receive_body() -> Message:
        message = await receive()
        if not message.get("more_body"):
            is_sent.set()
        return message

    async with leaving(receive, is_sent):
        begun: RelayedAnswer | None = None
        try:
            asked = connections.ask(scope["method"], target_of(scope), headers, receive_body if body is None else body)
            async with asked as answer:
                begun = answer
                await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                async for part in answer.parts():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SessionLost:
            if begun is None:
                raise
            if begun.header(b"content-type").startswith(b"text/event-stream"):
                await send({"type": "http.response.body", "body": last_event, "more_body": False})


@asynccontextmanager
async def leaving(receive: Receive, is_sent: asyncio.Event) -> AsyncGenerator[None]:
    """End the block when the caller hangs up after the whole request was read, which sets `is_sent`."""
    waiting = asyncio.current_task()
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        await is_sent.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        if waiting is not None:
            waiting.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_left or waiting is None or waiting.uncancel():
            raise
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
