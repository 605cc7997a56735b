"""A limit to the time that the session's code may take on the main thread: it raises there. C code outlasts it."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

# Code that swallows one gets the next.
_REPEAT_S = 0.25


class TimeIsUp(BaseException):
    """Not an Exception, so that code which catches those does not keep it."""


class TimeLimit:
    """The process's timer, taken for a while: a session that uses it too finds it as it was."""

    def __init__(self, limit_s: float | None) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._is_armed = False

    def left_s(self) -> float | None:
        """Until all of the time is used; None when there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @contextmanager
    def taken(self) -> Generator[None, None, None]:
        """While this lasts, `limited` works."""
        handler = signal.signal(signal.SIGALRM, self._on_signal)
        timer = signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)

    @contextmanager
    def limited(self, limit_s: float | None) -> Generator[None, None, None]:
        """The block gets this long, and `TimeIsUp` after it."""
        if limit_s is None:
            yield
            return
        signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.001), _REPEAT_S)
        try:
            self._is_armed = True
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            raise TimeIsUp
