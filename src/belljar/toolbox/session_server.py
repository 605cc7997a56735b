"""Where the code of a session calls tools: JSON lines over a UNIX socket in its scratch folder, many in flight.

Whoever asks may be hostile: form, size, number and time (`pace.py`) are bounded here, and whoever breaks the form is
hung up on. What may be asked is not decided here.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

from belljar.egress.session_sockets import SessionSocket, serving_as
from belljar.ipc import Line, Lines, Overlong
from belljar.toolbox.base import JsonObject
from belljar.toolbox.broker import Broker
from belljar.toolbox.fair_share import CALL_S, SLICE_S, FairShare, FairShares, clock
from belljar.toolbox.large_results import encoded
from belljar.toolbox.session_requests import (
    LINE_BYTES,
    MOST_VALUES,
    CallMessage,
    CancelMessage,
    JoinMessage,
    SearchMessage,
    TooDeep,
    cancelled_by,
    has_too_many_values,
    number_in,
    parsed,
)

_MOST_CONNECTIONS = 16
# Of one session, over all its connections: what it asks and what it does not fetch is in the server's memory.
_MOST_IN_FLIGHT = 64
_MOST_ASKED_BYTES = 2 * LINE_BYTES
_SMALL_BYTES = 65_536
"""What is longer comes in over one connection at a time."""
_MOST_WAITING_BYTES = 4 * _SMALL_BYTES
"""Over one connection, of what there is no room for yet: behind it there may be word that some of it is not wanted."""
_MOST_TAKEN_BACK = 4_096
_SEARCH_S = 0.05
"""The most that a search is charged; it may have waited for others."""

log = logging.getLogger(__name__)

Find = Callable[[SearchMessage], Awaitable[JsonObject]]
"""Answers a search."""


class ToolServer:
    """One kernel's way to its session's broker."""

    def __init__(self, broker: Broker, find: Find, folder_inside: str, paces: FairShares) -> None:
        self._broker = broker
        self._find = find
        self._folder = folder_inside
        self._conversations: set[_SessionConnection] = set()
        self.under_way = 0
        self._asked_bytes = 0
        self._longest: _SessionConnection | None = None
        self.unsent = Unsent(broker.session_id)
        self.pace = FairShare(paces, lambda: broker.owner, self._listen_on)

    def _listen_on(self) -> None:
        for conversation in [*self._conversations]:
            conversation.listen()

    def serve(self) -> asyncio.Protocol:
        """Serve one process of the session's."""
        return _SessionConnection(self)

    def admit(self, conversation: "_SessionConnection") -> bool:
        """Whether there is room for one more."""
        if len(self._conversations) >= _MOST_CONNECTIONS:
            return False
        self._conversations.add(conversation)
        return True

    def dismiss(self, conversation: "_SessionConnection") -> None:
        """It is over."""
        self._conversations.discard(conversation)
        self.end_long(conversation)

    async def answer(self, request: CallMessage | SearchMessage | JoinMessage) -> JsonObject:
        """What the session is told."""
        if isinstance(request, SearchMessage):
            began = clock()
            found = await self._find(request)
            self.pace.spend(min(clock() - began, _SEARCH_S))
            return found
        if isinstance(request, JoinMessage):
            return await self._broker.join(request.server)
        return await self._broker.call(request.server, request.tool, request.arguments, self._folder)

    def take_room(self, size_bytes: int) -> bool:
        """Whether a request of that size may be under way."""
        if self.unsent.is_full:
            return False
        if self.under_way >= _MOST_IN_FLIGHT or (self.under_way and self._asked_bytes + size_bytes > _MOST_ASKED_BYTES):
            return False
        self.under_way += 1
        self._asked_bytes += size_bytes
        return True

    def free_room(self, size_bytes: int) -> None:
        """A request is over: others may be waiting."""
        self.under_way -= 1
        self._asked_bytes -= size_bytes
        for conversation in [*self._conversations]:
            conversation.start_requests()

    def begin_long(self, conversation: "_SessionConnection") -> bool:
        """Whether it may go on with a long line: of all the others' the host keeps no more than their beginnings."""
        self._longest = self._longest or conversation
        return self._longest is conversation

    def end_long(self, conversation: "_SessionConnection") -> None:
        """Its long line is complete."""
        if self._longest is conversation:
            self._longest = None
            for other in [*self._conversations]:
                other.start_requests()

    async def aclose(self) -> None:
        """Stop, whatever is under way."""
        self.pace.close()
        await asyncio.gather(*(conversation.aclose() for conversation in [*self._conversations]))


