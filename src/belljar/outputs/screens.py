"""Output on its way from a kernel to the record: screens may change events, and hold the end of a stream back.

A screen is made for one execution. What it looks for may be split over two pieces of a stream, so it may keep the last
of them until it knows more; `flush` gives it out. Knows nothing of what screens look for.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from belljar.outputs.events import CommMessage, DisplayData, Event, ExecuteResult, Raised, Stream

# An escape sequence that has begun: what stands after it is not a word of its own before it ends.
_BEGUN_ESCAPE = re.compile(r"\x1b(?:\[[0-9;:?]{0,32})?\Z")
_LONGEST_ESCAPE = 40
_PATIENCE = 16
# Takes a screen less than a millisecond; of digits alone, which code can choose to say, a hundred times that.
_SMALL_CHARS = 256


class OutputScreen(Protocol):
    """Something that events pass through."""

    def screen(self, event: Event) -> Iterable[Event]:
        """What goes on in place of an event: itself, another, none, or what was held back and then it."""
        ...

    def flush(self) -> Iterable[Event]:
        """What was held back: the cell is over, or waits for someone who should see it."""
        ...


class Screens:
    """One behind the other."""

    def __init__(self, screens: Sequence[OutputScreen] = ()) -> None:
        self._screens = screens

    async def passed(self, event: Event) -> list[Event]:
        """What is left of an event behind the last screen. Large ones are looked through in a thread."""
        if not self._screens:
            return [event]
        if _size(event) <= _SMALL_CHARS:
            return self._pass_on([event], self._screens)
        return await asyncio.to_thread(self._pass_on, [event], self._screens)

    def flush(self) -> list[Event]:
        """What all of them held back, in order."""
        passed: list[Event] = []
        for place, screen in enumerate(self._screens):
            passed += self._pass_on(list(screen.flush()), self._screens[place + 1 :])
        return passed

    def _pass_on(self, events: list[Event], screens: Sequence[OutputScreen]) -> list[Event]:
        for screen in screens:
            events = [passed for event in events for passed in screen.screen(event)]
        return events


def _size(event: Event) -> int:
    """How much of it there is to look through, as far as that can be told at once."""
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
    """Cuts a stream where nothing that is looked for can go on: text before the cut is whole.

    `breakers` are characters that cannot stand in what is looked for, and `longest` is how long that can be. `spans`
    finds it: a piece without any breaker is cut between two of them.
    """

    def __init__(self, breakers: str, *, longest: int, spans: Callable[[str], Iterable[tuple[int, int]]]) -> None:
        self._breakers = breakers
        self._longest = longest
        self._spans = spans
        self._kept = ""

    def feed(self, text: str) -> str:
        """The next piece of the stream in, as much of the text so far as can go out."""
        whole = self._kept + text
        cut = self._cut(whole)
        self._kept = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """The rest, because there will be no more of it."""
        kept, self._kept = self._kept, ""
        return kept

    def _cut(self, whole: str) -> int:
        begun = _BEGUN_ESCAPE.search(whole, max(0, len(whole) - _LONGEST_ESCAPE))
        end = begun.start() if begun else len(whole)
        cut = max(whole.rfind(breaker, 0, end) for breaker in self._breakers) + 1
        if end - cut > 2 * self._longest:
            # No breaker for a long time: what begins before this place would have ended by now.
            place = end - self._longest
            within = next((span for span in self._spans(whole[cut:end]) if span[0] < place - cut < span[1]), None)
            place = cut + within[0] if within else place
            # Something without an end is held back no longer than this.
            cut = place if place > cut or end - cut < _PATIENCE * self._longest else end
        return cut
