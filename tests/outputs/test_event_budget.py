from typing import Any

import pytest

from belljar.models import OutputEvent
from belljar.outputs.budget import within_budget


def _event(kind: Any, text: str = "", **data: Any) -> OutputEvent:
    return OutputEvent(sequence=1, kind=kind, text=text, data=data)


def _told(events: list[OutputEvent], limit: int) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in within_budget(events, limit)]


CUT = "\n[belljar: {} characters left out here]\n"


@pytest.mark.parametrize(
    ("events", "limit", "told"),
    [
        ([_event("stdout", "abcdef")], 6, [("stdout", "abc"), ("stdout", "def")]),
        ([_event("stdout", "abcdefgh")], 6, [("stdout", "abc"), ("notice", CUT.format(2)), ("stdout", "fgh")]),
        (
            [_event("stdout", "abc"), _event("display", "D"), _event("stdout", "defg"), _event("result", "R")],
            6,
            [("stdout", "abc"), ("display", "D"), ("notice", CUT.format(1)), ("stdout", "efg"), ("result", "R")],
        ),
        (
            [_event("stdout", "abcd"), _event("display", "D"), _event("stderr", "efgh")],
            6,
            [("stdout", "abc"), ("display", "D"), ("notice", CUT.format(2)), ("stderr", "fgh")],
        ),
        ([_event("stdout", "abcdefgh")], 0, [("stdout", "abcdefgh")]),
        ([_event("stdout", "a"), _event("clear"), _event("stdout", "b")], 0, [("clear", ""), ("stdout", "b")]),
        ([_event("stdout", "a"), _event("clear", wait=True)], 0, [("stdout", "a")]),
        (
            [_event("stdout", "a"), _event("clear", wait=True), _event("stdout", "b")],
            0,
            [("clear", ""), ("stdout", "b")],
        ),
        (
            [
                _event("display", "D", display_id="1"),
                _event("clear"),
                _event("display", "E", display_id="1", update=True),
            ],
            0,
            [("display", "D"), ("clear", ""), ("display", "E")],
        ),
    ],
)
def test_head_and_tail_are_kept_and_displays_between_them(
    events: list[OutputEvent], limit: int, told: list[tuple[str, str]]
) -> None:
    assert _told(events, limit) == told


def test_a_loop_that_clears_its_output_is_not_remembered() -> None:
    events = [event for _ in range(1_000) for event in (_event("clear", wait=True), _event("stdout", "x" * 100))]
    assert _told(events, 200) == [("clear", ""), ("stdout", "x" * 100)]
