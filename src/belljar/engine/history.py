"""Reads the journal for the engine: lists of sessions and executions, output, lines, tool calls.

Every query runs on a read-only connection in a thread of its own, so that neither the event loop nor the writer waits
for it. Knows nothing of live sessions, and checks no access: its callers do.
"""

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from belljar.engine.contract import BATCH_BYTES, STREAM_CHARS, TAIL_LINES
from belljar.engine.line_index import LineIndexes, LinePage
from belljar.engine.models import CallEntry, Tail
from belljar.errors import EngineError, InvalidArgument
from belljar.journal.schema import VERSION, version_of
from belljar.journal.search_index import READ_S, FoundRow, TextQuery, owners, search
from belljar.journal.session_records import (
    SESSION_COLUMNS,
    UNCOUNTED_COLUMNS,
    SessionRecord,
    SessionState,
    session_record,
)
from belljar.models import TEXT_KINDS, ExecutionResult, OutputEvent, iso_ms
from belljar.outputs.budget import EventBudget

_T = TypeVar("_T")
_THREADS = 3
_BUSY_S = 5.0
# About what an event takes in an answer beside its text.
_EVENT_BYTES = 120
# Output up to this size is read whole; of a longer one the head, the tail, and what is not text.
_WHOLE_BYTES = 1_000_000
_MAX_RICH = 500
_CODE_CHARS = 2_000
_TAIL_BYTES = 2_000_000
_TAIL_CHARS = 8_000
_EXECUTION = (
    "SELECT rowid, id, session_id, principal, code, submitted_at, started_at, ended_at, undone_at, dropped_at, author, "
    "client, output_bytes, "
    "coalesce((SELECT run FROM sessions WHERE id = executions.session_id AND state = 'live'), ''), result "
    "FROM executions"
)
_EVENTS = "SELECT sequence, kind, text, data FROM events WHERE execution_id = ?"


