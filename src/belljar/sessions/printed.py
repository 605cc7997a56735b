"""All that an execution printed, read from the journal's file. Reads by itself, so any thread may do it."""

import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from belljar.models import OutputEvent

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
