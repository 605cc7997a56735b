"""One socket to the host for all threads and event loops of this process, with many questions in flight.

Who waits for an answer reads for everyone: no thread stays behind between two cells, where it would keep the session
from being copied whole. Only while an event loop waits does a thread read for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .errors import ToolError

VARIABLE = "BELLJAR_TOOLBOX"
CHUNK_BYTES = 1 << 18
MOST_BYTES = 4 * 1024 * 1024

_Answer = dict[str, Any]


class Connection:
    """Opened with the first question, and again after a fork or when the host has gone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[_Answer]] = {}
        self._awaited: set[int] = set()
        """Of those, the ones that an event loop waits for."""
        self._is_read = False
        self._has_thread = False
        self._socket: socket.socket | None = None
        self._buffer = bytearray()

    def ask(self, message: dict[str, Any]) -> _Answer:
        """The host's answer. An interrupt while waiting takes the question back."""
        __tracebackhide__ = True
        number, future = self._send(message)
        try:
            self._read_until(future.done)
            return future.result()
        except BaseException:
            self._take_back(number)
            raise

    async def ask_in_loop(self, message: dict[str, Any]) -> _Answer:
        """The same for coroutines. Cancelling the task takes the question back."""
        __tracebackhide__ = True
        number, future = self._send(message)
        with self._changed:
            if number in self._pending:
                self._awaited.add(number)
            must_start, self._has_thread = not self._has_thread, True
        if must_start:
            threading.Thread(target=self._read_until, args=(self._is_idle,), name="toolbox", daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            self._take_back(number)
            raise

    def rest(self) -> None:
        """Nothing runs: hold nothing that a copy of this process would lack."""
        with self._changed:
            if not self._pending and not self._is_read:
                self._close()

    # Sending

    def _send(self, message: dict[str, Any]) -> tuple[int, Future[_Answer]]:
        number, future = next(self._numbers), Future[_Answer]()
        line = json.dumps({"id": number, **message}, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        if len(line) > MOST_BYTES:
            raise ValueError(f"{len(line):,} bytes, and {MOST_BYTES:,} is the most that a call can take along")
        for is_last in (False, True):
            with self._changed:
                sock = self._socket or self._open()
                self._pending[number] = future
            try:
                self._write(sock, line)
                break
            except OSError as error:
                with self._changed:
                    self._pending.pop(number, None)
                self._fail(sock, f"the host does not answer: {error}")
                if is_last:
                    raise ToolError(f"the host does not answer: {error}") from None
            except BaseException:
                with self._changed:
                    self._pending.pop(number, None)
                raise
        return number, future

    def _write(self, sock: socket.socket, line: bytes) -> None:
        try:
            with self._sending:
                sock.sendall(line)
        except OSError:
            raise
        except BaseException:
            # Half a line may be out: nothing after it could be understood.
            self._fail(sock, "the connection was interrupted")
            raise

    def _open(self) -> socket.socket:
        place = os.environ.get(VARIABLE, "")
        if not place:
            raise ToolError("no toolbox is configured for this session")
        sock = socket.socket(socket.AF_UNIX)
        try:
            _connect(sock, place)
        except OSError as error:
            sock.close()
            raise ToolError(f"the host does not answer: {error.strerror}") from None
        self._socket, self._buffer = sock, bytearray()
        return sock

    def _take_back(self, number: int) -> None:
        with self._changed:
            is_pending = self._pending.pop(number, None) is not None
            self._awaited.discard(number)
            sock = self._socket
            self._changed.notify_all()
        if is_pending and sock is not None:
            with contextlib.suppress(OSError):
                self._write(sock, json.dumps({"id": number, "op": "cancel"}).encode() + b"\n")

    # Reading

    def _is_idle(self) -> bool:
        """Whether the thread may go; asked with the lock held."""
        if self._awaited:
            return False
        self._has_thread = False
        return True

    def _read_until(self, is_done: Callable[[], bool]) -> None:
        """Read for everyone, or wait while another does, until there is what this one waits for."""
        __tracebackhide__ = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_done() or not self._is_read)
                if is_done():
                    return
                sock = self._socket
                self._is_read = True
            try:
                self._read(sock)
            except (OSError, ValueError):
                self._fail(sock, "the host has closed the connection")
            except RecursionError:
                self._fail(sock, "a result is nested too deeply to be read")
            except BaseException:
                # What was read may be lost with the interrupt.
                self._fail(sock, "the connection was interrupted")
                raise
            finally:
                with self._changed:
                    self._is_read = False
                    self._changed.notify_all()

    def _read(self, sock: socket.socket | None) -> None:
        piece = sock.recv(CHUNK_BYTES) if sock is not None else b""
        if not piece:
            raise OSError("closed")
        self._buffer += piece
        if b"\n" not in piece:
            return
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            self._deliver(json.loads(line))

    def _deliver(self, answer: _Answer) -> None:
        number = int(answer.get("id", 0))
        with self._changed:
            future = self._pending.pop(number, None)
            self._awaited.discard(number)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def _fail(self, sock: socket.socket | None, reason: str) -> None:
        with self._changed:
            if sock is not self._socket:
                return
            self._close()
            pending, self._pending = self._pending, {}
            self._awaited.clear()
            self._changed.notify_all()
        for future in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(ToolError(reason))

    def _close(self) -> None:
        sock, self._socket = self._socket, None
        self._buffer = bytearray()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    def abandon(self) -> None:
        """After a fork: the socket is the other process's, and nobody here waits."""
        if self._socket is not None:
            self._socket.close()


def _connect(sock: socket.socket, place: str) -> None:
    """An address holds 107 bytes, and the folder's name may be longer."""
    if len(place.encode()) < 100:
        sock.connect(place)
        return
    folder, name = os.path.split(place)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sock.connect(f"/proc/self/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


_own = Connection()


def own() -> Connection:
    """This process's."""
    return _own


def _renew() -> None:
    global _own  # one process has one
    _own.abandon()
    _own = Connection()


os.register_at_fork(after_in_child=_renew)
