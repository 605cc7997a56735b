"""A time limit for the session's code on the main thread, by SIGALRM: it raises there, but not inside C code."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

# Raise again after this time, because the session's code may have swallowed the first one.
_REPEAT_S = 0.25


class TimeIsUp(BaseException):
    """The time is over. Not an Exception, so that `except Exception` in the session's code does not catch it."""


class TimeLimit:
    """A limit on the whole and on parts of it. It uses the process's only timer, and restores what the session set."""

    def __init__(self, limit_s: float | None) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._is_armed = False

    def left_s(self) -> float | None:
        """Return how much of the whole time is left; None when there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @contextmanager
    def take_timer(self) -> Generator[None, None, None]:
        """Take the timer over for the block; `limited` works inside of it only."""
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
        """Raise `TimeIsUp` in the block after this time."""
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
