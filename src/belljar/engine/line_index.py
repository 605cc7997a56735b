"""Lines of the printed output of an execution, any page of them by one query of the journal.

An index marks the output after every `MARK_EVENTS` events or `MARK_CHARS` characters: the event, and how many lines end
before its end. It is built when somebody first asks for lines, goes on where it ended while the execution runs, and is
kept beside the displays once the execution has ended. Runs in the threads of `HistoryReader`.
"""

import sqlite3
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from belljar.files.private import make_folder, write_file
from belljar.models import Model
from belljar.outputs.spoofed_notices import disarmed

MARK_EVENTS = 1_000
MARK_CHARS = 256 * 1024
MAX_MARKS = 20_000
"""With more of them, every second one is dropped: a file of some 300 kB at most, for output of any size."""
MAX_LINE_CHARS = 10_000
"""More of one line is not shown."""
MAX_PAGE_CHARS = 1_000_000
"""The lines of one answer have no more than this together: it then has fewer lines than were asked for."""
MAX_READ_CHARS = 64 * 1024 * 1024
"""More is not read for one page, which matters only for lines of many megabytes."""
MAX_MATCHES = 1_000
FILE = "lines"
_MAX_OPEN = 64
# Shorter output than this is read faster than a file.
_LEAST_KEPT_CHARS = 1024 * 1024
_MAX_FILE_BYTES = 4 * 1024 * 1024
_VERSION = 1
_TEXTS = (
    "SELECT sequence, kind, text FROM events WHERE execution_id = ? AND sequence > ? AND text <> '' "
    "AND kind IN ('stdout', 'stderr', 'notice', 'display') ORDER BY sequence"
)


@dataclass(frozen=True, slots=True)
class LinePage:
    """Some lines, how many there are, and the numbers of those that have the searched text."""

    lines: list[str]
    total: int
    matches: list[int]


class _SavedIndex(Model):
    """An index in its file."""

    version: int
    last_sequence: int
    lines: int
    is_at_line_start: bool
    sequences: list[int]
    ends: list[int]


@dataclass(slots=True)
class LineIndex:
    """The marks of one execution. `sequences[n]` is an event, `ends[n]` the number of lines that end up to there."""

    last_sequence: int = 0
    lines: int = 0
    is_at_line_start: bool = True
    chars: int = 0
    sequences: list[int] = field(default_factory=lambda: [0])
    ends: list[int] = field(default_factory=lambda: [0])
    is_complete: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _events: int = 0
    _marked_chars: int = 0
    _step: int = 1

    @property
    def total(self) -> int:
        """Return the number of lines, with the one that has no end yet."""
        return self.lines + (not self.is_at_line_start)

    def extend(self, connection: sqlite3.Connection, execution_id: str) -> None:
        """Read what came after the last event that is known."""
        for sequence, text in _texts(connection, execution_id, self.last_sequence):
            self.last_sequence = sequence
            self.lines += text.count("\n")
            self.is_at_line_start = text.endswith("\n")
            self.chars += len(text)
            self._events += 1
            due = self._events >= MARK_EVENTS * self._step
            if due or self.chars - self._marked_chars >= MARK_CHARS * self._step:
                self._mark()

    def _mark(self) -> None:
        self.sequences.append(self.last_sequence)
        self.ends.append(self.lines)
        self._events, self._marked_chars = 0, self.chars
        if len(self.sequences) > MAX_MARKS:
            self._step *= 2
            self.sequences, self.ends = self.sequences[::2], self.ends[::2]

    def page(self, connection: sqlite3.Connection, execution_id: str, first: int, count: int) -> list[str]:
        """Return `count` lines from line `first` on, or fewer; see `MAX_PAGE_CHARS`."""
        # The last mark before which line `first - 1` has not ended: the line after it then begins within what is read.
        place = max(0, bisect_right(self.ends, first - 2) - 1)
        number = self.ends[place] + 1
        found: list[str] = []
        line, length = [""], 0
        shown = read = 0
        for _, text in _texts(connection, execution_id, self.sequences[place], is_marked=True):
            read += len(text)
            pieces = text.split("\n")
            for place_in_text, piece in enumerate(pieces):
                if place_in_text:
                    if number >= first:
                        found.append("".join(line)[:MAX_LINE_CHARS])
                        shown += len(found[-1])
                    number += 1
                    line, length = [""], 0
                    if len(found) == count or shown >= MAX_PAGE_CHARS:
                        return found
                if number >= first and length < MAX_LINE_CHARS:
                    line.append(piece[:MAX_LINE_CHARS])
                    length += len(piece)
            if read > MAX_READ_CHARS:
                break
        if length:
            found.append("".join(line)[:MAX_LINE_CHARS])
        return found

    def saved(self) -> str:
        """Return the content of its file."""
        return _SavedIndex(
            version=_VERSION,
            last_sequence=self.last_sequence,
            lines=self.lines,
            is_at_line_start=self.is_at_line_start,
            sequences=self.sequences,
            ends=self.ends,
        ).model_dump_json()


