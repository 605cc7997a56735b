"""Bounds how many bytes of servers' large messages are in memory at once; messages beyond that wait for their turn.

A server that sends half a message and then stops must not keep the others waiting forever.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 1024 * 1024
"""A longer message needs a share of the memory before the rest of it is read."""
_COPIES: Final = 2
"""A message is in memory twice: as it came, and as it is passed on."""
MAX_INCOMPLETE_S: Final = 60.0
"""How long a message may take to be complete while others wait."""


class MemoryShare:
    """The memory that one message may take, reserved before its length is known."""

    def __init__(
        self,
        memory: "MessageMemory",
        size_bytes: int,
        on_granted: Callable[[], object],
        on_overdue: Callable[[], object] | None,
    ) -> None:
        self.is_granted = False
        self.size_bytes = size_bytes
        self.on_granted = on_granted
        self.on_overdue = on_overdue
        self._memory = memory

    def shrink(self, size_bytes: int) -> None:
        """Reduce the share to the size of the message, which is complete now."""
        self.on_overdue = None
        self._memory.give_back(self, self.size_bytes - min(_COPIES * size_bytes, self.size_bytes))

    def release(self) -> None:
        """Give back the whole share; may be called twice."""
        self._memory.give_back(self, self.size_bytes)


class MessageMemory:
    """The memory for large messages of all servers, because they share one host."""

    def __init__(self, limit_bytes: int, *, max_incomplete_s: float = MAX_INCOMPLETE_S) -> None:
        self._limit_bytes = limit_bytes
        self._max_incomplete_s = max_incomplete_s
        self._timed: dict[MemoryShare, float] = {}
        """The time at which each share was granted, of those that have `on_overdue`."""
        self._timer: asyncio.TimerHandle | None = None
        self._taken_bytes = 0
        self._waiting: deque[MemoryShare] = deque()

    @property
    def waiting(self) -> int:
        """Return how many messages wait for memory."""
        return len(self._waiting)

    def reserve(
        self, size_bytes: int, on_granted: Callable[[], object], on_overdue: Callable[[], object] | None = None
    ) -> MemoryShare:
        """Return a share, granted at once, or when others have given back enough; then `on_granted` is called.

        `on_overdue` is called if the message takes too long while others wait; it has to release the share.
        """
        share = MemoryShare(self, min(_COPIES * size_bytes, self._limit_bytes), on_granted, on_overdue)
        if self._waiting or not self._grant(share):
            self._waiting.append(share)
            self._watch()
        return share

    def _watch(self) -> None:
        """Set a timer for the share that was granted first, as long as a message waits."""
        begun = [since for share, since in self._timed.items() if share.on_overdue is not None]
        if self._waiting and begun and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(min(begun) + self._max_incomplete_s, self._expire_overdue)

    def _expire_overdue(self) -> None:
        self._timer = None
        since = asyncio.get_running_loop().time() - self._max_incomplete_s
        for share in [share for share, begun in self._timed.items() if begun <= since]:
            if self._waiting and share.on_overdue is not None:
                share.on_overdue()
        self._watch()

    async def acquire(self, size_bytes: int) -> MemoryShare:
        """Return a share once it is granted."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        share = self.reserve(size_bytes, lambda: granted.done() or granted.set_result(None))
        try:
            if not share.is_granted:
                await granted
        except BaseException:
            share.release()
            raise
        return share

    def _grant(self, share: MemoryShare) -> bool:
        if self._taken_bytes + share.size_bytes > self._limit_bytes:
            return False
        self._taken_bytes += share.size_bytes
        share.is_granted = True
        if share.on_overdue is not None:
            self._timed[share] = asyncio.get_running_loop().time()
        return True

    def give_back(self, share: MemoryShare, size_bytes: int) -> None:
        """Take back a part of a share, or all of it; a share that still waits is then no longer wanted."""
        share.size_bytes -= size_bytes
        if not share.size_bytes or share.on_overdue is None:
            self._timed.pop(share, None)
        if share.is_granted:
            self._taken_bytes -= size_bytes
        elif not share.size_bytes and share in self._waiting:
            self._waiting.remove(share)
        while self._waiting and self._grant(self._waiting[0]):
            self._waiting.popleft().on_granted()
        self._watch()
