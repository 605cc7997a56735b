"""How often calls went out within a period, for the rules of a policy that have a rate.

A server that is alone counts in memory. Servers of one machine count together, in a file that each opens when it first
has to.
"""

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.files.private import FILE_MODE

MAX_KEYS = 10_000
_BUSY_S = 1.0
"""How long a turn of other servers may take, which is less than a millisecond."""
_TABLE = """
CREATE TABLE IF NOT EXISTS calls (principal TEXT, rule TEXT, at REAL);
CREATE INDEX IF NOT EXISTS calls_of ON calls (principal, rule, at);
"""

_LATEST = (  # a clock that was set back has left calls in the future
    "SELECT at FROM calls WHERE principal = ? AND rule = ? AND at BETWEEN ? AND ? ORDER BY at DESC LIMIT 1 OFFSET ?"
)
_ADD = "INSERT INTO calls VALUES (?, ?, ?)"
_FORGET = (
    "DELETE FROM calls WHERE rowid IN "
    "(SELECT rowid FROM calls WHERE principal = ? AND rule = ? ORDER BY at DESC LIMIT -1 OFFSET ?)"
)

log = logging.getLogger(__name__)
RateKey = tuple[str, str]
"""A principal, whose sessions all share a window, and a rule."""


class Rates:
    """Counts calls in a moving window, by key."""

    def __init__(self) -> None:
        self._calls: dict[RateKey, deque[float]] = {}

    @contextmanager
    def turn(self) -> Generator[None]:
        """Let nobody else count until the block ends, in which nothing is awaited."""
        yield

    def wait_s(self, key: RateKey, most: int, period_s: float) -> float:
        """Return how long to wait until another call fits; 0 if one fits now."""
        calls = self._calls.get(key)
        if calls is None:
            return 0.0
        now = time.monotonic()
        while calls and calls[0] <= now - period_s:
            calls.popleft()
        return calls[len(calls) - most] + period_s - now if len(calls) >= most else 0.0

    def add(self, key: RateKey, most: int) -> None:
        """Record a call. Only the latest `most` calls of a key are remembered, because older ones cannot matter."""
        if key not in self._calls and len(self._calls) >= MAX_KEYS:
            del self._calls[next(iter(self._calls))]
        calls = self._calls.setdefault(key, deque())
        calls.append(time.monotonic())
        while len(calls) > most:
            calls.popleft()


class SharedRates(Rates):
    """The same for all servers of a machine. While the file cannot be used, each counts what it lets out itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._opened: sqlite3.Connection | None = None
        self._turn: sqlite3.Connection | None = None

    @contextmanager
    def turn(self) -> Generator[None]:
        """Let no server count until the block ends, in which nothing is awaited."""
        try:
            self._turn = self._opened = self._opened or self._open()
            self._turn.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
        try:
            yield
        finally:
            turn, self._turn = self._turn, None
            if turn is not None:
                try:
                    turn.execute("COMMIT")
                except sqlite3.Error as error:
                    self._give_up(error)

    def wait_s(self, key: RateKey, most: int, period_s: float) -> float:
        """Return how long to wait until another call fits; 0 if one fits now."""
        now, own = time.time(), super().wait_s(key, most, period_s)
        try:
            values = (*key, now - period_s, now, most - 1)
            found = self._turn.execute(_LATEST, values).fetchone() if self._turn is not None else None
        except sqlite3.Error as error:
            self._give_up(error)
            return own
        return max(own, found[0] + period_s - now) if found is not None else own

    def add(self, key: RateKey, most: int) -> None:
        """Record a call, and forget those of the key that cannot matter any more."""
        super().add(key, most)
        try:
            if self._turn is not None:
                self._turn.execute(_ADD, (*key, time.time()))
                self._turn.execute(_FORGET, (*key, most))
        except sqlite3.Error as error:
            self._give_up(error)

    def _open(self) -> sqlite3.Connection:
        self._path.touch(mode=FILE_MODE)
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        # It need not outlive the machine, only a server that is killed in the middle of a turn.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(_TABLE)
        return connection

    def _give_up(self, error: Exception) -> None:
        """Count alone for the rest of this turn."""
        log.warning("rates of the policy are counted by each worker alone for now: %s", error)
        connection, self._opened, self._turn = self._opened, None, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            self._path.unlink(missing_ok=True)  # damaged: the next turn begins another one
