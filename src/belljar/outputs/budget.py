"""Text within a budget: the head and the tail are kept, what lies between is counted."""

from collections import deque

from belljar.models import Truncation

MARK = "mark"
"""The name of a place between texts: it has no text, takes nothing of the budget, and is never left out."""


class TextBudget:
    """Stream text in the order it was produced, of which at most `budget_chars` characters stay in memory."""

    def __init__(self, budget_chars: int) -> None:
        self._limit = budget_chars // 2
        self._head: list[tuple[str, str]] = []
        self._tail: deque[tuple[str, str]] = deque()
        self._head_chars = 0
        self._tail_chars = 0
        self._marks_left_out = 0
        self.total_bytes = 0

    def add(self, name: str, text: str) -> None:
        """Append text of one stream."""
        self.total_bytes += _size(text)
        room = self._limit - self._head_chars
        if room > 0:
            _append(self._head, name, text[:room])
            self._head_chars += min(room, len(text))
            text = text[room:]
        if text:
            text = text[-self._limit :]
            _append(self._tail, name, text)
            self._tail_chars += len(text)
            self._trim_tail()

    def mark(self) -> None:
        """Remember the place between what was added and what will be."""
        (self._head if self._head_chars < self._limit else self._tail).append((MARK, ""))

    def _trim_tail(self) -> None:
        while self._tail_chars > self._limit:
            name, text = self._tail[0]
            excess = self._tail_chars - self._limit
            if excess >= len(text):
                self._tail.popleft()
                self._tail_chars -= len(text)
                self._marks_left_out += name == MARK
            else:
                self._tail[0] = (name, text[excess:])
                self._tail_chars -= excess

    def segments(self) -> list[tuple[str, str]]:
        """(stream, text) pairs and marks, with a line in place of what is left out."""
        left_out = self.total_bytes - self._shown_bytes()
        if left_out <= 0:
            return _merged([*self._head, *self._tail])
        cut = ("notice", f"\n[belljar: {left_out:,} bytes left out here]\n")
        return _merged([*self._head, cut, *[(MARK, "")] * self._marks_left_out, *self._tail])

    def truncation(self, uri: str) -> Truncation | None:
        """What is missing, and where the whole is; None when nothing is."""
        shown = self._shown_bytes()
        if shown >= self.total_bytes:
            return None
        return Truncation(shown_bytes=shown, total_bytes=self.total_bytes, uri=uri)

    def _shown_bytes(self) -> int:
        return sum(_size(text) for _, text in (*self._head, *self._tail))


def clip(text: str, limit: int) -> str:
    """A single text within a limit, head and tail kept."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[belljar: {len(text) - 2 * half:,} characters left out here]\n{text[-half:]}"


def _append(parts: "list[tuple[str, str]] | deque[tuple[str, str]]", name: str, text: str) -> None:
    if parts and parts[-1][0] == name != MARK:
        parts[-1] = (name, parts[-1][1] + text)
    else:
        parts.append((name, text))


def _merged(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    merged: list[tuple[str, str]] = []
    for name, text in parts:
        _append(merged, name, text)
    return merged


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))
