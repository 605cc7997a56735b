"""The init process of a container: it receives an order from the server, starts the command, and stays as PID 1.

Descriptors and environment come through a socket, because container engines pass no descriptors and show a command's
environment to everyone who may ask them. The server stops listening and removes the socket's path before the command
starts. This process reaps orphans, sends the command's exit status to the server, and exits when the server closes the
connection or dies, which ends the container.

Code of the session cannot reach the connection: signals from inside do not reach PID 1, and PID 1 is not dumpable, so
its descriptors and its memory are closed to processes of the same user.
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

_MAX_DESCRIPTORS = 253  # the most that Linux passes in one message
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_BYTES_PER_INSTRUCTION = 8
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main() -> None:
    """Connect to the server, run one command for it and exit; never returns."""
    with contextlib.suppress(OSError):
        server = socket.socket(socket.AF_UNIX)
        server.connect(sys.argv[1])
        _control(_PR_SET_DUMPABLE, 0)
        _, received, _, _ = socket.recv_fds(server, 1, _MAX_DESCRIPTORS)
        if received:
            _serve(server, received)
    os._exit(0)


def _serve(server: socket.socket, received: "list[int]") -> None:
    with open(received[0], "rb", closefd=False) as file:
        order = json.load(file)
    # With Python's own handler, a SIGINT from the session would end this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _on_child)
    command = os.fork()
    if command == 0:
        _execute(order, received[1:])
    for descriptor in received:
        os.close(descriptor)
    while True:
        ready, _, _ = select.select([server, wakeup_read], [], [])
        if server in ready:
            return
        os.read(wakeup_read, 4096)
        for pid, status in _reap():
            if pid == command:
                server.sendall(b"%d" % os.waitstatus_to_exitcode(status))


def _on_child(_number: int, _frame: object) -> None:
    """Do nothing; a handler has to be there for SIGCHLD to write to the wakeup descriptor."""


def _reap() -> "list[tuple[int, int]]":
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended


def _execute(order: "dict[str, Any]", descriptors: "list[int]") -> None:
    command, environment = order["command"], order["environment"]
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        _place(descriptors, order["descriptors"])
        for path, numbers in order.get("shown", {}).items():
            _check_folder(path, numbers)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(order["folder"])
        # Set limits after the descriptors are in place, because their numbers may be above RLIMIT_NOFILE.
        for kind, limit in order["limits"].items():
            _limit(int(kind), limit)
        _filter(base64.b64decode(order["filter"]))
        os.execvpe(command[0], command, environment)
    except FileNotFoundError as error:
        _fail(f"{command[0]}: {error.strerror}", _NOT_FOUND)
    except Exception as error:
        _fail(f"{command[0]}: {error}", _CANNOT_EXECUTE)


def _check_folder(path: str, numbers: "list[int]") -> None:
    """Refuse a folder of the user's that somebody exchanged after the server had looked at it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(folder)
    os.close(folder)
    if [status.st_dev, status.st_ino] != numbers:
        raise PermissionError(0, f"{path} is not the folder that the settings name")


def _place(descriptors: "list[int]", numbers: "list[int]") -> None:
    """Put the command's descriptors at their numbers, an empty input at 0, and close everything else."""
    above = max(numbers) + 1
    held = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    os.closerange(0, above)
    empty_input, end = os.pipe()  # gets the lowest free numbers, 0 and 1
    os.close(end)
    os.set_inheritable(empty_input, True)
    for descriptor, number in zip(held, numbers):  # noqa: B905 - `strict` is Python 3.10's
        os.dup2(descriptor, number)


def _limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _filter(program: bytes) -> None:
    """Install the server's seccomp filter, in addition to the engine's own."""
    if not program:
        return
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_program = _FilterProgram(len(program) // _BYTES_PER_INSTRUCTION, ctypes.addressof(buffer))
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    _control(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filter_program))


def _control(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *padded) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def _fail(message: str, status: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"belljar: {message}\n".encode(errors="replace"))
    os._exit(status)


if __name__ == "__main__":
    main()