class LineIndexes:
    """The indexes that were asked for lately. `sessions` is the folder of all sessions."""

    def __init__(self, sessions: Path) -> None:
        self._sessions = sessions
        self._open: OrderedDict[str, LineIndex] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self,
        connection: sqlite3.Connection,
        execution: tuple[str, str],
        *,
        first: int,
        count: int,
        search: str = "",
        is_complete: bool,
        is_dropped: bool = False,
    ) -> LinePage:
        """Return some lines of an execution, which is its id and that of its session."""
        execution_id, session_id = execution
        index = LineIndex() if is_dropped else self._index(execution_id, session_id)
        with index.lock:
            if not index.is_complete:
                index.extend(connection, execution_id)
                index.is_complete = is_complete
                if is_complete and not is_dropped and index.chars >= _LEAST_KEPT_CHARS:
                    self._keep(index, execution_id, session_id)
        matches = _matches(connection, execution_id, search) if search else []
        return LinePage(index.page(connection, execution_id, first, count), index.total, matches)

    def _index(self, execution_id: str, session_id: str) -> LineIndex:
        with self._lock:
            index = self._open.get(execution_id)
            if index is None:
                index = self._open[execution_id] = _load(self._path(execution_id, session_id)) or LineIndex()
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(execution_id)
            return index

    def _path(self, execution_id: str, session_id: str) -> Path:
        # Without a dot: the store of displays counts the files that have one.
        return self._sessions / session_id / "displays" / execution_id / FILE

    def _keep(self, index: LineIndex, execution_id: str, session_id: str) -> None:
        path = self._path(execution_id, session_id)
        if not (self._sessions / session_id).is_dir():  # it was cleared, and what it was must not come back
            return
        try:
            make_folder(path.parent.parent)
            make_folder(path.parent)
            write_file(path, index.saved())
        except OSError:  # a full disk: the index is built anew next time
            path.unlink(missing_ok=True)


def _load(path: Path) -> LineIndex | None:
    try:
        with path.open("rb") as file:
            saved = _SavedIndex.model_validate_json(file.read(_MAX_FILE_BYTES))
    except (OSError, ValidationError):
        return None
    is_whole = saved.version == _VERSION and len(saved.sequences) == len(saved.ends) > 0 and saved.ends[0] == 0
    if not is_whole:
        return None
    return LineIndex(
        last_sequence=saved.last_sequence,
        lines=saved.lines,
        is_at_line_start=saved.is_at_line_start,
        sequences=saved.sequences,
        ends=saved.ends,
        is_complete=True,
    )


def _texts(
    connection: sqlite3.Connection, execution_id: str, after: int, *, is_marked: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the printed text after an event; what a display says is a line of its own.

    With `is_marked`, for people to read, what looks like a notice of belljar's and was printed says so.
    """
    for sequence, kind, text in connection.execute(_TEXTS, (execution_id, after)):
        shown = disarmed(text) if is_marked and kind != "notice" else text
        yield sequence, f"{shown}\n" if kind == "display" else shown


def _matches(connection: sqlite3.Connection, execution_id: str, search: str) -> list[int]:
    """Return the numbers of the first lines that have a text, in any case. Reads all output once."""
    wanted = search.lower()
    found: list[int] = []
    number, rest = 1, ""
    for _, text in _texts(connection, execution_id, 0):
        # The end of the text before, in which a match may have begun. None of it is a whole match.
        searched = rest + text.lower()
        counted = place = 0
        while (place := searched.find(wanted, place)) >= 0:
            number += searched.count("\n", counted, place)
            counted = place
            if not found or found[-1] != number:
                found.append(number)
            if len(found) == MAX_MATCHES:
                return found
            # One match of a line is enough.
            end = searched.find("\n", place)
            if end < 0:
                break
            place = end
        number += searched.count("\n", counted)
        rest = searched[searched.rfind("\n") + 1 :][-(len(wanted) - 1) :] if len(wanted) > 1 else ""
    return found
