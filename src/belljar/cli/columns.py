"""Text in columns, legible in a pipe and without colour."""

from collections.abc import Sequence

from belljar.cli.streams import one_line


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The rows with every column but the last padded to its widest cell."""
    rows = [[*map(one_line, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
