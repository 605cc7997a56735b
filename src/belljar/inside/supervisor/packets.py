"""What a server and a supervisor say to each other with: packets of JSON that carry descriptors, over a UNIX socket.

Both ends use this one file, so it imports nothing of belljar's: the supervisor runs on Python's own library.
"""

import array
import errno
import os
import socket

FORM = 1
"""Of requests and answers. Raised when an earlier or later server could not make sense of them."""
PACKET_BYTES = 196_608
BUFFER_BYTES = 1_048_576
WELCOME, TAKEN = b"welcome", b"taken"
LOG = "log"
"""What it complains of, in its folder; it has a lock on the file."""
SOCKET = "socket"
"""Where it listens, in its folder."""
MOST_DESCRIPTORS = 253
"""In one packet, as Linux has it."""
_NUMBERS = array.array("i")


class Unreceived(OSError):
    """Not all of a packet is there: EMFILE, its descriptors have no room here; EMSGSIZE, its words have none."""

    def __init__(self, number: int, packet: bytes) -> None:
        super().__init__(number, os.strerror(number))
        self.packet = packet


def receive(sock: socket.socket, flags: int = 0) -> "tuple[bytes, list[int]]":
    """One packet with its descriptors, which no exec passes on; Unreceived when not all of it is there."""
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * _NUMBERS.itemsize)
    packet, ancillary, found, _ = sock.recvmsg(PACKET_BYTES, space, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % _NUMBERS.itemsize
            descriptors += array.array("i", data[:whole])
    # Linux leaves out the descriptors that this process has no room for, and says nothing else about it.
    for flag, number in ((socket.MSG_CTRUNC, errno.EMFILE), (socket.MSG_TRUNC, errno.EMSGSIZE)):
        if found & flag:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Unreceived(number, packet)
    return packet, descriptors


def widen(sock: socket.socket) -> None:
    """Make room for whole packets."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
