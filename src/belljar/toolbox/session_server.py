"""Serves the tool calls of a session's code: JSON lines over a UNIX socket in its scratch folder, many in flight.

The code may be hostile. This module bounds the form, size, number and time (`fair_share.py`) of requests and of unread
answers, and closes the connection of a process that breaks the form. What may be called is decided by the broker.
"""

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from belljar.egress.session_sockets import SessionSocket, open_protocol_server
from belljar.ipc import Line, Lines, Overlong
from belljar.json_values import MAX_VALUES, has_too_many_values
from belljar.toolbox.answer_values import encoded
from belljar.toolbox.base import JsonObject
from belljar.toolbox.broker import Broker
from belljar.toolbox.fair_share import CALL_S, SLICE_S, FairShare, FairShares, clock

LINE_BYTES = 4 * 1024 * 1024
"""The longest request, with its arguments."""
_MAX_CONNECTIONS = 16
# Limits of one session over all its connections, because its requests and unread answers are in the server's memory.
_MAX_IN_FLIGHT = 64
_MAX_ASKED_BYTES = 2 * LINE_BYTES
_SMALL_BYTES = 65_536
"""Longer lines are read from one connection at a time."""
_MAX_WAITING_BYTES = 4 * _SMALL_BYTES
"""Requests of one connection that are read before they can start, because a cancellation of them may follow."""
_MAX_CANCELLED = 4_096
_SEARCH_S = 0.05
"""The most that a search is charged, because it may have waited for other work."""

log = logging.getLogger(__name__)

Find = Callable[["SearchMessage"], Awaitable[JsonObject]]
"""Answers a search."""
_CANCEL_BYTES = 100
_NUMBER = re.compile(rb'\{"id": ?(\d{1,15}),')

Number = Annotated[int, Field(ge=0, le=2**53)]


class _Message(BaseModel):
    # The validators are built when the first tool is called.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    id: Number


class CallMessage(_Message):
    """Calls a tool."""

    op: Literal["call"]
    server: str = Field(max_length=1_000)
    tool: str = Field(max_length=1_000)
    arguments: dict[str, Any]


class CancelMessage(_Message):
    """Cancels an earlier request."""

    op: Literal["cancel"]


class SearchMessage(_Message):
    """Searches for tools."""

    op: Literal["search"]
    query: str = Field(max_length=1_000)
    detail: Literal["names", "signatures", "source"] = "signatures"
    limit: int = Field(5, ge=1, le=50)
    server: str = Field("", max_length=1_000)


class JoinMessage(_Message):
    """Waits for a server that is imported and was still connecting when the tree was written."""

    op: Literal["join"]
    server: str = Field(max_length=1_000)


_REQUEST: TypeAdapter[CallMessage | CancelMessage | SearchMessage | JoinMessage] = TypeAdapter(
    Annotated[CallMessage | CancelMessage | SearchMessage | JoinMessage, Field(discriminator="op")],
    config=ConfigDict(defer_build=True),
)


class TooDeep(ValueError):
    """A request is JSON, but nested too deeply to be parsed."""


def parse(line: bytes) -> CallMessage | CancelMessage | SearchMessage | JoinMessage:
    """Return the request in a line. Raises ValueError if there is none."""
    try:
        return _REQUEST.validate_json(line)
    except ValidationError as error:
        if "recursion limit" in error.errors(include_url=False, include_input=False)[0]["msg"]:
            raise TooDeep from None
        raise


def cancelled_by(line: bytes) -> int | None:
    """Return the number of the request that a line cancels; None for any other line."""
    if len(line) > _CANCEL_BYTES or b'"cancel"' not in line:
        return None
    try:
        request = parse(line)
    except ValueError:
        return None
    return request.id if isinstance(request, CancelMessage) else None


def number_in(line: bytes) -> int | None:
    """Return the number of a request without parsing it; None if it is not found at the start."""
    found = _NUMBER.match(line)
    return int(found[1]) if found else None


