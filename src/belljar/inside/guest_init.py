"""Connect a command's descriptors to the host from inside a virtual machine, then execute the command.

`sandboxes/microvm.py` runs it as a script, `guest_init.py ORDER`, with the Python that is in the machine. A machine
shares no descriptors with the host, so this script opens one connection for each descriptor that the command is to
have, moves it to that number and lets the command inherit it. ORDER is JSON: the command, its environment and folder,
and an address for each descriptor number, `vsock:PORT`, or `unix:PATH` in tests, which have no machine.
"""

import fcntl
import json
import os
import socket
import sys

HOST = 2
"""The host's context id (CID) for virtual sockets, see vsock(7)."""


def main(order_json: str) -> None:
    """Connect the descriptors that the order names and execute its command; never returns."""
    order = json.loads(order_json)
    # Open all connections before moving any, because a new socket may get a number that the command is to have.
    connected = {int(number): _connect(address) for number, address in order["descriptors"].items()}
    free = max([*connected, 2]) + 1
    moved = {number: fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, free) for number, sock in connected.items()}
    for sock in connected.values():
        sock.close()
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(order["folder"])
    command: list[str] = order["command"]
    os.execvpe(command[0], command, order["environment"])


def _connect(address: str) -> socket.socket:
    kind, _, target = address.partition(":")
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_VSOCK)
    sock.connect(target if kind == "unix" else (HOST, int(target)))
    return sock


if __name__ == "__main__":
    main(sys.argv[1])
