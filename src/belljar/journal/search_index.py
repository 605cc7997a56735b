"""The index of cells' code and output: a file of SQLite's full-text search for each owner, beside the journal.

It is made when somebody first searches, and each search brings it up to date: while nobody searches, no cell costs
anything. An owner's search reads that owner's file only, so that nothing in it, not even its time, depends on the cells
of others. Whatever is found is compared with the journal before it is told, which has the last word: what is not there
any more is not found, even where this file still has it. Any thread may call these functions.
"""

import hashlib
import os
import re
import sqlite3
import time
import unicodedata
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

from belljar.errors import EngineError, InvalidArgument
from belljar.files.private import FILE_MODE, make_folder
from belljar.journal.damage import PRIMARY_CODE
from belljar.outputs.terminal_text import as_plain

FOLDER: Final = "search"
MAX_QUERY_CHARS: Final = 1_000
READ_S: Final = 3.0
"""So long a search reads new cells into the index; the next one goes on with those that are left."""
_CELLS_AT_ONCE: Final = 100
_MOST_CHARS: Final = 50_000
"""So much of the code is read in, of the beginning of the output and of its end."""
_BUSY_S: Final = 5.0
_MAX_WORDS: Final = 64
_BEFORE_CHARS, _EXCERPT_CHARS = 80, 300
_VERSION: Final = 1
_TABLES: Final = """
CREATE TABLE cells (
    number INTEGER PRIMARY KEY,
    place INTEGER NOT NULL,
    execution_id TEXT NOT NULL UNIQUE,
    session_id TEXT NOT NULL,
    has_ended INTEGER NOT NULL
);
CREATE INDEX cells_of_session ON cells (session_id, place);
CREATE INDEX cells_running ON cells (place) WHERE has_ended = 0;
CREATE VIRTUAL TABLE texts USING fts5(code, output, tokenize = 'unicode61 remove_diacritics 2');
"""
# `number` is the time of a cell in microseconds, so that results of several owners and hosts have one order.
_CELL: Final = (
    "SELECT id, session_id, substr(code, 1, ?), submitted_at, result IS NOT NULL OR NOT EXISTS "
    "(SELECT 1 FROM journal.sessions s WHERE s.id = e.session_id AND s.state = 'live') "
    "FROM journal.executions e WHERE rowid = ?"
)
# Each session is read on from its own latest cell that is known and has its place yet: those that come back from a
# store have new places, which may be before the old ones.
_UNREAD: Final = (
    "SELECT e.rowid FROM journal.sessions s CROSS JOIN journal.executions e ON e.session_id = s.id AND e.rowid > "
    "coalesce((SELECT c.place FROM cells c WHERE c.session_id = s.id AND EXISTS (SELECT 1 FROM journal.executions k "
    "WHERE k.rowid = c.place AND k.id = c.execution_id) ORDER BY c.place DESC LIMIT 1), 0) "
    "WHERE s.principal = ? AND s.state <> 'gone' AND e.principal = s.principal ORDER BY s.used_at DESC, e.rowid"
)
_GONE: Final = (
    "SELECT DISTINCT session_id FROM cells WHERE NOT EXISTS "
    "(SELECT 1 FROM journal.sessions s WHERE s.id = cells.session_id AND s.principal = ? AND s.state <> 'gone')"
)
_FOUND: Final = (
    "SELECT c.number, c.execution_id, c.session_id, e.undone_at IS NOT NULL, "
    "texts.code, iif(e.dropped_at IS NULL, texts.output, NULL) "
    "FROM texts CROSS JOIN cells c ON c.number = texts.rowid "
    "CROSS JOIN journal.executions e ON e.id = c.execution_id AND e.session_id = c.session_id "
    "CROSS JOIN journal.sessions s ON s.id = e.session_id "
    "WHERE texts MATCH :wanted AND texts.rowid <= :before AND s.principal = :owner AND e.principal = :owner "
    "AND (s.state = 'asleep' OR (s.state = 'live' AND s.run = :run)) AND substr(e.code, 1, :most) = texts.code "
    "ORDER BY texts.rowid DESC"
)
_EVENTS: Final = "SELECT sequence, text FROM journal.events WHERE execution_id = ? AND kind <> 'input' AND text <> '' "


