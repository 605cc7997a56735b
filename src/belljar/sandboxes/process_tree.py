"""Finds and kills the processes that one command has started, by reading Linux's /proc. Knows nothing of sandboxes.

A process belongs to the command when it is in the command's session, when its parent belongs, or when it was started
with the sandbox's mark in its environment, by which a daemon is found that left its session and lost its parent. One
that does both and also replaces its environment is not found; only a pid namespace can end that.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from belljar.sandboxes.child import open_pidfd

MARK = "BELLJAR_SANDBOX"

_TIMEOUT_S = 10.0
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class _ProcessEntry:
    pid: int
    parent: int
    session: int
    started: int
    is_dead: bool


def kill_process_tree(leader: int, mark: str, spare: Collection[int] = ()) -> None:
    """Kill all processes of the command `leader` except the spared, and wait. `leader` must not have been reaped."""
    deadline = time.monotonic() + _TIMEOUT_S
    untouchable = set(spare)
    # Each pass may miss a child that is being forked; the next one sees it.
    while members := [process for process in _members(leader, mark) if process.pid not in untouchable]:
        untouchable |= _kill(members, deadline)


def open_descendant(ancestor: int, name: str) -> int | None:
    """Return a pidfd of the descendant whose command line begins with this name; None when there is none."""
    living = {process.pid: process for process in _processes() if not process.is_dead}
    below = {ancestor}
    while more := {p.pid for p in living.values() if p.parent in below} - below:
        below |= more
    for pid in below:
        if _name(pid) == name and (pidfd := open_pidfd(pid)) is not None:
            if _is_same(living[pid]):
                return pidfd
            os.close(pidfd)
    return None


def _name(pid: int) -> str:
    try:
        return os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0])
    except OSError:
        return ""


def _members(leader: int, mark: str) -> list[_ProcessEntry]:
    living = {process.pid: process for process in _processes() if not process.is_dead and process.pid != os.getpid()}
    wanted = f"{MARK}={mark}".encode()
    found = {p.pid for p in living.values() if p.session == leader or wanted in _environment(p.pid)}
    while more := {p.pid for p in living.values() if p.parent in found} - found:
        found |= more
    return [living[pid] for pid in found]


def _processes() -> Iterator[_ProcessEntry]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (process := _read(int(folder.name))):
            yield process


def _read(pid: int) -> _ProcessEntry | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in brackets and may itself contain blanks and brackets, so the fields count from the last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    return _ProcessEntry(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(members: list[_ProcessEntry], deadline: float) -> set[int]:
    """Kill the processes, wait until they are gone, and return those that cannot be killed."""
    with contextlib.ExitStack() as stack:
        dying: dict[int, int] = {}
        survivors: set[int] = set()
        for process in members:
            if (pidfd := open_pidfd(process.pid)) is None:
                continue
            stack.callback(os.close, pidfd)
            if not _is_same(process):
                continue
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                dying[pidfd] = process.pid
            except ProcessLookupError:
                continue
            except PermissionError:
                survivors.add(process.pid)
        return survivors | _wait_gone(dying, deadline)


def _is_same(process: _ProcessEntry) -> bool:
    now = _read(process.pid)
    return now is not None and now.started == process.started


def _wait_gone(dying: dict[int, int], deadline: float) -> set[int]:
    poll = select.poll()
    for pidfd in dying:
        poll.register(pidfd, select.POLLIN)
    while dying and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            del dying[pidfd]
    return set(dying.values())
