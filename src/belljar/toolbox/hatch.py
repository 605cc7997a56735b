"""Where the code of a session calls tools: JSON lines over a UNIX socket in its scratch folder, many in flight.

Whoever asks may be hostile: form, size, number and time are bounded here, and whoever breaks the form is hung up on.
What may be asked is not decided here.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from belljar.egress.listening import Conversations, serving
from belljar.toolbox.base import JsonObject
from belljar.toolbox.broker import Broker
from belljar.toolbox.encoding import encoded

LINE_BYTES = 4 * 1024 * 1024
"""The longest request, arguments and all."""
MOST_VALUES = 100_000
"""In one request: four megabytes of empty lists take a second to read, and every session waits for that."""
_MOST_CONNECTIONS = 16
# Of one session, over all its connections: what it asks and what it does not fetch is in the server's memory.
_MOST_IN_FLIGHT = 64
_MOST_WAITING_BYTES = 4 * LINE_BYTES
_WRITE_S = 60
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NUMBER = re.compile(rb'\{"id": ?(\d{1,15}),')

log = logging.getLogger(__name__)

Number = Annotated[int, Field(ge=0, le=2**53)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: Number


class _Call(_Message):
    op: Literal["call"]
    server: str = Field(max_length=1_000)
    tool: str = Field(max_length=1_000)
    arguments: dict[str, Any]


class _Cancel(_Message):
    op: Literal["cancel"]


class Search(_Message):
    """Tools for something."""

    op: Literal["search"]
    query: str = Field(max_length=1_000)
    detail: Literal["names", "signatures", "source"] = "signatures"
    limit: int = Field(5, ge=1, le=50)
    server: str = Field("", max_length=1_000)


_REQUEST: TypeAdapter[_Call | _Cancel | Search] = TypeAdapter(
    Annotated[_Call | _Cancel | Search, Field(discriminator="op")]
)

Find = Callable[[Search], Awaitable[JsonObject]]
"""Answers a search."""


class Hatch:
    """One kernel's; made by `open_hatch`."""

    def __init__(self, broker: Broker, find: Find, folder_inside: str) -> None:
        self._broker = broker
        self._find = find
        self._folder = folder_inside
        self._conversations = Conversations()
        self._in_flight: dict[object, int] = {}
        self._is_freed = asyncio.Event()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one process of the session's."""
        if len(self._conversations) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._conversations.begin(_Conversation(self, reader, writer).run())

    async def answer(self, request: _Call | Search) -> JsonObject:
        """What the session is told."""
        if isinstance(request, Search):
            return await self._find(request)
        return await self._broker.call(request.server, request.tool, request.arguments, self._folder)

    async def take_room(self, key: object, size_bytes: int) -> None:
        """Wait until a request of that size may be under way."""
        while len(self._in_flight) >= _MOST_IN_FLIGHT or (
            self._in_flight and sum(self._in_flight.values()) + size_bytes > _MOST_WAITING_BYTES
        ):
            self._is_freed.clear()
            await self._is_freed.wait()
        self._in_flight[key] = size_bytes

    def free_room(self, key: object) -> None:
        """A request is over."""
        self._in_flight.pop(key, None)
        self._is_freed.set()

    async def aclose(self) -> None:
        """Stop, whatever is under way."""
        await self._conversations.aclose()


class _Conversation:
    """One connection. Calls that are under way when it ends are cancelled: nobody is there to hear of them."""

    def __init__(self, hatch: Hatch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hatch = hatch
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        try:
            # A line that is too long is a ValueError of the reader's.
            with contextlib.suppress(OSError, ValueError):
                while line := await self._reader.readline():
                    if not await self._take(line):
                        return
        finally:
            self._writer.transport.abort()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _take(self, line: bytes) -> bool:
        if _has_too_many_values(line):
            return await self._refuse_size(line)
        try:
            request = _REQUEST.validate_json(line)
        except ValidationError:
            return await self._refuse("the request cannot be read")
        if isinstance(request, _Cancel):
            if (task := self._tasks.get(request.id)) is not None:
                task.cancel()
            return True
        if request.id in self._tasks:
            return await self._refuse("the request has the number of another")
        # Who asks for more at once is not read from until there is room.
        key = object()
        await self._hatch.take_room(key, len(line))
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._end(request.id, key))
        return True

    def _end(self, number: int, key: object) -> None:
        self._tasks.pop(number, None)
        self._hatch.free_room(key)

    async def _refuse(self, message: str) -> bool:
        """Say so and hang up: nothing after it could be trusted to be what it seems."""
        await self._write({"id": 0, "outcome": "error", "kind": "form", "message": message})
        return False

    async def _refuse_size(self, line: bytes) -> bool:
        """The question is not looked at, but who asked it is answered where its number can be told."""
        message = f"the arguments have more than {MOST_VALUES:,} values"
        if (found := _NUMBER.match(line)) is None:
            return await self._refuse(message)
        await self._write({"id": int(found[1]), "outcome": "error", "kind": "arguments", "message": message})
        return True

    async def _serve(self, request: _Call | Search) -> None:
        try:
            outcome = await self._hatch.answer(request)
        except Exception:
            # A fault of ours must not leave the cell waiting for ever.
            log.exception("a call of a session failed inside belljar")
            outcome: JsonObject = {"outcome": "error", "kind": "internal", "message": "the host failed; see its log"}
        await self._write({"id": request.id, **outcome})

    async def _write(self, message: JsonObject) -> None:
        line = encoded(message) + b"\n"
        if not self._writing.locked() and not self._writer.transport.get_write_buffer_size():
            self._writer.write(line)
            if not self._writer.transport.get_write_buffer_size():
                return  # it went out whole, and nobody has to wait
            line = b""
        try:
            async with self._writing, asyncio.timeout(_WRITE_S):
                self._writer.write(line)
                await self._writer.drain()
        except (OSError, TimeoutError):
            self._writer.transport.abort()


def _has_too_many_values(line: bytes) -> bool:
    """Told by the signs between values. Most lines have too few even with those that stand in texts."""
    if _signs(line) <= MOST_VALUES:
        return False
    return _signs(_TEXT.sub(b"", line, count=MOST_VALUES)) > MOST_VALUES


def _signs(line: bytes) -> int:
    return line.count(b",") + line.count(b"[") + line.count(b"{")


@asynccontextmanager
async def open_hatch(
    folder: Path, name: str, *, broker: Broker, find: Find, folder_inside: str
) -> AsyncGenerator[Hatch]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends."""
    hatch = Hatch(broker, find, folder_inside)
    try:
        async with serving(folder, name, hatch.accept, limit=LINE_BYTES):
            yield hatch
    finally:
        with contextlib.suppress(OSError):
            await hatch.aclose()
