"""The journal opened read-only, for the operator and for exports: any session, whether its server runs or not.

A server may be writing at the same time. Changes nothing, so it can neither repair nor upgrade the file. Also reads the
printed text of one execution.
"""

import os
import sqlite3
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from belljar.errors import InvalidArgument, SessionNotFound
from belljar.journal.damage import damage_told
from belljar.journal.journal import KILLED, Journal
from belljar.journal.run_records import RunRecords
from belljar.journal.schema import VERSION, version_of
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.journal.writer import LAST_BUSY_S
from belljar.models import OutputEvent
from belljar.outputs.displays import read_display
from belljar.outputs.notebook import NotebookCell
from belljar.outputs.spoofed_notices import disarmed_around
from belljar.outputs.terminal_text import LineFolder

_SHOWN = 5


class Archive:
    """All sessions of a data directory, as they were when the archive was opened."""

    def __init__(self, data_directory: Path, journal: Journal) -> None:
        self._folder = data_directory / "sessions"
        self._journal = journal
        self.records = SessionRecords(journal, "")

    @property
    def runs(self) -> RunRecords:
        """Return the runs of workflows."""
        return RunRecords(self._journal, "")

    def find(self, prefix: str) -> SessionRecord:
        """Return the session whose id begins with `prefix`, or refuse a prefix of none or of several."""
        if not prefix.isascii() or not prefix.isalnum():
            raise InvalidArgument(f"{prefix[:64]!r} is no session id", hint=self._latest())
        found = self._ids("substr(id, 1, length(?)) = ?", (prefix, prefix))
        if not found:
            raise SessionNotFound(f"no session here has an id that begins with {prefix[:64]}", hint=self._latest())
        if len(found) > 1:
            raise InvalidArgument(
                f"{prefix} begins the ids of {'several' if len(found) > _SHOWN else len(found)} sessions",
                hint=f"Give more of the id: {', '.join(found[:_SHOWN])}",
            )
        entry = self.records.find(found[0])
        if entry is None or entry.state == "gone":
            raise SessionNotFound(f"session {found[0]} {entry.end if entry else 'is gone'}, and its executions with it")
        return entry

    def count(self, session_id: str) -> int:
        """Return how many executions a session has."""
        return next(self._journal.rows("SELECT count(*) FROM executions WHERE session_id = ?", (session_id,)))[0]

    def cells(self, session_id: str, *, is_live: Callable[[], bool]) -> Iterator[NotebookCell]:
        """Yield a session's executions and installations in order.

        `is_live` is asked, for an execution without a result, if its server runs.
        """
        installs: dict[str, list[NotebookCell]] = {}
        for after, code in self._journal.installs(session_id):
            installs.setdefault(after, []).append(NotebookCell(code, None, (), is_install=True))
        yield from installs.get("", ())
        for record in self._journal.of_session(session_id):
            fate = ""
            if record.result is None:
                fate = "it had not ended when this was exported" if is_live() else f"{KILLED} while it ran"
            yield NotebookCell(record.code, record.result, self._journal.events(record.id), record.is_undone, fate)
            yield from installs.get(record.id, ())

    def display_reader(self, session_id: str) -> Callable[[str], bytes | None]:
        """Return a function that reads a display of a session by its URI, or returns None."""
        return partial(read_display, self._folder / session_id / "displays")

    def _ids(self, condition: str, values: tuple[object, ...] = ()) -> list[str]:
        query = (
            f"SELECT id FROM sessions WHERE state <> 'unborn' AND {condition} ORDER BY used_at DESC LIMIT {_SHOWN + 1}"  # noqa: S608
        )
        return [identifier for (identifier,) in self._journal.rows(query, values)]

    def _latest(self) -> str:
        latest = self._ids("state <> 'gone'")[:_SHOWN]
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
            # One transaction, so that a server that writes meanwhile does not change what the caller reads.
            connection.execute("BEGIN")
            yield Archive(data_directory, Journal(path, connection))
    except sqlite3.Error as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    # SQLite creates files beside the journal when it opens it. In a folder that is not writable it cannot, but no
    # server writes there either, unless those files are there already.
    is_immutable = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    options = "immutable=1" if is_immutable else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True, isolation_level=None, timeout=LAST_BUSY_S)


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    version = version_of(connection)
    if version != VERSION:
        age, action = (
            ("a later", "Upgrade belljar") if version > VERSION else ("an earlier", "Start `belljar serve` once")
        )
        raise InvalidArgument(f"{path} is of {age} belljar (version {version}, this one knows {VERSION})", hint=action)


# The printed text of one execution

_PRINTED = (
    "SELECT sequence, kind, text FROM events "
    "WHERE execution_id = ? AND kind IN ('stdout', 'stderr', 'notice', 'display') AND text <> '' ORDER BY sequence"
)
_KINDS = ("stdout", "stderr", "notice", "display")


@dataclass(frozen=True, slots=True)
class PrintedPage:
    """A part of what an execution printed, with text that imitates a notice of belljar's marked."""

    text: str
    is_last: bool


def read_printed(
    journal: Path, execution_id: str, offset: int, limit: int, unwritten: Sequence[OutputEvent] = ()
) -> PrintedPage:
    """Return the text of an execution from character `offset` on, at most `limit` characters; 0 means all.

    Both count characters as they were printed, without marks; of a line that is written over, the last
    state is returned. Opens a connection of its own, so any thread may call it.
    `unwritten` are the events that were not in the file when the caller looked; those that were written since are not
    repeated.
    """
    parts: list[tuple[str, bool]] = []
    folder = LineFolder()
    left = limit or sys.maxsize
    is_last = True
    with damage_told(), closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True)) as connection:
        for kind, raw in _kinds_and_texts(connection.execute(_PRINTED, (execution_id,)), unwritten):
            text = f"{raw}\n" if kind == "display" and raw else raw
            skipped = min(offset, len(text))
            offset -= skipped
            part = text[skipped : skipped + left]
            left -= len(part)
            is_stream = kind in ("stdout", "stderr")
            parts += [(line, False) for _, line in (folder.add(kind, part) if is_stream else folder.settle())]
            if not is_stream:
                parts.append((part, kind == "notice"))
            if skipped + len(part) < len(text):
                is_last = False
                break
    parts += [(line, False) for _, line in folder.settle()]
    return PrintedPage(disarmed_around(parts), is_last)


def read_stream_texts(
    journal: Path, execution_id: str, unwritten: Sequence[OutputEvent] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the texts of an execution in order, each with its kind: stdout, stderr, notice or display.

    Like `read_printed`, it opens a connection of its own.
    """
    with damage_told(), closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True)) as connection:
        yield from _kinds_and_texts(connection.execute(_PRINTED, (execution_id,)), unwritten)


def _kinds_and_texts(
    rows: Iterable[tuple[int, str, str]], unwritten: Sequence[OutputEvent]
) -> Iterator[tuple[str, str]]:
    written = 0
    for sequence, kind, text in rows:
        written = sequence
        yield kind, text
    for event in unwritten:
        if event.sequence > written and event.kind in _KINDS:
            yield event.kind, event.text
