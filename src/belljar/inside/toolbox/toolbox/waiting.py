"""Who waits for an answer, a thread or a coroutine, and the open socket that it comes over."""

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
    """A thread, which looks itself whether its answer has come."""

    __slots__ = ("_asleep", "answer", "error", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.answer: Answer = {}
        self.error: Exception | None = None
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def sleep(self) -> None:
        """Until it is woken, which may have been before."""
        self._asleep.acquire()

    def wake(self) -> None:
        """Its answer has come, or nobody reads."""
        with contextlib.suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def resolve(self, answer: Answer, error: Exception | None = None) -> None:
        """It has come, or never will; only the first time counts."""
        if not self.is_done:
            self.answer, self.error, self.is_done = answer, error, True
        self.wake()


class LoopWaiter:
    """A coroutine, in the thread that made this."""

    __slots__ = ("_loop", "_thread", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.future: asyncio.Future[Answer] = self._loop.create_future()

    def resolve(self, answer: Answer, error: Exception | None = None) -> None:
        """It has come, or never will."""
        if threading.get_ident() == self._thread:
            self._set(answer, error)
        else:
            with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
                self._loop.call_soon_threadsafe(self._set, answer, error)

    def _set(self, answer: Answer, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(answer)
        else:
            self.future.set_exception(error)


class HostSocket:
    """One open socket. It is closed when no event loop watches it any more: the number could be another's next."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._is_shut = False

    @property
    def has_part(self) -> bool:
        """Whether an answer has come in part."""
        return bool(self._buffer)

    def read(self, flags: int = 0) -> list[Answer]:
        """The answers that are complete after the next piece. Raises OSError when there is none."""
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
        """Tell the loop that runs; as often as this, `unwatch` is called in it."""
        if self._is_shut:
            return
        loop = asyncio.get_running_loop()
        self._loops[loop] = count = self._loops.get(loop, 0) + 1
        if count == 1:
            loop.add_reader(self.sock.fileno(), on_readable, self)

    def unwatch(self) -> None:
        """One coroutine of this loop does not wait any more."""
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
        """Nothing goes over it any more; may be called twice."""
        self._is_shut = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # a thread that reads hears of it, which it would not of the closing
        if not self._loops:
            self.sock.close()
