"""What the journal has of sessions that are also in the store: which bundle each is, and its rows as they travel.

A session that sleeps is *stored* when its row names a bundle and no owner object: then whoever makes the next owner
object goes on with it. With an owner object, or without a bundle, it is this data directory's alone, and waits to be
put. Knows nothing of the store itself.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from pydantic import TypeAdapter
from pydantic_core import ValidationError

from belljar.errors import EngineError
from belljar.journal.journal import Journal
from belljar.journal.retention import remove_outputs, rest
from belljar.journal.writer import LAST_BUSY_S

Row = tuple[str, dict[str, Any]]
"""A table, and the values of one row by their columns."""

_ROWS: Final = TypeAdapter(list[Row])
_OF_EXECUTION: Final = "execution_id IN (SELECT id FROM executions WHERE session_id = ?)"
_TABLES: Final = {
    "sessions": "id = ?",
    "executions": "session_id = ? ORDER BY rowid",
    "events": f"{_OF_EXECUTION} ORDER BY execution_id, sequence",
    "calls": f"{_OF_EXECUTION} ORDER BY execution_id, number",
    "questions": "session_id = ?",
    "installs": "session_id = ? ORDER BY rowid",
    "identifiers": "session_id = ?",
    "runs": "session_id = ?",
    "steps": "run_id IN (SELECT id FROM runs WHERE session_id = ?) ORDER BY number",
}
"""Every table that has rows of a session, those that others refer to first, and which rows those are."""
_UNSENT: Final = {"sessions": ("bundle", "owned"), "steps": ("number",)}
"""Columns that mean something in one journal only."""
_AT_ONCE_BYTES: Final = 1024 * 1024
BRINGING: Final = "is being brought from the store"


class BundleRecord(NamedTuple):
    """What the journal says of a session and its bundle."""

    principal: str
    state: str
    run: str
    bundle: int
    """The number of the bundle that the session is or went on from; 0 for none, negative if it went on unasked."""
    owned: int
    """The number of the owner object that was made here; negative while the head of that bundle is being put."""
    end: str

    @property
    def is_free(self) -> bool:
        """Return whether it may be woken here without asking the store."""
        return self.owned > 0 or (self.bundle <= 0 and self.owned == 0)

    @property
    def is_pending(self) -> bool:
        """Return whether the store has still to be told: of what sleeps, or that there is nothing any more."""
        return (self.bundle <= 0 if self.state == "asleep" else self.bundle != 0) or self.owned != 0


class BundleRecords:
    """Reads and writes those columns for one server, whose name is `run`."""

    def __init__(self, journal: Journal, run: str) -> None:
        self._journal = journal
        self.run = run

    def find(self, session_id: str) -> BundleRecord | None:
        """Return what is known of a session; None where nothing is."""
        query = "SELECT principal, state, run, bundle, owned, end FROM sessions WHERE id = ? AND state <> 'unborn'"
        row = next(self._journal.rows(query, (session_id,)), None)
        return BundleRecord(*row) if row else None

    def pending(self) -> list[tuple[str, str]]:
        """Return the sessions of which the store has to be told, each with the server that had it last."""
        query = (
            "SELECT id, run FROM sessions WHERE (state = 'asleep' AND (bundle <= 0 OR owned <> 0)) "
            "OR (state = 'gone' AND (bundle <> 0 OR owned <> 0)) ORDER BY used_at"
        )
        return [*self._journal.rows(query)]

    def change(self, session_id: str, found: BundleRecord, *, bundle: int, owned: int) -> bool:
        """Change both numbers, if the session is still as it was found; return whether it was."""
        changed = self._journal.write_now(
            "UPDATE sessions SET bundle = ?, owned = ? WHERE id = ? AND state = ? AND bundle = ? AND owned = ?",
            (bundle, owned, session_id, found.state, found.bundle, found.owned),
        )
        return changed == 1

    def end(self, session_id: str, found: BundleRecord, end: str) -> bool:
        """Record that a session that slept is not here any more, if it is still as it was found."""
        changed = self._journal.write_now(
            "UPDATE sessions SET state = 'gone', end = ?, bundle = 0, owned = 0 "
            "WHERE id = ? AND state = ? AND bundle = ? AND owned = ?",
            (end, session_id, found.state, found.bundle, found.owned),
        )
        return changed == 1


class RowsRefused(EngineError):
    """Rows from a bundle that this journal does not take."""

    code = "bundle-refused"


def rows_of(journal: Path, session_id: str) -> Iterator[Row]:
    """Yield the rows of a session from every table, as they are at one moment; any thread may call it."""
    with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for table, condition in _TABLES.items():
            cursor = connection.execute(f"SELECT * FROM {table} WHERE {condition}", (session_id,))  # noqa: S608
            columns = [column for column, *_ in cursor.description]
            for values in cursor:
                row = dict(zip(columns, values, strict=True))
                for name in _UNSENT.get(table, ()):
                    del row[name]
                yield table, row


class RowsEntry:
    """Enters the rows of one session into a journal, in place of all that it has of that session.

    In short transactions, because a session may have printed hundreds of megabytes and other servers write meanwhile.
    Until `finish` the session is recorded as gone: an entry that is broken off is nobody's, and the next one begins
    anew. Every row must be of this session and its owner. Any thread may use it, one at a time.
    """

    def __init__(self, journal: Path, session_id: str, principal: str, run: str) -> None:
        self._path = journal
        self._session_id = session_id
        self._principal = principal
        self._run = run
        self._end = ""
        self._ids: dict[str, set[str]] = {"sessions": set(), "executions": set(), "runs": set()}
        self._columns: dict[str, frozenset[str]] = {}
        self._waiting: list[Row] = []
        self._waiting_bytes = 0
        self._connection = sqlite3.connect(journal, isolation_level=None, timeout=LAST_BUSY_S, check_same_thread=False)
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Close the file; what is not finished stays recorded as gone."""
        self._connection.close()

    def add(self, rows: Iterable[Row], size_bytes: int) -> None:
        """Enter rows, of about this size."""
        for table, row in rows:
            self._check(table, row)
            if table == "sessions":
                remove_outputs(self._path, self._session_id)
            self._waiting.append((table, row))
        self._waiting_bytes += size_bytes
        if self._waiting_bytes > _AT_ONCE_BYTES:
            self._write()

    def finish(self, bundle: int, owned: int) -> None:
        """Have the session sleep here, as what it is in the store."""
        self._write()
        if not self._end:
            raise RowsRefused("the bundle has no row of its session")
        with self._connection:
            self._connection.execute(
                "UPDATE sessions SET state = 'asleep', end = ?, bundle = ?, owned = ? WHERE id = ? AND state = 'gone'",
                (self._end, bundle, owned, self._session_id),
            )

    def _check(self, table: str, row: dict[str, Any]) -> None:
        """Refuse a row that is of another session, or that this version does not know."""
        if table not in _TABLES:
            raise _later(f"the table {table[:64]!r}")
        if table not in self._columns:
            found = self._connection.execute(f"PRAGMA table_info({table})").fetchall()
            self._columns[table] = frozenset(column[1] for column in found) - {*_UNSENT.get(table, ())}
        if unknown := sorted(row.keys() - self._columns[table]):
            raise _later(f"the column {unknown[0][:64]!r} of {table}")
        if not all(value is None or isinstance(value, str | int | float) for value in row.values()):
            raise RowsRefused(f"a row of {table} has values that no column has")
        if "principal" in row and row["principal"] != self._principal:
            raise RowsRefused(f"a row of {table} is another owner's")
        if table == "sessions":
            query = "SELECT 1 FROM sessions WHERE id = ? AND state NOT IN ('asleep', 'gone')"
            if self._connection.execute(query, (self._session_id,)).fetchone():
                raise RowsRefused(f"session {self._session_id} is open here")
            is_ours = row.get("id") == self._session_id and not self._ids["sessions"]
        elif table in ("events", "calls"):
            is_ours = row.get("execution_id") in self._ids["executions"]
        elif table == "steps":
            is_ours = row.get("run_id") in self._ids["runs"]
        else:
            is_ours = row.get("session_id") == self._session_id
        if not is_ours:
            raise RowsRefused(f"a row of {table} is not of this session")
        if table in self._ids:
            self._ids[table].add(str(row.get("id")))

    def _write(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        began = time.monotonic()
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                for table, row in waiting:
                    self._insert(table, row)
            rest(began)
        except sqlite3.IntegrityError as error:
            raise RowsRefused(
                f"the journal has rows of another session in place of some of its rows: {error}"
            ) from error

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        if table == "sessions":
            self._begin(row)
            return
        verb = "INSERT"
        if table == "identifiers":
            verb = "INSERT OR IGNORE"  # here the name stands for another session already
        elif table == "executions" and row.get("key") is not None:
            query = "SELECT 1 FROM executions WHERE principal = ? AND key = ?"
            if self._connection.execute(query, (self._principal, row["key"])).fetchone():
                row = {**row, "key": None}
        columns = ", ".join(row)
        marks = ", ".join("?" * len(row))
        self._connection.execute(f"{verb} INTO {table} ({columns}) VALUES ({marks})", [*row.values()])

    def _begin(self, row: dict[str, Any]) -> None:
        """Remove what there is of the session, and record it as gone until it is whole."""
        for table in reversed(_TABLES):
            condition = _TABLES[table].partition(" ORDER BY ")[0]
            self._connection.execute(f"DELETE FROM {table} WHERE {condition}", (self._session_id,))  # noqa: S608
        self._end = str(row.get("end", "")) or "it slept"
        values = {**row, "state": "gone", "run": self._run, "end": BRINGING}
        columns = ", ".join(values)
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO sessions ({columns}) VALUES ({marks})", [*values.values()])  # noqa: S608


def as_lines(rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield rows as lines of JSON."""
    for row in rows:
        yield json.dumps(row).encode() + b"\n"


def of_lines(lines: bytes) -> list[Row]:
    """Return the rows of some lines; raise `RowsRefused` for what is none."""
    try:
        return _ROWS.validate_json(b"[" + b",".join(lines.splitlines()) + b"]")
    except ValidationError as error:
        raise RowsRefused("what the bundle has for the journal are no rows") from error


def _later(what: str) -> RowsRefused:
    return RowsRefused(
        f"the bundle is of a later belljar: {what} is unknown here", hint="Upgrade belljar on this machine"
    )
