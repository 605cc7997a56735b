"""Finds out whether the journal's file is damaged: its pages no longer hold what SQLite wrote to them.

A damaged file is another thing than one that cannot be written now: no retry helps, and what is told meanwhile may
not be kept. `salvage.py` recovers what is readable.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from belljar.errors import JournalDamaged, SettingsError

if TYPE_CHECKING:
    from belljar.journal.journal import Journal

START_S = 1.0
"""How long a server's start may be delayed: half a gigabyte is checked in that time, the rest in the background."""
INTERVAL_S = 3600.0
_STOP_S = 0.05
_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
PRIMARY_CODE = 0xFF
SALVAGE_HINT = (
    "Stop the servers of its data directory and run `belljar journal salvage`: it recovers what can be read and keeps "
    "the damaged file beside"
)

log = logging.getLogger(__name__)


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether SQLite says that the file is malformed, and not that it is locked or its disk full."""
    return getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE in _CODES


def damaged(reason: str) -> JournalDamaged:
    """Return the error for whoever needs what a damaged journal cannot give."""
    return JournalDamaged(
        f"the server's journal is damaged ({reason})",
        hint="Only the server's operator can mend it, with `belljar journal salvage`; open sessions go on meanwhile",
    )


@contextmanager
def damage_told(on_damage: Callable[[str], None] = lambda _: None) -> Generator[None]:
    """Turn SQLite's error about a damaged file into ours; tell it to `on_damage` first."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        on_damage(str(error))
        raise damaged(str(error)) from error


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found."""

    damage: str
    """The first thing that is wrong, in SQLite's words; empty when nothing is."""
    is_complete: bool = True
    """Whether the whole file was read."""


class FileCheck:
    """One reading of a whole journal. It may run in any thread, and be stopped from any other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._is_stopped = False

    def run(self, limit_s: float | None = None) -> Finding:
        """Read the file, for `limit_s` at most; raise sqlite3.Error where it cannot be opened or is locked."""
        timer = threading.Timer(limit_s, self.stop) if limit_s is not None else None
        with closing(_connect(self._path)) as connection:
            with self._lock:
                self._connection = connection
            if timer is not None:
                timer.daemon = True
                timer.start()
            try:
                return self._run(connection)
            finally:
                if timer is not None:
                    timer.cancel()
                with self._lock:
                    self._connection = None

    def _run(self, connection: sqlite3.Connection) -> Finding:
        if self._is_stopped:
            return Finding("", is_complete=False)
        try:
            (first, *_) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            if is_damage(error):
                return Finding(str(error))
            if getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE == sqlite3.SQLITE_INTERRUPT:
                return Finding("", is_complete=False)
            raise
        # Its first line names the database, which is always the same.
        return Finding("" if first == "ok" else str(first).removeprefix("*** in database main ***\n").splitlines()[0])

    def stop(self) -> None:
        """Have `run` return soon; may be called again, because one call is lost between two statements of SQLite."""
        with self._lock:
            self._is_stopped = True
            if self._connection is not None:
                self._connection.interrupt()


def _connect(path: Path) -> sqlite3.Connection:
    # Used by one thread at a time; `interrupt` is meant for others.
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, check_same_thread=False)


@asynccontextmanager
async def open_checks(journal: "Journal") -> AsyncGenerator[None]:
    """Refuse a journal that is found damaged within `START_S`, and check it in the background while this is open."""
    found = await asyncio.to_thread(FileCheck(journal.path).run, START_S)
    if found.damage:
        raise SettingsError(f"Journal {journal.path} is damaged: {found.damage}", hint=SALVAGE_HINT)
    work = asyncio.get_running_loop().create_task(
        _check_periodically(journal, INTERVAL_S if found.is_complete else 0.0)
    )
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _check_periodically(journal: "Journal", first_s: float) -> None:
    pause_s = first_s
    while True:
        await asyncio.sleep(pause_s)
        pause_s = INTERVAL_S
        with suppress(sqlite3.Error):  # it is gone or locked, which `Journal.fault` says
            if damage := await _checked(journal.path):
                journal.note_damage(damage)


async def _checked(path: Path) -> str:
    """Return what is wrong with a file, read to its end in a thread that ends when this is cancelled."""
    check = FileCheck(path)
    reading = asyncio.get_running_loop().create_task(asyncio.to_thread(check.run))
    try:
        found = await asyncio.shield(reading)
    except asyncio.CancelledError:
        while not reading.done():
            check.stop()
            await asyncio.wait([reading], timeout=_STOP_S)
        raise
    return found.damage
