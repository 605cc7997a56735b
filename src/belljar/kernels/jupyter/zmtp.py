"""The client's half of ZMTP 3.0 over one UNIX socket: greeting, NULL handshake, messages (rfc.zeromq.org/spec/23).

We do not use libzmq, because the peer may be hostile. Its MAXMSGSIZE bounds a frame and not a message: one message of
400 frames, each within a limit of 1 MB, grew the process by 400 MB at a high-water mark of 4. And it hides a lost
connection by making a new one to whatever is at the path by then. Knows nothing of Jupyter.
"""

import asyncio
import contextlib
import errno
import socket
import struct
from pathlib import Path
from typing import Literal

from belljar import ipc
from belljar.errors import KernelDied

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_PARTS = 1024
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_LENGTH = struct.Struct("!Q")
_VALUE_LENGTH = struct.Struct("!I")

SocketType = Literal["DEALER", "SUB"]


class ZmtpConnection:
    """One connection after the handshake. It is never made again when it is lost."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_pid: int) -> None:
        self._reader = reader
        self._writer = writer
        self.peer_pid = peer_pid
        """The host's pid of the process that listens; 0 when it is unknown."""

    async def send(self, parts: list[bytes]) -> None:
        """Send one message; OSError when the peer is gone. Waits while the peer does not read."""
        self.send_nowait(parts)
        await self._writer.drain()

    def send_nowait(self, parts: list[bytes]) -> None:
        """Queue one small message, to be sent when the peer reads next."""
        last = len(parts) - 1
        for index, part in enumerate(parts):
            self._writer.write(_frame(part, _MORE if index < last else 0))

    async def receive(self) -> list[bytes] | None:
        """Return the next message; None when the peer is gone, KernelDied when it breaks the protocol or a limit."""
        parts: list[bytes] = []
        left_bytes = MAX_MESSAGE_BYTES
        try:
            while True:
                flags, body = await self._receive_frame(left_bytes)
                if flags & _COMMAND:
                    await self._answer(body)
                    continue
                parts.append(body)
                left_bytes -= len(body)
                if len(parts) > MAX_PARTS:
                    raise KernelDied(f"the kernel sent a message of more than {MAX_PARTS:,} parts")
                if not flags & _MORE:
                    return parts
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def aclose(self) -> None:
        """Close at once; may be called twice."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def shake_hands(self, socket_type: SocketType, identity: bytes) -> None:
        """Do the handshake; IncompleteReadError when the peer hangs up, KernelDied when it does not speak ZMTP 3."""
        self._writer.write(_GREETING)
        greeting = await self._reader.readexactly(len(_GREETING))
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:32] != _GREETING[12:32]:
            raise KernelDied("the kernel's socket does not speak ZMTP 3 without encryption")
        properties = _property(b"Socket-Type", socket_type.encode()) + _property(b"Identity", identity)
        self._writer.write(_frame(b"\x05READY" + properties, _COMMAND))
        flags, body = await self._receive_frame(MAX_MESSAGE_BYTES)
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise KernelDied(f"the kernel's socket refused a {socket_type} peer: {body[:80]!r}")
        if socket_type == "SUB":
            await self.send([b"\x01"])  # a subscription to everything

    async def _receive_frame(self, limit_bytes: int) -> tuple[int, bytes]:
        flags = (await self._reader.readexactly(1))[0]
        if flags & _LONG:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        else:
            length = (await self._reader.readexactly(1))[0]
        if length > limit_bytes:
            raise KernelDied(f"the kernel sent a message over the limit of {MAX_MESSAGE_BYTES:,} bytes")
        return flags, await self._reader.readexactly(length)

    async def _answer(self, command: bytes) -> None:
        if command.startswith(b"\x04PING"):
            self._writer.write(_frame(b"\x04PONG" + command[7:23], _COMMAND))
            await self._writer.drain()


async def open_connection(path: Path, socket_type: SocketType, identity: bytes) -> ZmtpConnection:
    """Connect to the socket at a path; OSError while nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _connect(sock, path)
        peer = ipc.peer_of(sock)
        reader, writer = await asyncio.open_unix_connection(sock=sock)
    except BaseException:
        sock.close()
        raise
    connection = ZmtpConnection(reader, writer, peer.pid if peer else 0)
    try:
        await connection.shake_hands(socket_type, identity)
    except asyncio.IncompleteReadError as error:
        await connection.aclose()
        raise ConnectionResetError("the peer hung up while greeting") from error
    except BaseException:
        await connection.aclose()
        raise
    return connection


def _connect(sock: socket.socket, path: Path) -> None:
    try:
        ipc.connect_unlinked(sock, path)
    except OSError as error:
        if error.errno != errno.ENOTSOCK:
            raise
        raise KernelDied(f"the kernel put something else than a socket at {path.name}") from None


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes([flags | _LONG]) + _LENGTH.pack(len(body)) + body
    return bytes([flags, len(body)]) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + _VALUE_LENGTH.pack(len(value)) + value
