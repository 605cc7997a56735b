"""The journal: executions, their numbered output events and their results, in one SQLite file.

Writing an event takes some 20 µs, so it happens on the event loop's thread, in order. What gathers is committed before
any query, an execution before its code runs, before a caller is told of it, and when it has ended; its output within
`COMMIT_S`, or before a caller is told of it. An execution that was only submitted is nearly always written when it
starts, as one row that has started already, because it nearly always starts at once.
"""

import asyncio
import json
import os
import secrets
import sqlite3
import string
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belljar.errors import Busy, JournalDamaged, SettingsError
from belljar.files.private import FILE_MODE
from belljar.journal.damage import SALVAGE_HINT, damage_told, damaged, is_damage
from belljar.journal.schema import migrate
from belljar.journal.writer import BUSY_S, LAST_BUSY_S, JournalWriter
from belljar.models import ExecutionResult, OutputEvent
from belljar.toolbox.base import CallRecord

PROBE_S = 1.0
# After this much was written, the journal's size is checked at once instead of at the next interval (`retention.py`).
LOOK_BYTES = 8 * 1024 * 1024
# What the shortest execution adds to the write-ahead log. The size check, in a thread, also empties that log.
EXECUTION_BYTES = 5 * 4_096
# The write-ahead log is truncated to this size once all of it is in the journal.
WAL_BYTES = 16 * 1024 * 1024
# SQLite's own checkpoint of the log waits for the disk on the event loop's thread, so it happens only at a log of this
# size, which the checks in a thread normally prevent.
CHECKPOINT_PAGES = 4_000
_BEGIN = (
    "INSERT INTO executions (id, session_id, principal, code, submitted_at, key, author, client, started_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_CHANGE = "UPDATE executions SET code = ? WHERE id = ?"
_START = "UPDATE executions SET started_at = ? WHERE id = ?"
_APPEND = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
_FINISH = "UPDATE executions SET result = ?, output_bytes = ?, display_bytes = ?, ended_at = ? WHERE id = ?"
_CALL = (
    "INSERT INTO calls (execution_id, number, server, tool, state, started_at, duration_s, reason) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (execution_id, number) DO UPDATE SET "
    "state = excluded.state, duration_s = excluded.duration_s, reason = excluded.reason"
)
_INSTALL = (
    "INSERT INTO installs (session_id, after_execution, code) VALUES (?, "
    "coalesce((SELECT id FROM executions WHERE session_id = ? ORDER BY rowid DESC LIMIT 1), ''), ?)"
)
# The most calls of one execution. A loop over a tool would otherwise fill the file with rows that nobody reads.
MAX_CALLS = 1_000
_RECORD = (
    "SELECT id, session_id, principal, code, result, undone_at, started_at, submitted_at, author, client "
    "FROM executions"
)
_ID_LETTERS = 17
"""The first three are the journal's tag, the others give 66 bits. As 32 hexadecimal digits an id was 19 tokens, and now
it is 9. It has no digits, so that nobody takes it for a number."""
TAG_LETTERS = 3
_TAGS = len(string.ascii_lowercase) ** TAG_LETTERS
KILLED = "its server ended without notice"
"""The cause of an execution that has no result because its server was killed."""
GONE = "was removed or replaced while the server has it open, and ends with it"
UNKEPT = "[belljar: output is missing here: the journal could not be written]\n"


def has_id_form(text: str) -> bool:
    """Return whether a text could be an id of ours; names that callers choose look otherwise."""
    return len(text) == _ID_LETTERS and text.isascii() and text.isalpha() and text.islower()


def new_id(tag: str = "") -> str:
    """Return an id that nobody can guess, which begins with `tag`."""
    # One random number for all letters: each call of the system's generator takes 15 µs.
    count = _ID_LETTERS - len(tag)
    return tag + _letters(secrets.randbelow(len(string.ascii_lowercase) ** count), count)


def _letters(number: int, count: int) -> str:
    """Return the last `count` digits of a number in base 26, as letters."""
    letters = ""
    for _ in range(count):
        number, letter = divmod(number, len(string.ascii_lowercase))
        letters += string.ascii_lowercase[letter]
    return letters


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution in the journal; `result` is None until it has finished."""

    id: str
    session_id: str
    principal: str
    code: str
    result: ExecutionResult | None
    is_undone: bool = False
    """Whether its session was rewound to before it."""
    started_at: float | None = None
    """When its code began to run, as far as it may have; None while it waits for its turn."""
    submitted_at: float = 0.0
    author: str = ""
    """Who ran it; empty for the owner of the session."""
    client: str = ""
    """The name of the MCP client through which it came, if it gave one."""

    @property
    def has_begun(self) -> bool:
        """Return whether its code may have run."""
        return self.started_at is not None


class Journal(JournalWriter):
    """The journal of a runtime. The base class writes the rows, and holds them while they cannot be written."""

    def __init__(self, path: Path, connection: sqlite3.Connection, tag: str = "") -> None:
        super().__init__(connection)
        self.path = path
        self.tag = tag
        """The letters that ids made here begin with, so that other servers know where to ask for them."""
        self._identity = _identity(path)
        self._cut: set[str] = set()
        """Executions whose output is dropped because too much waits to be written."""
        self._grown_bytes = 0
        self.has_grown = asyncio.Event()
        """Set when so much was written that the size should be checked."""

    def new_id(self) -> str:
        """Return an id for what is recorded here."""
        return new_id(self.tag)

    def draw_tag(self) -> str:
        """Draw another tag, and return it; empty where something may be recorded whose id begins with this one."""
        self.flush()
        before = self.tag
        if not self.is_failing:
            try:
                self.tag = _tag(self._connection, draws_anew=True)
            except sqlite3.Error:
                self._connection.rollback()
        return self.tag if self.tag != before else ""

    def rows(self, query: str, values: tuple[object, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a query."""
        self.commit()
        with damage_told(self.note_damage):
            # No `yield from`, which closes the cursor when a caller stops early, and the journal may be closed by then.
            for row in self._connection.execute(query, values):  # noqa: UP028
                yield row

    def check_room(self) -> None:
        """Refuse another execution while too much waits to be written."""
        if self.is_full and self.damage:
            raise damaged(self.damage)
        if self.is_full:
            raise Busy(
                "the journal cannot be written, and no more executions can wait in memory to be kept",
                hint="Try again in 30 seconds; the server's operator finds the reason in its log",
            )

    def submit(self, record: ExecutionRecord, submitted_at: float, key: str = "") -> None:
        """Record that an execution was submitted, under its idempotency key if it has one."""
        whose = (record.id, record.session_id, record.principal)
        self.write(_BEGIN, (*whose, record.code, submitted_at, key or None, record.author, record.client, None))
        # Committed at once, so that another server finds the key.
        if key and self.find_key(record.principal, key) != record.id:
            raise Busy(
                "another server is at work on an execution with this idempotency_key", hint="Make the same call again"
            )

    def change_code(self, execution_id: str, code: str) -> None:
        """Record the code that a person allowed in place of an execution's; it has not begun."""
        self.write(_CHANGE, (code, execution_id))
        self.commit()

    def start(self, execution_id: str) -> None:
        """Record that the code of an execution is about to run."""
        now = time.time()
        if not self.amend(_BEGIN, execution_id, now):
            self.write(_START, (now, execution_id))
        self.commit()

    def find_key(self, principal: str, key: str) -> str | None:
        """Return the id of the execution that a principal submitted under a key; None if there is none."""
        query = "SELECT id FROM executions WHERE principal = ? AND key = ?"
        row = next(self.rows(query, (principal, key)), None)
        for execution_id, _, owner, _, _, known, *_ in self.values_of(_BEGIN):
            if (owner, known) == (principal, key):
                return execution_id
        return row[0] if row else None

    def append(self, execution_id: str, event: OutputEvent) -> None:
        """Record an output event of an execution."""
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
        """Record the result of an execution, with the size of its output in the journal and of its displays."""
        sizes = (output_bytes, display_bytes)
        self.write(_FINISH, (result.model_dump_json(), *sizes, time.time(), result.execution_id))
        self.commit()
        self._grow(EXECUTION_BYTES)

    def record_call(self, execution_id: str, number: int, call: CallRecord) -> None:
        """Record the start or the end of a tool call, by its number among those of its execution."""
        if number > MAX_CALLS:
            return
        what = (call.server, call.tool, call.state, time.time(), call.duration_s, call.reason)
        self.write(_CALL, (execution_id, number, *what))

    def record_install(self, session_id: str, code: str) -> None:
        """Record an installation behind the executions so far, as a cell that does the same."""
        self.write(_INSTALL, (session_id, session_id, code))
        self.commit()

    def installs(self, session_id: str) -> Iterator[tuple[str, str]]:
        """Yield a session's installations in order, each as the execution before it, if any, and its cell."""
        query = "SELECT after_execution, code FROM installs WHERE session_id = ? ORDER BY rowid"
        yield from self.rows(query, (session_id,))

    def undo(self, execution_ids: Sequence[str]) -> None:
        """Mark executions as undone, because their session was rewound."""
        now = time.time()  # one time for all of them, which tells those of one rewind from others
        for execution_id in execution_ids:
            self.write("UPDATE executions SET undone_at = ? WHERE id = ?", (now, execution_id))
        self.commit()

    def find(self, execution_id: str) -> ExecutionRecord | None:
        """Return an execution by its id; None if there is none."""
        if not execution_id.isascii():  # SQLite would refuse a lone surrogate by raising
            return None
        row = next(self.rows(f"{_RECORD} WHERE id = ?", (execution_id,)), None)
        for values in self.values_of(_BEGIN):
            begun = (*values[:4], None, None, values[-1], values[4], *values[6:8])
            row = begun if values[0] == execution_id else row
        for result, *_, finished in self.values_of(_FINISH):
            row = (*row[:4], result, *row[5:]) if row and finished == execution_id else row
        return _record(row) if row else None

    def of_session(self, session_id: str) -> Iterator[ExecutionRecord]:
        """Yield a session's executions in the order they were submitted."""
        for row in self.rows(f"{_RECORD} WHERE session_id = ? ORDER BY rowid", (session_id,)):
            yield _record(row)

    def unfinished(self, session_id: str) -> list[ExecutionRecord]:
        """Return a session's executions that have no result."""
        query = f"{_RECORD} WHERE session_id = ? AND result IS NULL ORDER BY rowid"
        return [_record(row) for row in self.rows(query, (session_id,))]

    def not_undone(self, session_id: str, most: int) -> list[str]:
        """Return the ids of the last `most` executions of a session that were not undone, in order."""
        query = "SELECT id FROM executions WHERE session_id = ? AND undone_at IS NULL ORDER BY rowid DESC LIMIT ?"
        return [row[0] for row in self.rows(query, (session_id, most))][::-1]

    def events(self, execution_id: str, since: int = 0) -> Iterator[OutputEvent]:
        """Yield the output events of an execution after event number `since`."""
        query = (
            "SELECT sequence, kind, text, data FROM events WHERE execution_id = ? AND sequence > ? ORDER BY sequence"
        )
        self.commit()
        unwritten = self.unwritten(execution_id, since)
        with damage_told(self.note_damage):
            # SQLite has no numbers above `sys.maxsize`.
            for sequence, kind, text, data in self._connection.execute(query, (execution_id, min(since, sys.maxsize))):
                yield OutputEvent(sequence=sequence, kind=kind, text=text, data=json.loads(data))
        yield from unwritten

    def unwritten(self, execution_id: str, since: int = 0) -> list[OutputEvent]:
        """Return the output events of an execution that wait in memory because the file could not be written."""
        return [
            OutputEvent.model_validate({"sequence": sequence, "kind": kind, "text": text, "data": json.loads(data)})
            for owner_id, sequence, kind, text, data in self.values_of(_APPEND)
            if owner_id == execution_id and sequence > since
        ]

    def unkept(self) -> str:
        """Return why what is told now will not be found by the next server; empty when it will."""
        if self.damage and self.is_failing:
            return f"the server's journal is damaged ({self.damage})"
        return "" if _identity(self.path) == self._identity else f"the server's journal {GONE}"

    def fault(self) -> str:
        """Return what is wrong with the file now, as the rest of a sentence about it; empty when nothing is.

        Opens a connection of its own, so any thread may call it.
        """
        if self.damage:
            return f"is damaged: {self.damage}"
        if _identity(self.path) != self._identity:
            return GONE
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=PROBE_S)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                # Writing the same version again writes a page to disk. It is read first, because another server may
                # have migrated the file meanwhile.
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute(f"PRAGMA user_version = {version}")
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            return f"is damaged: {error}" if is_damage(error) else f"cannot be written: {error}"
        return ""

    def output_bytes(self, session_id: str) -> int:
        """Return about how many bytes the output of a session's executions takes in the journal."""
        query = "SELECT coalesce(sum(output_bytes), 0) FROM executions WHERE session_id = ?"
        return next(self.rows(query, (session_id,)))[0]

    def forget_session(self, session_id: str) -> None:
        """Delete all executions and events of a session."""
        self.write(
            "DELETE FROM events WHERE execution_id IN (SELECT id FROM executions WHERE session_id = ?)", (session_id,)
        )
        self.write(
            "DELETE FROM calls WHERE execution_id IN (SELECT id FROM executions WHERE session_id = ?)", (session_id,)
        )
        self.write("DELETE FROM executions WHERE session_id = ?", (session_id,))
        self.write("DELETE FROM questions WHERE session_id = ?", (session_id,))
        self.write("DELETE FROM installs WHERE session_id = ?", (session_id,))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a path leads to; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def last_written(path: Path) -> float:
    """Return when something was last written to a journal; 0 where there is none."""
    times = [0.0]
    for file in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _record(row: tuple[Any, ...]) -> ExecutionRecord:
    identifier, session_id, principal, code, result, undone_at, started_at, *rest = row
    parsed = ExecutionResult.model_validate_json(result) if result is not None else None
    return ExecutionRecord(identifier, session_id, principal, code, parsed, undone_at is not None, started_at, *rest)


