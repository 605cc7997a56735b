"""Recovers what can be read of a damaged journal into a new file, which takes its place; the old one is kept beside.

Python's SQLite has no recovery of its own, so tables are read row by row around the pages that cannot be. Rows that
others refer to come first: executions, then their events and calls. A session whose row is lost is known by its
executions.
"""

import os
import sqlite3
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from belljar.files.private import FILE_MODE
from belljar.journal.damage import is_damage
from belljar.journal.schema import VERSION, migrate, version_of
from belljar.models import ExecutionResult

_NUMBERED = ("sessions", "executions", "runs", "steps", "installs")
"""The tables whose rows have a number of SQLite's, by which one can go on behind a page that cannot be read."""
_KEYED = {"identifiers": ("principal", "identifier"), "questions": ("id",)}
_OF_EXECUTION = {"events": "sequence", "calls": "number"}
_TYPES: dict[str, tuple[type, ...]] = {"TEXT": (str,), "REAL": (float, int), "INTEGER": (int,)}
_LARGEST = 2**62
_LOST = "its record was lost with a damaged journal"
_GAP = "[belljar: output is missing here: the journal was damaged]\n"
_LOST_RESULT = "the journal was damaged, and its result is lost"


@dataclass(slots=True)
class Salvaged:
    """What was recovered."""

    kept: Path
    """Where the damaged file is now."""
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """How many rows of each table were recovered."""
    remade: int = 0
    """How many sessions are known by their executions alone."""
    unreadable: list[str] = field(default_factory=list[str])
    """The tables of which something could not be read."""


