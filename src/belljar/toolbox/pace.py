"""How much of the server's event loop one session may take with what it asks of the toolbox.

All sessions share one event loop. A cell can write thousands of requests a second, each of which costs the server a
fraction of a millisecond, and whoever else wants something waits for all of them. So every session has an account of
time: what is done for it is charged, and while nothing is left, it is neither read from nor answered. Sessions that
call tools now and then never notice.
"""

import asyncio
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.3
"""The part of the loop's time that a session is given, second by second."""
SAVED_S: Final = 0.1
"""The most that it can save up: some hundred calls at once."""
CALL_S: Final = 0.0002
"""What a call costs the loop, at least (measured: 0.2 ms for one that is refused)."""
SLICE_S: Final = 0.002
"""The longest that the loop works for one session without a look at the others."""


class Pace:
    """The account of one session's hatch; `on_rested` is called when there is time again after there was none."""

    def __init__(self, on_rested: Callable[[], object]) -> None:
        self._on_rested = on_rested
        self._left_s = SAVED_S
        self._counted_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_spent(self) -> bool:
        """Whether nothing is to be done for the session at the moment."""
        return self._timer is not None

    def spend(self, seconds: float) -> None:
        """Charge for what was done, or for what is about to be."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        earned_s = SHARE * (now - self._counted_at) if self._counted_at is not None else 0.0
        self._left_s = min(SAVED_S, self._left_s + earned_s) - seconds
        self._counted_at = now
        if self._left_s <= 0 and self._timer is None:
            self._timer = loop.call_later((SLICE_S - self._left_s) / SHARE, self._rest)

    def _rest(self) -> None:
        self._timer = None
        self._on_rested()

    def close(self) -> None:
        """Call nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
