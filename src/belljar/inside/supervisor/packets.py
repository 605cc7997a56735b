"""The wire between a server and its supervisor.

It carries packets of JSON with descriptors, over a UNIX socket. It imports nothing of belljar, because the supervisor
uses it too and has only the standard library.
"""

import array
import errno
import os
import socket

FORM = 1
"""The version of requests and answers. Increase it when an earlier or later server could not understand them."""
PACKET_BYTES = 196_608
BUFFER_BYTES = 1_048_576
WELCOME, TAKEN = b"welcome", b"taken"
LOG = "log"
"""The name of the log in the supervisor's folder; a running supervisor holds a lock on this file."""
SOCKET = "socket"
"""The name of the listening socket in the supervisor's folder."""
MAX_DESCRIPTORS = 253
"""The most descriptors that Linux passes in one packet."""
_NUMBERS = array.array("i")


class Unreceived(OSError):
    """A packet that arrived incompletely.

    EMFILE: this process has no room for its descriptors. EMSGSIZE: its text is longer than `PACKET_BYTES`.
    """

    def __init__(self, number: int, packet: bytes) -> None:
        super().__init__(number, os.strerror(number))
        self.packet = packet


def receive(sock: socket.socket, flags: int = 0) -> "tuple[bytes, list[int]]":
    """Return one packet with its descriptors, which are close-on-exec; raise Unreceived when it is incomplete."""
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * _NUMBERS.itemsize)
    packet, ancillary, found, _ = sock.recvmsg(PACKET_BYTES, space, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % _NUMBERS.itemsize
            descriptors += array.array("i", data[:whole])
    # Linux drops the descriptors that this process has no room for; the flag is the only sign of it.
    for flag, number in ((socket.MSG_CTRUNC, errno.EMFILE), (socket.MSG_TRUNC, errno.EMSGSIZE)):
        if found & flag:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Unreceived(number, packet)
    return packet, descriptors


def widen(sock: socket.socket) -> None:
    """Enlarge the socket's buffers so that they hold whole packets."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
