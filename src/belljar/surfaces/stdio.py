"""The stdio side: MCP over descriptors 0 and 1, read and written on the event loop's own thread.

The SDK's own streams go through a worker thread for every line in and twice for every line out: 0.6 ms of a call.
While it serves, descriptor 0 is empty and descriptor 1 is stderr, so that nothing stray gets between the messages.
"""

import os
import select
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import cast

import anyio
from anyio import AsyncFile, to_thread
from mcp.server.stdio import stdio_server

from belljar.surfaces.server import BelljarServer

PIPE_BYTES = 262_144
# What poll promises of a pipe that can be written to: so much fits without blocking.
ATOMIC_BYTES = select.PIPE_BUF


@contextmanager
def claimed() -> Generator[tuple[int, int]]:
    """Private descriptors for the wire; the standard ones are put back at the end."""
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


class Lines:
    """The client's lines, as the SDK iterates over them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._is_ended = False

    def __aiter__(self) -> "Lines":
        return self

    async def __anext__(self) -> str:
        while not self._lines:
            if self._is_ended:
                raise StopAsyncIteration
            self._take(await self._read())
        return self._lines.popleft().decode("utf-8", "replace")

    async def _read(self) -> bytes:
        with suppress(PermissionError):  # a regular file cannot be waited for, and need not be
            await anyio.wait_readable(self._descriptor)
        return os.read(self._descriptor, PIPE_BYTES)

    def _take(self, chunk: bytes) -> None:
        self._is_ended = not chunk
        *ended, rest = chunk.split(b"\n") if chunk else (b"", b"")
        for line in ended:
            if whole := b"".join([*self._parts, line]).strip():
                self._lines.append(whole)
            self._parts.clear()
        self._parts.append(rest)


class Writer:
    """The answers, as the SDK writes them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    async def write(self, text: str) -> None:
        """Write all of it; a client that does not read makes only its own connection wait."""
        data = text.encode()
        if len(data) <= ATOMIC_BYTES and self._poll.poll(0):
            os.write(self._descriptor, data)
        else:
            await to_thread.run_sync(self._write_all, data)

    async def flush(self) -> None:
        """Written already."""

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]


async def serve_stdio(server: BelljarServer) -> None:
    """Serve one client until it closes its end."""
    with claimed() as (wire_in, wire_out):
        # The SDK asks for anyio's file objects; all it does with them is iterate, write and flush.
        stdin, stdout = cast("AsyncFile[str]", Lines(wire_in)), cast("AsyncFile[str]", Writer(wire_out))
        async with stdio_server(stdin, stdout) as (read, write):
            await server.run_on(read, write)
