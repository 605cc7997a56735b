"""Messages to and from the host: a 4-byte length and a JSON object, over one UNIX socket.

Where the host may be replaced while we run, it is a socket of packets: the first byte of each says whether a message
begins with it, so that the rest of a message that was broken off is never taken for the next one.

Owns framing and nothing else; the host's side of the same format is `kernels/wire.py`.
"""

import fcntl
import json
import os
import select
import socket
import stat
import struct
import termios
import threading
from json.encoder import encode_basestring
from typing import Any

MAX_FRAME_BYTES = 32 * 1024 * 1024
# The host accepts slightly deeper nesting, and treats what is deeper still as an invalid message.
MAX_DEPTH = 150
# Likewise: the host does not parse messages with more.
MAX_VALUES = 90_000
PACKET_BYTES = 65_536
_CONTAINERS: "tuple[Any, ...]" = (dict, list, tuple)
_BEGINS, _GOES_ON = b"\1", b"\0"
_LENGTH = struct.Struct("!I")
_INT = struct.Struct("i")
_SYSTEMS_SHARE = 8_192
_STDERR = 2
_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)
_make_encoder: Any = getattr(json.encoder, "c_make_encoder", None)
_DECODER = json.JSONDecoder()
_PEEK = int(socket.MSG_PEEK)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MAX_DESCRIPTORS = socket.CMSG_SPACE(16 * _INT.size)


class Channel:
    """The connection to the host. Sending is safe from any thread; only the main thread may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Programs that the session starts must not inherit it, because they would keep it open after the runner's end.
        sock.set_inheritable(False)
        sock.settimeout(None)  # a cell may have called `socket.setdefaulttimeout`, which new sockets take over
        self._in_packets = sock.type == socket.SOCK_SEQPACKET
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._sender = 0
        self._later: list[bytes] = []
        self._is_receiving = False

    def is_forked(self) -> bool:
        """Return whether this process is a forked child of the runner. Ask the system, because C code can fork too."""
        return os.getpid() != self._pid

    def is_owner(self) -> bool:
        """Return whether the caller may wait for an answer: it is the main thread, and not in a child forked by a cell.

        A finaliser that runs in the middle of a message may not either; a progress bar's prints wherever it runs.
        """
        is_inside = self._is_receiving or self._sender == self._thread
        return not self.is_forked() and threading.get_ident() == self._thread and not is_inside

    def send(self, *messages: dict[str, Any], if_room: bool = False) -> None:
        """Send messages, one directly after the other; in a child forked by a cell, send nothing.

        `if_room`: drop them rather than wait when the socket is full, because the host may not be reading.
        """
        if not self.is_forked():
            self.send_encoded(self.encode(*messages), if_room=if_room)

    def encode(self, *messages: dict[str, Any]) -> "list[bytes]":
        """Return messages as they go over a socket of this kind."""
        if not self._in_packets:
            return [encode_stream(*messages)]
        return [packet for message in messages for packet in _packets(_frame(message))]

    def send_encoded(self, packets: "list[bytes]", *, if_room: bool = False) -> None:
        """Send what `encode` returned."""
        if self._sender == threading.get_ident():
            self._later += packets  # from a finaliser that runs while a message is sent; sent after that message
            return
        with self._lock:
            self._sender = threading.get_ident()
            try:
                if if_room and not self._has_room(sum(map(len, packets))):
                    return
                for packet in packets:
                    self._sock.sendall(packet)
                while self._later:
                    self._sock.sendall(self._later.pop(0))
            finally:
                self._sender = 0

    def _has_room(self, size: int) -> bool:
        """Return whether the socket takes that many bytes without blocking, counting the system's own overhead."""
        try:
            waiting = fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0\0\0\0")
        except OSError:
            return True
        room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _INT.unpack(waiting)[0]
        return 2 * size + _SYSTEMS_SHARE < room

    def receive(self) -> dict[str, Any]:
        """Wait for one message and return it; raise EOFError when the host is gone."""
        self._is_receiving = True
        try:
            return self._receive()
        finally:
            self._is_receiving = False

    def _receive(self) -> dict[str, Any]:
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                end = _LENGTH.size + length
                if len(self._buffer) >= end:
                    frame = self._buffer[_LENGTH.size : end]
                    del self._buffer[:end]
                    return _DECODER.decode(frame.decode("utf-8", "surrogatepass"))
            chunk = self._read()
            self._buffer += chunk

    def _read(self) -> bytes:
        chunk, ancillary, _, _ = self._sock.recvmsg(262_144, _MAX_DESCRIPTORS, _CLOSE_ON_EXEC)
        if not chunk:
            raise EOFError
        if self._in_packets:
            if chunk[:1] == _BEGINS:
                self._give_up_message()
            elif not self._buffer:
                return b""
            chunk = chunk[1:]
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for (descriptor,) in _INT.iter_unpack(data[: len(data) - len(data) % _INT.size]):
                    self._descriptors.append(_above_standard(descriptor))
        return chunk

    def _give_up_message(self) -> None:
        """Drop a half-received message when another one begins, because the host that sent its first half is gone."""
        if self._buffer:
            self._buffer.clear()
            for descriptor in self.take_descriptors():
                os.close(descriptor)

    def take_descriptors(self, count: "int | None" = None) -> "list[int]":
        """Return the descriptors that came with the last message: all, or `count` if a later message may be here."""
        taken, self._descriptors = self._descriptors[:count], self._descriptors[len(self._descriptors[:count]) :]
        return taken

    def close(self) -> None:
        """Close the socket. Called in a forked process, which has another connection or none."""
        self._sock.close()

    def is_open(self) -> bool:
        """Return whether there is a socket at its descriptor: a cell may have closed it by number."""
        try:
            return stat.S_ISSOCK(os.fstat(self._sock.fileno()).st_mode)
        except OSError:
            return False

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._sock.fileno()

    def has_message(self) -> bool:
        """Return whether bytes of a message are buffered or in the socket, without waiting for any."""
        # Not `select`, because a server with many sessions passes on descriptors above the 1,024 that it can handle.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return self.has_buffered() or bool(poll.poll(0))

    def send_and_wait(self, packets: "list[bytes]") -> None:
        """Send what `encode` returned, then wait until the next message begins, and leave that in the socket.

        For the main thread of a process that has no other. The caller looks at `has_buffered` first, because bytes that
        are here already do not end the wait. This is all that a session does after a checkpoint of it was forked, so it
        touches little.
        """
        self._is_receiving, self._sender = True, self._thread
        try:
            for packet in packets:
                self._sock.sendall(packet)
            self._sender = 0
            if self._later:
                self.send_encoded([])
            self._sock.recv(1, _PEEK)
        finally:
            self._is_receiving, self._sender = False, 0

    def has_buffered(self) -> bool:
        """Return whether bytes of a message are buffered, so that polling the socket would miss them."""
        return bool(self._buffer)


