"""Files that hold a table, as the console previews them: the beginning of a CSV, read here; others, read in a cell.

A file is the session's, so that nothing but its text is read in the server. What needs a library to be read, like
Parquet, is read by the session, in its sandbox.
"""

import csv
from dataclasses import dataclass
from typing import Any, Final

from belljar.console.templating import markup
from belljar.outputs.tables import FILTER, MAX_COLUMNS, HeadCell, ShownTable, TableRow, table_parts

_SHOWN_ROWS: Final = 200
_DELIMITERS: Final = {".csv": ",;\t|", ".tsv": "\t"}
_READERS: Final = {
    ".parquet": "pd.read_parquet({name!r})",
    ".feather": "pd.read_feather({name!r})",
    ".arrow": "pd.read_feather({name!r})",
    ".xlsx": "pd.read_excel({name!r})",
    ".xls": "pd.read_excel({name!r})",
}


@dataclass(frozen=True, slots=True)
class TablePreview:
    """The beginning of a file as a table, in markup of ours."""

    rows: Any
    columns: Any
    read: int
    """How many rows were read; of more than are shown the columns tell all the same."""
    shown: int
    width: int
    is_whole: bool
    wide: int = MAX_COLUMNS
    """How many columns are shown at most."""

    @property
    def filter(self) -> Any:
        """Return the field that filters the rows."""
        return markup(FILTER)


def _ending(name: str) -> str:
    return name[name.rfind(".") :].lower() if "." in name else ""


def reading_code(name: str) -> str:
    """Return the code of a cell that shows a file as a table; empty where none is known."""
    reader = _READERS.get(_ending(name))
    return f"import pandas as pd\n\n{reader.format(name=name)}" if reader else ""


def table_preview(name: str, text: str, *, is_whole: bool) -> TablePreview | None:
    """Return a file as a table, by the end of its name; None for one that is no table, or no regular one."""
    delimiters = _DELIMITERS.get(_ending(name))
    lines = text.split("\n")
    if not is_whole:
        lines.pop()  # it may be cut
    if delimiters is None or len(lines) < 2:
        return None
    delimiter = max(delimiters, key=lines[0].count)
    try:
        names, *rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except (csv.Error, ValueError):  # a field that is too long, or no row at all
        return None
    width = len(names)
    regular = [row for row in rows if len(row) == width]
    if not regular or len(regular) < 0.9 * len(rows):
        return None
    table = ShownTable(
        [[HeadCell(column) for column in names[:MAX_COLUMNS]]],
        [TableRow([], row[:MAX_COLUMNS]) for row in regular],
        [],
    )
    shown, columns = table_parts(table, can_sort=True, most_rows=_SHOWN_ROWS)
    return TablePreview(markup(shown), markup(columns), len(regular), min(len(regular), _SHOWN_ROWS), width, is_whole)
