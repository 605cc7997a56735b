"""How many bytes of large messages may be in memory at once. Who wants more than is left waits for its turn."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 1024 * 1024
"""What is longer has to find room in memory before the rest of it is read."""
_COPIES: Final = 2
"""As it came, and as it goes on."""


class Share:
    """What one message may take; asked for before it is known how long it gets."""

    def __init__(self, memory: "Memory", size_bytes: int, on_granted: Callable[[], object]) -> None:
        self.is_granted = False
        self.size_bytes = size_bytes
        self.on_granted = on_granted
        self._memory = memory

    def shrink(self, size_bytes: int) -> None:
        """It is no longer than that."""
        self._memory.give_back(self, self.size_bytes - min(_COPIES * size_bytes, self.size_bytes))

    def release(self) -> None:
        """It is gone; may be called twice."""
        self._memory.give_back(self, self.size_bytes)


class Memory:
    """One for all servers: what they send ends up in the memory of one host."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._taken_bytes = 0
        self._waiting: deque[Share] = deque()

    @property
    def waiting(self) -> int:
        """How many messages wait for room."""
        return len(self._waiting)

    def ask(self, size_bytes: int, on_granted: Callable[[], object]) -> Share:
        """A share, which is granted at once or when others have given back enough; then `on_granted` is called."""
        share = Share(self, min(_COPIES * size_bytes, self._most_bytes), on_granted)
        if self._waiting or not self._grant(share):
            self._waiting.append(share)
        return share

    async def wait(self, size_bytes: int) -> Share:
        """A share, once there is room for it."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        share = self.ask(size_bytes, lambda: granted.done() or granted.set_result(None))
        try:
            if not share.is_granted:
                await granted
        except BaseException:
            share.release()
            raise
        return share

    def _grant(self, share: Share) -> bool:
        if self._taken_bytes + share.size_bytes > self._most_bytes:
            return False
        self._taken_bytes += share.size_bytes
        share.is_granted = True
        return True

    def give_back(self, share: Share, size_bytes: int) -> None:
        """Part of a share, or all of it; one that still waits is then not wanted any more."""
        share.size_bytes -= size_bytes
        if share.is_granted:
            self._taken_bytes -= size_bytes
        elif not share.size_bytes and share in self._waiting:
            self._waiting.remove(share)
        while self._waiting and self._grant(self._waiting[0]):
            self._waiting.popleft().on_granted()
