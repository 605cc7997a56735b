"""The limit on the journal's size: output of the oldest finished executions is dropped when the journal is larger.

It is always the output of the owner who uses the most at that moment, so that nobody loses output because of another's.
A notice takes the place of dropped output, for every reader of the execution. The work is done on a connection of its
own, in a thread, in transactions of some milliseconds, so that it does not delay the server's own writing.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

from belljar import metrics
from belljar.files.fd_walk import remove_tree
from belljar.journal.journal import Journal
from belljar.journal.search_index import forget_part
from belljar.journal.writer import LAST_BUSY_S
from belljar.models import ExecutionResult, ResultNotice, iso
from belljar.outputs.budget import clip
from belljar.settings import MEBIBYTE

LOOK_S = 60.0
# Trim to a little below the limit, or every execution that ends would cost the oldest one its output.
LOW_WATER = 0.9
EVENTS_AT_ONCE = 64
PAGES_AT_ONCE = 512
# Free pages that stay in the file for the next rows.
SPARE_PAGES = 1_024
KEPT_CHARS = 1_000
# The pause between two transactions, for others to write: as long as the transaction took, and at least this.
REST_S = 0.002

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_trimming(journal: Journal, sessions: Path, limit_mb: int | None) -> AsyncGenerator[None]:
    """Keep the journal, and the displays under `sessions`, within the limit; None means no limit."""
    if limit_mb is None:
        yield
        return
    trimmer = Trimmer(journal.path, sessions, limit_mb)
    work = asyncio.get_running_loop().create_task(_trim_periodically(journal, trimmer))
    try:
        yield
    finally:
        trimmer.is_stopped = True
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _trim_periodically(journal: Journal, trimmer: "Trimmer") -> None:
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await journal.has_grown.wait()
        journal.has_grown.clear()
        try:
            dropped = await asyncio.to_thread(trimmer.trim)
        except (sqlite3.Error, OSError) as error:
            log.warning("the journal could not be trimmed: %s", error)
            continue
        if dropped:
            log.warning("the journal was over journal_mb: the output of %d executions was dropped", dropped)


class Trimmer:
    """Trims one journal. Its methods may be called in any thread."""

    def __init__(self, path: Path, sessions: Path, limit_mb: int) -> None:
        self._path = path
        self._sessions = sessions
        self._limit_mb = limit_mb
        self._is_tidy = False
        self.is_stopped = False
        """Set it to make `trim` return early, because its work may take seconds."""

    def trim(self) -> int:
        """Drop output while there is too much, and shrink the file; return how many executions lost theirs."""
        dropped = 0
        limit = self._limit_mb * MEBIBYTE
        with closing(_connect(self._path)) as connection:
            if not self._is_tidy:
                _finish_dropping(connection)
                self._is_tidy = True
            if _taken_bytes(connection) > limit:
                dropped = self._drop_oldest(connection, down_to=int(LOW_WATER * limit))
            self._shrink(connection)
        return dropped

    def _drop_oldest(self, connection: sqlite3.Connection, *, down_to: int) -> int:
        """Drop output, and then code, of the owner who uses the most at that moment.

        Output of running executions cannot be dropped. Where there are several owners, none is trimmed below an equal
        share because another owner's executions print a lot and do not end.
        """
        dropped = 0
        owners = {owner: _Owner(owner, size) for owner, size in _sizes(connection)}
        share = down_to // len(owners) if len(owners) > 1 else 0
        while owners and not self.is_stopped and _taken_bytes(connection) > down_to:
            owner = max(owners.values(), key=lambda each: each.size_bytes)
            if owner.size_bytes < share:
                break
            if (found := owner.next_output(connection)) is not None:
                self._drop(connection, *found)
                forget_part(self._path, owner.name, found[0], "output")
                metrics.outputs_dropped.add()
                dropped += 1
            elif (execution_id := owner.next_code(connection)) is not None:
                notice = f"# belljar: this code was dropped, to keep the journal within {self._limit_mb:,} MB"
                connection.execute("UPDATE executions SET code = ? WHERE id = ?", (notice, execution_id))
                forget_part(self._path, owner.name, execution_id, "code")
            else:
                del owners[owner.name]
        return dropped

    def _drop(self, connection: sqlite3.Connection, execution_id: str, session_id: str, result: str) -> None:
        """Replace the output of an execution by a notice.

        The notice is committed first; then the events are deleted in steps, because the server may end at any of them.
        """
        notice = f"[belljar: {self._dropped_text(time.time())}]\n"
        reduced = _reduced(ExecutionResult.model_validate_json(result), notice)
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "UPDATE executions SET dropped_at = ?, output_bytes = 0, display_bytes = 0, result = ? WHERE id = ?",
                (time.time(), reduced.model_dump_json(), execution_id),
            )
            connection.execute(
                "INSERT OR REPLACE INTO events SELECT ?, ?, 'notice', ?, '{}' "
                "WHERE EXISTS (SELECT 1 FROM executions WHERE id = ?)",
                (execution_id, max(1, reduced.sequence), notice, execution_id),
            )
        remove_tree(self._sessions / session_id / "displays" / execution_id)
        delete_events(connection, execution_id, before=max(1, reduced.sequence))

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Shrink the file by the pages that nothing uses."""
        while (free := connection.execute("PRAGMA freelist_count").fetchone()[0]) > SPARE_PAGES and not self.is_stopped:
            began = time.monotonic()
            # `executescript`, because it runs the statement to its end; `execute` would stop after the first page.
            connection.executescript(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
            rest(began)
            if connection.execute("PRAGMA freelist_count").fetchone()[0] >= free:
                break  # the file was created without incremental vacuum
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _dropped_text(self, moment: float) -> str:
        why = f"to keep the journal within {self._limit_mb:,} MB"
        return f"the output of this execution was dropped at {iso(moment)}, {why}"


def delete_events(connection: sqlite3.Connection, execution_id: str, *, before: int) -> None:
    """Delete the events of an execution that are numbered below `before`, in order, in short transactions."""
    query = "SELECT max(sequence) FROM (SELECT sequence FROM events WHERE execution_id = ? AND sequence < ? "
    query += f"ORDER BY sequence LIMIT {EVENTS_AT_ONCE})"
    while (last := connection.execute(query, (execution_id, before)).fetchone()[0]) is not None:
        began = time.monotonic()
        connection.execute("DELETE FROM events WHERE execution_id = ? AND sequence <= ?", (execution_id, last))
        rest(began)


def remove_outputs(path: Path, session_id: str) -> None:
    """Delete the events of a session that is over; call it in a thread, because it may take a second."""
    with closing(_connect(path)) as connection:
        found = connection.execute("SELECT id FROM executions WHERE session_id = ?", (session_id,)).fetchall()
        for (execution_id,) in found:
            delete_events(connection, execution_id, before=2**62)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=LAST_BUSY_S)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _taken_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes used by the journal, without its free pages, and by the displays beside it."""
    queries = (
        "PRAGMA page_count",
        "PRAGMA freelist_count",
        "PRAGMA page_size",
        "SELECT coalesce(sum(display_bytes), 0) FROM executions WHERE display_bytes > 0",
    )
    pages, free, page_bytes, displays = (int(connection.execute(query).fetchone()[0]) for query in queries)
    return (pages - free) * page_bytes + displays


class _Owner:
    """One principal's executions, with the position up to which they were trimmed.

    Reads one execution at a time, because an open query would keep the write-ahead log from being emptied.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._output_row = 0
        self._code_row = 0

    def next_output(self, connection: sqlite3.Connection) -> tuple[str, str, str] | None:
        """Return the id, session and result of the oldest finished execution that has output to drop."""
        found = connection.execute(
            "SELECT rowid, output_bytes + display_bytes, id, session_id, result FROM executions WHERE principal = ? "
            "AND rowid > ? AND output_bytes > 0 AND result IS NOT NULL ORDER BY rowid LIMIT 1",
            (self.name, self._output_row),
        ).fetchone()
        if found is None:
            return None
        self._output_row, size, execution_id, session_id, result = found
        self.size_bytes -= size
        return execution_id, session_id, result

    def next_code(self, connection: sqlite3.Connection) -> str | None:
        """Return the id of the oldest finished execution with long code, because code takes space as output does."""
        found = connection.execute(
            "SELECT rowid, length(code), id FROM executions WHERE principal = ? AND rowid > ? AND length(code) > ? "
            "AND result IS NOT NULL ORDER BY rowid LIMIT 1",
            (self.name, self._code_row, KEPT_CHARS),
        ).fetchone()
        if found is None:
            return None
        self._code_row, size, execution_id = found
        self.size_bytes -= size
        return execution_id