_UNDAMAGED: Final = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT),
)
"""Errors of SQLite that do not come from what is in the file; a page that was altered may cause any other."""
_WORD: Final = re.compile(r"[^\W_]+")  # as SQLite's `unicode61` has it


class ExcerptPiece(NamedTuple):
    """A piece of a text, and whether it is what was looked for."""

    text: str
    is_match: bool


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A cell that has what was looked for, in its code, its output or both."""

    number: int
    execution_id: str
    session_id: str
    owner: str
    is_undone: bool
    code: list[ExcerptPiece]
    output: list[ExcerptPiece]

    @property
    def place(self) -> tuple[int, str]:
        """Return its place among all results; the latest cell has the greatest."""
        return self.number, self.execution_id


@dataclass(frozen=True, slots=True)
class TextQuery:
    """What to look for. `run` is the server whose live sessions are searched, with those that sleep."""

    text: str
    run: str
    before: tuple[int, str] | None = None
    limit: int = 50


def match_expression(text: str) -> str:
    """Return what SQLite is asked for: each word or "quoted text" has to occur, words as the beginning of one.

    Nothing that somebody types is syntax: it all goes between quotes.
    """
    if len(text) > MAX_QUERY_CHARS:
        raise InvalidArgument(
            f"the text to search has {len(text):,} characters", hint=f"Search for {MAX_QUERY_CHARS:,} at most"
        )
    phrases = _phrases(text)
    if not phrases:
        raise InvalidArgument("there is no word to search for", hint="Write some letters or digits")
    if (count := sum(len(_WORD.findall(phrase)) for phrase, _ in phrases)) > _MAX_WORDS:
        raise InvalidArgument(f"the text to search has {count:,} words", hint=f"Search for {_MAX_WORDS} at most")
    return " AND ".join(f'"{phrase}"{"" if is_quoted else "*"}' for phrase, is_quoted in phrases)


def _phrases(text: str) -> list[tuple[str, bool]]:
    """Return what has to occur, each once, and whether it stood in quotes."""
    text = text.encode(errors="replace").decode().replace("\0", " ")
    found: dict[tuple[str, bool], None] = {}
    for place, piece in enumerate(text.split('"')):
        is_quoted = place % 2 == 1
        for phrase in [piece] if is_quoted else piece.split():
            if _WORD.search(phrase):
                found[phrase, is_quoted] = None
    return list(found)


def search(journal: Path, owner: str, query: TextQuery, until: float) -> tuple[list[FoundRow], int]:
    """Return cells of an owner that have all that is wanted, the latest first, and how many are not in the index yet.

    New cells are read in until that time (`time.monotonic`), and at least some of them.
    """
    expression = match_expression(query.text)
    with _told():
        try:
            return _search(journal, owner, query, expression, until)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE in _UNDAMAGED:
                raise
            _remove(_file(journal, owner))  # all that it has is in the journal
            return _search(journal, owner, query, expression, until)


def owners(journal: Path) -> list[str]:
    """Return whose sessions the journal has."""
    address = f"file:{quote(str(journal))}?mode=ro"
    with _told(), closing(sqlite3.connect(address, uri=True, timeout=_BUSY_S)) as connection:
        query = "SELECT DISTINCT principal FROM sessions WHERE state IN ('live', 'asleep') ORDER BY principal"
        return [row[0] for row in connection.execute(query)]


# Forgetting


def has_index(journal: Path, owner: str) -> bool:
    """Return whether somebody has searched the cells of an owner."""
    return _file(journal, owner).exists()


def forget_session(journal: Path, owner: str, session_id: str) -> None:
    """Delete the texts of a session that is over."""
    with _forgetting(journal, owner) as connection:
        if connection is not None:
            _delete_session(connection, session_id)


def forget_part(journal: Path, owner: str, execution_id: str, part: Literal["code", "output"]) -> None:
    """Delete the code or the output of a cell, which the journal does not have any more."""
    query = f"UPDATE texts SET {part} = '' WHERE rowid = (SELECT number FROM cells WHERE execution_id = ?)"  # noqa: S608
    with _forgetting(journal, owner) as connection:
        if connection is not None:
            connection.execute(query, (execution_id,))


@contextmanager
def _forgetting(journal: Path, owner: str) -> Generator[sqlite3.Connection | None]:
    """Give the index, if there is one.

    Where it cannot be written, nothing is wrong: the journal decides what is found, and a search deletes the rest.
    """
    file = _file(journal, owner)
    with suppress(sqlite3.Error):
        if not file.exists():
            yield None
            return
        with closing(sqlite3.connect(file, isolation_level=None, timeout=_BUSY_S)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection


# The file of an owner


def _file(journal: Path, owner: str) -> Path:
    # Names of owners come from tokens, and may have any character and length.
    return journal.parent / FOLDER / f"{hashlib.sha256(owner.encode(errors='replace')).hexdigest()[:32]}.sqlite"


def _remove(file: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        Path(f"{file}{ending}").unlink(missing_ok=True)


@contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if "fts5" in str(error):
            raise EngineError(
                "code and output cannot be searched: the SQLite of this server's Python has no FTS5",
                hint="Run belljar with another Python, such as one that uv installs",
            ) from error
        raise EngineError(
            f"the index for searching cannot be used: {error}",
            hint=f"Make room on the disk of the data directory; the folder {FOLDER} in it may be deleted at any time",
        ) from error


def _search(journal: Path, owner: str, query: TextQuery, expression: str, until: float) -> tuple[list[FoundRow], int]:
    with closing(_open(journal, owner)) as connection:
        unread = _read_new(connection, owner, until)
        return _found(connection, owner, query, expression), unread


def _open(journal: Path, owner: str) -> sqlite3.Connection:
    file = _file(journal, owner)
    make_folder(file.parent)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    connection = sqlite3.connect(f"file:{quote(str(file))}", uri=True, isolation_level=None, timeout=_BUSY_S)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            connection.execute("BEGIN IMMEDIATE")  # another server may make it at this moment
            if connection.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                for statement in _TABLES.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")
        connection.execute("ATTACH ? AS journal", (f"file:{quote(str(journal))}?mode=ro",))
    except BaseException:
        connection.close()
        raise
    return connection


def _read_new(connection: sqlite3.Connection, owner: str, until: float) -> int:
    """Bring the index up to date, or as far as time allows; return how many cells are left."""
    gone = [row[0] for row in connection.execute(_GONE, (owner,))]
    running = [row[0] for row in connection.execute("SELECT place FROM cells WHERE has_ended = 0")]
    places = [*running, *(row[0] for row in connection.execute(_UNREAD, (owner,)))]
    for session_id in gone:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            _delete_session(connection, session_id)
    read = 0
    while read < len(places) and (read == 0 or time.monotonic() < until):
        batch = places[read : read + _CELLS_AT_ONCE]
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for place in batch:
                _read_cell(connection, place)
        read += len(batch)
    return len(places) - read


def _read_cell(connection: sqlite3.Connection, place: int) -> None:
    row = connection.execute(_CELL, (_MOST_CHARS, place)).fetchone()
    if row is None:
        return
    execution_id, session_id, code, submitted_at, has_ended = row
    query = "SELECT number FROM cells WHERE execution_id = ?"
    known = connection.execute(query, (execution_id,)).fetchone()
    number = known[0] if known else int(submitted_at * 1_000_000)
    if known:
        connection.execute("DELETE FROM texts WHERE rowid = ?", (number,))
    while not known and connection.execute("SELECT 1 FROM cells WHERE number = ?", (number,)).fetchone():
        number += 1
    values = (number, place, execution_id, session_id, has_ended)
    connection.execute("INSERT OR REPLACE INTO cells VALUES (?, ?, ?, ?, ?)", values)
    texts = (number, code, _output(connection, execution_id))
    connection.execute("INSERT INTO texts (rowid, code, output) VALUES (?, ?, ?)", texts)


def _output(connection: sqlite3.Connection, execution_id: str) -> str:
    """Return what a cell printed and showed as text, of a long one the beginning and the end."""
    head = _taken(connection.execute(f"{_EVENTS} ORDER BY sequence", (execution_id,)))
    tail: list[tuple[int, str]] = []
    if sum(len(text) for _, text in head) > _MOST_CHARS:
        query = f"{_EVENTS} AND sequence > ? ORDER BY sequence DESC"
        tail = _taken(connection.execute(query, (execution_id, head[-1][0])))[::-1]
    texts = "".join(text for _, text in head)[: 2 * _MOST_CHARS], "".join(text for _, text in tail)[-_MOST_CHARS:]
    return as_plain("\n".join(filter(None, texts)))


def _taken(rows: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the first rows that have enough text together."""
    taken: list[tuple[int, str]] = []
    size = 0
    for row in rows:
        taken.append(row)
        size += len(row[1])
        if size > _MOST_CHARS:
            break
    return taken


