"""Writes changes to one SQLite file, on one thread. Knows nothing of what the rows mean.

Changes gather in memory and are written together, within `COMMIT_S`, in one transaction that is over before this thread
does anything else: other servers that share the file never wait for our event loop. What cannot be written because of
the disk or of another process's lock stays in memory, in order, and is retried until it is written, so that the event
loop is not blocked.
"""

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from belljar import metrics
from belljar.errors import Busy
from belljar.journal.damage import PRIMARY_CODE, damaged, is_damage

COMMIT_S = 0.05
# How long the event loop waits for another server's transaction, which takes some milliseconds.
BUSY_S = 0.1
# The same when the writer closes, because there is no later retry and no other work to delay.
LAST_BUSY_S = 5.0
# Servers that share the file take turns, and whoever trims it holds it longer: a lock that lasts is told, and no other.
LOCK_TOLD_S = 1.0
RETRY_S = 0.05
MAX_RETRY_S = 1.0
MAX_WAITING_BYTES = 32 * 1024 * 1024
# The most that is written in one transaction, which takes some 20 ms. So much is written at once, and does not gather.
MAX_AT_ONCE_BYTES = 2 * 1024 * 1024
CHANGE_BYTES = 200
# Errors of the change and not of the disk: a retry would fail again, and hold up all changes behind it.
_InvalidChange = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,  # a number that SQLite has not
    UnicodeEncodeError,  # a lone surrogate
)

log = logging.getLogger(__name__)


class JournalChange(NamedTuple):
    """One SQL statement with its values."""

    statement: str
    values: tuple[Any, ...]
    size_bytes: int
    """About how much it takes in memory."""


class JournalWriter:
    """Writes over one connection, which is in autocommit mode."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        """Commits, or retries. A commit leaves it running: setting it takes 10 µs."""
        self._waiting: deque[JournalChange] = deque()
        """The changes that are not written yet, in order."""
        self._waiting_bytes = 0
        self.is_failing = False
        """Whether changes wait because they could not be written."""
        self._failing_since = 0.0
        self._retry_s = RETRY_S
        self._is_told = False
        """Whether the log says that changes wait."""
        self.damage = ""
        """What is wrong with the file, once it was found malformed."""

    @property
    def is_full(self) -> bool:
        """Return whether so much waits in memory that no more should be added."""
        return self._waiting_bytes > MAX_WAITING_BYTES

    def values_of(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the values of the waiting changes by this statement, in order, because no query sees them yet."""
        return [change.values for change in self._waiting if change.statement is statement]

    def write(self, statement: str, values: tuple[Any, ...]) -> None:
        """Change rows with the next commit."""
        size_bytes = CHANGE_BYTES + sum(len(value) for value in values if isinstance(value, str))
        self._waiting.append(JournalChange(statement, values, size_bytes))
        self._waiting_bytes += size_bytes
        if self.is_failing:
            return
        if self._waiting_bytes > MAX_AT_ONCE_BYTES:
            self.commit()
        elif self._timer is None:
            self._schedule(COMMIT_S, self.commit)

    def amend(self, statement: str, key: object, last: object) -> bool:
        """Give the waiting change by this statement, whose first value is `key`, another last value.

        Return False if there is none, because it is written already.
        """
        for place, change in enumerate(self._waiting):
            if change.statement is statement and change.values[0] == key:
                self._waiting[place] = change._replace(values=(*change.values[:-1], last))
                return True
        return False

    def write_now(self, statement: str, values: tuple[object, ...]) -> int:
        """Change rows and commit before this returns, for changes that must not be made later.

        Raises `Busy` where that may be tried again, and `JournalDamaged` where it is no use.
        """
        self.commit()
        try:
            if not self._waiting:
                return self._connection.execute(statement, values).rowcount
            reason = "earlier changes wait to be written"
        except sqlite3.Error as error:
            self._look_for_damage(error)
            reason = str(error)
        if self.damage:
            raise damaged(self.damage)
        hint = "Make room on its disk" if "full" in reason else "Try again in 10 seconds"
        raise Busy(f"the journal cannot be written now ({reason})", hint=hint)

    def commit(self) -> None:
        """Write what waits, so that queries and other readers see it and it survives this process."""
        while self._waiting and not self.is_failing:
            if (error := self._write_first()) is not None:
                self.is_failing = True
                self._failing_since = time.monotonic()
                self._tell(error)
                self._connection.execute("PRAGMA busy_timeout = 0")
                self._schedule(self._retry_s, self._retry)

    def flush(self) -> None:
        """Commit now and, unless something waits, cancel the timer, because its event loop may end before this does."""
        self.commit()
        if not self._waiting:
            self._stop_timer()

    def close(self) -> None:
        """Write what is left, as far as possible, and close the file."""
        self.commit()
        self._stop_timer()
        if self._waiting:
            self._connection.execute(f"PRAGMA busy_timeout = {LAST_BUSY_S * 1000:.0f}")
            while self._waiting and self._write_first() is None:
                pass
        if self._waiting:
            why = f", because it is damaged ({self.damage})" if self.damage else ""
            log.error("the journal could not be written to the end: %d changes are lost%s", len(self._waiting), why)
        self._connection.close()

    def _write_first(self) -> sqlite3.Error | None:
        """Write the first of the waiting changes in one transaction; return why that failed, if it did."""
        written = written_bytes = 0
        try:
            if len(self._waiting) > 1:
                self._connection.execute("BEGIN IMMEDIATE")
            for statement, values, size_bytes in self._waiting:
                if written_bytes > MAX_AT_ONCE_BYTES:
                    break
                try:
                    self._connection.execute(statement, values)
                except _InvalidChange as error:
                    _report_invalid(error)  # only this change; the transaction goes on
                written += 1
                written_bytes += size_bytes
            if len(self._waiting) > 1:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._connection.rollback()
            return error
        for _ in range(written):
            self._waiting.popleft()
        self._waiting_bytes -= written_bytes
        return None

    # While it cannot be written

    def _tell(self, error: sqlite3.Error) -> None:
        """Log once that changes wait, and count it, unless all that is wrong is a lock of a moment."""
        self._look_for_damage(error)
        is_moment = _is_lock(error) and time.monotonic() - self._failing_since < LOCK_TOLD_S
        if self._is_told or is_moment:
            return
        self._is_told = True
        metrics.journal_failures.add()
        if not self.damage:
            log.error("the journal cannot be written, so executions wait in memory to be kept: %s", error)

    def _look_for_damage(self, error: sqlite3.Error) -> None:
        if is_damage(error):
            self.note_damage(str(error))

    def note_damage(self, damage: str) -> None:
        """Remember that the file is malformed, and log it once."""
        if not self.damage:
            log.error(
                "the journal is damaged (%s): what sessions do from now on may be lost with this server. Stop it and "
                "run `belljar journal salvage`",
                damage,
            )
        self.damage = self.damage or damage

    def _retry(self) -> None:
        error = self._write_first()
        if error is not None:
            self._tell(error)
            self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
            self._schedule(self._retry_s, self._retry)
        elif self._waiting:
            self._schedule(0, self._retry)
        else:
            self.is_failing = False
            self._retry_s = RETRY_S
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
            if self._is_told:
                log.warning("the journal can be written again, and nothing that waited is lost")
            self._is_told = False

    def _schedule(self, after_s: float, action: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(after_s, self._on_timer, action)

    def _on_timer(self, action: Callable[[], None]) -> None:
        self._timer = None
        action()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_lock(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _report_invalid(error: Exception) -> None:
    metrics.journal_failures.add()
    log.error("the journal refuses a change: %s", error)