def salvage(path: Path, environment: str) -> Salvaged:
    """Put what can be read of a journal that no server has open in its place.

    `environment` is that of sessions whose row is lost.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    new = path.with_name(f"journal.salvaging-{stamp}.sqlite")
    salvaged = Salvaged(path.with_name(f"journal.damaged-{stamp}.sqlite"))
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as target:
            migrate(new, target)
            with closing(_connect(path)) as source:
                target.execute("BEGIN")
                with suppress(sqlite3.DatabaseError):  # its first page is lost: then ids that come begin otherwise
                    (tag,) = source.execute("PRAGMA application_id").fetchone()
                    target.execute(f"PRAGMA application_id = {tag}")
                _Copier(source, target, salvaged).copy(environment)
                target.execute("COMMIT")
    except BaseException:
        for ending in ("", "-wal", "-shm"):
            Path(f"{new}{ending}").unlink(missing_ok=True)
        raise
    # In this order there is a journal at `path` at every moment, and never the old write-ahead log beside the new file.
    os.link(path, salvaged.kept)
    for ending in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            Path(f"{path}{ending}").rename(f"{salvaged.kept}{ending}")
    new.replace(path)
    return salvaged


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)
    # A text that was overwritten is a loss of its own, and not of the rows around it.
    connection.text_factory = _decoded
    return connection


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")


class _Copier:
    """Copies the rows of one journal to another."""

    def __init__(self, source: sqlite3.Connection, target: sqlite3.Connection, salvaged: Salvaged) -> None:
        self._source = source
        self._target = target
        self._salvaged = salvaged
        self._known: dict[str, dict[str, str]] = {}

    def copy(self, environment: str) -> None:
        if not self._is_ours():
            self._salvaged.unreadable.append("all")
            return
        for table in _NUMBERED:
            columns = self._columns(table)
            self._insert(table, ["rowid", *columns], self._numbered(table, columns))
        for table, key in _KEYED.items():
            columns = self._columns(table)
            self._insert(table, [*columns], self._keyed(table, columns, key))
        for (execution_id,) in self._target.execute("SELECT id FROM executions ORDER BY rowid").fetchall():
            for table, number in _OF_EXECUTION.items():
                columns = self._columns(table)
                rows = self._keyed(table, columns, (number,), execution_id)
                if not self._insert(table, [*columns], rows) and table == "events":
                    self._mark_gap(execution_id)
        self._remake_sessions(environment)

    def _is_ours(self) -> bool:
        """Return whether the list of tables can be read; without it there is nothing to go by."""
        try:
            found = version_of(self._source)
            self._source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.DatabaseError:
            return False
        return 0 < found <= VERSION

    def _columns(self, table: str) -> dict[str, str]:
        """Return the columns that a table has in both files, with their types."""
        if table not in self._known:
            there = {row[1] for row in self._source.execute(f"PRAGMA table_info({table})")}
            own = self._target.execute(f"PRAGMA table_info({table})")
            self._known[table] = {row[1]: row[2] for row in own if row[1] in there}
        return self._known[table]

    # Reading around what cannot be read

    def _numbered(self, table: str, columns: Iterable[str]) -> Generator[Sequence[Any], None, bool]:
        """Yield the rows of a table, each after its number; return whether all could be read."""
        if not (names := ", ".join(columns)):
            return True  # a table that the file's version does not have yet
        query = f"SELECT rowid, {names} FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid"  # noqa: S608
        place: int | None = 0
        is_whole = True
        while place is not None:
            try:
                for row in self._source.execute(query, (place,)):
                    place = max(place, row[0])
                    yield row
            except sqlite3.DatabaseError as error:
                _check_is_damage(error)
                is_whole = False
                place = self._next_readable(query, place)
            else:
                break
        return is_whole

    def _next_readable(self, query: str, after: int) -> int | None:
        """Return the number behind which a row can be read again; None where there is none.

        Looks twice as far each time, and then for where it begins.
        """
        step = 1
        while not (found := self._look(query, after + step)):
            after, step = after + step, 2 * step
            if after > _LARGEST:
                return None
        bad, good = after, after + step
        while good - bad > 1:
            middle = (bad + good) // 2
            if again := self._look(query, middle):
                good, found = middle, again
            else:
                bad = middle
        return good if found == "row" else None

    def _look(self, query: str, after: int) -> str:
        """Return "row" if the row behind this number can be read, "end" if there is none, nothing if it is damaged."""
        try:
            return "row" if self._source.execute(f"{query} LIMIT 1", (after,)).fetchone() else "end"
        except sqlite3.DatabaseError as error:
            _check_is_damage(error)
            return ""

    def _keyed(
        self, table: str, columns: Iterable[str], key: Sequence[str], execution_id: str = ""
    ) -> Generator[Sequence[Any], None, bool]:
        """Yield the rows of a table without numbers, of one execution if one is named; return whether that was all.

        They are read from both ends, which skips one damaged place. Rows may come twice.
        """
        if not (names := ", ".join(columns)):
            return True
        condition, values = ("WHERE execution_id = ?", (execution_id,)) if execution_id else ("", ())
        for direction in ("ASC", "DESC"):
            order = ", ".join(f"{name} {direction}" for name in key)
            try:
                yield from self._source.execute(f"SELECT {names} FROM {table} {condition} ORDER BY {order}", values)  # noqa: S608
            except sqlite3.DatabaseError as error:
                _check_is_damage(error)
            else:
                return direction == "ASC"
        return False

    # Writing

    def _insert(self, table: str, names: Sequence[str], rows: Generator[Sequence[Any], None, bool]) -> bool:
        """Insert the rows that are in order; return whether there were no others."""
        types = self._columns(table)
        allowed = [_TYPES.get(types.get(name, "INTEGER"), ()) for name in names]
        marks = ", ".join("?" * len(names))
        statement = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({marks})"  # noqa: S608
        inserted, is_whole = 0, True

        def sound() -> Iterator[Sequence[Any]]:
            nonlocal is_whole
            is_whole = yield from rows

        for row in sound():
            if all(value is None or isinstance(value, kinds) for value, kinds in zip(row, allowed, strict=True)):
                values = _with_result(dict(zip(names, row, strict=True))) if table == "executions" else row
                inserted += max(0, self._target.execute(statement, tuple(values)).rowcount)
            else:
                is_whole = False
        self._salvaged.rows[table] = self._salvaged.rows.get(table, 0) + inserted
        if not is_whole and table not in self._salvaged.unreadable:
            self._salvaged.unreadable.append(table)
        return is_whole

    def _mark_gap(self, execution_id: str) -> None:
        """Say in the output of an execution where the first of its events are missing."""
        query = "SELECT sequence FROM events WHERE execution_id = ? ORDER BY sequence"
        there = {number for (number,) in self._target.execute(query, (execution_id,))}
        gap = next(number for number in range(1, len(there) + 2) if number not in there)
        self._target.execute("INSERT INTO events VALUES (?, ?, 'notice', ?, '{}')", (execution_id, gap, _GAP))

    def _remake_sessions(self, environment: str) -> None:
        """Make a row for each session that has executions and no row, so that it can be read and woken."""
        self._salvaged.remade = self._target.execute(
            "INSERT INTO sessions (id, principal, environment, reason, run, state, created_at, used_at, end) "
            "SELECT session_id, principal, ?, '', '', 'asleep', min(submitted_at), max(submitted_at), ? "
            "FROM executions WHERE session_id NOT IN (SELECT id FROM sessions) GROUP BY session_id",
            (environment, _LOST),
        ).rowcount


def _with_result(row: dict[str, Any]) -> Iterable[Any]:
    """Return the values of an execution's row; a result that is no result any more says so."""
    try:
        if row["result"] is not None:
            ExecutionResult.model_validate_json(row["result"])
    except ValidationError:
        lost = ExecutionResult(
            success=False,
            status="died",
            execution_id=row["id"],
            session_id=row["session_id"],
            execution_count=0,
            output=[],
            stdout="",
            stderr="",
            error=_LOST_RESULT,
            cause=_LOST_RESULT,
        )
        row["result"] = lost.model_dump_json()
    return row.values()


def _check_is_damage(error: sqlite3.DatabaseError) -> None:
    if not is_damage(error):
        raise error
