"""Lets the host meet a kernel that knows nothing but TCP: UNIX sockets outside, the sandbox's own loopback inside.

Listens at the addresses of the connection file, writes another one for the kernel, leaves a relay behind and becomes
the kernel. What it carries is for the two ends to judge.
"""

import json
import os
import socket
from functools import partial
from pathlib import Path

from . import relay

_CHANNELS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def main(outside_file: str, inside_file: str, *command: str) -> None:
    """`outside_file` is the host's connection file, `inside_file` the one that the command knows."""
    told = json.loads(Path(outside_file).read_text(encoding="utf-8"))
    ports = _free_ports(len(_CHANNELS))
    doors = {
        _listening(f"{told['ip']}-{told[channel]}"): partial(socket.create_connection, ("127.0.0.1", port))
        for channel, port in zip(_CHANNELS, ports)  # noqa: B905 — `strict` is not known to every Python here
    }
    told.update(zip(_CHANNELS, ports), transport="tcp", ip="127.0.0.1")  # noqa: B905
    descriptor = os.open(inside_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(told, file)
    relay.become([*command], [*doors], lambda: doors)


def _free_ports(count: int) -> "list[int]":
    # Bound at once, so that they differ; the loopback is the sandbox's own, and nobody else is about to take them.
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in held]
    for sock in held:
        sock.close()
    return ports


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(8)
    return listener
