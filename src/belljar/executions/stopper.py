"""The stopper of one running cell: its timeout, the interrupt, and the kill of a cell that ignores it."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Literal

from belljar.errors import KernelDied
from belljar.kernels.base import Kernel

Reason = Literal["timeout", "interrupted", "disk_full"]
ON_REQUEST = "on request"


class Stopper:
    """Stops one running cell at its timeout or on request.

    The timeout is paused while the cell waits for a person, for `pause_s` in all. That is bounded, because only the
    cell itself says that it waits.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        timeout_s: float,
        grace_s: float,
        pause_s: float = 0.0,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._kernel = kernel
        self._on_stop = on_stop
        self._pauses = 0
        self._pause_left_s = pause_s
        self._paused_at = 0.0
        self._pause_end: asyncio.TimerHandle | None = None
        self._is_over = False
        self._grace_s = grace_s
        self._left_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._started_at = 0.0
        self._stopping: asyncio.Task[None] | None = None
        self.reason: Reason | None = None
        self.why = ON_REQUEST
        """Who wanted it stopped, in words for the cause."""
        self.was_killed = False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Apply the timeout while the cell runs."""
        self._start_clock()
        try:
            yield
        finally:
            self._is_over = True
            self._stop_clock()
            self._end_pause()
            if self._stopping is not None:
                self._stopping.cancel()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the timeout while the cell waits for a person."""
        # Several tool calls of a cell may wait for answers at once, and may still wait when the cell has ended.
        if self._pauses == 0 and not self._is_over:
            self._begin_pause()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._end_pause()

    def pause_left_s(self) -> float:
        """Return how long the cell may still wait for people."""
        passed_s = asyncio.get_running_loop().time() - self._paused_at if self._pause_end is not None else 0.0
        return max(0.0, self._pause_left_s - passed_s)

    def stop(self, reason: Reason, why: str = ON_REQUEST) -> None:
        """Interrupt the cell now, and kill the kernel if the cell has not ended after the grace period."""
        if self.reason is None:
            self.reason, self.why = reason, why
            self._on_stop()
            self._stopping = asyncio.get_running_loop().create_task(self._interrupt_then_kill())

    def kill(self, reason: Reason) -> None:
        """Kill the kernel now, also when an interrupt is already under way."""
        if self._stopping is not None:
            self._stopping.cancel()
        self.reason = self.reason or reason
        self._on_stop()
        self.was_killed = True
        self._stopping = asyncio.get_running_loop().create_task(self._kernel.kill())

    async def _interrupt_then_kill(self) -> None:
        # Twice, because ipykernel can lose a signal that arrives while its own code runs.
        for _ in range(2):
            try:
                await self._interrupt(self._grace_s / 2)
            except KernelDied:
                return
        self.was_killed = True
        await self._kernel.kill()

    async def _interrupt(self, patience_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + patience_s
        # A kernel that takes no messages must not delay its kill.
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._kernel.interrupt()
        await asyncio.sleep(max(0, deadline - asyncio.get_running_loop().time()))

    def _begin_pause(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pause_left_s <= 0:
            return
        self._stop_clock()
        self._paused_at = loop.time()
        self._pause_end = loop.call_later(self._pause_left_s, self._end_pause)

    def _end_pause(self) -> None:
        if self._pause_end is None:
            return
        self._pause_left_s = self.pause_left_s()
        self._pause_end.cancel()
        self._pause_end = None
        if not self._is_over:
            self._start_clock()

    def _start_clock(self) -> None:
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        self._timer = loop.call_later(max(self._left_s, 0), self.stop, "timeout")

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s -= asyncio.get_running_loop().time() - self._started_at