def _above_standard(descriptor: int) -> int:
    """Return the descriptor, by another number if it is that of a standard stream which a cell has closed."""
    if descriptor > _STDERR:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    os.close(descriptor)
    return moved


def encode_stream(*messages: dict[str, Any]) -> bytes:
    """Return messages as they go over a socket that is no socket of packets."""
    return b"".join(map(_frame, messages))


def _frame(message: dict[str, Any]) -> bytes:
    content = _encoded(message)
    if len(content) > MAX_FRAME_BYTES:
        if message["type"] == "comm":
            # Do not shorten it, because half a message would be worse than none for the front ends.
            raise ValueError(f"a comm's message of {len(content):,} bytes is over the limit of {MAX_FRAME_BYTES:,}")
        content = _encoded(_shortened(message, len(content)))
    return _LENGTH.pack(len(content)) + content


def _packets(frame: bytes) -> "list[bytes]":
    starts = range(0, len(frame), PACKET_BYTES)
    return [(_GOES_ON if start else _BEGINS) + frame[start : start + PACKET_BYTES] for start in starts]


def _encoded(message: dict[str, Any]) -> bytes:
    if _make_encoder is None:
        text = _ENCODER.encode(message)
    else:
        # What `_ENCODER.encode` does, except that it also makes a function, which writes to pages of a fork.
        text = "".join(_make_encoder({}, str, encode_basestring, None, ": ", ", ", False, False, True)(message, 0))
    # Lone surrogates have no UTF-8 form; replace them by question marks, because the host would refuse the message.
    return text.encode("utf-8", "replace")


def _shortened(message: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the message with a notice in place of its data, so that a large output is not dropped silently."""
    notice = f"<output of {size:,} bytes is over the limit of {MAX_FRAME_BYTES:,} and was left out>"
    return {**message, "data": {"text/plain": notice}, "message": notice, "traceback": [notice]}


def is_too_deep(value: Any) -> bool:
    """Return whether containers are nested deeper than a message may be."""
    if not isinstance(value, _CONTAINERS):
        return False
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        # Each container once, because one that contains itself twice would double the level with every step.
        level = [*{id(inner): inner for outer in level for inner in _containers_in(outer)}.values()]
        if not level:
            return False
    return True


def has_too_many_values(value: Any) -> bool:
    """Return whether a value has more values in it, as JSON, than a message may have."""
    count, waiting = 0, [value]
    while waiting and count <= MAX_VALUES:
        outer = waiting.pop()
        count += 1 + (len(outer) if isinstance(outer, _CONTAINERS) else 0)
        waiting += _containers_in(outer)
    return count > MAX_VALUES


def _containers_in(outer: Any) -> "list[Any]":
    if not isinstance(outer, _CONTAINERS):
        return []
    inside: Any = outer.values() if hasattr(outer, "values") else outer
    return [value for value in inside if isinstance(value, _CONTAINERS)]
