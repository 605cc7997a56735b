"""Screens: filters through which output passes on its way from a kernel to the record.

A screen is made for one execution. It may change events, and hold back the end of a stream, because what it looks for
may be split over two pieces; `flush` gives that out. This module knows nothing of what screens look for.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from belljar.outputs.events import CommMessage, DisplayData, Event, ExecuteResult, Raised, Stream

# An escape sequence that has begun and not ended: text that follows may belong to it.
_BEGUN_ESCAPE = re.compile(r"\x1b(?:\[[0-9;:?]{0,32})?\Z")
_LONGEST_ESCAPE = 40
_PATIENCE = 16
# So much text takes a screen less than a millisecond; of digits alone, which code can choose, a hundred times that.
_SMALL_CHARS = 256


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

    async def passed(self, event: Event) -> list[Event]:
        """Return what is left of an event behind the last screen. Large events are screened in a thread."""
        if not self._screens:
            return [event]
        if _size(event) <= _SMALL_CHARS:
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
    """Return how many characters of an event are to be screened; more than `_SMALL_CHARS` where counting takes long."""
    match event:
        case Stream():
            return len(event.text)
        case DisplayData() | ExecuteResult():
            return sum(len(form) if isinstance(form, str) else _SMALL_CHARS + 1 for form in event.data.values())
        case CommMessage():
            return _SMALL_CHARS + 1
        case Raised():
            return len(event.message) + sum(map(len, event.traceback))
        case _:
            return 0


class TailKeeper:
    """Cuts a stream where nothing that is looked for can go on, so that the text before the cut is complete.

    `breakers` are characters that cannot stand in what is looked for, and `longest` is how long that can be. `spans`
    finds it: a piece without any breaker is cut between two of its findings.
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
            # Something that does not end is held back no longer than this.
            cut = place if place > cut or end - cut < _PATIENCE * self._longest else end
        return cut
