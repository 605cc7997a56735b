"""What screens hold back of a stream, and for how long."""

import re

import pytest

from belljar.outputs.events import Event, Stream
from belljar.outputs.recorder import Screens, TailBuffer

pytestmark = pytest.mark.anyio


def keeper() -> TailBuffer:
    return TailBuffer("\n,", longest=10, spans=lambda text: [match.span() for match in re.finditer(r"\d+", text)])


def test_text_goes_out_as_far_as_nothing_can_go_on() -> None:
    tail = keeper()
    assert [tail.feed(piece) for piece in ("one, tw", "o\nthree", "", " four,")] == [
        "one,",
        " two\n",
        "",
        "three four,",
    ]
    assert (tail.flush(), tail.flush()) == ("", "")


def test_a_line_without_end_is_cut_between_what_is_looked_for() -> None:
    tail = keeper()
    assert [tail.feed(piece) for piece in ("abcdefghijklmn 1234", "56789 xyzabcd")] == ["", "abcdefghijklmn "]
    assert tail.flush() == "123456789 xyzabcd"


def test_something_without_end_is_not_held_back_for_ever() -> None:
    tail = keeper()
    assert "".join(tail.feed("1" * 50) for _ in range(10))


def test_an_escape_sequence_is_not_taken_apart() -> None:
    tail = TailBuffer(";\n", longest=10, spans=lambda _: [])
    assert tail.feed("a;\x1b[1;3") == "a;"
    assert tail.feed("1mred\n") == "\x1b[1;31mred\n"


class Doubling:
    """Says everything twice, the second time at the end."""

    def __init__(self) -> None:
        self._said: list[Event] = []

    def screen(self, event: Event) -> list[Event]:
        self._said.append(event)
        return [event]

    def flush(self) -> list[Event]:
        said, self._said = self._said, []
        return said


async def test_what_one_screen_held_back_goes_through_those_behind_it() -> None:
    screens = Screens([Doubling(), Doubling()])
    first = Stream("stdout", "a")
    large = Stream("stderr", "b" * 10_000)
    assert [*await screens.apply(first), *await screens.apply(large)] == [first, large]
    assert screens.flush() == [first, large, first, large, first, large]
    assert screens.flush() == []
