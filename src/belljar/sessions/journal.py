"""What happened, on disk: executions, their numbered output events, their results.

One SQLite file. Writing an event takes some 20 µs, so it happens on the event loop's thread, in order, with no queue
between what a caller is told and what is kept. A finished execution is committed before anyone is told of it; what a
running one says is committed within `COMMIT_S`.
"""

import asyncio
import json
import logging
import sqlite3
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from belljar.models import ExecutionResult, OutputEvent

COMMIT_S = 0.05

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS executions (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    principal TEXT NOT NULL,
    code TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    result TEXT
);
CREATE INDEX IF NOT EXISTS executions_of_session ON executions (session_id, submitted_at);
CREATE TABLE IF NOT EXISTS events (
    execution_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (execution_id, sequence)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Record:
    """One execution as journalled; `result` is there once it has finished."""

    id: str
    session_id: str
    principal: str
    code: str
    result: ExecutionResult | None


class Journal:
    """Open for the life of the runtime."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN")
                self._timer = asyncio.get_running_loop().call_later(COMMIT_S, self.commit)
            self._connection.execute(statement, values)
        except sqlite3.Error as error:
            self._give_up(error)

    def commit(self) -> None:
        """Make what was written visible to other readers, and safe from the end of this process."""
        self._stop_timer()
        if not self._connection.in_transaction:
            return
        try:
            self._connection.execute("COMMIT")
            self._is_failing = False
        except sqlite3.Error as error:
            self._give_up(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, error: sqlite3.Error) -> None:
        """A full disk must not take results with it: callers are still told, only nothing is kept meanwhile."""
        self._stop_timer()
        with suppress(sqlite3.Error):
            self._connection.rollback()
        if not self._is_failing:
            log.error("the journal cannot be written, so executions are not kept: %s", error)
        self._is_failing = True

    def begin(self, record: Record, submitted_at: float) -> None:
        """An execution was submitted."""
        self._write(
            "INSERT INTO executions (id, session_id, principal, code, submitted_at) VALUES (?, ?, ?, ?, ?)",
            (record.id, record.session_id, record.principal, record.code, submitted_at),
        )

    def append(self, execution_id: str, event: OutputEvent) -> None:
        """An execution said something."""
        self._write(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            (execution_id, event.sequence, event.kind, event.text, json.dumps(event.data)),
        )

    def finish(self, result: ExecutionResult) -> None:
        """An execution is over."""
        self._write("UPDATE executions SET result = ? WHERE id = ?", (result.model_dump_json(), result.execution_id))
        self.commit()

    def find(self, execution_id: str) -> Record | None:
        """One execution by its id."""
        if not execution_id.isascii():  # SQLite would refuse a lone surrogate by raising
            return None
        row = self._connection.execute(
            "SELECT id, session_id, principal, code, result FROM executions WHERE id = ?", (execution_id,)
        ).fetchone()
        return _record(row) if row else None

    def of_session(self, session_id: str) -> Iterator[Record]:
        """A session's executions in the order they were submitted."""
        for row in self._connection.execute(
            "SELECT id, session_id, principal, code, result FROM executions WHERE session_id = ? ORDER BY submitted_at",
            (session_id,),
        ):
            yield _record(row)

    def events(self, execution_id: str, since: int = 0) -> Iterator[OutputEvent]:
        """What an execution said after event number `since`."""
        for sequence, kind, text, data in self._connection.execute(
            "SELECT sequence, kind, text, data FROM events WHERE execution_id = ? AND sequence > ? ORDER BY sequence",
            (execution_id, since),
        ):
            yield OutputEvent(sequence=sequence, kind=kind, text=text, data=json.loads(data))

    def read_output(self, execution_id: str, offset: int, limit: int) -> str:
        """Stream text from character `offset`, `limit` of them or all. Reads by itself, so any thread may call it."""
        parts: list[str] = []
        left = limit or sys.maxsize
        with closing(sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True)) as connection:
            for (text,) in connection.execute(
                "SELECT CASE kind WHEN 'display' THEN text || char(10) ELSE text END FROM events "
                "WHERE execution_id = ? AND kind IN ('stdout', 'stderr', 'notice', 'display') AND text <> '' "
                "ORDER BY sequence",
                (execution_id,),
            ):
                skipped = min(offset, len(text))
                offset -= skipped
                part = text[skipped : skipped + left]
                left -= len(part)
                parts.append(part)
                if left <= 0:
                    break
        return "".join(parts)

    def forget_session(self, session_id: str) -> None:
        """A session was cleared by its owner."""
        self._write(
            "DELETE FROM events WHERE execution_id IN (SELECT id FROM executions WHERE session_id = ?)", (session_id,)
        )
        self._write("DELETE FROM executions WHERE session_id = ?", (session_id,))


def _record(row: tuple[str, str, str, str, str | None]) -> Record:
    identifier, session_id, principal, code, result = row
    parsed = ExecutionResult.model_validate_json(result) if result is not None else None
    return Record(identifier, session_id, principal, code, parsed)


@contextmanager
def open_journal(path: Path) -> Generator[Journal]:
    """Open or make the journal file."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        journal = Journal(path, connection)
        try:
            yield journal
        finally:
            journal.commit()
    finally:
        connection.close()
