"""The children of a supervisor, from their start until they are reaped. Knows numbers, not what runs."""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import commands

Answer = tuple[dict[str, Any], list[int]]
"""Words, and descriptors that go with them."""


class Children:
    """By number, with a descriptor of each. They stay until their server has asked how they ended."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}

    def start(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Start a command."""
        try:
            pid = commands.start(request, descriptors)
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

    def end(self, pids: "Iterable[int]") -> None:
        """Kill these, as far as they are children, and reap them."""
        known = [pid for pid in pids if pid in self._children]
        for pid in known:
            _kill_group(pid)
        for pid in known:
            self.forget(pid)

    def end_all_but(self, kept: "set[int]") -> None:
        """Kill the others, and reap them."""
        self.end([*self._children.keys() - kept])

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
