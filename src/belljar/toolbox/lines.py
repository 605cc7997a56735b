"""Bytes cut into lines of a bounded length. Of a line that is longer its two ends are kept, to tell whose it was."""

from collections.abc import Iterator
from dataclasses import dataclass

_END_BYTES = 1_024


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was dropped."""

    limit_bytes: int
    head: bytes
    tail: bytes
    was_given_up: bool = False
    """It was not too long, but took too long."""


Line = bytes | Overlong


class Lines:
    """One stream of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._parts: list[bytes] = []
        self.size = 0
        """Bytes of the line that is not complete yet."""
        self._head = b""
        self._tail = b""
        self._is_given_up = False

    @property
    def is_dropped(self) -> bool:
        """Whether nothing of the line is kept any more but its ends."""
        return self._is_given_up or self.size > self._limit

    def give_up(self) -> None:
        """Keep no more of the line that is not complete yet."""
        self._is_given_up = True
        self._drop(b"")

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines that this chunk completes, without their ends."""
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            self._add(part)
            yield self._taken()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        if not part:
            return
        self.size += len(part)
        if self.is_dropped:
            self._drop(part)
        else:
            self._parts.append(part)

    def _drop(self, part: bytes) -> None:
        if self._parts or not self._head:
            whole = b"".join(self._parts)
            self._head, self._tail = (whole + part[:_END_BYTES])[:_END_BYTES], whole[-_END_BYTES:]
            self._parts = []
        self._tail = (self._tail + part[-_END_BYTES:])[-_END_BYTES:]

    def _taken(self) -> Line:
        dropped = Overlong(self._limit, self._head, self._tail, self._is_given_up) if self.is_dropped else None
        line = dropped or b"".join(self._parts)
        self._parts, self.size, self._head, self._tail, self._is_given_up = [], 0, b"", b"", False
        return line
