"""The journal as the operator reads it: any session's, whether its server runs, has gone, or died.

Opened read-only, beside a server that may be writing. Changes nothing, and so can neither mend nor upgrade it.
"""

import os
import sqlite3
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from belljar.errors import InvalidArgument, SessionNotFound
from belljar.journal.journal import KILLED, Journal
from belljar.journal.schema import VERSION, version_of
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.journal.writer import LAST_BUSY_S
from belljar.models import OutputEvent
from belljar.outputs.displays import read_display
from belljar.outputs.notebook import NotebookCell

_TOLD = 5


class Archive:
    """Every session of a data directory, as it was when this was opened."""

    def __init__(self, data_directory: Path, journal: Journal) -> None:
        self._folder = data_directory / "sessions"
        self._journal = journal
        self._roll = SessionRecords(journal, "")

    def find(self, prefix: str) -> SessionRecord:
        """The one session whose id begins like this."""
        if not prefix.isascii() or not prefix.isalnum():
            raise InvalidArgument(f"{prefix[:64]!r} is no session id", hint=self._latest())
        found = self._ids("substr(id, 1, length(?)) = ?", (prefix, prefix))
        if not found:
            raise SessionNotFound(f"no session here has an id that begins with {prefix[:64]}", hint=self._latest())
        if len(found) > 1:
            raise InvalidArgument(
                f"{prefix} begins the ids of {'several' if len(found) > _TOLD else len(found)} sessions",
                hint=f"Give more of the id: {', '.join(found[:_TOLD])}",
            )
        entry = self._roll.find(found[0])
        if entry is None or entry.state == "gone":
            raise SessionNotFound(f"session {found[0]} {entry.end if entry else 'is gone'}, and its executions with it")
        return entry

    def count(self, session_id: str) -> int:
        """How many executions a session has."""
        return next(self._journal.rows("SELECT count(*) FROM executions WHERE session_id = ?", (session_id,)))[0]

    def cells(self, session_id: str, *, is_live: Callable[[], bool]) -> Iterator[NotebookCell]:
        """A session's executions in order; `is_live` is asked about those that have not ended."""
        for record in self._journal.of_session(session_id):
            fate = ""
            if record.result is None:
                fate = "it had not ended when this was exported" if is_live() else f"{KILLED} while it ran"
            yield NotebookCell(record.code, record.result, self._journal.events(record.id), record.is_undone, fate)

    def display_reader(self, session_id: str) -> Callable[[str], bytes | None]:
        """Reads what a session's executions showed, by its URI; None for what is not there."""
        return partial(read_display, self._folder / session_id / "displays")

    def _ids(self, condition: str, values: tuple[object, ...] = ()) -> list[str]:
        query = (
            f"SELECT id FROM sessions WHERE state <> 'unborn' AND {condition} ORDER BY used_at DESC LIMIT {_TOLD + 1}"  # noqa: S608
        )
        return [identifier for (identifier,) in self._journal.rows(query, values)]

    def _latest(self) -> str:
        latest = self._ids("state <> 'gone'")[:_TOLD]
        return f"The latest sessions are {', '.join(latest)}" if latest else "There are no sessions on record"


@contextmanager
def open_archive(data_directory: Path) -> Generator[Archive]:
    """Open the journal of a data directory for reading."""
    path = data_directory / "journal.sqlite"
    if not path.is_file():
        raise InvalidArgument(
            f"there is no journal at {path}", hint="Name the server's data directory with --data-directory"
        )
    try:
        with closing(_connect(path)) as connection:
            _check_version(path, connection)
            # One transaction, so that a server at work does not change the story while it is told.
            connection.execute("BEGIN")
            yield Archive(data_directory, Journal(path, connection))
    except sqlite3.Error as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    # SQLite wants to make files beside the journal. In a folder where it may not, there is no server at work either,
    # unless one has left those files there already.
    is_still = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    options = "immutable=1" if is_still else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True, isolation_level=None, timeout=LAST_BUSY_S)


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    version = version_of(connection)
    if version != VERSION:
        age, action = (
            ("a later", "Upgrade belljar") if version > VERSION else ("an earlier", "Start `belljar serve` once")
        )
        raise InvalidArgument(f"{path} is of {age} belljar (version {version}, this one knows {VERSION})", hint=action)


# All that an execution printed, read from the journal's file. Reads by itself, so any thread may do it.

_PRINTED = (
    "SELECT sequence, kind, text FROM events "
    "WHERE execution_id = ? AND kind IN ('stdout', 'stderr', 'notice', 'display') AND text <> '' ORDER BY sequence"
)
_KINDS = ("stdout", "stderr", "notice", "display")


def read_printed(
    journal: Path, execution_id: str, offset: int, limit: int, unwritten: Sequence[OutputEvent] = ()
) -> str:
    """Text from character `offset` on, `limit` characters or all; what was `unwritten` may have been written since."""
    parts: list[str] = []
    left = limit or sys.maxsize
    with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True)) as connection:
        for text in _texts(connection.execute(_PRINTED, (execution_id,)), unwritten):
            skipped = min(offset, len(text))
            offset -= skipped
            part = text[skipped : skipped + left]
            left -= len(part)
            parts.append(part)
            if left <= 0:
                break
    return "".join(parts)


def _texts(rows: Iterable[tuple[int, str, str]], unwritten: Sequence[OutputEvent]) -> Iterator[str]:
    written = 0
    for sequence, kind, text in rows:
        written = sequence
        yield _text(kind, text)
    for event in unwritten:
        if event.sequence > written and event.kind in _KINDS:
            yield _text(event.kind, event.text)


def _text(kind: str, text: str) -> str:
    return f"{text}\n" if kind == "display" and text else text
