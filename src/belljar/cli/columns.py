"""Text in columns, legible in a pipe and without colour."""

from collections.abc import Sequence


def printable(text: str) -> str:
    """The text with nothing in it that would move the cursor: some of it may come from the code of a session."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The rows with every column but the last padded to its widest cell."""
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
