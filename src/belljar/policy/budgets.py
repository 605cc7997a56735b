"""How often something was done: counts of a session, and rates over time. It knows keys and numbers, not rules."""

import time
from collections import deque

MOST_KEYS = 10_000


class Rates:
    """Calls in a moving window, by key; shared by all sessions of whoever the keys stand for."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, ...], deque[float]] = {}

    def wait_s(self, key: tuple[str, ...], most: int, period_s: float) -> float:
        """How long until another call fits; 0 when one does now."""
        calls = self._calls.get(key)
        if calls is None:
            return 0.0
        now = time.monotonic()
        while calls and calls[0] <= now - period_s:
            calls.popleft()
        return calls[len(calls) - most] + period_s - now if len(calls) >= most else 0.0

    def note(self, key: tuple[str, ...], most: int) -> None:
        """A call is made. No more are remembered than can matter."""
        if key not in self._calls and len(self._calls) >= MOST_KEYS:
            del self._calls[next(iter(self._calls))]
        calls = self._calls.setdefault(key, deque())
        calls.append(time.monotonic())
        while len(calls) > most:
            calls.popleft()
