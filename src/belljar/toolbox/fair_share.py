"""Limits how much of the server's event loop the sessions of one owner may take with toolbox requests.

All sessions share one event loop. A cell can write thousands of requests a second, each of which costs the server a
fraction of a millisecond, and everybody else waits for all of them. So every owner has an account of time: work for
their sessions is charged, and while nothing is left, these are neither read from nor answered. Sessions of one owner
take turns, so many get no more than one would. Owners who have used up their time share `TOTAL`. Sessions that call
tools now and then do not notice.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

SHARE: Final = 0.3
"""The part of the loop's time that one owner gets, second by second."""
TOTAL: Final = 0.6
"""The part that all owners who have used up their time get together."""
SAVED_S: Final = 0.1
"""The most time that an owner can save up: some hundred calls at once."""
CALL_S: Final = 0.0002
"""The least that a call costs the loop (measured: 0.2 ms for one that is refused)."""
SLICE_S: Final = 0.002
"""The longest that the loop works for one session before it looks at the others."""

clock = time.thread_time
"""Processor time of the loop's thread, so that nobody is charged for the time that a busy machine lets it wait."""


class FairShares:
    """The accounts of all owners who have sessions with tools."""

    def __init__(self) -> None:
        self._accounts: WeakValueDictionary[str, _Account] = WeakValueDictionary()
        self._overdrawn: set[_Account] = set()

    def account(self, owner: str) -> "_Account":
        """Return the account of an owner, which exists as long as a `FairShare` of theirs."""
        if (account := self._accounts.get(owner)) is None:
            account = self._accounts[owner] = _Account(self._overdrawn)
        return account


class _Account:
    """One owner's time, and their sessions that wait for it, the one that has waited longest first."""

    def __init__(self, overdrawn: "set[_Account]") -> None:
        self.waiting: dict[FairShare, None] = {}
        self._all_overdrawn = overdrawn
        self._left_s = SAVED_S
        self._counted_at: float | None = None

    @property
    def is_overdrawn(self) -> bool:
        return self in self._all_overdrawn

    @property
    def _rate(self) -> float:
        return min(SHARE, TOTAL / max(1, len(self._all_overdrawn)))

    def charge(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        earned_s = self._rate * (now - self._counted_at) if self._counted_at is not None else 0.0
        self._left_s = min(SAVED_S, self._left_s + earned_s) - seconds
        self._counted_at = now
        if self._left_s <= 0 and not self.is_overdrawn:
            self._all_overdrawn.add(self)
            loop.call_later((SLICE_S - self._left_s) / self._rate, self._rest)

    def _rest(self) -> None:
        """Let the waiting sessions go on, one after the other, until the time is used up again."""
        self._all_overdrawn.discard(self)
        while self.waiting and not self.is_overdrawn:
            share = next(iter(self.waiting))
            del self.waiting[share]
            share.on_rested()


class FairShare:
    """One session's view of its owner's account.

    If `has_time` returned False, `on_rested` is called when it would return True.
    """

    def __init__(self, shares: FairShares, owner_of: Callable[[], str], on_rested: Callable[[], object]) -> None:
        self.on_rested = on_rested
        self._shares = shares
        self._owner_of = owner_of
        self._owner: str | None = None
        self._is_closed = False

    def _account_now(self) -> _Account:
        # A pooled session gets its owner later.
        if self._owner != (owner := self._owner_of()):
            if self._owner is not None:
                self._account.waiting.pop(self, None)
            self._owner, self._account = owner, self._shares.account(owner)
        return self._account

    def has_time(self) -> bool:
        """Return whether to work for the session now; if not, queue it for its turn."""
        account = self._account_now()
        if account.is_overdrawn and not self._is_closed:
            account.waiting[self] = None
            return False
        return True

    def spend(self, seconds: float) -> None:
        """Charge the owner for work that was done or is about to be done."""
        self._account_now().charge(seconds)

    def close(self) -> None:
        """Leave the queue, and never call `on_rested` again."""
        self._is_closed = True
        if self._owner is not None:
            self._account.waiting.pop(self, None)