def _delete_session(connection: sqlite3.Connection, session_id: str) -> None:
    numbers = "SELECT number FROM cells WHERE session_id = ?"
    connection.execute(f"DELETE FROM texts WHERE rowid IN ({numbers})", (session_id,))  # noqa: S608
    connection.execute("DELETE FROM cells WHERE session_id = ?", (session_id,))


def _found(connection: sqlite3.Connection, owner: str, query: TextQuery, expression: str) -> list[FoundRow]:
    before = query.before or (2**62, "")
    values = {
        "wanted": expression,
        "before": min(before[0], 2**62),
        "owner": owner,
        "run": query.run,
        "most": _MOST_CHARS,
    }
    pattern = _pattern(query.text)
    found: list[FoundRow] = []
    for number, execution_id, session_id, is_undone, code, output in connection.execute(_FOUND, values):
        if (number, execution_id) >= before:
            continue
        code_excerpt, output_excerpt = _excerpt(code, pattern), _excerpt(output or "", pattern)
        if not (code_excerpt or output_excerpt):
            if output is None:
                continue  # it was in the output that the journal does not have any more
            # A word of some script that SQLite sees otherwise than we do.
            code_excerpt = [ExcerptPiece(code[:_EXCERPT_CHARS], is_match=False)]
        found.append(FoundRow(number, execution_id, session_id, owner, bool(is_undone), code_excerpt, output_excerpt))
        if len(found) == query.limit:
            break
    return found


