"""Data URIs that code prints: found whatever the pieces they come in, kept whole or left out whole, never cut."""

import base64
import re

import pytest

from belljar.models import OutputEvent
from belljar.outputs.summary import LEAST_CHARS, MAX_URIS, DataUri, DataUriFinder, Summary, TextBudget
from growth import TIMES, growth

URI = f"data:image/png;base64,{base64.b64encode(bytes(range(256)) * 40).decode()}"


def found(pieces: list[str]) -> list[tuple[str, str]]:
    """What a finder makes of the pieces of one stream: texts joined, URIs apart."""
    finder, parts = DataUriFinder(), list[tuple[str, str]]()
    told = [*(each for piece in pieces for each in finder.add("stdout", piece))]
    for _, part in (*told, *finder.settle()):
        kind, text = ("uri", part.text) if isinstance(part, DataUri) else ("text", part)
        if kind == "text" and parts and parts[-1][0] == "text":
            parts[-1] = ("text", parts[-1][1] + text)
        elif text:
            parts.append((kind, text))
    return parts


@pytest.mark.parametrize("size", [1, 3, 7, 64, 4_096, 65_536])
def test_a_uri_is_found_in_pieces_of_any_size(size: int):
    text = f'a d data: da\ndata:{{"x": 1}} <img src="{URI}"> and {URI}\nend da'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert found(pieces) == [
        ("text", 'a d data: da\ndata:{"x": 1} <img src="'),
        ("uri", URI),
        ("text", '"> and '),
        ("uri", URI),
        ("text", "\nend da"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "data:",
        "data:image/png;base64,AAAA",
        "data:" * 1_000,
        f"data:{'x' * 1_000}",
        f"data:a/{'b' * 1_000},",
        f"metadata: {'y' * 500}",
    ],
)
def test_what_is_no_uri_or_a_short_one_is_text(text: str):
    assert found([text]) == [("text", text)]
    assert found([*text]) == [("text", text)]


def test_only_so_many_are_told_apart():
    short = f"data:a/b,{'x' * LEAST_CHARS} "
    parts = found([short * (2 * MAX_URIS)])
    assert [kind for kind, _ in parts].count("uri") == MAX_URIS
    assert "".join(text for _, text in parts) == short * (2 * MAX_URIS)


@pytest.mark.parametrize("text", ["data:", "data:a/b,", "data:a/b;", "d", "data:image/png;base64,AAAA\n", "data:a/"])
def test_finding_takes_twice_as_long_for_twice_the_text(text: str):
    def work(printed: str) -> None:
        finder = DataUriFinder()
        for piece in (printed, *printed):
            for _ in finder.add("stdout", piece):
                pass

    assert growth(work, lambda count: text * count) < TIMES


@pytest.mark.parametrize("around", [0, 5_000, 30_000])
def test_a_text_within_a_limit_has_no_part_of_a_uri(around: int):
    text = f"{'x' * around}\n{URI}\n{'y' * around}"
    summary = Summary(budget_chars=10_000, uri="u")
    summary.add(OutputEvent(sequence=1, kind="stdout", text=text))
    assert "base64" not in summary.stream("stdout")
    assert not re.search("[A-Z]", summary.stream("stdout"))
    said = "".join(text for _, text in summary.segments())
    assert f"[belljar: a data: URI of {len(URI):,} characters is left out here]" in said
    assert summary.truncation is not None
    assert summary.truncation.total_bytes == len(text)
    assert summary.truncation.shown_bytes == len(summary.stream("stdout"))
    (left_out,) = summary.uris_left_out()
    assert left_out.content() == bytes(range(256)) * 40
    roomy = Summary(budget_chars=len(text) + 1, uri="u")
    roomy.add(OutputEvent(sequence=1, kind="stdout", text=text))
    assert (roomy.stream("stdout"), roomy.truncation, roomy.uris_left_out()) == (text, None, [])


def test_where_uris_go_out_whole_the_rest_is_cut():
    budget = TextBudget(1_000, has_whole_uris=True)
    for _ in range(3):
        budget.add("stdout", f"{'x' * 1_000}{URI}\n{'y' * 1_000}")
    text = "".join(text for _, text in budget.segments())
    assert text.count(URI) == 3
    assert len(text.replace(URI, "")) < 1_100
    assert budget.uris_left_out() == []


def test_texts_keep_their_order_although_a_uri_may_begin_with_them():
    summary = Summary(budget_chars=1_000, uri="u")
    said = [("stdout", "found"), ("stderr", "da"), ("stdout", "data"), ("notice", "[belljar: n]\n"), ("stdout", ":x")]
    for at, (kind, text) in enumerate(said):
        summary.add(OutputEvent.model_validate({"sequence": at, "kind": kind, "text": text}))
    assert summary.segments() == said


@pytest.mark.parametrize(
    ("uri", "content"),
    [
        ("data:text/plain;base64,aGk=", b"hi"),
        ("data:text/plain;charset=utf-8;BASE64,aGk%3D", b"hi"),
        ("data:image/svg+xml,%3Csvg/%3E", b"<svg/>"),
        ("data:image/png;base64,not!base64", None),
        ("data:image/png;base64,", None),
        ("", None),
    ],
)
def test_the_content_of_a_uri_is_what_it_holds(uri: str, content: bytes | None):
    assert DataUri(uri, len(uri), "").content() == content