@contextmanager
def open_journal(path: Path) -> Generator[Journal]:
    """Open or create the journal file.

    Engines on one thread share one journal. With two, one would block the event loop while it waits for the other's
    transaction, which that same loop has to commit.
    """
    key = str(path.resolve()), threading.get_ident()
    journal, users = _open_journals.get(key) or (_open_usable(path), 0)
    _open_journals[key] = journal, users + 1
    try:
        yield journal
    finally:
        journal.flush()
        _, users = _open_journals.pop(key)
        if users > 1:
            _open_journals[key] = journal, users - 1
        else:
            journal.close()


_open_journals: dict[tuple[str, int], tuple[Journal, int]] = {}


def _open_usable(path: Path) -> Journal:
    with usable(path):
        return _open_file(path)


@contextmanager
def usable(path: Path) -> Generator[None]:
    """Turn an SQLite error at a server's start into an error of the settings, because the operator has to repair it."""
    try:
        yield
    except JournalDamaged as error:
        raise SettingsError(f"Journal {path} cannot be used: {error.message}", hint=SALVAGE_HINT) from error
    except sqlite3.Error as error:
        hint = "Make room on its disk, end the process that locks it, or choose another data_directory"
        raise SettingsError(
            f"Journal {path} cannot be used: {error}", hint=SALVAGE_HINT if is_damage(error) else hint
        ) from error