# Excerpts: not by FTS5's `snippet` or `highlight`, whose time grows with the square of the matches in a text


def _pattern(text: str) -> re.Pattern[str]:
    """Return what finds the places, in a folded text, of all that is looked for."""
    alternatives: list[str] = []
    for phrase, is_quoted in _phrases(text):
        words = [re.escape(word) for word in _WORD.findall(_fold(phrase))]
        alternatives.append(r"[\W_]++".join(words) + (r"(?![^\W_])" if is_quoted else r"[^\W_]*+"))
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(alternatives)})")


def _fold(text: str) -> str:
    """Return a text of the same length in lower case and without accents."""
    return text.lower() if text.isascii() else text.translate(_Folding())


class _Folding(dict[int, str]):
    """What each character of a text becomes."""

    def __missing__(self, number: int) -> str:
        base, *marks = unicodedata.normalize("NFD", chr(number))
        plain = (base if all(map(unicodedata.combining, marks)) else chr(number)).lower()
        self[number] = folded = plain if len(plain) == 1 else chr(number)
        return folded


def _excerpt(text: str, pattern: re.Pattern[str]) -> list[ExcerptPiece]:
    """Return the pieces of a text around the first place of what was looked for; none where it is not in it."""
    folded = _fold(text)
    if (first := pattern.search(folded)) is None:
        return []
    place = max(0, first.start() - _BEFORE_CHARS)
    end = first.start() + _EXCERPT_CHARS
    pieces = [ExcerptPiece("…", is_match=False)] if place else []
    for match in pattern.finditer(folded, first.start(), end):
        pieces += [
            ExcerptPiece(text[place : match.start()], is_match=False),
            ExcerptPiece(text[slice(*match.span())], is_match=True),
        ]
        place = match.end()
    pieces.append(ExcerptPiece(text[place:end] + ("…" if end < len(text) else ""), is_match=False))
    return [piece for piece in pieces if piece.text]
