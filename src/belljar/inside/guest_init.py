"""Connect a command's descriptors to the host from inside a virtual machine, run the command, and tell how it ended.

`sandboxes/microvm.py` runs it as a script, `guest_init.py ORDER`, with the Python that is in the machine. A machine
shares no descriptors with the host, so this script opens one connection for each descriptor that the command is to
have, moves it to that number and lets the command inherit it. ORDER is JSON: the command, its environment and folder,
and an address for each descriptor number, `vsock:PORT`, or `unix:PATH` in tests, which have no machine.

The script stays as the command's parent, because the machine's agent reports -1 for every signal that ends its child.
It exits with the command's status, or with 128 and the signal's number, as shells do.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
from typing import Any

HOST = 2
"""The host's context id (CID) for virtual sockets, see vsock(7)."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NOT_STARTED = 127
_PR_SET_PDEATHSIG = 1


def main(order_json: str) -> None:
    """Connect the descriptors that the order names, run its command, and exit as it did; never returns."""
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
    # Block signals before the fork, so that one that arrives at once is passed on and does not end this script.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        _execute(order)
    # The host must read end of file when the command has closed its ends.
    for number in moved:
        os.close(number)
    os._exit(_end_of(child))


def _execute(order: dict[str, Any]) -> None:
    """Become the command, in a process group of its own, which ends with this script; never returns."""
    try:
        os.setpgid(0, 0)
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(order["folder"])
        command = order["command"]
        os.execvpe(command[0], command, order["environment"])
    except BaseException as error:  # this copy of the script must not go on
        os.write(2, f"{order['command'][0]} did not start: {error}\n".encode())
    os._exit(NOT_STARTED)


def _end_of(child: int) -> int:
    """Pass signals on to the command until it ends; return its status, or 128 and the number of the signal."""
    while True:
        received = signal.sigwait({*FORWARDED, signal.SIGCHLD})
        if received != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, received)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _connect(address: str) -> socket.socket:
    kind, _, target = address.partition(":")
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_VSOCK)
    sock.connect(target if kind == "unix" else (HOST, int(target)))
    return sock


if __name__ == "__main__":
    main(sys.argv[1])