def _open_file(path: Path) -> Journal:
    # Create the file with a private mode; SQLite gives the files beside it (the write-ahead log) the same mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    connection = sqlite3.connect(path, isolation_level=None, timeout=LAST_BUSY_S)
    try:
        migrate(path, connection)
        tag = _tag(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
    except BaseException:
        connection.close()
        raise
    return Journal(path, connection, tag)


def _tag(connection: sqlite3.Connection, *, draws_anew: bool = False) -> str:
    """Return the tag of a file, drawn when it is first opened, and anew on demand as long as nothing is recorded.

    It is kept as the file's `application_id`, a number that SQLite leaves to applications: so it needs no table of its
    own, and earlier versions of belljar open the file as before.
    """
    connection.execute("BEGIN IMMEDIATE")  # two servers may open it at once
    try:
        (number,) = connection.execute("PRAGMA application_id").fetchone()
        tables = ("sessions", "executions", "runs") if draws_anew else ()
        is_empty = not any(connection.execute(f"SELECT 1 FROM {each} LIMIT 1").fetchone() for each in tables)  # noqa: S608
        if not number or (draws_anew and is_empty):
            number = 1 + secrets.randbelow(_TAGS)
            connection.execute(f"PRAGMA application_id = {number}")
    finally:
        connection.execute("COMMIT")
    return _letters(number - 1, TAG_LETTERS)