class ToolServer:
    """Passes the requests of one kernel's processes to the session's broker."""

    def __init__(self, broker: Broker, find: Find, folder_inside: str, shares: FairShares) -> None:
        self._broker = broker
        self._find = find
        self._folder = folder_inside
        self._connections: set[_SessionConnection] = set()
        self.under_way = 0
        self._asked_bytes = 0
        self._longest: _SessionConnection | None = None
        self.unread_answers = UnreadAnswers(broker.session_id)
        self.share = FairShare(shares, lambda: broker.owner, self._listen_on)

    def _listen_on(self) -> None:
        for connection in [*self._connections]:
            connection.listen()

    def serve(self) -> asyncio.Protocol:
        """Return a protocol that serves one process of the session."""
        return _SessionConnection(self)

    def admit(self, connection: "_SessionConnection") -> bool:
        """Add a connection; return False if there are too many."""
        if len(self._connections) >= _MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def remove(self, connection: "_SessionConnection") -> None:
        """Remove a connection that is over."""
        self._connections.discard(connection)
        self.end_long(connection)

    async def answer(self, request: CallMessage | SearchMessage | JoinMessage) -> JsonObject:
        """Return the answer to a request."""
        if isinstance(request, SearchMessage):
            began = clock()
            found = await self._find(request)
            self.share.spend(min(clock() - began, _SEARCH_S))
            return found
        if isinstance(request, JoinMessage):
            return await self._broker.join(request.server)
        return await self._broker.call(request.server, request.tool, request.arguments, self._folder)

    def reserve(self, size_bytes: int) -> bool:
        """Reserve a place for a request of that size; return False if there is none."""
        if self.unread_answers.is_full:
            return False
        if self.under_way >= _MAX_IN_FLIGHT or (self.under_way and self._asked_bytes + size_bytes > _MAX_ASKED_BYTES):
            return False
        self.under_way += 1
        self._asked_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Free the place of a request that is over, and start requests that waited for one."""
        self.under_way -= 1
        self._asked_bytes -= size_bytes
        for connection in [*self._connections]:
            connection.start_requests()

    def begin_long(self, connection: "_SessionConnection") -> bool:
        """Return whether the connection may go on with a long line; of all others only the beginning is in memory."""
        self._longest = self._longest or connection
        return self._longest is connection

    def end_long(self, connection: "_SessionConnection") -> None:
        """Let another connection read a long line, because the one of this connection is complete."""
        if self._longest is connection:
            self._longest = None
            for other in [*self._connections]:
                other.start_requests()

    async def aclose(self) -> None:
        """Close all connections and cancel what is in flight."""
        self.share.close()
        await asyncio.gather(*(connection.aclose() for connection in [*self._connections]))


class _SessionConnection(asyncio.Protocol):
    """One connection. When it ends, its calls are cancelled, because nobody can receive their answers."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._lines = Lines(LINE_BYTES)
        self._unread: deque[Line] = deque()
        self._waiting: deque[Line] = deque()
        self._waiting_bytes = 0
        self._cancelled: set[int] = set()
        self._next: tuple[CallMessage | SearchMessage | JoinMessage, int] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._outgoing = Outgoing(self._server.unread_answers, self._transport)
        if not self._server.admit(self):
            self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._unread.clear()
        self._waiting.clear()
        self._next = None
        self._outgoing.close()
        for task in self._tasks.values():
            task.cancel()
        self._unregister()

    def _unregister(self) -> None:
        if not self._tasks:
            self._server.remove(self)

    def pause_writing(self) -> None:
        self._outgoing.pause()

    def resume_writing(self) -> None:
        self._outgoing.resume()

    def data_received(self, data: bytes) -> None:
        self._unread.extend(self._lines.feed(data))
        if self._lines.size > LINE_BYTES:
            self._hang_up()
        self.listen()

    def listen(self) -> None:
        """Take in the lines that were read, as long as the session has time left; the rest waits for its next turn."""
        began = clock()
        while self._unread and self._server.share.has_time():
            self._receive(self._unread.popleft())
            if (now := clock()) - began > SLICE_S:
                self._server.share.spend(now - began)
                began = now
        self.start_requests()
        self._server.share.spend(clock() - began)

    def _receive(self, line: Line) -> None:
        """Queue a line, or obey it at once if it cancels a request, because the queued ones may wait for that one."""
        number = cancelled_by(line) if isinstance(line, bytes) else None
        if number is None:
            self._waiting.append(line)
            self._waiting_bytes += _size(line)
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()
        elif self._next is not None and self._next[0].id == number:
            self._next = None
        elif self._waiting and len(self._cancelled) < _MAX_CANCELLED:
            self._cancelled.add(number)

    def start_requests(self) -> None:
        """Start the requests for which there is a place; stop reading from a process that has sent many more."""
        while not self._is_over and self._server.share.has_time():
            if self._next is None:
                if not self._waiting:
                    self._cancelled.clear()
                    break
                line = self._waiting.popleft()
                self._waiting_bytes -= _size(line)
                self._next = self._read(line)
            elif self._next[0].id in self._cancelled:
                self._next = None
            elif self._server.reserve(self._next[1]):
                request, size_bytes = self._next
                self._next = None
                self._start(request, size_bytes)
            elif self._next[1] + self._waiting_bytes > _MAX_WAITING_BYTES:
                self._transport.pause_reading()
                return
            else:
                break
        if not self._is_over:
            self._read_on()

    def _read_on(self) -> None:
        if self._unread or not self._server.share.has_time():
            self._transport.pause_reading()
            return
        if self._lines.size <= _SMALL_BYTES:
            self._server.end_long(self)
        elif not self._server.begin_long(self):
            self._transport.pause_reading()
            return
        self._transport.resume_reading()

    def _read(self, line: Line) -> tuple[CallMessage | SearchMessage | JoinMessage, int] | None:
        """Return the request of a line and its size; None if the line was refused."""
        if isinstance(line, Overlong):
            return self._hang_up()
        if has_too_many_values(line):
            few = f"the arguments have more than {MAX_VALUES:,} values; pass fewer at once"
            return self._refuse_arguments(line, few)
        try:
            request = parse(line)
        except TooDeep:
            return self._refuse_arguments(line, "the arguments are nested too deeply to be read; pass flatter ones")
        except ValueError:
            return self._refuse("the request cannot be read")
        if isinstance(request, CancelMessage):
            return self._refuse("a question is taken back in fewer words")
        if request.id in self._tasks:
            return self._refuse("the request has the number of another")
        return request, len(line)

    def _start(self, request: CallMessage | SearchMessage | JoinMessage, size_bytes: int) -> None:
        def end(_: Any) -> None:
            self._tasks.pop(request.id, None)
            self._server.release(size_bytes)
            if self._is_over:
                self._unregister()

        self._server.share.spend(CALL_S)
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks[request.id] = task
        task.add_done_callback(end)

    def _hang_up(self) -> None:
        self._is_over = True
        self._transport.abort()

    def _refuse(self, message: str) -> None:
        """Send an error and close the connection, because the lines that follow may be misread as well."""
        self._outgoing.say({"id": 0, "outcome": "error", "kind": "form", "message": message})
        self._hang_up()

    def _refuse_arguments(self, line: bytes, message: str) -> None:
        """Refuse a request without parsing it, under its number if the line shows one."""
        if (number := number_in(line)) is None:
            self._refuse("the request cannot be read")
        else:
            self._outgoing.say({"id": number, "outcome": "error", "kind": "arguments", "message": message})

    async def _serve(self, request: CallMessage | SearchMessage | JoinMessage) -> None:
        try:
            outcome = await self._server.answer(request)
        except Exception:
            # A fault in belljar must not leave the cell waiting forever.
            log.exception("a call of a session failed inside belljar")
            outcome: JsonObject = {"outcome": "error", "kind": "internal", "message": "the host failed; see its log"}
        began = clock()
        line = encoded({"id": request.id, **outcome}) + b"\n"
        self._server.share.spend(clock() - began)
        del outcome
        await self._outgoing.send(line)

    async def aclose(self) -> None:
        """Close the connection and cancel its requests."""
        self._hang_up()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@asynccontextmanager
