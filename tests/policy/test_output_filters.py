"""Output rules: what callers see of streams that arrive in pieces, and of everything else."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from belljar.outputs.events import (
    CommMessage,
    DisplayData,
    Event,
    ExecuteResult,
    Finished,
    InputRequest,
    Notice,
    Raised,
    Stream,
)
from belljar.policy.output_filter import MAX_LINE_CHARS, FilterScreen
from belljar.policy.rules import OutputRule

KEY = "sk-abcdefgh12345678"
PICTURE = base64.b64encode(b"\x89PNG\xff\x00").decode()
RULES: list[dict[str, Any]] = [{"pattern": "sk-[a-z0-9]{8,}", "replace": "\\0[key]"}, {"text": "Projekt Ü"}]


def screen(*rules: dict[str, Any]) -> FilterScreen:
    return FilterScreen([OutputRule.model_validate(rule) for rule in rules or RULES])


def shown(screen: FilterScreen, *events: Event) -> list[Event]:
    passed = [passed for event in events for passed in screen.screen(event)]
    return [*passed, *screen.flush()]


def text_of(events: list[Event], name: str = "stdout") -> str:
    return "".join(event.text for event in events if isinstance(event, Stream) and event.name == name)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_value_is_replaced_however_the_stream_is_cut(size: int) -> None:
    text = f"key={KEY} of Projekt Ü\nnext {KEY}"
    pieces = [Stream("stdout", text[start : start + size]) for start in range(0, len(text), size)]
    assert text_of(shown(screen(), *pieces)) == "key=\\0[key] of [removed]\nnext \\0[key]"


def test_lines_go_out_as_soon_as_they_end_and_each_stream_by_itself() -> None:
    filtering = screen()
    assert filtering.screen(Stream("stdout", "one\ntw")) == [Stream("stdout", "one\n")]
    assert filtering.screen(Stream("stderr", "err")) == []
    assert filtering.screen(Stream("stdout", "o\r")) == [Stream("stdout", "two\r")]
    assert list(filtering.flush()) == [Stream("stderr", "err")]


def test_a_line_without_end_is_given_out_and_a_value_in_it_is_not() -> None:
    filtering = screen()
    filler = "x" * (MAX_LINE_CHARS // 2)
    said: list[Event] = []
    for _ in range(6):
        for piece in (filler, " sk-abcd", "efgh1234 "):
            said += filtering.screen(Stream("stdout", piece))
    assert len(text_of(said)) > MAX_LINE_CHARS
    whole = text_of([*said, *filtering.flush()])
    assert whole == f"{filler} \\0[key] " * 6


def test_a_value_at_every_place_around_the_cut_is_replaced() -> None:
    for shift in range(0, 200, 9):
        filtering = screen()
        said = list(
            filtering.screen(Stream("stdout", "y" * (MAX_LINE_CHARS - 4_100 - shift) + f" {KEY} " + "z" * 4_300))
        )
        assert "sk-" not in text_of([*said, *filtering.flush()])


def test_results_displays_errors_and_questions_are_changed_too() -> None:
    seen = shown(
        screen(),
        ExecuteResult({"text/plain": repr(KEY), "image/png": PICTURE, "application/json": {KEY: [KEY, 1, None]}}),
        DisplayData({"text/html": f"<b>{KEY}</b>"}),
        Raised("ValueError", KEY, ["Traceback", f"ValueError: {KEY}"]),
        InputRequest(f"{KEY}? "),
    )
    assert seen == [
        ExecuteResult(
            {
                "text/plain": "'\\0[key]'",
                "image/png": PICTURE,
                "application/json": {"\\0[key]": ["\\0[key]", 1, None]},
            }
        ),
        DisplayData({"text/html": "<b>\\0[key]</b>"}),
        Raised("ValueError", "\\0[key]", ["Traceback", "ValueError: \\0[key]"]),
        InputRequest("\\0[key]? "),
    ]


@pytest.mark.parametrize("mime", ["image/png", "application/zip", "application/pdf", "font/woff"])
def test_a_text_with_a_binary_type_is_changed_too(mime: str) -> None:
    """Code may give any text any type; what is no base64 is shown as text, and base64 of a text can be read."""
    (plain,) = shown(screen(), DisplayData({mime: f"the key is {KEY}"}))
    assert plain == DisplayData({mime: "the key is \\0[key]"})
    (encoded,) = shown(screen(), DisplayData({mime: base64.b64encode(KEY.encode()).decode()}))
    assert encoded == DisplayData({mime: base64.b64encode(b"\\0[key]").decode()})


def test_pictures_pass_and_a_media_type_tells_nothing() -> None:
    assert shown(screen(), DisplayData({"image/png": PICTURE})) == [DisplayData({"image/png": PICTURE})]
    (named,) = shown(screen(), DisplayData({f"text/{KEY}": "x"}))
    assert named == DisplayData({"text/\\0[key]": "x"})


def test_what_widgets_say_is_changed_too_and_withheld_with_the_rest() -> None:
    said = CommMessage("comm_msg", "id", {"state": {"value": KEY}}, buffers=("QQ==",))
    assert shown(screen(), said) == [replace(said, data={"state": {"value": "\\0[key]"}})]
    notice, withheld = shown(screen({"text": KEY, "withhold": True}), said)
    assert isinstance(notice, Notice)
    assert isinstance(withheld, CommMessage)
    assert (KEY in str(withheld), withheld.buffers) == (False, ())
    # Code chooses the names of what they say: none of them passes for a picture, nor holds anything itself.
    named = CommMessage("comm_msg", "id", {"image/png": KEY, KEY: 1}, metadata={"video/mp4": [KEY]})
    assert KEY not in str(shown(screen(), named))


def test_what_a_line_holds_comes_before_what_follows_it() -> None:
    finished = Finished(is_ok=True, execution_count=1)
    assert shown(screen(), Stream("stdout", "no newline"), finished) == [Stream("stdout", "no newline"), finished]


def test_withholding_says_so_once_and_gives_nothing_more() -> None:
    filtering = screen({"pattern": "BEGIN PRIVATE KEY", "withhold": True, "reason": "a key"})
    said = [
        *filtering.screen(Stream("stdout", "before\n")),
        *filtering.screen(Stream("stdout", "just before\n-----BEGIN PRIVATE KEY-----\nMIIE")),
        *filtering.screen(Stream("stderr", "more\n")),
        *filtering.screen(ExecuteResult({"text/plain": "MIIE", "image/png": "MIIE"})),
        *filtering.flush(),
    ]
    words = "output withheld by output.1: a key; the cell ran, show less of what it made"
    assert said == [Stream("stdout", "before\n"), Stream("stdout", "just before\n"), Notice(words)]


def test_an_error_or_a_question_that_is_withheld_is_still_one() -> None:
    rule = {"text": KEY, "withhold": True}
    notice, raised = shown(screen(rule), Raised("ValueError", KEY, ["Traceback", f"ValueError: {KEY}"]))
    assert (type(notice), raised) == (Notice, Raised("Error", "withheld", []))
    _, asked = shown(screen(rule), InputRequest(f"{KEY}? "))
    assert asked == InputRequest("(withheld) ")


def test_lone_surrogates_do_not_stop_the_output() -> None:
    assert KEY not in text_of(shown(screen(), Stream("stdout", f"\ud800 {KEY}\n")))
