"""An execution's events within a limit: the head and the tail of its text, and what a notebook would still show of it.

Works on events as they come, so that an execution with gigabytes of output is never in memory as a whole.
"""

import sys
from collections import deque
from collections.abc import Iterable

from belljar.models import OutputEvent

_TEXT = ("stdout", "stderr", "notice")


class EventBudget:
    """Takes an execution's events in order; `limit_chars` is for the text of its streams, 0 for no limit."""

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
        """Take in the next event."""
        if event.kind == "clear":
            self._is_clear_pending = bool(event.data.get("wait"))
            if not self._is_clear_pending:
                self._clear()
            return
        if self._is_clear_pending:
            self._clear()
        if event.kind in _TEXT:
            self._add_text(event)
        else:
            (self._tail or self._head).append(event)

    def events(self) -> list[OutputEvent]:
        """What is left, in order, with a word in place of text that was left out."""
        if not self._left_out:
            return [*self._head, *self._middle, *self._tail]
        said = f"\n[belljar: {self._left_out:,} characters left out here]\n"
        return [*self._head, *self._middle, OutputEvent(sequence=0, kind="notice", text=said), *self._tail]

    def _clear(self) -> None:
        """Forget what was shown, except that a later update may still mean one of these displays."""
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
        if first.kind not in _TEXT:
            self._middle.append(first)
            return
        surplus = min(self._tail_chars - self._half, len(first.text))
        self._left_out += surplus
        self._tail_chars -= surplus
        if surplus < len(first.text):
            self._tail.appendleft(_cut(first, first.text[surplus:]))


def within_budget(events: Iterable[OutputEvent], limit_chars: int) -> list[OutputEvent]:
    """What is kept of an execution that has ended."""
    budget = EventBudget(limit_chars)
    for event in events:
        budget.add(event)
    return budget.events()


def _cut(event: OutputEvent, text: str) -> OutputEvent:
    return event.model_copy(update={"text": text})
