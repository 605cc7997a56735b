"""Writes changes to one SQLite file, on one thread. Knows nothing of what the rows mean.

A change is made at once, in a transaction that is committed within `COMMIT_S`. A change that fails because of the disk
or of another process's lock waits in memory, in order, and is retried until it is written, so that the event loop is
not blocked.
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
# How long the event loop waits for another server's transaction, which lasts no longer than COMMIT_S.
BUSY_S = 0.1
# The same when the writer closes, because there is no later retry and no other work to delay.
LAST_BUSY_S = 5.0
# Servers that share the file take turns, and whoever trims it holds it longer: a lock that lasts is told, and no other.
LOCK_TOLD_S = 1.0
RETRY_S = 0.05
MAX_RETRY_S = 1.0
MAX_WAITING_BYTES = 32 * 1024 * 1024
# The most waiting changes that are written in one transaction, which takes some 20 ms.
MAX_AT_ONCE_BYTES = 2 * 1024 * 1024
CHANGE_BYTES = 200
# Errors of the change and not of the disk: a retry would fail again, and hold up all changes behind it.
_InvalidChange = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)

log = logging.getLogger(__name__)


class JournalChange(NamedTuple):
    """One SQL statement with its values."""

    statement: str
    values: tuple[Any, ...]

    @property
    def size_bytes(self) -> int:
        """Return about how many bytes it takes in memory."""
        return CHANGE_BYTES + sum(len(value) for value in self.values if isinstance(value, str))


class JournalWriter:
    """Writes over one connection, which is in autocommit mode."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        """Commits the open transaction, or retries what waits. A commit leaves it running: setting it takes 10 µs."""
        self._made: list[JournalChange] = []
        """The changes of the open transaction."""
        self._deferred: dict[str, JournalChange] = {}
        """Changes to be made with the next commit, by name."""
        self._waiting: deque[JournalChange] = deque()
        self._waiting_bytes = 0
        self._retry_s = RETRY_S
        self._waiting_since = 0.0
        self._is_told = False
        """Whether the log says that changes wait."""
        self.damage = ""
        """What is wrong with the file, once it was found malformed."""

    @property
    def is_failing(self) -> bool:
        """Return whether changes wait in memory."""
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Return whether so much waits in memory that no more should be added."""
        return self._waiting_bytes > MAX_WAITING_BYTES

    def values_of(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the values of the waiting changes by this statement, in order, because no query sees them yet."""
        return [change.values for change in self._waiting if change.statement is statement]

    def write(self, statement: str, values: tuple[object, ...]) -> int:
        """Change rows within the open transaction; return how many, or 0 where the change has to wait."""
        return self._write(JournalChange(statement, values), within_transaction=True)

    def write_and_commit(self, statement: str, values: tuple[object, ...]) -> None:
        """Change rows and commit; without an explicit transaction where nothing else is to be committed."""
        is_alone = not (self._connection.in_transaction or self._deferred)
        self._write(JournalChange(statement, values), within_transaction=not is_alone)
        if not is_alone:
            self.commit()

    def _write(self, change: JournalChange, *, within_transaction: bool) -> int:
        if self._waiting:
            self._hold(change)
            return 0
        try:
            if within_transaction and not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
                self._commit_soon()
            changed = self._connection.execute(*change).rowcount
        except _InvalidChange as error:
            _report_invalid(error)  # only this change; the transaction goes on
            return 0
        except sqlite3.Error as error:
            self._postpone(error, change)
            return 0
        if within_transaction:
            self._made.append(change)
        return changed

    def defer(self, name: str, statement: str, values: tuple[Any, ...]) -> None:
        """Make a change with the next commit, within `COMMIT_S`, unless `cancel_deferred` gets its name before."""
        self._deferred[name] = JournalChange(statement, values)
        self._commit_soon()

    def cancel_deferred(self, name: str) -> tuple[Any, ...] | None:
        """Cancel a deferred change and return its values; None if there is none or it was made already."""
        change = self._deferred.pop(name, None)
        return change.values if change else None

    def write_deferred(self) -> None:
        """Make the deferred changes now, in order."""
        while self._deferred:
            self.write(*self._deferred.pop(next(iter(self._deferred))))

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
        """Commit what was written, so that other readers see it and it survives this process."""
        self.write_deferred()
        if self._waiting:
            return
        if self._connection.in_transaction:
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._postpone(error)
        self._made.clear()

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
            while self._waiting and self._write_waiting():
                pass
        if self._waiting:
            why = f", because it is damaged ({self.damage})" if self.damage else ""
            log.error("the journal could not be written to the end: %d changes are lost%s", len(self._waiting), why)
        self._connection.close()

    # While it cannot be written

    def _postpone(self, error: sqlite3.Error, *changes: JournalChange) -> None:
        """Move all changes of a failed transaction, and those given, to the waiting ones, and schedule a retry."""
        self._waiting_since = time.monotonic()
        self._tell(error)
        with suppress(sqlite3.Error):
            self._connection.rollback()
        for change in (*self._made, *changes):
            self._hold(change)
        self._made.clear()
        self._connection.execute("PRAGMA busy_timeout = 0")
        self._schedule(self._retry_s, self._retry)

    def _tell(self, error: sqlite3.Error) -> None:
        """Log once that changes wait, and count it, unless all that is wrong is a lock of a moment."""
        self._look_for_damage(error)
        is_moment = _is_lock(error) and time.monotonic() - self._waiting_since < LOCK_TOLD_S
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

    def _hold(self, change: JournalChange) -> None:
        self._waiting.append(change)
        self._waiting_bytes += change.size_bytes

    def _retry(self) -> None:
        is_written = self._write_waiting()
        if not self._waiting:
            self._retry_s = RETRY_S
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
            if self._is_told:
                log.warning("the journal can be written again, and nothing that waited is lost")
            self._is_told = False
            return
        self._retry_s = 0.0 if is_written else min(MAX_RETRY_S, max(RETRY_S, 2 * self._retry_s))
        self._schedule(self._retry_s, self._retry)

    def _write_waiting(self) -> bool:
        """Write the first of the waiting changes in a transaction of their own; return whether that succeeded."""
        written = written_bytes = 0
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for change in self._waiting:
                if written_bytes > MAX_AT_ONCE_BYTES:
                    break
                try:
                    self._connection.execute(*change)
                except _InvalidChange as error:
                    _report_invalid(error)
                written += 1
                written_bytes += change.size_bytes
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._tell(error)
            with suppress(sqlite3.Error):
                self._connection.rollback()
            return False
        for _ in range(written):
            self._waiting.popleft()
        self._waiting_bytes -= written_bytes
        return True

    def _commit_soon(self) -> None:
        if self._timer is None:
            self._schedule(COMMIT_S, self.commit)

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


def _report_invalid(error: sqlite3.Error) -> None:
    metrics.journal_failures.add()
    log.error("the journal refuses a change: %s", error)
