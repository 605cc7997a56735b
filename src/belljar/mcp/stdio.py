"""The stdio transport: MCP over descriptors 0 and 1, read and written on the event loop's own thread.

The SDK's own streams go through a worker thread for every line in and twice for every line out: 0.6 ms of a call.
While we serve, descriptor 0 is /dev/null and descriptor 1 is stderr, so that no stray output gets between messages.

A client that closes either pipe and an operator's signal have the same effect: the input ends.
"""

import asyncio
import os
import select
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

import anyio
from anyio import to_thread
from mcp.shared._context_streams import ContextReceiveStream, ContextSendStream, create_context_streams
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp.types import (
    INVALID_REQUEST,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from belljar.http.jsonrpc import SCANNED_BYTES, find_id, id_in_use, read_message, refusal
from belljar.mcp.server import BelljarServer

PIPE_BYTES: Final = 262_144
# poll() promises that so much fits into a writable pipe without blocking.
ATOMIC_BYTES: Final = select.PIPE_BUF
# A client that stopped reading delays the end for no longer than this.
DRAIN_S: Final = 3.0
POLL_MS: Final = 100


@contextmanager
def claim_stdio() -> Generator[tuple[int, int]]:
    """Yield private descriptors for the messages; the standard ones are put back at the end."""
    wire_in, wire_out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        os.close(wire_in)
        os.close(wire_out)


class StdinLines:
    """The request lines from the client. Of a line that is too long, the beginning is kept."""

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self._descriptor = descriptor
        self._limit = limit_bytes
        self._lines: deque[tuple[bytes, bool]] = deque()
        self._parts: list[bytes] = []
        self._size = 0
        self._is_ended = False

    def __aiter__(self) -> "StdinLines":
        return self

    async def __anext__(self) -> tuple[bytes, bool]:
        """Return the next line, and whether it is whole."""
        while not self._lines:
            if self._is_ended:
                raise StopAsyncIteration
            self._take(await self._read())
        return self._lines.popleft()

    async def _read(self) -> bytes:
        with suppress(PermissionError):  # a regular file cannot be waited for, and need not be
            await anyio.wait_readable(self._descriptor)
        try:
            return os.read(self._descriptor, PIPE_BYTES)
        except OSError:  # a terminal or a socket whose other end has gone
            return b""

    def _take(self, chunk: bytes) -> None:
        self._is_ended = not chunk
        *ended, rest = chunk.split(b"\n") if chunk else (b"", b"")
        for part in ended:
            self._add(part)
            if whole := b"".join(self._parts).strip():
                self._lines.append((whole, self._size <= self._limit))
            self._parts.clear()
            self._size = 0
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._limit:
            self._parts.append(part)
        elif len(self._parts) != 1 or len(self._parts[0]) > SCANNED_BYTES:
            self._parts[:] = [b"".join([*self._parts, part])[:SCANNED_BYTES]]


class Writer:
    """The writer of answers; it sets `gone` when there is nobody to read them any more."""

    def __init__(self, descriptor: int, gone: asyncio.Event) -> None:
        self._descriptor = descriptor
        self._gone = gone
        self._turn = anyio.Lock()
        self._is_closed = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    async def write(self, line: str) -> None:
        """Write the whole line; a client that does not read makes only its own connection wait."""
        data = f"{line}\n".encode()
        async with self._turn:
            if self._is_closed:
                return
            try:
                if len(data) <= ATOMIC_BYTES and self._poll.poll(0):
                    os.write(self._descriptor, data)
                else:
                    await to_thread.run_sync(self._write_all, data)
            except OSError:
                self.close()
                self._gone.set()

    def close(self) -> None:
        """Stop writing, even in the middle of a line whose reader has stopped reading."""
        self._is_closed = True

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_closed:
            if self._poll.poll(POLL_MS):
                view = view[os.write(self._descriptor, view[:ATOMIC_BYTES]) :]


class OpenRequests:
    """Ids of requests under way, kept because the SDK lets a second request with the same id replace the first."""

    def __init__(self) -> None:
        self._ids: set[RequestId] = set()

    def has(self, request: JSONRPCRequest) -> bool:
        """Return whether the request's id belongs to another request under way."""
        return coerce_request_id(request.id) in self._ids

    def track(self, request: JSONRPCRequest) -> ServerMessageMetadata:
        """Keep the request's id until it is answered, or is over without an answer because its client cancelled it."""
        key = coerce_request_id(request.id)
        self._ids.add(key)

        async def forget() -> None:
            self._ids.discard(key)

        return ServerMessageMetadata(on_request_unanswered=forget)

    def note_answer(self, message: JSONRPCMessage) -> None:
        """Let the id of an answered request be used again."""
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._ids.discard(coerce_request_id(message.id))


async def serve_stdio(server: BelljarServer, stop: asyncio.Event, *, line_bytes: int) -> None:
    """Serve one client until it closes its end or `stop` is set; then requests under way are answered with an error."""
    with claim_stdio() as (wire_in, wire_out):
        lines, writer, under_way = StdinLines(wire_in, line_bytes), Writer(wire_out, stop), OpenRequests()
        requests, read_stream = create_context_streams[SessionMessage | Exception](0)
        write_stream, answers = create_context_streams[SessionMessage](0)
        written = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_requests, lines, requests, writer, under_way, stop)
            tasks.start_soon(_write_answers, answers, writer, under_way, written)
            await server.run_on(read_stream, write_stream)
            with anyio.move_on_after(DRAIN_S):
                await written.wait()
            writer.close()
            tasks.cancel_scope.cancel()


async def _read_requests(
    lines: StdinLines,
    requests: ContextSendStream[SessionMessage | Exception],
    writer: Writer,
    under_way: OpenRequests,
    stop: asyncio.Event,
) -> None:
    async def cancel_on_stop() -> None:
        await stop.wait()
        reading.cancel_scope.cancel()

    async with requests:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the server has ended
            async with anyio.create_task_group() as reading:
                reading.start_soon(cancel_on_stop)
                async for line, is_whole in lines:
                    message = _read(line, under_way) if is_whole else [_too_long(line)]
                    await _pass_on(message, requests, writer, under_way)
                reading.cancel_scope.cancel()


def _read(line: bytes, under_way: OpenRequests) -> JSONRPCMessage | list[JSONRPCError]:
    message = read_message(line)
    return [id_in_use(message)] if isinstance(message, JSONRPCRequest) and under_way.has(message) else message


def _too_long(line: bytes) -> JSONRPCError:
    return refusal(INVALID_REQUEST, "The message is too long: put large data into files, in parts", find_id(line))


async def _pass_on(
    message: JSONRPCMessage | list[JSONRPCError],
    requests: ContextSendStream[SessionMessage | Exception],
    writer: Writer,
    under_way: OpenRequests,
) -> None:
    if isinstance(message, list):
        for answer in message:
            await writer.write(answer.model_dump_json(by_alias=True, exclude_unset=True))
    else:
        metadata = under_way.track(message) if isinstance(message, JSONRPCRequest) else None
        await requests.send(SessionMessage(message, metadata))


async def _write_answers(
    answers: ContextReceiveStream[SessionMessage], writer: Writer, under_way: OpenRequests, written: anyio.Event
) -> None:
    async with answers:
        async for answer in answers:
            under_way.note_answer(answer.message)
            await writer.write(answer.message.model_dump_json(by_alias=True, exclude_unset=True))
    written.set()
