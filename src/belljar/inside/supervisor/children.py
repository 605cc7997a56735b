"""The children of a supervisor, from their start until they are reaped. Knows numbers, not what runs."""

import contextlib
import fcntl
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Answer = tuple[dict[str, Any], list[int]]
"""Words, and descriptors that go with them."""


class Children:
    """By number, with a descriptor of each. They stay until their server has asked how they ended."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}

    def start(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Start a command."""
        try:
            pid = start(request, descriptors)
        finally:
            while descriptors:
                os.close(descriptors.pop())
        try:
            self._children[pid] = os.pidfd_open(pid)
        except OSError:
            _kill_group(pid)
            os.waitpid(pid, 0)
            raise
        return {"pid": pid}, [self._children[pid]]

    def find(self, pid: int) -> Answer:
        """A descriptor of one."""
        pidfd = self._children.get(pid)
        return ({"error": f"{pid} is no child of mine"}, []) if pidfd is None else ({}, [pidfd])

    def status(self, pid: int) -> "int | None":
        """How one ended; None while it lives. It stays until it is forgotten."""
        outcome = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if outcome is None:
            return None
        return outcome.si_status if outcome.si_code == os.CLD_EXITED else -outcome.si_status

    def kill(self, pid: int) -> None:
        """End one and its process group."""
        if pid in self._children:
            _kill_group(pid)

    def forget(self, pid: int) -> None:
        """It has ended, and nobody asks about it any more."""
        if pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            os.close(self._children.pop(pid))

    def kill_and_reap(self, pids: "Iterable[int]") -> None:
        """Kill these, as far as they are children, and reap them."""
        known = [pid for pid in pids if pid in self._children]
        for pid in known:
            _kill_group(pid)
        for pid in known:
            self.forget(pid)

    def end_all_but(self, kept: "set[int]") -> None:
        """Kill the others, and reap them."""
        self.kill_and_reap([*self._children.keys() - kept])

    def end_strangers(self) -> bool:
        """Those whose parents have ended are ours by now, and nobody's: kill and reap them. Whether there were any.

        Bubblewrap that is killed takes its child along, but not when that one has hardly begun.
        """
        strangers = _children_of_ours() - self._children.keys()
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        return bool(strangers)


def _children_of_ours() -> "set[int]":
    try:
        return {int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# A command as a child: forked, with the descriptors that it was promised and no others, and executed.

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
        except BaseException as error:
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
    os.execve(request["command"][0], request["command"], request["environment"])


def make_room() -> None:
    """For the descriptors of all sessions together, ten or so of each; what is started gets the limit of its server."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))
        _USUAL_FILES.append(usual)
