"""Wakes those who wait for the next change: of an execution, of a workflow's run, of a server's sessions.

What happens to the sessions of a runtime is published by the engine in a log, in order and numbered, for monitors; a
reader goes on after the number that it saw last. Output is not there: it is in the journal. Nobody who reads counts as
somebody who uses a session.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

MAX_KEPT = 10_000

ChangeKind = Literal["session", "execution", "question", "usage"]


class ChangeSignal:
    """Told of every change, on the event loop's thread. It keeps none: who waits must have looked before."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    def wait(self, wait_s: float) -> Coroutine[None, None, bool]:
        """Wait for the next change after this call; return False when `wait_s` passed without one.

        The call itself counts, not the first step of a task that it is given to: a change between the two is heard.
        """
        return _is_set_within(self._event, wait_s)


async def _is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened.

    `state` of a session: made, renamed, woken, asleep, gone; of an execution: queued, begun, ended, undone.
    """

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
