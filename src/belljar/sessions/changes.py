"""What happens to the sessions of a runtime, in order and numbered, for monitors.

Executions and sessions are published here by the engine; a reader goes on after the number that it saw last. Output
is not here: it is in the journal. Nobody who reads counts as somebody who uses a session.
"""

import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from belljar.change_signal import ChangeSignal

MAX_KEPT = 10_000

ChangeKind = Literal["session", "execution", "question", "usage"]
SESSION_STATES = ("made", "state", "woken", "asleep", "gone")
EXECUTION_STATES = ("queued", "begun", "ended", "undone")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened. `state` is one of `SESSION_STATES` or `EXECUTION_STATES`, by its kind."""

    number: int
    kind: ChangeKind
    state: str
    session_id: str
    principal: str
    """The owner of the session."""
    execution_id: str = ""
    at: float = 0.0


class ChangeLog:
    """The latest changes of a runtime. Written and read on the event loop's thread."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._kept: deque[Change] = deque(maxlen=most)
        self._number = 0
        self._changed = ChangeSignal()

    @property
    def number(self) -> int:
        """Return the number of the latest change; 0 before the first."""
        return self._number

    def publish(self, kind: ChangeKind, state: str, session_id: str, principal: str, execution_id: str = "") -> None:
        """Add a change, and wake those who wait for one."""
        self._number += 1
        self._kept.append(Change(self._number, kind, state, session_id, principal, execution_id, time.time()))
        self._changed.notify()

    def has(self, number: int) -> bool:
        """Return whether everything after `number` is still here, so that a reader can go on from it."""
        oldest = self._kept[0].number if self._kept else self._number + 1
        return oldest - 1 <= number <= self._number

    def after(self, number: int) -> list[Change]:
        """Return the changes after `number`, oldest first, as far as they are kept."""
        # From the end, so that a reader who is nearly up to date costs nothing.
        return [*takewhile(lambda change: change.number > number, reversed(self._kept))][::-1]

    async def wait(self, number: int, wait_s: float) -> bool:
        """Wait until there is a change after `number`; return False when `wait_s` passed without one."""
        return self._number > number or await self._changed.wait(wait_s)
