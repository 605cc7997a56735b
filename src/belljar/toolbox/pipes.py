"""Lines over the pipes of a process, read and written in callbacks of the event loop, without switching tasks.

Each line is offered at once to a callback, and waits for `next()` if the callback does not take it. This module knows
bytes, not what they say.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from belljar.ipc import Line, Lines
from belljar.toolbox.message_memory import LARGE_BYTES, MemoryShare, MessageMemory

_CHUNK: Final = 65_536

Take = Callable[[Line, MemoryShare | None], bool]
"""Returns whether it takes a line; then it also has to release the line's share of memory."""


class PipeReader:
    """Reads lines from a descriptor."""

    def __init__(self, descriptor: int, limit_bytes: int, memory: MessageMemory, take: Take) -> None:
        self._descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._lines = Lines(limit_bytes)
        self._memory = memory
        self._share: MemoryShare | None = None
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Line] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False
        self._is_read = False

    def open(self) -> None:
        """Start or resume reading."""
        if not self._is_read and not self._has_ended:
            self._is_read = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def close(self) -> None:
        """Stop reading, before the descriptor is closed; may be called twice."""
        self._pause()
        self._has_ended = True
        self._arrived.set()
        self._free()

    async def next(self) -> Line | None:
        """Return the next line that `take` did not take; None if the writer is gone.

        While such a line waits to be fetched, nothing more is read.
        """
        while not self._waiting:
            if self._has_ended:
                return None
            self._arrived.clear()
            if self._share is None or self._share.is_granted:
                self.open()
            await self._arrived.wait()
        return self._waiting.popleft()

    def _pause(self) -> None:
        if self._is_read:
            self._is_read = False
            self._loop.remove_reader(self._descriptor)

    def _on_readable(self) -> None:
        # Read one piece at a time, because a server that never stops writing must leave time for others.
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        for line in self._lines.feed(chunk):
            share, self._share = self._share, None
            if share is not None:
                share.shrink(len(line) if isinstance(line, bytes) else 0)
            if not self._take(line, share):
                if share is not None:
                    share.release()
                self._waiting.append(line)
        if not chunk:
            self._has_ended = True
        if self._has_ended or self._waiting:
            self._pause()
            self._arrived.set()
        if self._lines.size > LARGE_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        if self._lines.is_dropped:
            self._free()
        elif self._share is None:
            self._share = self._memory.reserve(self._limit_bytes, self._go_on, self._give_up)
            if not self._share.is_granted:
                self._pause()

    def _free(self) -> None:
        if self._share is not None:
            self._share.release()
            self._share = None

    def _give_up(self) -> None:
        self._lines.give_up()
        self._free()

    def _go_on(self) -> None:
        if not self._waiting:
            self.open()


class PipeWriter:
    """Writes lines to a descriptor, whole and in order. A line is sent even if its sender is cancelled meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._left = memoryview(b"")
        self._emptied = asyncio.Event()
        self._is_closed = False
        self.sent_bytes = 0

    async def send(self, line: bytes) -> None:
        """Start sending a line after those before it. Raises OSError if nobody reads any more."""
        while self._left:
            await self._emptied.wait()
        if self._is_closed:
            raise BrokenPipeError("closed")
        self._begin(memoryview(line))

    def post(self, line: bytes) -> None:
        """Send a short line without waiting, for a caller that does not need to know whether it is read."""
        if self._left:
            self._left = memoryview(bytes(self._left) + line)
        elif not self._is_closed:
            with contextlib.suppress(OSError):
                self._begin(memoryview(line))

    def close(self) -> None:
        """Stop writing, before the descriptor is closed; may be called twice."""
        if self._left:
            self._loop.remove_writer(self._descriptor)
        self._is_closed, self._left = True, memoryview(b"")
        self._emptied.set()

    def _begin(self, data: memoryview) -> None:
        self._write(data)
        if self._left:
            self._emptied.clear()
            self._loop.add_writer(self._descriptor, self._on_writable)

    def _on_writable(self) -> None:
        try:
            self._write(self._left)
        except OSError:
            self.close()
            return
        if not self._left:
            self._loop.remove_writer(self._descriptor)
            self._emptied.set()

    def _write(self, data: memoryview) -> None:
        try:
            written = os.write(self._descriptor, data)
            self.sent_bytes += written
            self._left = data[written:]
        except BlockingIOError:
            self._left = data
