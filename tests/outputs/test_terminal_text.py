import time

import pytest

from belljar.outputs.terminal_text import as_plain, coloured


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a\nb\n", "a\nb\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://host\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("\x1b", ""),
        ("10%\r100%\r\n", "100%\n"),
        ("long line\rab", "abng line"),
        ("abc\b\bX", "aX"),
        ("\b\bx", "x"),
        ("nul\x00 bell\x07 right\u202eleft half\ud800", "nul� bell� right�left half�"),
        ("one\u2028two\x85three\x0cfour", "one�two�three�four"),
    ],
)
def test_plain_text_is_what_was_on_the_screen(text: str, plain: str) -> None:
    assert as_plain(text) == plain


def test_a_line_that_is_written_over_without_end_takes_no_longer_than_its_length() -> None:
    started = time.process_time()
    assert len(as_plain("x" * 500_000 + "\ry" * 500_000)) == 500_000
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("<b>&", "&lt;b&gt;&amp;"),
        ("\x1b[31m<i>\x1b[0m.", '<span class="ansi-red">&lt;i&gt;</span>.'),
        ("\x1b[1m\x1b[92mx\x1b[22my", '<span class="ansi-bold ansi-green">x</span><span class="ansi-green">y</span>'),
        ("\x1b[38;5;1;4mx", '<span class="ansi-underline">x</span>'),
        ("\x1b[38;2;1;3;4mx", "x"),
        ("\x1b[31m0%\r\x1b[32m1%", "1%"),
        ('\x1b[31"onclick=m', "nclick=m"),
        ("\x1b[9999999999999999999mx", "x"),
        ("\x1b[m\x1b[;mx", "x"),
    ],
)
def test_colours_become_classes_and_everything_else_is_escaped(text: str, html: str) -> None:
    assert coloured(text) == html
