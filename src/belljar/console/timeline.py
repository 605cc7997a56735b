"""The history of a session as a tree: its cells, the branches that rewinds undid, and its forks, a row each.

Each row has a picture of the lines that pass it, so that rows may be as long as what they say. Lane 0 is the session as
it is; what a rewind undid is in the lane beside the one that it began at.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from belljar.console.cell_views import CellView
from belljar.console.templating import markup
from belljar.engine.models import SessionDetail

LANE_PIXELS: Final = 18
ROW_PIXELS: Final = 40
_MOST_LANES: Final = 8


@dataclass(slots=True)
class TimelineRow:
    """A cell or a fork, with the lines that pass it."""

    cell: CellView | None = None
    fork: SessionDetail | None = None
    parent: int | None = None
    """The number of the row that it goes on from, from the oldest on."""
    lane: int = 0
    is_latest: bool = False
    """Whether the session goes on from here."""
    undone: int = 0
    """How many cells were undone together; with the latest of them only."""
    through: set[int] = field(default_factory=set[int])
    """The lanes whose lines pass the row from top to bottom."""
    is_joined_above: bool = False
    down_to: int | None = None
    """The lane that its own line goes to, below."""

    def picture(self, lanes: int) -> Any:
        """Return the lines and the dot of the row."""
        middle, x = ROW_PIXELS // 2, _x(self.lane)
        parts = [_line(lane, f"M{_x(lane)} 0V{ROW_PIXELS}") for lane in sorted(self.through)]
        if self.is_joined_above:
            parts.append(_line(self.lane, f"M{x} 0V{middle}"))
        if self.down_to is not None:
            end = _x(self.down_to)
            curve = f"C{x} {ROW_PIXELS - 4} {end} {middle + 4} {end} {ROW_PIXELS}" if end != x else f"V{ROW_PIXELS}"
            parts.append(_line(self.lane, f"M{x} {middle}{curve}"))
        if self.fork is not None:
            parts.append(f'<rect class="fork" x="{x - 5}" y="{middle - 5}" width="10" height="10" rx="2"/>')
        else:
            kind, size = ("latest", 6) if self.is_latest else ("undone" if self.lane else "kept", 4)
            parts.append(f'<circle class="{kind}" cx="{x}" cy="{middle}" r="{size}"/>')
        width = lanes * LANE_PIXELS
        return markup(
            f'<svg class="branch" viewBox="0 0 {width} {ROW_PIXELS}" width="{width}" height="{ROW_PIXELS}" '
            f'aria-hidden="true">{"".join(parts)}</svg>'
        )


def _x(lane: int) -> int:
    return min(lane, _MOST_LANES - 1) * LANE_PIXELS + LANE_PIXELS // 2


def _line(lane: int, path: str) -> str:
    return f'<path class="{"side" if lane else "main"}" d="{path}"/>'


def lane_count(rows: Sequence[TimelineRow]) -> int:
    """Return how many lanes the pictures need."""
    return min(_MOST_LANES, max((row.lane for row in rows), default=0) + 1)


def timeline_rows(
    newest_first: Sequence[CellView], forks: Mapping[str, Sequence[SessionDetail]], *, goes_on: bool
) -> list[TimelineRow]:
    """Return the rows of cells and forks, newest first; `goes_on` says whether there are cells before these."""
    rows: list[TimelineRow] = []
    unplaced = sorted(forks.get("", ()), key=lambda fork: fork.created_at)
    for cell in reversed(newest_first):
        entry = cell.entry
        while unplaced and unplaced[0].created_at < entry.submitted_at:
            _add_fork(rows, unplaced.pop(0))
        for fork in forks.get(entry.execution_id, ()):
            _add_fork(rows, fork, entry.submitted_at)
        parent = _live_at(rows, entry.submitted_at)
        rows.append(TimelineRow(cell, parent=parent, lane=_lane(cell, rows[parent] if parent is not None else None)))
    for fork in unplaced:
        _add_fork(rows, fork)
    _mark(rows)
    _connect(rows, goes_on=goes_on)
    return rows[::-1]


def _add_fork(rows: list[TimelineRow], fork: SessionDetail, at: str = "") -> None:
    """Add a fork of the session as it was when the fork was made, or before a cell that began `at` some time."""
    parent = _live_at(rows, at or fork.created_at)
    rows.append(TimelineRow(fork=fork, parent=parent, lane=(rows[parent].lane if parent is not None else 0) + 1))


def _live_at(rows: Sequence[TimelineRow], time: str) -> int | None:
    """Return the row of the cell whose state the session had at a time."""
    for place in range(len(rows) - 1, -1, -1):
        cell = rows[place].cell
        if cell is not None and (cell.entry.undone_at is None or cell.entry.undone_at > time):
            return place
    return None


def _lane(cell: CellView, parent: TimelineRow | None) -> int:
    if not cell.entry.is_undone:
        return 0
    if parent is None or parent.cell is None:
        return 1
    return parent.lane if parent.cell.entry.undone_at == cell.entry.undone_at else parent.lane + 1


def _mark(rows: Sequence[TimelineRow]) -> None:
    """Say where the session is now, and how many cells each rewind undid."""
    undone = Counter(row.cell.entry.undone_at for row in rows if row.cell is not None and row.cell.entry.is_undone)
    for row in reversed(rows):
        if row.cell is None:
            continue
        row.undone = undone.pop(row.cell.entry.undone_at, 0)
        if not row.lane and not any(other.is_latest for other in rows):
            row.is_latest = True


def _connect(rows: Sequence[TimelineRow], *, goes_on: bool) -> None:
    for place, row in enumerate(rows):
        if row.parent is None and not goes_on:
            continue
        parent = row.parent if row.parent is not None else -1
        row.down_to = rows[parent].lane if row.parent is not None else row.lane
        for between in rows[parent + 1 : place]:
            between.through.add(row.down_to)
        if row.parent is not None:
            rows[parent].is_joined_above = True
