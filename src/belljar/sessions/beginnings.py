"""The state of a session before its first cell, which need not be copied: a kernel that was just started is like it."""

from collections.abc import Awaitable, Callable

from belljar.kernels.base import Asleep, Kernel


class Beginning:
    """Stands for a copy, and for the kernel that it would sleep beside."""

    def __init__(self, start: Callable[[], Awaitable[Kernel]]) -> None:
        self.lost: list[str] = []
        self._start = start

    def is_alive(self) -> bool:
        """Always: there is nothing that could end."""
        return True

    def memory_mb(self) -> float:
        """Nothing."""
        return 0.0

    async def wake(self, copy: Asleep) -> Kernel:
        """Start a kernel; the copy is this."""
        return await self._start()

    def forget(self, copy: Asleep) -> None:
        """Nothing is kept."""

    def shares_sandbox(self, other: object) -> bool:
        """It has none."""
        return False
