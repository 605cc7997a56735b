"""How many values a JSON text has, counted before it is parsed: to parse 12 MB of `[{},{},…]` took 10 s and 1.5 GB.

For every JSON text from outside: of MCP clients, over REST, from sessions, from other servers. A text's length is
limited where it is read. Knows nothing of JSON's grammar but its separators and its strings.
"""

from collections.abc import Iterator
from typing import Final

MAX_VALUES: Final = 100_000
"""The most values in one text. A string counts as one, however long it is."""
# Other threads get their turn between two of them.
_PIECE_BYTES: Final = 1024 * 1024


class TooManyValues(ValueError):
    """A text is perhaps JSON, but with more values than are parsed."""

    def __init__(self) -> None:
        super().__init__(f"it has more than {MAX_VALUES:,} values")


def check_values(text: bytes | str) -> None:
    """Refuse a text with too many values (TooManyValues, a ValueError), whether it is valid or not."""
    if has_too_many_values(text):
        raise TooManyValues


def has_too_many_values(text: bytes | str) -> bool:
    """Return whether a text has too many values, by counting commas and brackets, in time linear in its length.

    Most texts have too few even with those inside strings, so strings are left out only if needed.
    """
    if len(text) <= MAX_VALUES:
        return False
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if not _is_over(map(_separators, _pieces(data))):
        return False
    # With a zero it is none in UTF-8, and the strings of other encodings are not found here.
    return b"\0" in data or _is_over(_separators_outside_strings(data))


def _is_over(counts: Iterator[int]) -> bool:
    total = 0
    for count in counts:
        total += count
        if total > MAX_VALUES:
            return True
    return False


def _separators(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _separators_outside_strings(data: bytes) -> Iterator[int]:
    is_inside, held = False, b""
    for piece in _pieces(data):
        piece = held + piece
        # A backslash that escapes what comes next goes to the next piece.
        held = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        bare = piece.removesuffix(held).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = bare.split(b'"')
        yield _separators(b"".join(parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
