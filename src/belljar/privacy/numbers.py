"""Numbers for tokens, none of them twice in the life of a session, whatever its server dies of.

A killed server takes along what its tokens stood for, and files of the session may still have some. A token must
not come to stand for another value then, so numbers are promised to a file, a thousand ahead. No values are in it.
"""

import json
import logging
from pathlib import Path
from typing import Any

from belljar.files.private import write_file

AHEAD = 1_000
MOST = 999_999
"""The widest number that a token has room for."""

log = logging.getLogger(__name__)


class Numbers:
    """One session's; with the file of an earlier server they begin after all that it may have given out."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._promised: dict[str, int] = _read(path) if path else {}
        self._last = {**self._promised}

    def next(self, kind: str) -> int | None:
        """The next one; None when all are given out."""
        number = self._last.get(kind, 0) + 1
        if number > MOST:
            return None
        self.reach(kind, number)
        return number

    def restart(self) -> None:
        """Everything that was given out is known, and will be told of by `reach`."""
        self._last.clear()

    def reach(self, kind: str, number: int) -> None:
        """This one was given out, by this session or by the one that it goes on from."""
        if self._path is not None and number > self._promised.get(kind, 0):
            self._promised[kind] = min(number + AHEAD - 1, MOST)
            _write(self._path, self._promised)
        self._last[kind] = max(self._last.get(kind, 0), number)

    def reached(self) -> dict[str, int]:
        """The last of each kind that may have been given out, also where nobody knows any more for what."""
        return {**self._last}


def _read(path: Path) -> dict[str, int]:
    try:
        kept: Any = json.loads(path.read_text("utf-8"))
        return {str(kind): int(number) for kind, number in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("the numbers of tokens cannot be read and begin anew: %s", type(error).__name__)
        return {}


def _write(path: Path, promised: dict[str, int]) -> None:
    draft = path.with_suffix(".new")
    try:
        write_file(draft, json.dumps(promised))
        draft.replace(path)
    except OSError as error:
        log.warning("the numbers of tokens are not kept: %s", error.strerror)