async def open_tool_server(
    folder: Path,
    name: str,
    *,
    broker: Broker,
    find: Find,
    folder_inside: str,
    paces: FairShares,
    listener: SessionSocket | None = None,
) -> AsyncGenerator[ToolServer]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends.

    `listener` may be a socket that an earlier belljar server left.
    """
    server = ToolServer(broker, find, folder_inside, paces)
    try:
        async with open_protocol_server(folder, name, server.serve, session_socket=listener):
            yield server
    finally:
        with contextlib.suppress(OSError):
            await server.aclose()


def _size(line: Line) -> int:
    return len(line) if isinstance(line, bytes) else 0


# Unread answers. They wait in memory, in bounded number, size and time. The connection of a process that does not read
# its answers is closed, because they take the server's memory. Its pending calls end with an error, and it connects
# again for the next one.

MAX_BYTES: Final = 8 * 1024 * 1024
"""Unread answers of one session over all its connections: by default two of the largest (`tool_result_bytes`)."""
BACKLOG_S: Final = 10.0
"""How long more than that may wait, because many large answers may come at once, and reading them takes time."""
ANSWER_S: Final = 60.0
"""How long a single answer may wait, because a cell may compute for a while before it reads."""
_PIECE_BYTES: Final = 262_144
"""The most that is given to a transport at once, because it keeps what it cannot send in memory."""
_MAX_SAID_BYTES: Final = 4 * _PIECE_BYTES


class UnreadAnswers:
    """Counts one session's unread answers over all its connections, and closes connections if there are too many."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._behind: set[Outgoing] = set()
        """The connections that have answers waiting."""
        self._hanging_up: asyncio.TimerHandle | None = None
        self.waiting = 0
        """The number of answers that wait."""
        self.size_bytes = 0
        """Their size."""

    @property
    def is_full(self) -> bool:
        """Return whether too much waits; meanwhile no request of the session is started."""
        return self.size_bytes > MAX_BYTES

    def add(self, outgoing: "Outgoing", size_bytes: int) -> None:
        """Count an answer that has to wait."""
        self.waiting += 1
        self.size_bytes += size_bytes
        outgoing.waiting_bytes += size_bytes
        self._behind.add(outgoing)
        self._watch()

    def remove(self, outgoing: "Outgoing", size_bytes: int) -> None:
        """Stop counting an answer that was sent or never will be."""
        self.waiting -= 1
        self.size_bytes -= size_bytes
        outgoing.waiting_bytes -= size_bytes
        if not outgoing.waiting_bytes:
            self._behind.discard(outgoing)
        self._watch()

    def _watch(self) -> None:
        if self.is_full and self._hanging_up is None:
            self._hanging_up = asyncio.get_running_loop().call_later(BACKLOG_S, self._hang_up)
        elif not self.is_full and self._hanging_up is not None:
            self._hanging_up.cancel()
            self._hanging_up = None

    def _hang_up(self) -> None:
        """Close the connection that is furthest behind; if that is not enough, the next follows `BACKLOG_S` later."""
        self._hanging_up = None
        furthest = max(self._behind, key=lambda outgoing: outgoing.waiting_bytes)
        log.warning(
            "session %s leaves %d bytes of tools' answers unread: a connection of it is closed",
            self._session_id,
            furthest.waiting_bytes,
        )
        furthest.hang_up()