class ExecutionRow(NamedTuple):
    """An execution as the journal has it."""

    place: int
    """Its place among all executions of the journal."""
    id: str
    session_id: str
    principal: str
    code: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    undone_at: float | None
    dropped_at: float | None
    author: str
    client: str
    output_bytes: int
    live_run: str
    """The server that has its session; empty while the session is not live."""
    result: ExecutionResult | None


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Which sessions to read: `owner` empty means those of all owners, `run` leaves out live ones of other servers."""

    owner: str = ""
    run: str = ""
    states: tuple[SessionState, ...] = ("live", "asleep")
    text: str = ""
    before: tuple[float, str] | None = None


class HistoryReader:
    """Reads one journal file. `aclose` ends its threads.

    `commit` is called before each query, on the event loop's thread: what this process was told, a query then finds.
    """

    def __init__(self, journal: Path, commit: Callable[[], None] = lambda: None) -> None:
        self._path = journal
        self._commit = commit
        self._lines = LineIndexes(journal.parent / "sessions")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="history")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    async def aclose(self) -> None:
        """Close the connections; may be called twice."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        while self._connections:
            self._connections.pop().close()

    async def _read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        self._commit()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)

    def _run(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        try:
            if connection is None:
                connection = self._local.connection = self._connect()
            return query(connection)
        except sqlite3.Error as error:
            self._local.connection = None
            if connection is not None:
                connection.close()
            raise EngineError(
                f"the journal cannot be read: {error}", hint="The server's log has the reason if it lasts"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode=ro",
            uri=True,
            isolation_level=None,
            timeout=_BUSY_S,
            check_same_thread=False,  # closed by whoever ends the reader
        )
        if (version := version_of(connection)) != VERSION:
            connection.close()
            raise EngineError(
                f"the journal is of another belljar (version {version}, this one knows {VERSION})",
                hint="Use the belljar that its server has",
            )
        self._connections.append(connection)
        return connection

    # Sessions

    async def sessions(self, wanted: SessionQuery, limit: int) -> list[SessionRecord]:
        """Return sessions, the latest made first."""
        return await self._read(lambda connection: _sessions(connection, wanted, limit))

    async def session(self, session_id: str, *, is_counted: bool = True) -> SessionRecord | None:
        """Return a session by its id, with the number of its executions where that is wanted; None if there is none."""
        if not session_id.isascii():
            return None
        columns = SESSION_COLUMNS if is_counted else UNCOUNTED_COLUMNS
        query = f"SELECT {columns} FROM sessions WHERE id = ? AND state <> 'unborn'"  # noqa: S608

        def find(connection: sqlite3.Connection) -> SessionRecord | None:
            row = connection.execute(query, (session_id,)).fetchone()
            return session_record(row) if row else None

        return await self._read(find)

    async def ends(self, session_ids: list[str]) -> dict[str, tuple[str, str]]:
        """Return the beginning of the code of the first and the latest execution of each session that has any."""
        code = "SELECT substr(code, 1, ?) FROM executions WHERE session_id = ? ORDER BY rowid {} LIMIT 1"

        def read(connection: sqlite3.Connection) -> dict[str, tuple[str, str]]:
            found: dict[str, tuple[str, str]] = {}
            for session_id in session_ids:
                values = (_CODE_CHARS, session_id)
                first = connection.execute(code.format(""), values).fetchone()
                if first is not None:
                    found[session_id] = first[0], connection.execute(code.format("DESC"), values).fetchone()[0]
            return found

        return await self._read(read)

    async def names(self, session_ids: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the reason of each session, and the beginning of the code of its first execution."""
        query = (
            "SELECT reason, (SELECT substr(code, 1, ?) FROM executions WHERE session_id = sessions.id "
            "ORDER BY rowid LIMIT 1) FROM sessions WHERE id = ?"
        )

        def read(connection: sqlite3.Connection) -> dict[str, tuple[str, str]]:
            rows = {one: connection.execute(query, (_CODE_CHARS, one)).fetchone() for one in session_ids}
            return {session_id: (row[0], row[1] or "") for session_id, row in rows.items() if row}

        return await self._read(read) if session_ids else {}

    async def forks(self, session_id: str) -> list[str]:
        """Return the sessions that are forks of this one, oldest first."""
        query = "SELECT id FROM sessions WHERE origin = ? AND origin <> '' ORDER BY created_at LIMIT 1000"
        return await self._read(lambda connection: [row[0] for row in connection.execute(query, (session_id,))])

    async def search(self, owner: str | None, query: TextQuery) -> tuple[list[FoundRow], int]:
        """Return cells that have a text, of one owner or of all, and how many are not in the index yet."""
        self._commit()
        return await asyncio.to_thread(self._search, owner, query)

    def _search(self, owner: str | None, query: TextQuery) -> tuple[list[FoundRow], int]:
        until = time.monotonic() + READ_S
        found: list[FoundRow] = []
        left = 0
        for each in owners(self._path) if owner is None else [owner]:
            rows, unread = search(self._path, each, query, until)
            found += rows
            left += unread
        return sorted(found, key=lambda row: row.place, reverse=True)[: query.limit], left

    # Executions

    async def executions(self, session_id: str, *, before: int | None, limit: int) -> list[ExecutionRow]:
        """Return executions of a session before a place, the latest first."""
        query = f"{_EXECUTION} WHERE session_id = ? AND rowid < ? ORDER BY rowid DESC LIMIT ?"
        values = (session_id, before if before is not None else 2**62, limit)
        return await self._read(lambda connection: [*map(_execution_row, connection.execute(query, values))])

    async def executions_from(self, session_id: str, place: int, limit: int) -> list[ExecutionRow]:
        """Return executions of a session from a place on, the earliest first."""
        query = f"{_EXECUTION} WHERE session_id = ? AND rowid >= ? ORDER BY rowid LIMIT ?"
        values = (session_id, place, limit)
        return await self._read(lambda connection: [*map(_execution_row, connection.execute(query, values))])

    async def execution(self, execution_id: str) -> ExecutionRow | None:
        """Return an execution by its id; None if there is none."""
        if not execution_id.isascii():
            return None

        def find(connection: sqlite3.Connection) -> ExecutionRow | None:
            row = connection.execute(f"{_EXECUTION} WHERE id = ?", (execution_id,)).fetchone()
            return _execution_row(row) if row else None

        return await self._read(find)

    async def count(self, session_id: str, before: int | None = None) -> int:
        """Return how many executions a session has, or had before a place."""
        query = "SELECT count(*) FROM executions WHERE session_id = ? AND rowid < ?"
        values = (session_id, before if before is not None else 2**62)
        return await self._read(lambda connection: int(connection.execute(query, values).fetchone()[0]))

    async def places(self, session_id: str, every: int) -> list[int]:
        """Return the place of every so many executions of a session, counted from the latest."""
        # Hops along the index, in one call of SQLite: a row for each execution would cost ten times as much.
        query = (
            "WITH RECURSIVE hops (place) AS (SELECT (SELECT rowid FROM executions WHERE session_id = :session "
            "ORDER BY rowid DESC LIMIT 1 OFFSET :skipped) UNION ALL SELECT (SELECT rowid FROM executions "
            "WHERE session_id = :session AND rowid < hops.place ORDER BY rowid DESC LIMIT 1 OFFSET :skipped) "
            "FROM hops WHERE hops.place IS NOT NULL) "
            "SELECT place FROM hops WHERE place > (SELECT min(rowid) FROM executions WHERE session_id = :session)"
        )
        values = {"session": session_id, "skipped": every - 1}
        return await self._read(lambda connection: [row[0] for row in connection.execute(query, values)])

    async def undone(self, session_id: str, limit: int = 1_000) -> list[str]:
        """Return the executions of a session that are undone, the latest first."""
        query = "SELECT id FROM executions WHERE session_id = ? AND undone_at IS NOT NULL ORDER BY rowid DESC LIMIT ?"
        return await self._read(lambda connection: [row[0] for row in connection.execute(query, (session_id, limit))])

    async def calls(self, execution_id: str) -> list[CallEntry]:
        """Return the tool calls of an execution."""
        query = (
            "SELECT number, server, tool, state, started_at, duration_s, reason FROM calls WHERE execution_id = ? "
            "ORDER BY number"
        )

        def read(connection: sqlite3.Connection) -> list[CallEntry]:
            return [
                CallEntry(
                    number=number,
                    server=server,
                    tool=tool,
                    state=state,
                    started_at=iso_ms(started_at),
                    duration_s=duration_s,
                    reason=reason,
                )
                for number, server, tool, state, started_at, duration_s, reason in connection.execute(
                    query, (execution_id,)
                )
            ]

        return await self._read(read)

    # Output

    async def output(self, execution_id: str, since: int, limit: int) -> tuple[list[OutputEvent], bool]:
        """Return events after number `since`, within `BATCH_BYTES` and at least one, and whether there are more."""
        return await self._read(lambda connection: _output(connection, execution_id, since, limit))

    async def event(self, execution_id: str, sequence: int) -> OutputEvent | None:
        """Return one event; None if there is none of this number."""
        query = f"{_EVENTS} AND sequence = ?"

        def find(connection: sqlite3.Connection) -> OutputEvent | None:
            row = connection.execute(query, (execution_id, min(sequence, 2**62))).fetchone()
            return _event(row) if row else None

        return await self._read(find)

    async def excerpt(self, execution_id: str, upto: int, chars: int) -> list[OutputEvent]:
        """Return the events up to a number (0 for all), of long text only head and tail; see `EventBudget`."""
        return await self._read(lambda connection: _excerpt(connection, execution_id, upto or 2**62, chars))

    async def size(self, execution_id: str, upto: int) -> tuple[int, int]:
        """Return how many characters and lines the text of an execution has up to an event."""
        query = (
            "SELECT coalesce(sum(length(text)), 0), "
            "coalesce(sum(length(text) - length(replace(text, char(10), ''))), 0) "
            "FROM events WHERE execution_id = ? AND sequence <= ? AND kind IN ('stdout', 'stderr', 'notice')"
        )
        values = (execution_id, upto)
        chars, lines = await self._read(lambda connection: connection.execute(query, values).fetchone())
        return int(chars), int(lines)

    async def tail(self, execution_id: str, since: int) -> tuple[Tail, list[OutputEvent]] | None:
        """Return the end of the text after an event, counted from there, and the events that are not text.

        None where there is nothing after it. Reads a part at a time, so the caller asks again until it has all.
        """
        return await self._read(lambda connection: _tail(connection, execution_id, since))

    async def lines(self, row: ExecutionRow, first: int, count: int, search: str, *, is_complete: bool) -> LinePage:
        """Return some lines of the printed output of an execution, and which of all have the searched text."""
        execution = row.id, row.session_id
        is_dropped = row.dropped_at is not None
        return await self._read(
            lambda connection: self._lines.read(
                connection,
                execution,
                first=first,
                count=count,
                search=search,
                is_complete=is_complete,
                is_dropped=is_dropped,
            )
        )


def _sessions(connection: sqlite3.Connection, wanted: SessionQuery, limit: int) -> list[SessionRecord]:
    conditions = [f"state IN ({', '.join('?' * len(wanted.states))})"]
    values: list[object] = [*wanted.states]
    if wanted.owner:
        conditions.append("principal = ?")
        values.append(wanted.owner)
    if wanted.run:
        conditions.append("(state <> 'live' OR run = ?)")
        values.append(wanted.run)
    if wanted.text:
        conditions.append("(instr(lower(id || ' ' || reason || ' ' || environment || ' ' || principal), ?) > 0)")
        values.append(wanted.text.lower())
    if wanted.before is not None:
        conditions.append("(created_at, id) < (?, ?)")
        values.extend(wanted.before)
    condition = " AND ".join(conditions)
    query = f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {condition} ORDER BY created_at DESC, id DESC LIMIT ?"  # noqa: S608
    return [session_record(row) for row in connection.execute(query, (*values, limit))]


def _execution_row(row: tuple[Any, ...]) -> ExecutionRow:
    *plain, result = row
    parsed = ExecutionResult.model_validate_json(result) if result is not None else None
    return ExecutionRow._make((*plain, parsed))


def _event(row: tuple[Any, ...]) -> OutputEvent:
    sequence, kind, text, data = row
    return OutputEvent(sequence=sequence, kind=kind, text=text, data=json.loads(data))


def _output(
    connection: sqlite3.Connection, execution_id: str, since: int, limit: int
) -> tuple[list[OutputEvent], bool]:
    found: list[OutputEvent] = []
    size = 0
    query = f"{_EVENTS} AND sequence > ? ORDER BY sequence LIMIT ?"
    for row in connection.execute(query, (execution_id, min(since, 2**62), limit + 1)):
        size += len(row[2]) + len(row[3]) + _EVENT_BYTES
        if found and (size > BATCH_BYTES or len(found) == limit):
            return found, True
        found.append(_event(row))
    return found, False


def _excerpt(connection: sqlite3.Connection, execution_id: str, upto: int, chars: int) -> list[OutputEvent]:
    budget = EventBudget(chars)
    size = 0
    last = 0
    for row in connection.execute(f"{_EVENTS} AND sequence <= ? ORDER BY sequence", (execution_id, upto)):
        budget.add(_event(row))
        size += len(row[2]) + len(row[3])
        last = row[0]
        if size > _WHOLE_BYTES:
            break
    else:
        return budget.events()
    # Of the rest, read only what can be left of it: what is not text, and the end of the text.
    between = "AND sequence > ? AND sequence <= ? AND kind NOT IN ('stdout', 'stderr', 'notice')"
    place = (execution_id, last, upto)
    rows = [*connection.execute(f"{_EVENTS} {between} ORDER BY sequence LIMIT ?", (*place, _MAX_RICH))]
    total = (
        "SELECT coalesce(sum(length(text)), 0) FROM events "
        "WHERE execution_id = ? AND sequence > ? AND sequence <= ? AND kind IN ('stdout', 'stderr', 'notice')"
    )
    left = int(connection.execute(total, place).fetchone()[0])
    tail: list[tuple[Any, ...]] = []
    taken = 0
    texts = "AND sequence > ? AND sequence <= ? AND kind IN ('stdout', 'stderr', 'notice')"
    for row in connection.execute(f"{_EVENTS} {texts} ORDER BY sequence DESC", place):
        tail.append(row)
        taken += len(row[2])
        if taken > chars:
            break
    skipped = left - taken
    if skipped > 0:
        # Stands for the text that was not read, so that what is left out is counted in full.
        budget.skip(skipped)
    for row in sorted([*rows, *tail]):
        budget.add(_event(row))
    return budget.events()


def _tail(connection: sqlite3.Connection, execution_id: str, since: int) -> tuple[Tail, list[OutputEvent]] | None:
    size = lines = chars = 0
    last = since
    text = ""
    rich: list[OutputEvent] = []
    for row in connection.execute(f"{_EVENTS} AND sequence > ? ORDER BY sequence", (execution_id, since)):
        last = row[0]
        size += len(row[2]) + len(row[3]) + _EVENT_BYTES
        if row[1] in TEXT_KINDS:
            lines += row[2].count("\n")
            chars += len(row[2])
            text = (text + row[2])[-_TAIL_CHARS:]
        else:
            rich.append(_event(row))
        if size > _TAIL_BYTES:
            break
    if last == since:
        return None
    return Tail(execution_id=execution_id, sequence=last, lines=lines, chars=chars, text=last_lines(text)), rich


def last_lines(text: str) -> str:
    """Return the end of a text, as much as is told of an output that is too long for a stream."""
    return "\n".join(text[-_TAIL_CHARS:].split("\n")[-TAIL_LINES - 1 :])


def parsed_place(place: str) -> int:
    """Return the number in a cursor of executions, or refuse another text."""
    if not place.isdecimal() or len(place) > 18:
        raise InvalidArgument("the cursor is none that this list gave", hint="Pass the `next` of the page before")
    return int(place)


__all__ = ["STREAM_CHARS", "ExecutionRow", "HistoryReader", "SessionQuery", "parsed_place"]
