"""Runs in a virtual machine: connects a command's descriptors to the host, and becomes the command.

`microvm.py` runs it as a script, `guest_init.py ORDER`, with the Python that is in the machine; it imports nothing of
belljar. A machine shares no descriptors with the host, but a connection is a descriptor: one is made for each number
that the command is to have, put there, and inherited through exec. ORDER is JSON: the command, its environment and
folder, and an address for each number, `vsock:PORT`, or `unix:PATH` where tests have no machine.
"""

import fcntl
import json
import os
import socket
import sys

HOST = 2
"""The host's number among virtual sockets, see vsock(7)."""


def main(order: str) -> None:
    """Do what the order says; never returns."""
    told = json.loads(order)
    # Connect all before any is put in place, because a connection may have a number that the command is to have.
    connected = {int(number): _connect(address) for number, address in told["descriptors"].items()}
    free = max([*connected, 2]) + 1
    moved = {number: fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, free) for number, sock in connected.items()}
    for sock in connected.values():
        sock.close()
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(told["folder"])
    command: list[str] = told["command"]
    os.execvpe(command[0], command, told["environment"])


def _connect(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_VSOCK)
    sock.connect(place if kind == "unix" else (HOST, int(place)))
    return sock


if __name__ == "__main__":
    main(sys.argv[1])