class _SessionConnection(asyncio.Protocol):
    """One connection. Calls that are under way when it ends are cancelled: nobody is there to hear of them."""

    def __init__(self, hatch: ToolServer) -> None:
        self._hatch = hatch
        self._lines = Lines(LINE_BYTES)
        self._unheard: deque[Line] = deque()
        self._waiting: deque[Line] = deque()
        self._waiting_bytes = 0
        self._taken_back: set[int] = set()
        self._next: tuple[CallMessage | SearchMessage | JoinMessage, int] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._outgoing = Outgoing(self._hatch.unsent, self._transport)
        if not self._hatch.admit(self):
            self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._unheard.clear()
        self._waiting.clear()
        self._next = None
        self._outgoing.close()
        for task in self._tasks.values():
            task.cancel()
        self._leave()

    def _leave(self) -> None:
        if not self._tasks:
            self._hatch.dismiss(self)

    def pause_writing(self) -> None:
        self._outgoing.pause()

    def resume_writing(self) -> None:
        self._outgoing.resume()

    def data_received(self, data: bytes) -> None:
        self._unheard.extend(self._lines.feed(data))
        if self._lines.size > LINE_BYTES:
            self._hang_up()
        self.listen()

    def listen(self) -> None:
        """Hear what was read, as long as the session has time left; the rest when it has some again."""
        began = clock()
        while self._unheard and self._hatch.pace.has_time():
            self._hear(self._unheard.popleft())
            if (now := clock()) - began > SLICE_S:
                self._hatch.pace.spend(now - began)
                began = now
        self.start_requests()
        self._hatch.pace.spend(clock() - began)

    def _hear(self, line: Line) -> None:
        """What takes a question back is heard at once: those before it may all wait for the end of that very one."""
        number = cancelled_by(line) if isinstance(line, bytes) else None
        if number is None:
            self._waiting.append(line)
            self._waiting_bytes += _size(line)
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()
        elif self._next is not None and self._next[0].id == number:
            self._next = None
        elif self._waiting and len(self._taken_back) < _MOST_TAKEN_BACK:
            self._taken_back.add(number)

    def start_requests(self) -> None:
        """Begin with what has come as far as there is room; who asks for much more is not read from meanwhile."""
        while not self._is_over and self._hatch.pace.has_time():
            if self._next is None:
                if not self._waiting:
                    self._taken_back.clear()
                    break
                line = self._waiting.popleft()
                self._waiting_bytes -= _size(line)
                self._next = self._read(line)
            elif self._next[0].id in self._taken_back:
                self._next = None
            elif self._hatch.take_room(self._next[1]):
                request, size_bytes = self._next
                self._next = None
                self._start(request, size_bytes)
            elif self._next[1] + self._waiting_bytes > _MOST_WAITING_BYTES:
                self._transport.pause_reading()
                return
            else:
                break
        if not self._is_over:
            self._read_on()

    def _read_on(self) -> None:
        if self._unheard or not self._hatch.pace.has_time():
            self._transport.pause_reading()
            return
        if self._lines.size <= _SMALL_BYTES:
            self._hatch.end_long(self)
        elif not self._hatch.begin_long(self):
            self._transport.pause_reading()
            return
        self._transport.resume_reading()

    def _read(self, line: Line) -> tuple[CallMessage | SearchMessage | JoinMessage, int] | None:
        """What it asks, and its size; None for what is dealt with already."""
        if isinstance(line, Overlong):
            return self._hang_up()
        if has_too_many_values(line):
            few = f"the arguments have more than {MOST_VALUES:,} values; pass fewer at once"
            return self._refuse_arguments(line, few)
        try:
            request = parsed(line)
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
            self._hatch.free_room(size_bytes)
            if self._is_over:
                self._leave()

        self._hatch.pace.spend(CALL_S)
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks[request.id] = task
        task.add_done_callback(end)

    def _hang_up(self) -> None:
        self._is_over = True
        self._transport.abort()

    def _refuse(self, message: str) -> None:
        """Say so and hang up: nothing after it could be trusted to be what it seems."""
        self._outgoing.say({"id": 0, "outcome": "error", "kind": "form", "message": message})
        self._hang_up()

    def _refuse_arguments(self, line: bytes, message: str) -> None:
        """The question is not looked at, but who asked it is answered where its number can be told."""
        if (number := number_in(line)) is None:
            self._refuse("the request cannot be read")
        else:
            self._outgoing.say({"id": number, "outcome": "error", "kind": "arguments", "message": message})

    async def _serve(self, request: CallMessage | SearchMessage | JoinMessage) -> None:
        try:
            outcome = await self._hatch.answer(request)
        except Exception:
            # A fault of ours must not leave the cell waiting for ever.
            log.exception("a call of a session failed inside belljar")
            outcome: JsonObject = {"outcome": "error", "kind": "internal", "message": "the host failed; see its log"}
        began = clock()
        line = encoded({"id": request.id, **outcome}) + b"\n"
        self._hatch.pace.spend(clock() - began)
        del outcome
        await self._outgoing.send(line)

    async def aclose(self) -> None:
        """End it, and what is under way."""
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
    door: SessionSocket | None = None,
) -> AsyncGenerator[ToolServer]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends."""
    hatch = ToolServer(broker, find, folder_inside, paces)
    try:
        async with serving_as(folder, name, hatch.serve, door=door):
            yield hatch
    finally:
        with contextlib.suppress(OSError):
            await hatch.aclose()


def _size(line: Line) -> int:
    return len(line) if isinstance(line, bytes) else 0


# Answers that a session has asked for and not read yet: they wait in memory, in bounded number, size and time.
# A process of the session that does not read its answers is hung up on, because they take the server's memory. Its
# pending calls end with an error, and it connects again for the next one.

MOST_BYTES: Final = 8 * 1024 * 1024
"""Of one session, over all its connections: two of the largest answers (`tool_result_bytes`) by default."""
BACKLOG_S: Final = 10.0
"""For which more than that may wait: many large answers may come at once, and code that reads needs time for them."""
ANSWER_S: Final = 60.0
"""For which any one answer may wait: a cell may compute for a while before it reads."""
_PIECE_BYTES: Final = 262_144
"""More is not given to a transport at once: what it cannot send it keeps."""
_MOST_SAID_BYTES: Final = 4 * _PIECE_BYTES


class Unsent:
    """One session's, over all its connections."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._behind: set[Outgoing] = set()
        """The connections that have answers waiting."""
        self._hanging_up: asyncio.TimerHandle | None = None
        self.waiting = 0
        """Answers that wait."""
        self.size_bytes = 0
        """Of them."""

    @property
    def is_full(self) -> bool:
        """Whether more waits than may wait for long; no request of the session begins meanwhile."""
        return self.size_bytes > MOST_BYTES

    def add(self, outgoing: "Outgoing", size_bytes: int) -> None:
        """Count an answer that has to wait."""
        self.waiting += 1
        self.size_bytes += size_bytes
        outgoing.waiting_bytes += size_bytes
        self._behind.add(outgoing)
        self._watch()

    def remove(self, outgoing: "Outgoing", size_bytes: int) -> None:
        """Count an answer no longer: it was sent, or never will be."""
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
    """Lines to one process, one after the other."""

    def __init__(self, unsent: Unsent, transport: asyncio.Transport) -> None:
        self._unsent = unsent
        self._transport = transport
        self._turn = asyncio.Lock()
        self._is_read = asyncio.Event()
        self._is_read.set()
        self.waiting_bytes = 0
        """Of the answers that wait for this process."""

    def pause(self) -> None:
        """It does not read."""
        self._is_read.clear()

    def resume(self) -> None:
        """It reads again."""
        self._is_read.set()

    close = resume

    def hang_up(self) -> None:
        """Close the connection, and drop what was not sent."""
        self._transport.abort()

    def say(self, message: JsonObject) -> None:
        """A few words that nobody waits for."""
        self._transport.write(encoded(message) + b"\n")
        if self._transport.get_write_buffer_size() > _MOST_SAID_BYTES:
            self.hang_up()

    async def send(self, line: bytes) -> None:
        """Returns when it was read, as far as can be told, or when nobody will."""
        if len(line) <= _PIECE_BYTES and not self._turn.locked() and self._is_read.is_set():
            self._transport.write(line)
            if self._is_read.is_set():
                return  # it went out whole, and nobody has to wait
            line = b""
        self._unsent.add(self, len(line))
        try:
            async with asyncio.timeout(ANSWER_S), self._turn:
                await self._is_read.wait()
                for start in range(0, len(line), _PIECE_BYTES):
                    self._transport.write(memoryview(line)[start : start + _PIECE_BYTES])
                    await self._is_read.wait()
        except TimeoutError:
            self.hang_up()
        finally:
            self._unsent.remove(self, len(line))
