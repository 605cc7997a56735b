"""Kills the processes of one pid namespace except some of them, by reading /proc. Knows nothing of sandboxes.

Processes in pid namespaces nested in it do not count. The processes that make those nested namespaces are in it, and
are recognised by their parents, which are not.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from belljar.sandboxes.child import children, open_pidfd

_TIMEOUT_S = 10.0
_QUIET = 3
_LOOKS = 10
_PATIENT_PASSES = 20


@dataclass(frozen=True, slots=True)
class SparedProcesses:
    """The processes that stay alive, besides the namespace's first process. Pids are the host's."""

    processes: Collection[int] = ()
    children_of: Collection[int] = ()
    forks_of: Sequence[str] = ()
    """A command: spares the processes that were started with it and have executed nothing else since."""

    def has(self, process: "_FoundProcess") -> bool:
        """Return whether a process of the namespace is spared."""
        if process.pid in self.processes or process.parent in self.children_of:
            return True
        line = b"".join(os.fsencode(word) + b"\0" for word in self.forks_of)
        return bool(line) and _command_line(process.pid) == line


@dataclass(frozen=True, slots=True)
class _FoundProcess:
    pid: int
    parent: int


def kill_all_except(first: int, spared: SparedProcesses) -> None:
    """Kill until only the spared are left. Blocks until the others are gone, for some seconds at most."""
    if (namespace := _namespace(first)) is None:
        return
    deadline = time.monotonic() + _TIMEOUT_S
    quiet = passes = 0
    while quiet < _QUIET and time.monotonic() < deadline:
        with contextlib.ExitStack() as stack:
            kill_pass = _NamespaceKill(first, namespace, spared, stack)
            # After some passes stop all before killing, because stopped processes of a fork bomb keep their places. Not
            # at first: a process in the same process group as a stopped one gets SIGHUP when the group is orphaned, and
            # may be a spared one.
            while passes > _PATIENT_PASSES and kill_pass.send(signal.SIGSTOP) and time.monotonic() < deadline:
                continue
            kill_pass.send(signal.SIGKILL)
            kill_pass.wait_gone(deadline)
            # Several scans must find nobody, because a process that forks and ends all the time may be missed: it has
            # another pid at each scan of /proc.
            quiet = 0 if kill_pass.found else quiet + 1
        passes += 1


class _NamespaceKill:
    """One pass of killing, with a pidfd of each process found."""

    def __init__(
        self, first: int, namespace: tuple[int, int], spared: SparedProcesses, stack: contextlib.ExitStack
    ) -> None:
        self.found: dict[int, int] = {}
        """Pids and their pidfds."""
        self._first = first
        self._namespace = namespace
        self._spared = spared
        self._stack = stack

    def send(self, number: signal.Signals) -> bool:
        """Signal the processes found before and those found now; return whether any were new."""
        for pidfd in self.found.values():
            _send(pidfd, number)
        count = len(self.found)
        for pid in _candidates(self._first):
            if pid not in self.found and self._is_wanted(pid) and (pidfd := open_pidfd(pid)) is not None:
                self._stack.callback(os.close, pidfd)
                # Checked again, because the pid may have become another process's before the pidfd was opened.
                if _namespace(pid) == self._namespace and _send(pidfd, number):
                    self.found[pid] = pidfd
        return len(self.found) > count

    def _is_wanted(self, pid: int) -> bool:
        if pid == self._first or _namespace(pid) != self._namespace:
            return False
        process = _read(pid)
        return process is not None and not self._spared.has(process)

    def wait_gone(self, deadline: float) -> None:
        """Wait until all processes found have ended."""
        poll = select.poll()
        left = set(self.found.values())
        for pidfd in left:
            poll.register(pidfd, select.POLLIN)
        while left and (left_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(left_s * 1000):
                poll.unregister(pidfd)
                left.discard(pidfd)


def _candidates(first: int) -> Iterator[int]:
    """Yield first the orphans, several times, because one that forks all the time soon has another pid; then all."""
    for _ in range(_LOOKS):
        yield from children(first)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            yield int(entry.name)


def _namespace(pid: int) -> tuple[int, int] | None:
    try:
        found = Path(f"/proc/{pid}/ns/pid").stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read(pid: int) -> _FoundProcess | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
    if fields["State"][0] in "ZX":
        return None
    return _FoundProcess(pid, int(fields["PPid"][0]))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _send(pidfd: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
