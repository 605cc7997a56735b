"""JSON messages over UNIX sockets: addresses, listening sockets, peers, and a bounded reader.

A message is one line of JSON. The tool server (`toolbox/session_server.py`) and the package and transfer servers
(`provisioning/request_server.py`) speak through here; a server's own socket uses `listen` and speaks HTTP. A session's
messages are hostile input, so every reader has a limit in bytes, and whatever it cannot read is `Malformed`, never
another exception. Streams are read with `recv`, for which Linux closes descriptors that a peer sends uninvited.

Three protocols are not here. Packets with descriptors are in `inside/supervisor/packets.py`, because the supervisor
runs without belljar's modules. The one order to a container's first process is in
`sandboxes/container/process.py`. The kernel's frames, each with its length in front, are in `kernels/wire.py`.
"""

import asyncio
import contextlib
import errno
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from belljar.json_values import check_values

PRIVATE_MODE: Final = 0o600
_END_BYTES: Final = 1_024
"""How much `Lines` keeps of each end of a line that is too long."""
_CREDENTIALS: Final = struct.Struct("3i")

Message = TypeVar("Message")


class Malformed(ValueError):
    """Raised when what a peer sent is no message: no JSON, JSON of another form, too long, or cut off."""


# Addresses


@contextmanager
def reachable(path: Path) -> Generator[str]:
    """Return an address for the socket at `path`, to bind or to connect, however long the path is.

    An address holds 107 bytes at most. On Linux this one names the folder by a descriptor, open during the block.
    """
    if sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def bind(listener: socket.socket, path: Path, mode: int = PRIVATE_MODE, *, replaces: bool = False) -> None:
    """Bind a socket to a file that has this mode and is at no moment open to more users than that.

    `replaces` removes the socket that an earlier process left at the path.
    """
    if replaces:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    with reachable(path) as address:
        _bind(listener, address, mode)


def _bind(listener: socket.socket, address: str, mode: int) -> None:
    # Linux gives the file the socket's own mode, less the umask; other systems refuse fchmod on a socket.
    with contextlib.suppress(OSError):
        os.fchmod(listener.fileno(), mode)
    listener.bind(address)
    _set_mode(address, mode)


def _set_mode(address: str, mode: int) -> None:
    """Set the mode of a socket's file, without following a link that a session may have put in its place."""
    if sys.platform != "linux":
        Path(address).chmod(mode, follow_symlinks=False)
        return
    with contextlib.suppress(FileNotFoundError):
        file = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(file).st_mode
            if stat.S_ISSOCK(found) and stat.S_IMODE(found) != mode:
                Path(f"/proc/self/fd/{file}").chmod(mode)
        finally:
            os.close(file)


def connect(sock: socket.socket, path: Path) -> None:
    """Connect to the socket at a path that only the host can write."""
    with reachable(path) as address:
        sock.connect(address)


def connect_unlinked(sock: socket.socket, path: Path) -> None:
    """Connect to the socket at a path that a session can write; OSError (ENOTSOCK) when something else is there.

    It follows no link, because the session could make one that leads to a socket of the host.
    """
    if sys.platform != "linux":
        sock.connect(str(path))
        return
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        sock.connect(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


# Peers


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process that connected or listened, as the kernel reports it."""

    pid: int
    """In the pid namespace of this process."""
    uid: int


def peer_of(sock: socket.socket) -> PeerProcess | None:
    """Return the process at the other end; None on systems other than Linux, which have no common way to tell."""
    if sys.platform != "linux":
        return None
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return PeerProcess(pid, uid)


# Lines


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was dropped. Its two ends are kept, so that the reader can tell which request it belonged to."""

    limit_bytes: int
    head: bytes
    tail: bytes
    was_given_up: bool = False
    """Whether the reader dropped it because it took too long to arrive, not because it was too long."""


Line = bytes | Overlong


class Lines:
    """Cuts one stream of bytes into lines of a bounded length."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._parts: list[bytes] = []
        self.size = 0
        """Bytes of the line that is not complete yet."""
        self._head = b""
        self._tail = b""
        self._is_given_up = False

    @property
    def is_dropped(self) -> bool:
        """Whether only the two ends of the current line are kept."""
        return self._is_given_up or self.size > self._limit

    def give_up(self) -> None:
        """Drop the line that is not complete yet, and what still comes of it."""
        self._is_given_up = True
        self._drop(b"")

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Yield the lines that this chunk completes, without their line feeds."""
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            self._add(part)
            yield self._take()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        if not part:
            return
        self.size += len(part)
        if self.is_dropped:
            self._drop(part)
        else:
            self._parts.append(part)

    def _drop(self, part: bytes) -> None:
        if self._parts or not self._head:
            whole = b"".join(self._parts)
            self._head, self._tail = (whole + part[:_END_BYTES])[:_END_BYTES], whole[-_END_BYTES:]
            self._parts = []
        self._tail = (self._tail + part[-_END_BYTES:])[-_END_BYTES:]

    def _take(self) -> Line:
        dropped = Overlong(self._limit, self._head, self._tail, self._is_given_up) if self.is_dropped else None
        line = dropped or b"".join(self._parts)
        self._parts, self.size, self._head, self._tail, self._is_given_up = [], 0, b"", b"", False
        return line


# Messages


def encode(message: Any) -> bytes:
    """Return a message as a line. Half a surrogate pair becomes a question mark, because UTF-8 cannot encode it."""
    return json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"


class MessageStream:
    """Sends and receives messages over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()
        # With this limit `drain` returns only when nothing is buffered here, so an abort loses nothing that was sent.
        writer.transport.set_write_buffer_limits(high=0)

    async def receive(self, read: Callable[[bytes], Message]) -> Message:
        """Return the next message, as `read` parses it from JSON; OSError when the peer is gone.

        `read` checks the form and raises ValueError, as pydantic's `validate_json` does. Raise `Malformed` when it
        does, or when no whole message came; close the stream then, because nobody knows where the next one begins.
        """
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Malformed(f"the connection ended after {len(error.partial):,} bytes of a message") from None
            raise ConnectionResetError(errno.ECONNRESET, "the peer has hung up") from None
        except asyncio.LimitOverrunError as error:
            raise Malformed(f"a message has more than {error.consumed:,} bytes") from None
        try:
            check_values(line)
            return read(line)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a message cannot be read: {type(error).__name__}") from error

    async def send(self, message: Any) -> None:
        """Send a message, and return when the kernel has all of it; OSError when the peer is gone.

        At most one message waits in this process for a peer that does not read. Bound the time with `asyncio.timeout`.
        """
        line = encode(message)
        async with self._sending:
            self._writer.write(line)
            await self._writer.drain()

    def close(self) -> None:
        """Close the connection at once and drop what was not read from the peer; may be called twice."""
        self._writer.transport.abort()


class Conversations:
    """The tasks that serve connections: a limited number, cancelled together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached, so that another connection gets no task, not even to be told so."""
        return len(self._tasks) >= self._most

    def start(self, conversation: Coroutine[None, None, None]) -> None:
        """Serve one connection in a task."""
        task = asyncio.get_running_loop().create_task(conversation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def listen(path: Path, protocol: Callable[[], asyncio.BaseProtocol]) -> AsyncGenerator[asyncio.Server]:
    """Serve this user's processes at `path` by a protocol of asyncio's until the block ends; its connections stay."""
    with socket.socket(socket.AF_UNIX) as listener, reachable(path) as address:
        _bind(listener, address, PRIVATE_MODE)
        server = await asyncio.get_running_loop().create_unix_server(protocol, sock=listener)
        try:
            yield server
        finally:
            server.close()
