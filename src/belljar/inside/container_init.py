"""The first process of a container: takes what the server hands it, starts the command with that, and stays.

Runs inside on whichever Python is there (3.9 or newer) and imports nothing of ours. Engines pass no descriptors, and
show the environment of a command to everyone who may ask them; so both come through a socket, which is gone before
the command starts. This process reaps whoever is orphaned, tells the server the command's status, and ends when the
server closes its end or is dead: that ends the container, because it is its first process.

Code of the session cannot get at the socket: signals from inside do not reach the first process, and it is not
dumpable, so its descriptors and its memory are closed to its own user too.
"""

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

_MOST_DESCRIPTORS = 253  # what Linux passes at once
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_BYTES_PER_INSTRUCTION = 8
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main() -> None:
    """Serve one command; never returns."""
    with contextlib.suppress(OSError):
        server = socket.socket(socket.AF_UNIX)
        server.connect(sys.argv[1])
        _control(_PR_SET_DUMPABLE, 0)
        _, received, _, _ = socket.recv_fds(server, 1, _MOST_DESCRIPTORS)
        if received:
            _serve(server, received)
    os._exit(0)


def _serve(server: socket.socket, received: "list[int]") -> None:
    with open(received[0], "rb", closefd=False) as file:
        order = json.load(file)
    # Python's own handler would let the session end us.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _on_child)
    command = os.fork()
    if command == 0:
        _become(order, received[1:])
    for descriptor in received:
        os.close(descriptor)
    while True:
        ready, _, _ = select.select([server, waking], [], [])
        if server in ready:
            return
        os.read(waking, 4096)
        for pid, status in _ended():
            if pid == command:
                server.sendall(b"%d" % os.waitstatus_to_exitcode(status))


def _on_child(_number: int, _frame: object) -> None:
    """Nothing: that there is a handler wakes us."""


def _ended() -> "list[tuple[int, int]]":
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended


def _become(order: "dict[str, Any]", descriptors: "list[int]") -> None:
    command, environment = order["command"], order["environment"]
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        _place(descriptors, order["descriptors"])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(order["folder"])
        # After the descriptors: their numbers may be beyond what may be opened from now on.
        for kind, most in order["limits"].items():
            _limit(int(kind), most)
        _filter(base64.b64decode(order["filter"]))
        os.execvpe(command[0], command, environment)
    except FileNotFoundError as error:
        _fail(f"{command[0]}: {error.strerror}", _NOT_FOUND)
    except Exception as error:
        _fail(f"{command[0]}: {error}", _CANNOT_EXECUTE)


def _place(descriptors: "list[int]", numbers: "list[int]") -> None:
    """The command's descriptors at their numbers, an input at its end, and nothing else."""
    above = max(numbers) + 1
    held = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    os.closerange(0, above)
    nothing, end = os.pipe()  # the lowest numbers are free: 0 and 1
    os.close(end)
    os.set_inheritable(nothing, True)
    for descriptor, number in zip(held, numbers):  # noqa: B905 - `strict` is Python 3.10's
        os.dup2(descriptor, number)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _filter(program: bytes) -> None:
    """Refuse the system calls that the server wants refused, beside what the engine refuses."""
    if not program:
        return
    buffer = ctypes.create_string_buffer(program, len(program))
    filling = _Program(len(program) // _BYTES_PER_INSTRUCTION, ctypes.addressof(buffer))
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    _control(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filling))


def _control(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *padded) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def _fail(words: str, status: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"belljar: {words}\n".encode(errors="replace"))
    os._exit(status)


if __name__ == "__main__":
    main()
