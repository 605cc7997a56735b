"""The waiters for an answer, a thread or a coroutine, and the open socket that answers come from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]

_CHUNK_BYTES = 1 << 18


class Waiter:
    """A thread that waits for an answer; it checks `is_done` itself."""

    __slots__ = ("_asleep", "answer", "error", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.answer: Answer = {}
        self.error: Exception | None = None
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def sleep(self) -> None:
        """Block until `wake` is called; return at once if it was called before."""
        self._asleep.acquire()

    def wake(self) -> None:
        """Wake the thread, because its answer has come or because no thread reads now."""
        with contextlib.suppress(RuntimeError):  # it is awake already
            self._asleep.release()

    def resolve(self, answer: Answer, error: Exception | None = None) -> None:
        """Set the answer or the error, and wake the thread; only the first call counts."""
        if not self.is_done:
            self.answer, self.error, self.is_done = answer, error, True
        self.wake()


class LoopWaiter:
    """A coroutine that waits for an answer, in the thread that made this object."""

    __slots__ = ("_loop", "_thread", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.future: asyncio.Future[Answer] = self._loop.create_future()

    def resolve(self, answer: Answer, error: Exception | None = None) -> None:
        """Set the answer or the error, from any thread."""
        if threading.get_ident() == self._thread:
            self._set(answer, error)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._set, answer, error)

    def _set(self, answer: Answer, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(answer)
        else:
            self.future.set_exception(error)


class HostSocket:
    """One open socket. It stays open while an event loop watches it, because its number could be reused otherwise."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._is_shut = False

    @property
    def has_part(self) -> bool:
        """Return whether the beginning of an answer has arrived."""
        return bool(self._buffer)

    def read(self, flags: int = 0) -> list[Answer]:
        """Receive once, and return the answers that are complete now. Raise OSError when the host has hung up."""
        piece = self.sock.recv(_CHUNK_BYTES, flags)
        if not piece:
            raise OSError("closed")
        if b"\n" not in piece:
            self._buffer += piece
            return []
        *lines, rest = (self._buffer + piece if self._buffer else piece).split(b"\n")
        self._buffer = bytearray(rest)
        return [json.loads(line) for line in lines]

    def watch(self, on_readable: Callable[[HostSocket], None]) -> None:
        """Add the socket to the running loop's readers. Each call needs one call of `unwatch` in the same loop."""
        if self._is_shut:
            return
        loop = asyncio.get_running_loop()
        self._loops[loop] = count = self._loops.get(loop, 0) + 1
        if count == 1:
            loop.add_reader(self.sock.fileno(), on_readable, self)

    def unwatch(self) -> None:
        """Undo one `watch` of the running loop, because a coroutine in it waits no longer."""
        loop = asyncio.get_running_loop()
        count = self._loops.pop(loop, 0) - 1
        if count > 0:
            self._loops[loop] = count
        if count:
            return
        loop.remove_reader(self.sock.fileno())
        if self._is_shut:
            self.shut()

    def shut(self) -> None:
        """End the connection; may be called twice."""
        self._is_shut = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, which closing alone does not
        if not self._loops:
            self.sock.close()
