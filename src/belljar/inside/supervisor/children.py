"""The children of a supervisor, from their start until they are reaped.

Owns fork, exec, kill and wait. It knows process ids and descriptors, and not what runs in the children.
"""

import contextlib
import fcntl
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Answer = tuple[dict[str, Any], list[int]]
"""A JSON object, and the descriptors that are sent with it."""


class Children:
    """All children by process id, with a pidfd of each. One stays a zombie until its server has asked how it ended."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}

    def start(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Start a command as a child, and answer with its process id and its pidfd."""
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
        """Answer with the pidfd of one child."""
        pidfd = self._children.get(pid)
        return ({"error": f"{pid} is no child of mine"}, []) if pidfd is None else ({}, [pidfd])

    def status(self, pid: int) -> "int | None":
        """Return how one child ended, or None while it runs. It is not reaped; `forget` does that."""
        outcome = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if outcome is None:
            return None
        return outcome.si_status if outcome.si_code == os.CLD_EXITED else -outcome.si_status

    def kill(self, pid: int) -> None:
        """Kill one child and its process group."""
        if pid in self._children:
            _kill_group(pid)

    def forget(self, pid: int) -> None:
        """Reap a child that has ended and that nobody will ask about any more."""
        if pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            os.close(self._children.pop(pid))

    def kill_and_reap(self, pids: "Iterable[int]") -> None:
        """Kill and reap those of these processes that are children of ours."""
        known = [pid for pid in pids if pid in self._children]
        for pid in known:
            _kill_group(pid)
        for pid in known:
            self.forget(pid)

    def end_all_but(self, kept: "set[int]") -> None:
        """Kill and reap all children except these."""
        self.kill_and_reap([*self._children.keys() - kept])

    def kill_orphans(self) -> bool:
        """Kill and reap the orphans that became our children when their parents ended. Return whether there were any.

        There are some because a Bubblewrap that is killed takes its child along, except when that child has hardly
        started.
        """
        orphans = _direct_children() - self._children.keys()
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        return bool(orphans)


def _direct_children() -> "set[int]":
    try:
        return {int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# Starting a command: fork, put its descriptors in place, exec

_INHERITED_LIMIT: "list[tuple[int, int]]" = []
"""The RLIMIT_NOFILE that the supervisor was started with; empty unless `raise_descriptor_limit` changed it."""


def start(request: "dict[str, Any]", descriptors: "list[int]") -> int:
    """Start a command and return its process id. It gets the descriptors under the numbers in `targets`."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        above: int = max(request["targets"]) + 1
        error_pipe = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, above)
        try:
            _execute(request, [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors])
        except BaseException as error:
            os.write(error_pipe, str(error).encode()[:4096])
        finally:
            os._exit(127)
    os.close(writing)
    try:
        # The exec closes the child's end, so an empty read means that the exec succeeded.
        error_text = os.read(reading, 4096)
    finally:
        os.close(reading)
    if error_text:
        os.waitpid(pid, 0)
        raise OSError(error_text.decode(errors="replace"))
    return pid


def _execute(request: "dict[str, Any]", descriptors: "list[int]") -> None:
    """Execute the command in a session of its own. All other descriptors of this process are closed by the exec."""
    if _INHERITED_LIMIT:
        resource.setrlimit(resource.RLIMIT_NOFILE, _INHERITED_LIMIT[0])
    for descriptor, target in zip(descriptors, request["targets"], strict=True):
        os.dup2(descriptor, target)
    os.setsid()
    # Reset these, because an ignored signal stays ignored after an exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.execve(request["command"][0], request["command"], request["environment"])


def raise_descriptor_limit() -> None:
    """Raise RLIMIT_NOFILE to its hard limit, because the supervisor holds about ten descriptors for each session.

    Commands are started with the original limit, which is the server's.
    """
    inherited = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (inherited[1], inherited[1]))
        _INHERITED_LIMIT.append(inherited)
