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
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from belljar import measures
from belljar.errors import SettingsError
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
    result TEXT,
    undone_at REAL,
    key TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS executions_by_key ON executions (principal, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS executions_of_session ON executions (session_id, submitted_at);
CREATE TABLE IF NOT EXISTS events (
    execution_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (execution_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    principal TEXT NOT NULL,
    environment TEXT NOT NULL,
    reason TEXT NOT NULL,
    run TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at REAL NOT NULL,
    used_at REAL NOT NULL,
    executions INTEGER NOT NULL DEFAULT 0,
    variables TEXT NOT NULL DEFAULT '[]',
    unkept TEXT NOT NULL DEFAULT '[]',
    end TEXT NOT NULL DEFAULT ''
);
"""
# Raised with every change of the schema; `_migrate` has a step for each.
VERSION = 1
# Another server may be writing: its transactions last no longer than COMMIT_S.
BUSY_S = 5.0
PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """One execution as journalled; `result` is there once it has finished."""

    id: str
    session_id: str
    principal: str
    code: str
    result: ExecutionResult | None
    is_undone: bool = False
    """Its session was rewound to before it."""


class Journal:
    """Open for the life of the runtime."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False

    def write(self, statement: str, values: tuple[object, ...]) -> int:
        """Change rows within the open transaction; returns how many. Nothing is kept while the disk refuses."""
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN")
                self._timer = asyncio.get_running_loop().call_later(COMMIT_S, self.commit)
            return self._connection.execute(statement, values).rowcount
        except sqlite3.Error as error:
            self._give_up(error)
            return 0

    def rows(self, query: str, values: tuple[object, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """What a query finds."""
        yield from self._connection.execute(query, values)

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
        measures.journal_failures.add()
        with suppress(sqlite3.Error):
            self._connection.rollback()
        if not self._is_failing:
            log.error("the journal cannot be written, so executions are not kept: %s", error)
        self._is_failing = True

    def close(self) -> None:
        """Let go of the file."""
        self._stop_timer()
        self._connection.close()

    def begin(self, record: Record, submitted_at: float, key: str = "") -> None:
        """An execution was submitted, under a key of its submitter's if it has one."""
        self.write(
            "INSERT INTO executions (id, session_id, principal, code, submitted_at, key) VALUES (?, ?, ?, ?, ?, ?)",
            (record.id, record.session_id, record.principal, record.code, submitted_at, key or None),
        )

    def find_key(self, principal: str, key: str) -> str | None:
        """The execution that this principal submitted under a key."""
        query = "SELECT id FROM executions WHERE principal = ? AND key = ?"
        row = next(self.rows(query, (principal, key)), None)
        return row[0] if row else None

    def append(self, execution_id: str, event: OutputEvent) -> None:
        """An execution said something."""
        self.write(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            (execution_id, event.sequence, event.kind, event.text, json.dumps(event.data)),
        )

    def finish(self, result: ExecutionResult) -> None:
        """An execution is over."""
        self.write("UPDATE executions SET result = ? WHERE id = ?", (result.model_dump_json(), result.execution_id))
        self.commit()

    def undo(self, execution_ids: Sequence[str]) -> None:
        """A session was rewound: these executions stay on record as taken back."""
        for execution_id in execution_ids:
            self.write("UPDATE executions SET undone_at = ? WHERE id = ?", (time.time(), execution_id))
        self.commit()

    def find(self, execution_id: str) -> Record | None:
        """One execution by its id."""
        if not execution_id.isascii():  # SQLite would refuse a lone surrogate by raising
            return None
        row = self._connection.execute(
            "SELECT id, session_id, principal, code, result, undone_at FROM executions WHERE id = ?", (execution_id,)
        ).fetchone()
        return _record(row) if row else None

    def of_session(self, session_id: str) -> Iterator[Record]:
        """A session's executions in the order they were submitted."""
        for row in self._connection.execute(
            "SELECT id, session_id, principal, code, result, undone_at FROM executions "
            "WHERE session_id = ? ORDER BY submitted_at",
            (session_id,),
        ):
            yield _record(row)

    def timeline(self, session_id: str, most: int) -> list[str]:
        """The last executions of a session that were not taken back, in order."""
        query = (
            "SELECT id FROM executions WHERE session_id = ? AND undone_at IS NULL ORDER BY submitted_at DESC LIMIT ?"
        )
        return [row[0] for row in self.rows(query, (session_id, most))][::-1]

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

    def fault(self) -> str:
        """Why nothing can be written now; empty when it can. Writes by itself, so any thread may call it."""
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None, timeout=PROBE_S)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                # The same again, which is a page on disk: another server may have migrated the file meanwhile.
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute(f"PRAGMA user_version = {version}")
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            return str(error)
        return ""

    def forget_session(self, session_id: str) -> None:
        """A session was cleared by its owner."""
        self.write(
            "DELETE FROM events WHERE execution_id IN (SELECT id FROM executions WHERE session_id = ?)", (session_id,)
        )
        self.write("DELETE FROM executions WHERE session_id = ?", (session_id,))


def _migrate(path: Path, connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise SettingsError(
            f"Journal {path} is of a later belljar (version {version}, this one knows {VERSION})",
            hint="Upgrade belljar, or choose another data_directory",
        )
    if version < VERSION:
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _record(row: tuple[str, str, str, str, str | None, float | None]) -> Record:
    identifier, session_id, principal, code, result, undone_at = row
    parsed = ExecutionResult.model_validate_json(result) if result is not None else None
    return Record(identifier, session_id, principal, code, parsed, undone_at is not None)


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
        journal.commit()
        _, users = _open.pop(key)
        if users > 1:
            _open[key] = journal, users - 1
        else:
            journal.close()


_open: dict[tuple[str, int], tuple[Journal, int]] = {}


def _connected(path: Path) -> Journal:
    connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        _migrate(path, connection)
    except BaseException:
        connection.close()
        raise
    return Journal(path, connection)
