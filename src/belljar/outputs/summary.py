"""Output events to the fields of a result: what a caller is shown, with a notebook's rules for clearing and updating.

A line that is written over, such as a progress bar, is shown as it is last; the journal has all that was printed.

Live executions and replays from the journal go through the same code, so that they give the same results.
"""

from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import Self

from belljar.models import Display, OutputEvent, ResultNotice, Truncation
from belljar.outputs.budget import clip
from belljar.outputs.displays import INLINE_CHARS
from belljar.outputs.imitations import disarmed
from belljar.outputs.terminal_text import LineFolder

MAX_DISPLAYS = 50
STREAMS = ("stdout", "stderr")
MARK = "mark"
"""The name of a mark between texts: it has no text, takes nothing of the budget, and is never left out."""


class Summary:
    """The output of one execution so far, as the fields of a result."""

    def __init__(self, *, budget_chars: int, uri: str) -> None:
        self._budget_chars = budget_chars
        self._uri = uri
        self._text = TextBudget(budget_chars)
        self._is_clear_pending = False
        self._left_out = 0
        self._displays: list[Display] = []
        """The displays, in the order of their marks between the texts."""
        self._rich_result: Display | None = None
        self.result: str | None = None
        self.error: str | None = None
        self.traceback: list[str] = []
        self.sequence = 0
        self._result_cut: Truncation | None = None

    def add(self, event: OutputEvent) -> None:
        """Add the next event."""
        self.sequence = event.sequence
        if event.kind == "clear":
            self._is_clear_pending = bool(event.data.get("wait"))
            if not self._is_clear_pending:
                self._clear()
            return
        if self._is_clear_pending and event.kind != "input":
            self._clear()
        match event.kind:
            case "stdout" | "stderr" | "notice":
                self._text.add(event.kind, event.text)
            case "display":
                self._display(event)
            case "result":
                self.result = event.text if event.data.get("has_text") else None
                self._result_cut = _cut_of(event)
                self._rich_result = _display_in(event)
            case "error":
                self.error = event.text
                lines = event.data.get("traceback")
                self.traceback = [str(line) for line in lines] if isinstance(lines, list) else []
            case _:
                pass

    def segments(self) -> list[tuple[str, str]]:
        """Return stream texts and notices in order, within the budget; what imitates a notice is marked."""
        segments = [
            (kind, text if kind == "notice" else disarmed(text)) for kind, text in self._text.segments() if kind != MARK
        ]
        if self._left_out:
            segments.append(("notice", f"[belljar: {self._left_out} more displays are not listed]\n"))
        return segments

    def texts(self) -> tuple[list[str], list[ResultNotice]]:
        """Return the texts of `segments`, and which of them are notices."""
        segments = self.segments()
        notices = [ResultNotice(text=text, at=at) for at, (kind, text) in enumerate(segments) if kind == "notice"]
        return [text for _, text in segments], notices

    def stream(self, name: str) -> str:
        """Return the text of one stream, within the budget."""
        return "".join(text for kind, text in self._text.segments() if kind == name)

    @property
    def displays(self) -> list[Display]:
        """The displays, each with its place between the texts; the last expression's value comes last."""
        places: list[int] = []
        texts = 0
        for kind, _ in self._text.segments():
            if kind == MARK:
                places.append(texts)
            else:
                texts += 1
        shown = [display.model_copy(update={"at": at}) for display, at in zip(self._displays, places, strict=True)]
        value = self._rich_result
        # A figure that is shown and is also the cell's last expression comes twice, byte for byte.
        return shown if value is None or self._is_last(value) else [*shown, value]

    @property
    def truncation(self) -> Truncation | None:
        """How much text was left out, of the streams or of the result; None for nothing."""
        return self._text.truncation(self._uri) or self._result_cut

    def _clear(self) -> None:
        self._text = TextBudget(self._budget_chars)
        self._displays = []
        self._rich_result = None
        self._left_out = 0
        self._is_clear_pending = False

    def _display(self, event: OutputEvent) -> None:
        display = _display_in(event)
        if display is None:
            display = Display(mime="text/plain", text=clip(event.text, INLINE_CHARS), size=len(event.text))
            display_id = event.data.get("display_id")
            display.display_id = display_id if isinstance(display_id, str) else None
        if event.data.get("update") and self._update(display):
            return
        if display.mime == "text/plain" and display.display_id is None:
            # Plain text keeps its place among the text.
            self._text.add("display", event.text + "\n")
            return
        self._keep(display)

    def _update(self, display: Display) -> bool:
        is_found = False
        for index, shown in enumerate(self._displays):
            if shown.display_id is not None and shown.display_id == display.display_id:
                self._displays[index] = display
                is_found = True
        return is_found

    def _keep(self, display: Display) -> None:
        if self._is_last(display):
            return
        if len(self._displays) >= MAX_DISPLAYS:
            self._left_out += 1
            return
        self._displays.append(display)
        self._text.mark()

    def _is_last(self, display: Display) -> bool:
        """Return whether this place shows the display already, byte for byte, and neither of the two can be updated."""
        if display.uri is None or display.display_id is not None or not self._displays:
            return False
        return self._displays[-1].uri == display.uri and self._text.ends_with_mark


