"""How much of the server's event loop an owner's sessions may take with what they ask of the toolbox.

All sessions share one event loop. A cell can write thousands of requests a second, each of which costs the server a
fraction of a millisecond, and whoever else wants something waits for all of them. So every owner has an account of
time: what is done for its sessions is charged, and while nothing is left, they are neither read from nor answered.
Then they take turns, so that many sessions of one owner get no more than one, and each of them its part. When several
owners have used theirs up, they divide what there is for all. Sessions that call tools now and then never notice.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

SHARE: Final = 0.3
"""The part of the loop's time that an owner is given, second by second."""
TOTAL: Final = 0.6
"""The part that all owners together are given who ask for more than they have."""
SAVED_S: Final = 0.1
"""The most that an owner can save up: some hundred calls at once."""
CALL_S: Final = 0.0002
"""What a call costs the loop, at least (measured: 0.2 ms for one that is refused)."""
SLICE_S: Final = 0.002
"""The longest that the loop works for one session without a look at the others."""

clock = time.thread_time
"""What is charged is the loop's own work: a busy machine that lets the loop wait is nobody's fault."""


class FairShares:
    """The accounts of all owners who have sessions with tools."""

    def __init__(self) -> None:
        self._accounts: WeakValueDictionary[str, _Account] = WeakValueDictionary()
        self._overdrawn: set[_Account] = set()

    def account(self, owner: str) -> "_Account":
        """Return the account of an owner, which lives as long as any pace of theirs."""
        if (account := self._accounts.get(owner)) is None:
            account = self._accounts[owner] = _Account(self._overdrawn)
        return account


class _Account:
    """One owner's time, and which of their sessions wait for it, the one that has waited longest first."""

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
        """Let the sessions go on, one after the other, until the time is used up again."""
        self._all_overdrawn.discard(self)
        while self.waiting and not self.is_overdrawn:
            pace = next(iter(self.waiting))
            del self.waiting[pace]
            pace.on_rested()


class FairShare:
    """One session's view of its owner's account; `on_rested` is called when `has_time` said no and would say yes."""

    def __init__(self, paces: FairShares, owner_of: Callable[[], str], on_rested: Callable[[], object]) -> None:
        self.on_rested = on_rested
        self._paces = paces
        self._owner_of = owner_of
        self._owner: str | None = None
        self._is_closed = False

    def _account_now(self) -> _Account:
        # A session of the pool is nobody's at first.
        if self._owner != (owner := self._owner_of()):
            if self._owner is not None:
                self._account.waiting.pop(self, None)
            self._owner, self._account = owner, self._paces.account(owner)
        return self._account

    def has_time(self) -> bool:
        """Return whether anything is to be done for the session now; if not, its turn comes."""
        account = self._account_now()
        if account.is_overdrawn and not self._is_closed:
            account.waiting[self] = None
            return False
        return True

    def spend(self, seconds: float) -> None:
        """Charge for what was done, or for what is about to be."""
        self._account_now().charge(seconds)

    def close(self) -> None:
        """Call nobody any more."""
        self._is_closed = True
        if self._owner is not None:
            self._account.waiting.pop(self, None)
