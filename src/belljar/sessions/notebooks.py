"""A session's notebook as a client gets it: everything that ran, within what one answer can carry.

`belljar export` has no such bounds: it writes to a file, and nobody waits for the server meanwhile.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from belljar.errors import TooLarge
from belljar.models import OutputEvent
from belljar.outputs.notebook import NotebookCell, notebook_of, written
from belljar.sessions.archive import open_archive

# Shared by all cells: 60 million characters took 1 GB of memory to send, and stopped everyone else for 10 s.
TEXT_CHARS = 8_000_000
MOST_CELL_CHARS = 1_000_000
LEAST_CELL_CHARS = 200
# Of code and of what cells showed, which is there whole or not at all.
MOST_BYTES = 32 * 1024 * 1024


def read_notebook(data_directory: Path, session_id: str, read_display: Callable[[str], bytes | None]) -> str:
    """The notebook as text, of long output head and tail. Reads by itself, so any thread may call it."""
    room = _Room(session_id)
    # Read bit by bit on a connection of its own: a session may have said more than memory holds.
    with open_archive(data_directory) as archive:
        count = max(1, archive.count(session_id))
        cells = map(room.cell, archive.cells(session_id, is_live=lambda: True))
        limit = max(LEAST_CELL_CHARS, min(MOST_CELL_CHARS, TEXT_CHARS // count))
        return written(notebook_of(session_id, cells, room.reader(read_display), limit_chars=limit))


class _Room:
    """What is left of `MOST_BYTES`."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._left = MOST_BYTES

    def cell(self, ran: NotebookCell) -> NotebookCell:
        self._take(len(ran.code))
        return replace(ran, events=self._events(ran))

    def _events(self, ran: NotebookCell) -> Iterator[OutputEvent]:
        for event in ran.events:
            if event.data:
                self._take(len(json.dumps(event.data)))
            yield event

    def reader(self, read_display: Callable[[str], bytes | None]) -> Callable[[str], bytes | None]:
        def read(uri: str) -> bytes | None:
            content = read_display(uri)
            self._take(len(content or b""))
            return content

        return read

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooLarge(
                f"the code and displays of session {self._session_id} are over {MOST_BYTES:,} bytes",
                hint="On the server's machine, belljar export writes all of them to a file",
            )