def _cut_of(event: OutputEvent) -> Truncation | None:
    uri, size = event.data.get("uri"), event.data.get("size")
    if not isinstance(uri, str) or not isinstance(size, int):
        return None
    return Truncation(shown_bytes=len(event.text.encode(errors="replace")), total_bytes=size, uri=uri)


def _display_in(event: OutputEvent) -> Display | None:
    value = event.data.get("display")
    return Display.model_validate(value) if isinstance(value, dict) else None


# The text of a result, within its budget


class TextBudget:
    """Stream text in the order it was produced, of which at most `budget_chars` characters stay in memory.

    What is counted and kept is the text with written over lines as they are last.
    """

    def __init__(self, budget_chars: int) -> None:
        self._limit = budget_chars // 2
        self._folder = LineFolder()
        self.ends_with_mark = False
        """Whether nothing came after the latest mark."""
        self._head: list[tuple[str, str]] = []
        self._tail: deque[tuple[str, str]] = deque()
        self._head_chars = 0
        self._tail_chars = 0
        self._marks_left_out = 0
        self.total_bytes = 0

    def add(self, name: str, text: str) -> None:
        """Append text of one stream, or a notice."""
        self.ends_with_mark = self.ends_with_mark and not text
        if name in STREAMS:
            self._keep_all(self._folder.add(name, text))
        else:
            self._keep_all([*self._folder.settle(), (name, text)])

    def _keep_all(self, parts: Iterable[tuple[str, str]]) -> None:
        for name, text in parts:
            self._keep(name, text)

    def _keep(self, name: str, text: str) -> None:
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
        """Mark the place between the text so far and the text to come."""
        self._keep_all(self._folder.settle())
        self.ends_with_mark = True
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
        """Return (stream, text) pairs and marks, with a line in place of what is left out."""
        return self._with_held_lines()._segments()

    def truncation(self, uri: str) -> Truncation | None:
        """Return how much is missing and where the whole text is; None when nothing is missing."""
        return self._with_held_lines()._truncation(uri)

    def _with_held_lines(self) -> Self:
        held = self._folder.held()
        if not held:
            return self
        whole = copy(self)
        whole._head, whole._tail = [*self._head], self._tail.copy()
        whole._keep_all(held)
        return whole

    def _segments(self) -> list[tuple[str, str]]:
        left_out = self.total_bytes - self._shown_bytes()
        if left_out <= 0:
            return _merged([*self._head, *self._tail])
        cut = ("notice", f"\n[belljar: {left_out:,} bytes left out here]\n")
        return _merged([*self._head, cut, *[(MARK, "")] * self._marks_left_out, *self._tail])

    def _truncation(self, uri: str) -> Truncation | None:
        shown = self._shown_bytes()
        if shown >= self.total_bytes:
            return None
        return Truncation(shown_bytes=shown, total_bytes=self.total_bytes, uri=uri)

    def _shown_bytes(self) -> int:
        return sum(_size(text) for _, text in (*self._head, *self._tail))


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
