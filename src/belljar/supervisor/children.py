"""Processes whose parent is the supervisor; the server's own children are in `sandboxes/child.py`."""

import asyncio
import contextlib
import os
import signal
from typing import Protocol


class Parent(Protocol):
    """What a supervisor does for its children."""

    async def status_of(self, pid: int) -> int:
        """Return the exit status of a child that has ended."""
        ...

    def kill_group_of(self, pid: int) -> None:
        """Kill a child and its process group."""
        ...

    def forget_child(self, pid: int) -> None:
        """Stop keeping the status of a child, because nobody will ask for it."""
        ...


class SupervisedChild:
    """A child of the supervisor, until it is released or detached."""

    def __init__(self, parent: Parent, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._parent = parent
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._status = 0
        self._has_ended = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._loop.add_reader(pidfd, self._on_exit)

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        await self._has_ended.wait()
        return self._status

    def kill_group(self) -> None:
        """Send SIGKILL to the child and its process group."""
        if self._pidfd >= 0:
            # Also from here, because the supervisor may take a while.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._parent.kill_group_of(self.pid)

    def release(self) -> None:
        """Have the supervisor reap the child, once it has ended; may be called twice."""
        if self._pidfd >= 0:
            self.detach()
            self._parent.forget_child(self.pid)

    def detach(self) -> None:
        """Stop watching the child and let it live; may be called twice."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        self._status = await self._parent.status_of(self.pid)
        self._has_ended.set()
