import time

import pytest

from belljar.outputs.terminal_text import LineFolder, as_plain, coloured, folded
from growth import TIMES, growth


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


TQDM = "".join(f"\r{n:4}%|{'#' * (n // 10):10}| {n}/100 [00:0{n % 9}<?, ?it/s]" for n in range(101)) + "\n"
BELOW = "".join(
    "\router: {n}%\n" + "".join(f"\n\r  inner: {m}%\x1b[A" for m in range(0, 101, 10)) for n in (0, 50, 100)
)
BARS = [
    (TQDM, " 100%|##########| 100/100 [00:01<?, ?it/s]\n"),
    ("".join(f"\r\x1b[2K\x1b[3{n}m{'━' * n}\x1b[0m {n}/5" for n in range(6)) + "\x1b[?25h\n", "━━━━━ 5/5\n"),
    (
        "Collecting x\r\n" + "".join(f"\r\x1b[K  {n} MB eta" for n in range(9)) + "\r\x1b[Kdone\r\n",
        "Collecting x\r\ndone\r\n",
    ),
    ("".join(f"{'.' * 30}{n}%\x1b[2K\x1b[1G" for n in range(3)) + "ready", "ready"),
    ("".join(f"step {n}\r" for n in range(12)), "step 11"),
    ("".join(f"{n}%" + "\b" * len(f"{n}%") for n in (1, 10, 100)) + "done\n", "done\n"),
    ("\x1b[31mred\x1b[0m\r\na,b\r\n\tc\n", "\x1b[31mred\x1b[0m\r\na,b\r\n\tc\n"),
    ("long words\rshort\x1b[K\nnext", "short\nnext"),
]


@pytest.mark.parametrize(("printed", "seen"), BARS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_a_line_that_is_written_over_is_folded_however_it_is_split(printed: str, seen: str, size: int) -> None:
    folder = LineFolder()
    settled = [part for at in range(0, len(printed), size) for part in folder.add("stdout", printed[at : at + size])]
    whole = "".join(text for _, text in [*settled, *folder.settle()])
    assert (whole, folded(printed)) == (seen, seen)


def test_a_bar_below_another_one_leaves_a_line_for_each_state_of_the_upper_one() -> None:
    assert folded(BELOW).count("inner") <= 3


def test_a_bar_stands_behind_the_lines_of_the_other_stream_that_came_between() -> None:
    folder = LineFolder()
    shown: list[tuple[str, str]] = []
    for n in range(4):
        shown += [*folder.add("stderr", f"\r{n}/3"), *folder.add("stdout", f"row {n}\n")]
    assert folder.held() == [("stderr", "3/3")]
    assert [*shown, *folder.add("stderr", "\n")] == [*(("stdout", f"row {n}\n") for n in range(4)), ("stderr", "3/3\n")]
    # What is no bar keeps its place.
    assert [*folder.add("stdout", "a"), *folder.add("stderr", "b\n"), *folder.add("stdout", "c\n")] == [
        ("stdout", "a"),
        ("stderr", "b\n"),
        ("stdout", "c\n"),
    ]


@pytest.mark.parametrize("piece", ["\rx", "x\b", "\x1b[2K", "\x1b[K\r", "\x1b[A\n", "\x1b[", "x", "\r", "\x9d\r"])
def test_folding_takes_as_long_as_the_text(piece: str) -> None:
    def fold(text: str) -> None:
        folder = LineFolder()
        for at in range(0, len(text), 100):
            folder.add("stdout", text[at : at + 100])
            folder.held()
        folded(text)

    assert growth(fold, lambda count: "y" * 4_000 + piece * count) <= TIMES


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
