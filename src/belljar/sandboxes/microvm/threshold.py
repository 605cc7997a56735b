"""Inside a virtual machine: connects a command's descriptors to the host, and becomes the command.

Run as a script: `threshold.py ORDER`, on whichever Python is there; imports nothing of ours. A machine shares no
descriptors with the host, but a connection is one: each is made, put at its number, and given away with the exec. The
order is JSON: the command, its environment and folder, and for each number an address, `vsock:PORT` or `unix:PATH`.
"""

import fcntl
import json
import os
import socket
import sys

HOST = 2
"""The host's number among virtual sockets, see vsock(7)."""


def main(order: str) -> None:
    """Never returns."""
    told = json.loads(order)
    # All before any is put in place: a number that is wanted may be one that a connection has.
    held = {int(number): _connect(address) for number, address in told["descriptors"].items()}
    most = max([*held, 2]) + 1
    moved = {number: _above(sock, most) for number, sock in held.items()}
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(told["folder"])
    command: list[str] = told["command"]
    os.execvpe(command[0], command, told["environment"])  # noqa: S606 - that is its work


def _connect(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place)
    else:
        sock = socket.socket(socket.AF_VSOCK)
        sock.connect((HOST, int(place)))
    return sock


def _above(sock: socket.socket, most: int) -> int:
    """The same descriptor, at a number that nobody asked for."""
    descriptor = fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, most)
    sock.close()
    return descriptor


if __name__ == "__main__":
    main(sys.argv[1])
