"""A text and output events within a limit: the head and the tail are kept, what lies between is counted.

Events are taken as they come, so that an execution with gigabytes of output is never in memory as a whole. The text of
a result is in `summary.py`.
"""

import sys
from collections import deque
from collections.abc import Iterable

from belljar.models import TEXT_KINDS, OutputEvent


def clip(text: str, limit: int) -> str:
    """Return a single text within a limit, with its head and tail kept."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out here …]\n{text[-half:]}"


class EventBudget:
    """An execution's events, added in order: the head and tail of its text, and what a notebook would still show of it.

    `limit_chars` is for the text of its streams, 0 for no limit.
    """

    def __init__(self, limit_chars: int) -> None:
        self._half = limit_chars // 2 or sys.maxsize
        self._is_clear_pending = False
        self._start([])

    def _start(self, head: list[OutputEvent]) -> None:
        self._head = head
        self._head_chars = 0
        self._middle: list[OutputEvent] = []
        self._tail: deque[OutputEvent] = deque()
        self._tail_chars = 0
        self._left_out = 0

    def add(self, event: OutputEvent) -> None:
        """Add the next event."""
        if event.kind == "clear":
            self._is_clear_pending = bool(event.data.get("wait"))
            if not self._is_clear_pending:
                self._clear()
            return
        if self._is_clear_pending:
            self._clear()
        if event.kind in TEXT_KINDS:
            self._add_text(event)
        else:
            (self._tail or self._head).append(event)

    def skip(self, chars: int) -> None:
        """Count text that comes next and that nobody read, because all of it would be left out."""
        self._left_out += chars

    def events(self) -> list[OutputEvent]:
        """Return the events that are left, in order, with a notice in place of text that was left out."""
        if not self._left_out:
            return [*self._head, *self._middle, *self._tail]
        notice = f"\n[belljar: {self._left_out:,} characters left out here]\n"
        return [*self._head, *self._middle, OutputEvent(sequence=0, kind="notice", text=notice), *self._tail]

    def _clear(self) -> None:
        """Forget the events so far, except displays with an id, because a later update may still mean one of them."""
        self._is_clear_pending = False
        named = [event for event in (*self._head, *self._middle, *self._tail) if event.data.get("display_id")]
        self._start([*named, OutputEvent(sequence=0, kind="clear")])

    def _add_text(self, event: OutputEvent) -> None:
        room = 0 if self._tail else self._half - self._head_chars
        if len(event.text) <= room:
            self._head.append(event)
            self._head_chars += len(event.text)
            return
        if room > 0:
            self._head.append(_cut(event, event.text[:room]))
            self._head_chars = self._half
            event = _cut(event, event.text[room:])
        self._tail.append(event)
        self._tail_chars += len(event.text)
        while self._tail_chars > self._half:
            self._shorten_tail()

    def _shorten_tail(self) -> None:
        first = self._tail.popleft()
        if first.kind not in TEXT_KINDS:
            self._middle.append(first)
            return
        surplus = min(self._tail_chars - self._half, len(first.text))
        self._left_out += surplus
        self._tail_chars -= surplus
        if surplus < len(first.text):
            self._tail.appendleft(_cut(first, first.text[surplus:]))


def within_budget(events: Iterable[OutputEvent], limit_chars: int) -> list[OutputEvent]:
    """Return what is kept of the events of an execution that has ended."""
    budget = EventBudget(limit_chars)
    for event in events:
        budget.add(event)
    return budget.events()


def _cut(event: OutputEvent, text: str) -> OutputEvent:
    return event.model_copy(update={"text": text})
