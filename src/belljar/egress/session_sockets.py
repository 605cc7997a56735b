"""Listening sockets in a session's scratch folder, where its code can connect to them.

The clients may be hostile, so connections are accepted at a pace that leaves the event loop time for others.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from belljar import ipc

AT_ONCE: Final = 64
"""How many connections of a session are accepted without a pause."""
PER_SECOND: Final = 200
"""How many are accepted after that: each costs the event loop a quarter of a millisecond. Others wait in the kernel."""
_BACKLOG: Final = 128
_NO_DESCRIPTORS_S: Final = 1.0

log = logging.getLogger(__name__)

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


@dataclass(slots=True)
class SessionSocket:
    """A listening socket that can outlive its server, for whoever deposits it."""

    descriptor: int = -1
    """At first an earlier server's descriptor to listen on, if any; while it is served, the one to deposit."""
    is_left: bool = False
    """Whether the socket's file stays when this server stops serving it."""


@asynccontextmanager
async def open_socket_server(
    folder: Path, name: str, accept: Accept, *, limit: int, session_socket: SessionSocket | None = None
) -> AsyncGenerator[None]:
    """Serve a UNIX socket of that name in the folder until the block ends; lines have up to `limit` bytes."""
    loop = asyncio.get_running_loop()

    def begin() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit, loop), accept, loop)

    async with open_protocol_server(folder, name, begin, session_socket=session_socket):
        yield


@asynccontextmanager
async def open_protocol_server(
    folder: Path, name: str, begin: Callable[[], asyncio.Protocol], *, session_socket: SessionSocket | None = None
) -> AsyncGenerator[None]:
    """Serve a socket like `open_socket_server`, for callers with an asyncio protocol of their own."""
    with _listening(folder, name, session_socket or SessionSocket()) as listener:
        acceptor = _Acceptor(listener, begin)
        acceptor.start()
        try:
            yield
        finally:
            await acceptor.aclose()


class _Acceptor:
    """Accepts connections, at first as they come, then at a steady pace."""

    def __init__(self, listener: socket.socket, begin: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        # For the loop, which would format the socket object for an error that it then catches.
        self._descriptor = listener.fileno()
        self._begin = begin
        self._left = float(AT_ONCE)
        self._counted_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        self._timer = None
        self._loop.add_reader(self._descriptor, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._descriptor)
        self._timer = self._loop.call_later(seconds, self.start)

    def _accept(self) -> None:
        now = self._loop.time()
        self._left = min(AT_ONCE, self._left + PER_SECOND * (now - self._counted_at))
        self._counted_at = now
        while self._left >= 1:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                log.warning("a session's connection cannot be accepted: %s", error.strerror)
                self._pause(_NO_DESCRIPTORS_S)
                return
            self._left -= 1
            connection.setblocking(False)
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._begin, connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        self._pause(1 / PER_SECOND)

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._descriptor)
        # Wait for the accepted connections to start, because whoever serves them also ends them.
        await asyncio.gather(*self._starting, return_exceptions=True)


@contextmanager
def _listening(folder: Path, name: str, kept: SessionSocket) -> Generator[socket.socket]:
    """Open the listening socket; remove its file afterwards. Only who may enter the folder can connect."""
    is_kept = kept.descriptor >= 0
    with socket.socket(fileno=kept.descriptor) if is_kept else socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        kept.descriptor = listener.fileno()
        if not is_kept:
            # The session may have its own uid; the folder is closed to all other users.
            ipc.bind(listener, folder / name, 0o666)
        try:
            if not is_kept:
                listener.listen(_BACKLOG)
            yield listener
        finally:
            if not kept.is_left:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
