"""What happened, on disk: executions, their numbered output events, their results.

One SQLite file. Writing an event takes some 20 µs, so it happens on the event loop's thread, in order, with no queue
between what a caller is told and what is kept. An execution is committed before its code runs, before a caller is told
of it and when it has ended; what a running one says within `COMMIT_S`, or before a caller is told. One that has only
just been submitted is written when it starts, as a row that has started already: that is nearly always at once.
"""

import asyncio
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belljar.errors import Busy, SettingsError
from belljar.files.private import FILE_MODE
from belljar.journal.schema import migrate
from belljar.journal.writer import BUSY_S, LAST_BUSY_S, JournalWriter
from belljar.models import ExecutionResult, OutputEvent

PROBE_S = 1.0
# Written since it was last measured: then the bound on its size is looked at, however soon that is.
LOOK_BYTES = 8 * 1024 * 1024
# What the shortest execution adds to the file beside the journal; whoever looks empties that, in a thread.
EXECUTION_BYTES = 5 * 4_096
# The file beside the journal is cut down to this once all of it is in the journal.
WAL_BYTES = 16 * 1024 * 1024
# That waits for the disk, on the event loop's thread: only where nobody has looked before.
CHECKPOINT_PAGES = 4_000
_BEGIN = (
    "INSERT INTO executions (id, session_id, principal, code, submitted_at, key, started_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_START = "UPDATE executions SET started_at = ? WHERE id = ?"
_APPEND = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
_FINISH = "UPDATE executions SET result = ?, output_bytes = ?, display_bytes = ? WHERE id = ?"
_RECORD = "SELECT id, session_id, principal, code, result, undone_at, started_at FROM executions"
KILLED = "its server ended without notice"
"""What is said of an execution that has no result, because its server was killed."""
UNKEPT = "[belljar: output is missing here: the journal could not be written]\n"


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution as journalled; `result` is there once it has finished."""

    id: str
    session_id: str
    principal: str
    code: str
    result: ExecutionResult | None
    is_undone: bool = False
    """Its session was rewound to before it."""
    has_begun: bool = False
    """Its code may have run; before that it waited for its turn."""


class Journal(JournalWriter):
    """Open for the life of the runtime. How its rows are written, and wait when they cannot be, is the base class's."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.path = path
        self._cut: set[str] = set()
        """Executions whose output is dropped while too much waits to be written."""
        self._grown_bytes = 0
        self.has_grown = asyncio.Event()
        """Set when so much was written that its size should be looked at."""

    def rows(self, query: str, values: tuple[object, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """What a query finds."""
        self.write_deferred()
        return self._connection.execute(query, values)

    def check_room(self) -> None:
        """Refuse another execution while too much waits to be written."""
        if self.is_full:
            raise Busy(
                "the journal cannot be written, and no more executions can wait in memory to be kept",
                hint="Try again in 30 seconds; the server's operator finds the reason in its log",
            )

    def submit(self, record: ExecutionRecord, submitted_at: float, key: str = "") -> None:
        """An execution was submitted, under a key of its submitter's if it has one."""
        values = (record.id, record.session_id, record.principal, record.code, submitted_at, key or None, None)
        if not key:
            self.defer(record.id, _BEGIN, values)
            return
        self.write_deferred()  # the order of the rows is that of executions
        if not self.write(_BEGIN, values) and not self.is_failing:
            raise Busy(
                "another server is at work on an execution with this idempotency_key", hint="Make the same call again"
            )
        self.commit()  # another server must find it

    def start(self, execution_id: str) -> None:
        """Its code is about to run."""
        submitted = self.take_back(execution_id)
        if submitted is None:
            self.write_and_commit(_START, (time.time(), execution_id))
        else:
            self.write_and_commit(_BEGIN, (*submitted[:-1], time.time()))

    def find_key(self, principal: str, key: str) -> str | None:
        """The execution that this principal submitted under a key."""
        for execution_id, _, owner, _, _, known, _ in self.values_of(_BEGIN):
            if (owner, known) == (principal, key):
                return execution_id
        query = "SELECT id FROM executions WHERE principal = ? AND key = ?"
        row = next(self.rows(query, (principal, key)), None)
        return row[0] if row else None

    def append(self, execution_id: str, event: OutputEvent) -> None:
        """An execution said something."""
        if self.is_full:
            if execution_id in self._cut:
                return
            self._cut.add(execution_id)
            event = OutputEvent(sequence=event.sequence, kind="notice", text=UNKEPT)
        elif self._cut and not self.is_failing:
            self._cut.clear()
        self.write(_APPEND, (execution_id, event.sequence, event.kind, event.text, json.dumps(event.data)))
        self._grow(len(event.text))

    def _grow(self, size_bytes: int) -> None:
        self._grown_bytes += size_bytes
        if self._grown_bytes > LOOK_BYTES:
            self._grown_bytes = 0
            self.has_grown.set()

    def finish(self, result: ExecutionResult, *, output_bytes: int = 0, display_bytes: int = 0) -> None:
        """An execution is over; its output takes so many bytes here, and its displays so many beside."""
        self.write_deferred()
        self.write(_FINISH, (result.model_dump_json(), output_bytes, display_bytes, result.execution_id))
        self.commit()
        self._grow(EXECUTION_BYTES)

    def undo(self, execution_ids: Sequence[str]) -> None:
        """A session was rewound: these executions stay on record as taken back."""
        for execution_id in execution_ids:
            self.write("UPDATE executions SET undone_at = ? WHERE id = ?", (time.time(), execution_id))
        self.commit()

    def find(self, execution_id: str) -> ExecutionRecord | None:
        """One execution by its id."""
        if not execution_id.isascii():  # SQLite would refuse a lone surrogate by raising
            return None
        row = next(self.rows(f"{_RECORD} WHERE id = ?", (execution_id,)), None)
        for values in self.values_of(_BEGIN):
            row = (*values[:4], None, None, values[6]) if values[0] == execution_id else row
        for result, _, _, finished in self.values_of(_FINISH):
            row = (*row[:4], result, *row[5:]) if row and finished == execution_id else row
        return _record(row) if row else None

    def of_session(self, session_id: str) -> Iterator[ExecutionRecord]:
        """A session's executions in the order they were submitted."""
        for row in self.rows(f"{_RECORD} WHERE session_id = ? ORDER BY rowid", (session_id,)):
            yield _record(row)

    def unfinished(self, session_id: str) -> list[ExecutionRecord]:
        """Those of them that have no result."""
        query = f"{_RECORD} WHERE session_id = ? AND result IS NULL ORDER BY rowid"
        return [_record(row) for row in self.rows(query, (session_id,))]

    def timeline(self, session_id: str, most: int) -> list[str]:
        """The last executions of a session that were not taken back, in order."""
        query = "SELECT id FROM executions WHERE session_id = ? AND undone_at IS NULL ORDER BY rowid DESC LIMIT ?"
        return [row[0] for row in self.rows(query, (session_id, most))][::-1]

    def events(self, execution_id: str, since: int = 0) -> Iterator[OutputEvent]:
        """What an execution said after event number `since`."""
        for sequence, kind, text, data in self._connection.execute(
            "SELECT sequence, kind, text, data FROM events WHERE execution_id = ? AND sequence > ? ORDER BY sequence",
            (execution_id, min(since, sys.maxsize)),  # SQLite has no larger numbers
        ):
            yield OutputEvent(sequence=sequence, kind=kind, text=text, data=json.loads(data))
        if self.is_failing:
            yield from self.unwritten(execution_id, since)

    def unwritten(self, execution_id: str, since: int = 0) -> list[OutputEvent]:
        """What of it waits in memory for a disk that refuses."""
        return [
            OutputEvent.model_validate({"sequence": sequence, "kind": kind, "text": text, "data": json.loads(data)})
            for of, sequence, kind, text, data in self.values_of(_APPEND)
            if of == execution_id and sequence > since
        ]

    def fault(self) -> str:
        """Why nothing can be written now; empty when it can. Writes by itself, so any thread may call it."""
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=PROBE_S)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                # The same again, which is a page on disk: another server may have migrated the file meanwhile.
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute(f"PRAGMA user_version = {version}")
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            return str(error)
        return ""

    def output_bytes(self, session_id: str) -> int:
        """What the output of a session's executions takes here, about."""
        query = "SELECT coalesce(sum(output_bytes), 0) FROM executions WHERE session_id = ?"
        return next(self.rows(query, (session_id,)))[0]

    def forget_session(self, session_id: str) -> None:
        """A session was cleared by its owner."""
        self.write_deferred()
        self.write(
            "DELETE FROM events WHERE execution_id IN (SELECT id FROM executions WHERE session_id = ?)", (session_id,)
        )
        self.write("DELETE FROM executions WHERE session_id = ?", (session_id,))


def _record(row: tuple[Any, ...]) -> ExecutionRecord:
    identifier, session_id, principal, code, result, undone_at, started_at = row
    parsed = ExecutionResult.model_validate_json(result) if result is not None else None
    return ExecutionRecord(
        identifier, session_id, principal, code, parsed, undone_at is not None, started_at is not None
    )


@contextmanager
def open_journal(path: Path) -> Generator[Journal]:
    """Open or make the journal file.

    Engines on one thread share it: waiting for each other's transactions, they would stop the loop that ends them.
    """
    key = str(path.resolve()), threading.get_ident()
    journal, users = _open.get(key) or (_connected(path), 0)
    _open[key] = journal, users + 1
    try:
        yield journal
    finally:
        journal.flush()
        _, users = _open.pop(key)
        if users > 1:
            _open[key] = journal, users - 1
        else:
            journal.close()


_open: dict[tuple[str, int], tuple[Journal, int]] = {}


def _connected(path: Path) -> Journal:
    with usable(path):
        return _opened(path)


@contextmanager
def usable(path: Path) -> Generator[None]:
    """While a server starts: a journal that it cannot use is the operator's to mend."""
    try:
        yield
    except sqlite3.Error as error:
        raise SettingsError(
            f"Journal {path} cannot be used: {error}",
            hint="Move a damaged file away, end the process that locks it, or choose another data_directory",
        ) from error


def _opened(path: Path) -> Journal:
    # SQLite gives the files that it keeps beside the journal the journal's mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    connection = sqlite3.connect(path, isolation_level=None, timeout=LAST_BUSY_S)
    try:
        migrate(path, connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
    except BaseException:
        connection.close()
        raise
    return Journal(path, connection)
