"""Text in columns, legible in a pipe and without colour."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The rows with every column but the last padded to its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
