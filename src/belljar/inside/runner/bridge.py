"""Connect the host to a kernel that speaks TCP only: UNIX sockets outside, the sandbox's own loopback inside.

Listens at the addresses of the host's connection file, writes another connection file for the kernel, starts a relay
and executes the kernel. It forwards bytes and decides nothing.
"""

import json
import os
import socket
from functools import partial
from pathlib import Path

from . import relay

_CHANNELS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def main(outside_file: str, inside_file: str, *command: str) -> None:
    """Start the relay and execute the command.

    `outside_file` is the host's connection file, `inside_file` the one to write, which the command reads.
    """
    connection = json.loads(Path(outside_file).read_text(encoding="utf-8"))
    ports = _free_ports(len(_CHANNELS))
    routes = {
        _listen(f"{connection['ip']}-{connection[channel]}"): partial(socket.create_connection, ("127.0.0.1", port))
        for channel, port in zip(_CHANNELS, ports)  # noqa: B905 — `strict` is not known to every Python here
    }
    connection.update(zip(_CHANNELS, ports), transport="tcp", ip="127.0.0.1")  # noqa: B905
    descriptor = os.open(inside_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(connection, file)
    relay.become([*command], [*routes], lambda: routes)


def _free_ports(count: int) -> "list[int]":
    # Hold all at the same time, so that they differ. Nobody takes them before the kernel does, because the loopback is
    # the sandbox's own.
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in held]
    for sock in held:
        sock.close()
    return ports


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(8)
    return listener
