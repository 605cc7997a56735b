"""Messages to and from the host: a 4-byte length and a JSON object, over one UNIX socket.

A socket of packets is for a host that may be replaced: each says whether a message begins with it, so that what is left
of one that was broken off is never taken for the next.

Owns framing and nothing else; the host's side of the same form is `kernels/wire.py`.
"""

import array
import fcntl
import json
import os
import select
import socket
import struct
import termios
import threading
from typing import Any

MAX_FRAME_BYTES = 32 * 1024 * 1024
# The host reads some more, and takes what is deeper still for no message at all.
MAX_DEPTH = 150
PACKET_BYTES = 65_536
_CONTAINERS: "tuple[Any, ...]" = (dict, list, tuple)
_BEGINS, _GOES_ON = b"\1", b"\0"
_LENGTH = struct.Struct("!I")
_LENGTH_NATIVE = struct.Struct("i")
_SYSTEMS_SHARE = 8_192
_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_DESCRIPTORS = array.array("i")
_MOST_DESCRIPTORS = socket.CMSG_SPACE(8 * _DESCRIPTORS.itemsize)


class Channel:
    """One peer, the host. Sending is safe from any thread; receiving is for the main thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Programs that the session starts have no part in this; and held open by one, it would outlive the runner.
        sock.set_inheritable(False)
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
        """Whether this process is a child of the one that speaks here. Asked of the system: C can fork too."""
        return os.getpid() != self._pid

    def is_owner(self) -> bool:
        """Whether the caller may wait for an answer: not a forked child of the cell's, not one of its threads.

        Nor a finaliser that runs in the middle of a message: a progress bar's says its last word wherever it is.
        """
        is_inside = self._is_receiving or self._sender == self._thread
        return not self.is_forked() and threading.get_ident() == self._thread and not is_inside

    def send(self, *messages: dict[str, Any], if_room: bool = False) -> None:
        """Send messages at once; a forked child of the cell's has no voice here.

        `if_room`: while nobody may be reading, it is better to lose them than to wait.
        """
        if self.is_forked():
            return
        frames = [*map(_frame, messages)]
        packets = [packet for frame in frames for packet in _packets(frame)] if self._in_packets else [b"".join(frames)]
        if self._sender == threading.get_ident():
            self._later += packets  # from a finaliser; its message follows the one it runs in the middle of
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
        """Whether the socket takes so much at once. What waits in it is counted with what the system adds to it."""
        try:
            waiting = fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0\0\0\0")
        except OSError:
            return True
        room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _LENGTH_NATIVE.unpack(waiting)[0]
        return 2 * size + _SYSTEMS_SHARE < room

    def receive(self) -> dict[str, Any]:
        """Wait for one message; EOFError when the host is gone."""
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
                    frame = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return json.loads(frame)
            chunk = self._read()
            self._buffer += chunk

    def _read(self) -> bytes:
        chunk, ancillary, _, _ = self._sock.recvmsg(262_144, _MOST_DESCRIPTORS, _CLOSE_ON_EXEC)
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
                whole = len(data) - len(data) % _DESCRIPTORS.itemsize
                self._descriptors += array.array("i", data[:whole])
        return chunk

    def _give_up_message(self) -> None:
        """Another one begins: whoever sent the first half of this one is gone."""
        if self._buffer:
            self._buffer.clear()
            for descriptor in self.take_descriptors():
                os.close(descriptor)

    def take_descriptors(self, count: "int | None" = None) -> "list[int]":
        """Those that came with the last message: all there are, or so many when another one may be here as well."""
        taken, self._descriptors = self._descriptors[:count], self._descriptors[len(self._descriptors[:count]) :]
        return taken

    def close(self) -> None:
        """Hang up. For a copy of the process, whose host is another one."""
        self._sock.close()

    def fileno(self) -> int:
        """For selecting on."""
        return self._sock.fileno()

    def has_message(self) -> bool:
        """Whether bytes of a message are here or in the socket, without waiting for any."""
        # Not `select`: a server with many sessions hands on descriptors beyond the 1,024 that it can look at.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return self.has_buffered() or bool(poll.poll(0))

    def has_buffered(self) -> bool:
        """Whether bytes of a message are already here, so that selecting on the socket would miss them."""
        return bool(self._buffer)


def _frame(message: dict[str, Any]) -> bytes:
    content = _encoded(message)
    if len(content) > MAX_FRAME_BYTES:
        if message["type"] == "comm":
            # Half of it would be worse than nothing for the views.
            raise ValueError(f"a comm's message of {len(content):,} bytes is over the limit of {MAX_FRAME_BYTES:,}")
        content = _encoded(_shortened(message, len(content)))
    return _LENGTH.pack(len(content)) + content


def _packets(frame: bytes) -> "list[bytes]":
    starts = range(0, len(frame), PACKET_BYTES)
    return [(_GOES_ON if start else _BEGINS) + frame[start : start + PACKET_BYTES] for start in starts]


def _encoded(message: dict[str, Any]) -> bytes:
    # Lone surrogates have no UTF-8 form; a question mark for one is better than a message the host must refuse.
    return _ENCODER.encode(message).encode("utf-8", "replace")


def _shortened(message: dict[str, Any], size: int) -> dict[str, Any]:
    """The same message without its data: what is too large to send is said, not dropped."""
    notice = f"<output of {size:,} bytes is over the limit of {MAX_FRAME_BYTES:,} and was left out>"
    return {**message, "data": {"text/plain": notice}, "message": notice, "traceback": [notice]}


def is_too_deep(value: Any) -> bool:
    """Whether containers stand inside each other more often than a message can have them."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        # Each once: those that hold themselves twice would be ever more.
        level = [*{id(inner): inner for outer in level for inner in _containers_in(outer)}.values()]
        if not level:
            return False
    return True


def _containers_in(outer: Any) -> "list[Any]":
    if not isinstance(outer, _CONTAINERS):
        return []
    inside: Any = outer.values() if hasattr(outer, "values") else outer
    return [value for value in inside if isinstance(value, _CONTAINERS)]