def _sizes(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    """Return about how many bytes each principal uses."""
    size = "output_bytes + display_bytes + length(code) + coalesce(length(result), 0)"
    return connection.execute(f"SELECT principal, sum({size}) FROM executions GROUP BY principal").fetchall()  # noqa: S608


def _finish_dropping(connection: sqlite3.Connection) -> None:
    """Delete the events that an earlier server had begun to drop."""
    query = "SELECT execution_id, max(sequence) FROM events WHERE execution_id IN "
    query += "(SELECT id FROM executions WHERE dropped_at IS NOT NULL) GROUP BY execution_id HAVING count(*) > 1"
    for execution_id, last in connection.execute(query).fetchall():
        delete_events(connection, execution_id, before=last)


def rest(began: float) -> None:
    """Leave the file to other writers for as long as the transaction took that began then."""
    time.sleep(max(REST_S, time.monotonic() - began))


def _reduced(result: ExecutionResult, notice: str) -> ExecutionResult:
    """Return the result without its output; how it ended stays."""
    return result.model_copy(
        update={
            "output": [notice],
            "notices": [ResultNotice(text=notice, at=0)],
            "stdout": "",
            "stderr": "",
            "displays": [],
            "truncated": None,
            "result": clip(result.result, KEPT_CHARS) if result.result is not None else None,
            "error": clip(result.error, KEPT_CHARS) if result.error is not None else None,
            "traceback": [],
        }
    )
