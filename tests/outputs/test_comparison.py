import re
import time
from typing import Any

import pytest

from belljar.outputs.comparison import Comparison


def _stream(text: str | list[str], name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def _shown(**data: Any) -> dict[str, Any]:
    named = {name.replace("__", "+").replace("_", "/", 1): value for name, value in data.items()}
    return {"output_type": "display_data", "data": named, "metadata": {}}


def _error(name: str, message: str) -> dict[str, Any]:
    return {"output_type": "error", "ename": name, "evalue": message, "traceback": ["anything"]}


def _differences(then: list[dict[str, Any]], now: list[dict[str, Any]], *ignored: str) -> list[str]:
    comparison = Comparison([re.compile(pattern) for pattern in ignored])
    return comparison.differences(comparison.said(then), comparison.said(now))


PLOTLY = "application/vnd.plotly.v1+json"


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ([_stream("<object at 0x7f0011223344>")], [_stream("<object at 0x55d0aabbccdd>")]),
        ([_stream("Cell In[3], line 1")], [_stream("Cell In [12], line 1")]),
        ([_stream("<ipython-input-3-0a1b2c>:1: W")], [_stream("/tmp/ipykernel_4/123.py:1: W")]),
        ([_stream("CPU times: user 3 ms\nWall time: 4 s")], [_stream("CPU times: user 9 us\nWall time: 1 ms")]),
        (
            [_stream("1.2 µs ± 3 ns per loop (mean ± std. dev. of 7 runs, 100 loops each)")],
            [_stream("9 ms ± 1.3 ns per loop (mean ± std. dev. of 7 runs, 10 loops each)")],
        ),
        ([_stream("took 0.123 s")], [_stream("took 12.5 seconds")]),
        ([_stream("50%|##| 5/10 [00:01<00:02, 3.1it/s]")], [_stream("50%|##| 5/10 [00:07<00:09, 0.9it/s]")]),
        ([_stream("/tmp/tmpab12cd_9")], [_stream("/tmp/tmpzzzzzzzz")]),
        ([_stream("/a/b/site-packages/x.py:1: W")], [_stream("/usr/lib/site-packages/x.py:1: W")]),
        ([_stream("\x1b[31mred\x1b[0m")], [_stream("red")]),
        ([_stream("0%\r100%\n")], [_stream("100%")]),
        ([_stream(["a\n", "b\n"])], [_stream("a\nb\n")]),
        ([_stream("a"), _stream("e", "stderr"), _stream("b")], [_stream("ab"), _stream("e", "stderr")]),
        ([_stream("x\n[belljar: a fresh kernel]\n", "stderr")], [_stream("x\n", "stderr")]),
        ([_shown(image_png="AA==", text_plain="<Figure>")], [_shown(image_png="BB==", text_plain="<Figure >")]),
        ([{"output_type": "display_data", "data": {PLOTLY: {}}}], [_shown(text_html="<div>", image_png="AA==")]),
        ([_shown(text_plain=["  a\n", "0 1"], text_html="<x>")], [_shown(text_plain="  a\n0 1")]),
        ([_error("E", "at 0x7f0011223344")], [_error("E", "at 0x7f0011223355")]),
    ],
)
def test_what_means_nothing_makes_no_difference(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    assert _differences(then, now) == []


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ([_stream("1\n2\n3")], [_stream("1\n5\n3")], ["stdout:", "- 2", "+ 5"]),
        ([_stream("--x")], [_stream("++x")], ["stdout:", "- --x", "+ ++x"]),
        ([_stream("a")], [], ["stdout:", "- a"]),
        ([], [_stream("w", "stderr")], ["stderr:", "+ w"]),
        ([_shown(text_plain="1")], [_shown(text_plain="2")], ["shown:", "- 1", "+ 2"]),
        (
            [_shown(text_html="<b>1</b>", text_plain="<HTML object>")],
            [_shown(text_html="<b>2</b>", text_plain="<HTML object>")],
            ["shown:", "- <b>1</b>", "+ <b>2</b>"],
        ),
        ([_shown(image_png="AA==")], [], ["shown:", "- [picture]"]),
        ([_error("A", "m")], [], ["error:", "- A: m"]),
        ([_error("A", "m")], [_error("A", "n")], ["error:", "- A: m", "+ A: n"]),
    ],
)
def test_differences_are_told_in_lines(then: list[dict[str, Any]], now: list[dict[str, Any]], told: list[str]) -> None:
    assert _differences(then, now) == told


def test_what_the_caller_ignores_makes_no_difference() -> None:
    assert _differences([_stream("on 2024-01-02")], [_stream("on 2025-03-04")], r"\d{4}-\d\d-\d\d") == []


def test_long_differences_are_shortened_around_the_first_one() -> None:
    lines = _differences([_stream("x" * 5_000 + "1" + "y" * 5_000)], [_stream("x" * 5_000 + "2" + "y" * 5_000)])
    assert max(map(len, lines)) < 200
    assert "1y" in lines[1]
    many = _differences([_stream("\n".join(map(str, range(20_000))))], [_stream("\n".join(map(str, range(1, 19_999))))])
    assert len(many) < 30
    lengthy = _differences([_stream("a\n" * 20_000)], [_stream("b\n" * 20_000)])
    assert lengthy[-1] == "… 39,984 more lines"


@pytest.mark.parametrize("unit", ["1", "/a", "0x", "0:", "1.1", "± ", "a-", "In[", "[belljar: ", "<ipython-input-"])
def test_hostile_text_is_compared_in_linear_time(unit: str) -> None:
    started = time.process_time()
    _differences([_stream(unit * (100_000 // len(unit)))], [_stream("")])
    assert time.process_time() - started < 2
