"""One socket to the host for all threads and event loops of this process, with many requests in flight.

There is no reader thread, because one that stayed between two cells would be missing in a forked copy of the session.
Instead, one of the threads that wait reads for all, and an event loop reads when the socket is readable. An interrupt
may come between any two steps and must leave nothing locked. So locks are taken by `with` only, and there is no
Condition, because its Python code is not safe for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from .errors import ArgumentError, ToolError

VARIABLE = "BELLJAR_TOOLBOX"
MAX_BYTES = 4 * 1024 * 1024
GONE = "the host has closed the connection; whether the call was made is not known"
LEFT_UNREAD = (
    "the host has closed the connection in the middle of an answer, as it does when code leaves answers unread: "
    "await calls soon after they are started; whether this one was made is not known"
)
_FULL_MS = 50
_CHUNK_BYTES = 1 << 18
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
Answer = dict[str, Any]


# The waiters for an answer, a thread or a coroutine, and the open socket that answers come from


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


class HostConnection:
    """The connection of this process. It opens with the first request, and again after a fork or when it was closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Waiter | LoopWaiter] = {}
        self._reader = 0
        """The id of the thread that reads now; 0 when none does."""
        self._socket: HostSocket | None = None

    def ask(self, message: dict[str, Any]) -> Answer:
        """Send a request and wait for the host's answer. An interrupt while waiting cancels the request."""
        __tracebackhide__ = True
        waiter = Waiter()
        number = next(self._numbers)
        try:
            self._wait(self._send(number, message, waiter), waiter)
        except BaseException:
            self._stop_reading()
            self._cancel(number)
            raise
        if waiter.error is not None:
            raise waiter.error
        return waiter.answer

    async def ask_in_loop(self, message: dict[str, Any]) -> Answer:
        """Do what `ask` does, for coroutines. Cancelling the task cancels the request."""
        __tracebackhide__ = True
        waiter = LoopWaiter()
        number = next(self._numbers)
        try:
            host_socket = self._send(number, message, waiter)
            with self._lock:
                host_socket.watch(self._on_readable)
            try:
                return await waiter.future
            finally:
                host_socket.unwatch()
        except BaseException:
            self._stop_reading()
            self._cancel(number)
            raise

    def close_if_idle(self) -> None:
        """Close the socket if no request is pending, because a forked copy of this process would lack it."""
        with self._lock:
            if not self._pending and not self._reader:
                self._close()

    # Sending

    def _send(self, number: int, message: dict[str, Any], waiter: Waiter | LoopWaiter) -> HostSocket:
        line = _JSON.encode({"id": number, **message}).encode() + b"\n"
        if len(line) > MAX_BYTES:
            raise ArgumentError(
                f"the arguments take {len(line):,} bytes, and {MAX_BYTES:,} is the most that a call can take along; "
                "pass less at once"
            )
        for is_last in (False, True):
            with self._lock:
                host_socket = self._socket or self._open()
                self._pending[number] = waiter
            try:
                self._write(host_socket, line)
            except OSError as error:
                with self._lock:
                    self._pending.pop(number, None)
                if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                    self._read_to_the_end(host_socket)
                self._fail(host_socket, GONE)
                if is_last:
                    raise ToolError(f"the host does not answer: {error}") from None
            else:
                return host_socket
        raise AssertionError("the last attempt returns or raises")

    def _write(self, host_socket: HostSocket, line: bytes) -> None:
        left = memoryview(line)
        try:
            with self._sending:
                while left:
                    try:
                        left = left[host_socket.sock.send(left, socket.MSG_DONTWAIT) :]
                    except BlockingIOError:
                        self._read_while_full(host_socket)
        except OSError:
            raise
        except BaseException:
            # Half a line may have been sent, and the host could not understand anything after it.
            self._fail(host_socket, "the connection was interrupted")
            raise

    def _read_while_full(self, host_socket: HostSocket) -> None:
        """Read answers while the socket is full, because the host takes no more until they are read.

        Nobody else reads them if no other thread waits for an answer.
        """
        poll = select.poll()
        poll.register(host_socket.sock, select.POLLIN | select.POLLOUT)
        if any(events & select.POLLIN for _, events in poll.poll(_FULL_MS)):
            self._on_readable(host_socket)

    def _open(self) -> HostSocket:
        path = os.environ.get(VARIABLE, "")
        if not path:
            raise ToolError("no toolbox is configured for this session")
        sock = socket.socket(socket.AF_UNIX)
        try:
            _connect(sock, path)
        except OSError as error:
            sock.close()
            raise ToolError(f"the host does not answer: {error.strerror}") from None
        self._socket = HostSocket(sock)
        return self._socket

    def _cancel(self, number: int) -> None:
        with self._lock:
            is_pending = self._pending.pop(number, None) is not None
            host_socket = self._socket
        if is_pending and host_socket is not None:
            with contextlib.suppress(OSError):
                self._write(host_socket, json.dumps({"id": number, "op": "cancel"}).encode() + b"\n")

    # Reading

    def _wait(self, host_socket: HostSocket, waiter: Waiter) -> None:
        """Read for all waiters, or sleep while another thread reads, until this waiter has its answer."""
        __tracebackhide__ = True
        while not waiter.is_done:
            if not self._may_read():
                waiter.sleep()
            elif waiter.is_done:
                self._stop_reading()
            else:
                self._read(host_socket)

    def _on_readable(self, host_socket: HostSocket) -> None:
        """Read what has arrived, unless another thread reads."""
        if self._may_read():
            self._read(host_socket, socket.MSG_DONTWAIT)

    def _read_to_the_end(self, host_socket: HostSocket) -> None:
        """Deliver what the host sent before it closed the connection, unless another thread does."""
        while host_socket is self._socket and self._may_read():
            self._read(host_socket, socket.MSG_DONTWAIT)

    def _may_read(self) -> bool:
        own = threading.get_ident()
        with self._lock:
            # It is ours already where an interrupt kept this thread from `_stop_reading`.
            if self._reader in (0, own):
                self._reader = own
            return self._reader == own

    def _stop_reading(self) -> None:
        """Give up the right to read, and wake another thread that waits, so that it reads."""
        with self._lock:
            if self._reader == threading.get_ident():
                self._reader = 0
            if self._reader:
                return
        for waiter in [*self._pending.values()]:
            if isinstance(waiter, Waiter) and not waiter.is_done:
                waiter.wake()
                return

    def _read(self, host_socket: HostSocket, flags: int = 0) -> None:
        __tracebackhide__ = True
        try:
            for answer in host_socket.read(flags):
                self._deliver(answer)
        except BlockingIOError:
            pass
        except OSError:
            self._fail(host_socket, LEFT_UNREAD if host_socket.has_part else GONE)
        except ValueError:
            self._fail(host_socket, GONE)
        except RecursionError:
            self._fail(host_socket, "a result is nested too deeply to be read")
        except BaseException:
            # Bytes that were read may be lost with the interrupt.
            self._fail(host_socket, "the connection was interrupted")
            raise
        finally:
            self._stop_reading()

    def _deliver(self, answer: Answer) -> None:
        number = int(answer.get("id", 0))
        waiter = self._pending.get(number)
        if waiter is not None:
            waiter.resolve(answer)
            # Remove it only now: if an interrupt comes before `resolve`, `_fail` still finds and resolves the waiter.
            self._pending.pop(number, None)

    def _fail(self, host_socket: HostSocket, reason: str) -> None:
        with self._lock:
            if host_socket is not self._socket:
                return
            self._close()
            pending, self._pending = self._pending, {}
        for waiter in pending.values():
            waiter.resolve({}, ToolError(reason))

    def _close(self) -> None:
        host_socket, self._socket = self._socket, None
        if host_socket is not None:
            host_socket.shut()

    def abandon(self) -> None:
        """Drop everything in a forked child. The socket belongs to the parent, and so do the answers.

        Coroutines that wait for one get an error.
        """
        if self._socket is not None:
            self._socket.sock.close()
        for waiter in self._pending.values():
            if isinstance(waiter, LoopWaiter):
                with contextlib.suppress(RuntimeError):
                    waiter.resolve({}, ToolError("the process was copied while the call was under way"))


def _connect(sock: socket.socket, path: str) -> None:
    """Connect, through the folder's descriptor where the path is too long for an address, which holds 107 bytes."""
    if len(path.encode()) < 100:
        sock.connect(path)
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sock.connect(f"/proc/self/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


_connection = HostConnection()


def host_connection() -> HostConnection:
    """Return the connection of this process."""
    return _connection


def _renew() -> None:
    global _connection  # one connection for each process
    _connection.abandon()
    _connection = HostConnection()


os.register_at_fork(after_in_child=_renew)