class Outgoing:
    """Sends lines to one process, one after the other."""

    def __init__(self, unread_answers: UnreadAnswers, transport: asyncio.Transport) -> None:
        self._unread_answers = unread_answers
        self._transport = transport
        self._turn = asyncio.Lock()
        self._is_read = asyncio.Event()
        self._is_read.set()
        self.waiting_bytes = 0
        """The size of the answers that wait for this process."""

    def pause(self) -> None:
        """Let answers wait, because the process does not read."""
        self._is_read.clear()

    def resume(self) -> None:
        """Let answers go out, because the process reads again."""
        self._is_read.set()

    close = resume

    def hang_up(self) -> None:
        """Close the connection, and drop what was not sent."""
        self._transport.abort()

    def say(self, message: JsonObject) -> None:
        """Send a short message without waiting."""
        self._transport.write(encoded(message) + b"\n")
        if self._transport.get_write_buffer_size() > _MAX_SAID_BYTES:
            self.hang_up()

    async def send(self, line: bytes) -> None:
        """Send a line; return when the process has read it, as far as is known, or when it never will."""
        if len(line) <= _PIECE_BYTES and not self._turn.locked() and self._is_read.is_set():
            self._transport.write(line)
            if self._is_read.is_set():
                return  # the whole line went out, so nothing has to wait
            line = b""
        self._unread_answers.add(self, len(line))
        try:
            async with asyncio.timeout(ANSWER_S), self._turn:
                await self._is_read.wait()
                for start in range(0, len(line), _PIECE_BYTES):
                    self._transport.write(memoryview(line)[start : start + _PIECE_BYTES])
                    await self._is_read.wait()
        except TimeoutError:
            self.hang_up()
        finally:
            self._unread_answers.remove(self, len(line))
