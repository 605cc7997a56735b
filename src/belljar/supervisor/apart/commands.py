"""A command as a child: forked, with the descriptors that it was promised and no others, and executed."""

import contextlib
import fcntl
import os
import resource
import signal
from typing import Any

_USUAL_FILES: "list[tuple[int, int]]" = []
"""The limit of descriptors that the supervisor was started with, where it has one of its own."""


def start(request: "dict[str, Any]", descriptors: "list[int]") -> int:
    """The process of a command; the descriptors are to have the numbers that `targets` says."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        above: int = max(request["targets"]) + 1
        complaints = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, above)
        try:
            _become(request, [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors])
        except BaseException as error:  # noqa: BLE001 - a fork must not go on as its parent
            os.write(complaints, str(error).encode()[:4096])
        finally:
            os._exit(127)
    os.close(writing)
    try:
        # Closed by the exec: silence means that it went well.
        complaint = os.read(reading, 4096)
    finally:
        os.close(reading)
    if complaint:
        os.waitpid(pid, 0)
        raise OSError(complaint.decode(errors="replace"))
    return pid


def _become(request: "dict[str, Any]", descriptors: "list[int]") -> None:
    """The command: in a session of its own, with these descriptors and no others, which are all closed by an exec."""
    if _USUAL_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, _USUAL_FILES[0])
    for descriptor, target in zip(descriptors, request["targets"], strict=True):
        os.dup2(descriptor, target)
    os.setsid()
    # An ignored signal crosses an exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606 - a list of words


def make_room() -> None:
    """For the descriptors of all sessions together, ten or so of each; what is started gets the limit of its server."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))
        _USUAL_FILES.append(usual)
