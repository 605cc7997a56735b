"""Turns kernel events into numbered output events, the form in which an execution's output is journalled and replayed.

Before they are recorded, events pass the session's screens (redaction, output rules).
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from pydantic import JsonValue

from belljar.models import OutputEvent
from belljar.outputs.budget import clip
from belljar.outputs.displays import INLINE_CHARS, DisplayStore, display_of, plain_of
from belljar.outputs.events import (
    VALUE,
    ClearOutput,
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    InputRequest,
    Notice,
    Raised,
    Stream,
)

# What an event takes in the journal beside its text, so that many events without text are capped too.
EVENT_BYTES = 256
MAX_TRACEBACK_LINES = 400
MAX_LINE_CHARS = 2_000
MAX_MESSAGE_CHARS = 8_000


class Recorder:
    """The record of one execution's output: numbers its events, and past the cap drops output after a notice."""

    def __init__(self, store: DisplayStore, *, cap_bytes: int, text_chars: int) -> None:
        self._store = store
        self._text_chars = text_chars
        self._cap_bytes = cap_bytes
        self._output_bytes = 0
        self._result_bytes = 0
        self._is_capped = False
        self.sequence = 0

    @property
    def text_bytes(self) -> int:
        """About how many bytes the events take in the journal."""
        return self._output_bytes + self._result_bytes

    @property
    def display_bytes(self) -> int:
        """How many bytes the files of displays take."""
        return self._store.total_bytes

    def continue_after(self, before: OutputEvent) -> None:
        """Continue after an event that an earlier server recorded. Called for each of them, in order."""
        if not self.sequence:
            self._store.continue_after()
        self.sequence = before.sequence
        self._output_bytes += len(before.text.encode(errors="replace")) + EVENT_BYTES

    def record(self, event: Event) -> OutputEvent | None:
        """Return the numbered form of an event; None for one that is not recorded."""
        if isinstance(event, Notice):
            return self.notice(event.text)
        if isinstance(event, Stream | DisplayData | ClearOutput):
            if self._is_capped:
                return None
            if self._output_bytes + self._store.total_bytes > self._cap_bytes:
                self._is_capped = True
                return self.notice(f"output past {self._cap_bytes:,} bytes is not kept; the cell goes on")
        elif self._result_bytes > self._cap_bytes:
            return None  # results, errors and questions are not capped above, and only a hostile cell has many
        match event:
            case Stream():
                self._output_bytes += len(event.text.encode(errors="replace"))
                return self._number(OutputEvent(sequence=0, kind=event.name, text=event.text))
            case DisplayData():
                return self._display(event)
            case ExecuteResult():
                return self._result(event)
            case Raised():
                return self._raised(event)
            case ClearOutput():
                return self._number(OutputEvent(sequence=0, kind="clear", data={"wait": event.wait}))
            case InputRequest():
                return self._number(OutputEvent(sequence=0, kind="input", text=event.prompt[:MAX_LINE_CHARS]))
            case _:
                return None

    def notice(self, text: str, **data: JsonValue) -> OutputEvent:
        """Return a notice of belljar's own, to stand between the cell's output; `data` is for programs."""
        return self._number(OutputEvent(sequence=0, kind="notice", text=Notice(text).line, data=data))

    def _number(self, event: OutputEvent) -> OutputEvent:
        self.sequence += 1
        self._output_bytes += EVENT_BYTES
        self._result_bytes += EVENT_BYTES if event.kind in ("result", "error", "input") else 0
        event.sequence = self.sequence
        return event

    def _display(self, event: DisplayData) -> OutputEvent:
        display = display_of(event.data, self._store, event.display_id)
        self._output_bytes += sum(min(len(form), INLINE_CHARS) for form in event.data.values() if isinstance(form, str))
        plain = plain_of(event.data) or ""
        data: dict[str, JsonValue] = {"update": event.update, "display_id": event.display_id}
        if display is not None:
            plain = ""
            data["display"] = display.model_dump(mode="json")
        return self._number(OutputEvent(sequence=0, kind="display", text=plain, data=data))

    def _result(self, event: ExecuteResult) -> OutputEvent:
        shown = {mime: form for mime, form in event.data.items() if mime != VALUE}
        text = shown.get("text/plain")
        text = text if isinstance(text, str) else None
        display = display_of(shown, self._store) if shown.keys() - {"text/plain"} else None
        data: dict[str, JsonValue] = {"has_text": text is not None}
        if VALUE in event.data:
            data["value"] = event.data[VALUE]
        if display is not None:
            data["display"] = display.model_dump(mode="json")
        if text is not None and len(text) > self._text_chars:
            whole = text.encode(errors="replace")
            with suppress(OSError):  # on a full disk the cut result is all there is
                data |= {"uri": self._store.store("text/plain", whole), "size": len(whole)}
            text = clip(text, self._text_chars)
        self._result_bytes += len(text or "")
        return self._number(OutputEvent(sequence=0, kind="result", text=text or "", data=data))

    def _raised(self, event: Raised) -> OutputEvent:
        lines = [clip(line, MAX_LINE_CHARS) for line in event.traceback]
        if len(lines) > MAX_TRACEBACK_LINES:
            half = MAX_TRACEBACK_LINES // 2
            lines = [*lines[:half], f"... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]
        self._result_bytes += sum(map(len, lines))
        message = clip(event.message, MAX_MESSAGE_CHARS)
        text = f"{event.name[:MAX_LINE_CHARS]}: {message}" if message else event.name[:MAX_LINE_CHARS]
        return self._number(OutputEvent(sequence=0, kind="error", text=text, data={"traceback": [*lines]}))


# Screens: filters through which output passes before it is recorded
#
# A screen is made for one execution. It may change events, and hold back the end of a stream, because what it looks for
# may be split over two pieces; `flush` gives that out. What a screen looks for is not known here.

# An escape sequence that has begun and not ended: text that follows may belong to it.
_BEGUN_ESCAPE = re.compile(r"\x1b(?:\[[0-9;:?]{0,32})?\Z")
_LONGEST_ESCAPE = 40
# A match that does not end is held back until there are as many characters as this many of the longest matches have.
_MAX_HELD_MATCHES = 16
# So much text takes a screen less than a millisecond; of digits alone, which code can choose, a hundred times that.
_MAX_INLINE_CHARS = 256


class OutputScreen(Protocol):
    """A filter that events pass through."""

    def screen(self, event: Event) -> Iterable[Event]:
        """Return what goes on in place of an event: itself, another, none, or what was held back and then the event."""
        ...

    def flush(self) -> Iterable[Event]:
        """Return what was held back, because the cell is over or waits for someone who should see it."""
        ...


class Screens:
    """Several screens, one behind the other."""

    def __init__(self, screens: Sequence[OutputScreen] = ()) -> None:
        self._screens = screens

    @property
    def is_empty(self) -> bool:
        """Return whether there is no screen, so that everything passes as it is."""
        return not self._screens

    async def apply(self, event: Event) -> list[Event]:
        """Return what is left of an event behind the last screen. Large events are screened in a thread."""
        if not self._screens:
            return [event]
        if _size(event) <= _MAX_INLINE_CHARS:
            return self._pass_on([event], self._screens)
        return await asyncio.to_thread(self._pass_on, [event], self._screens)

    def flush(self) -> list[Event]:
        """Return what all screens held back, in order."""
        passed: list[Event] = []
        for place, screen in enumerate(self._screens):
            passed += self._pass_on(list(screen.flush()), self._screens[place + 1 :])
        return passed

    def _pass_on(self, events: list[Event], screens: Sequence[OutputScreen]) -> list[Event]:
        for screen in screens:
            events = [passed for event in events for passed in screen.screen(event)]
        return events


def _size(event: Event) -> int:
    """Return how many characters are to be screened; more than `_MAX_INLINE_CHARS` where counting takes long."""
    match event:
        case Stream():
            return len(event.text)
        case DisplayData() | ExecuteResult():
            return sum(len(form) if isinstance(form, str) else _MAX_INLINE_CHARS + 1 for form in event.data.values())
        case CommMessage():
            return _MAX_INLINE_CHARS + 1
        case Raised():
            return len(event.message) + sum(map(len, event.traceback))
        case _:
            return 0


class TailBuffer:
    """Holds back the end of a stream, because a match in it may not be complete yet.

    `breakers` are characters that no match contains, and `longest` is the length of the longest match. `spans` finds
    matches: a piece without any breaker is cut between two of them.
    """

    def __init__(self, breakers: str, *, longest: int, spans: Callable[[str], Iterable[tuple[int, int]]]) -> None:
        self._breakers = breakers
        self._longest = longest
        self._spans = spans
        self._kept = ""

    def feed(self, text: str) -> str:
        """Add the next piece of the stream, and return as much of the text so far as can go out."""
        whole = self._kept + text
        cut = self._cut(whole)
        self._kept = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """Return the rest, because no more text will follow."""
        kept, self._kept = self._kept, ""
        return kept

    def _cut(self, whole: str) -> int:
        begun = _BEGUN_ESCAPE.search(whole, max(0, len(whole) - _LONGEST_ESCAPE))
        end = begun.start() if begun else len(whole)
        cut = max(whole.rfind(breaker, 0, end) for breaker in self._breakers) + 1
        if end - cut > 2 * self._longest:
            # No breaker for a long time: what began before this place has ended by now.
            place = end - self._longest
            within = next((span for span in self._spans(whole[cut:end]) if span[0] < place - cut < span[1]), None)
            place = cut + within[0] if within else place
            cut = place if place > cut or end - cut < _MAX_HELD_MATCHES * self._longest else end
        return cut
