"""The cells that a kernel has seen, as front ends ask for them: the last ones, a range, those that match."""

from collections import deque
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

MOST_CELLS = 1_000


class History:
    """Of one session only, whose number is 0."""

    def __init__(self) -> None:
        self._cells: deque[tuple[int, str]] = deque(maxlen=MOST_CELLS)

    def add(self, count: int, code: str) -> None:
        """A cell began."""
        self._cells.append((count, code))

    def reply(self, kind: str, *, output: bool, **wanted: Any) -> list[list[Any]]:
        """The cells that a `history_request` asks for. What they gave is not kept here."""
        found = list(self._found(kind, wanted))
        return [[0, count, (code, None) if output else code] for count, code in found]

    def _found(self, kind: str, wanted: dict[str, Any]) -> Iterable[tuple[int, str]]:
        if kind == "range":
            start, stop = wanted.get("start") or 0, wanted.get("stop")
            return [cell for cell in self._cells if cell[0] >= start and (stop is None or cell[0] < stop)]
        cells: Iterable[tuple[int, str]] = reversed(self._cells)
        if kind == "search":
            pattern = str(wanted.get("pattern") or "*")
            cells = [cell for cell in cells if fnmatchcase(cell[1], pattern)]
            if wanted.get("unique"):
                cells = {code: (count, code) for count, code in reversed(cells)}.values()
        return reversed(list(islice(cells, wanted.get("n") or MOST_CELLS)))
