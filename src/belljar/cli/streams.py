"""Stdout and stderr of every command: nothing that is written to them acts on the person's terminal.

What sessions, servers and files say may contain terminal control sequences, which set the title, fill the clipboard or
make the terminal answer as if the person had typed. `filter_streams` puts a filter before both streams, which treats
two kinds of text differently:

- Our own lines, which may quote names and messages of others. They have no colours; every control character becomes
  `U+FFFD`, on a terminal and elsewhere alike.
- Output that the person asked for (`write_output`): what code prints, an exported document. On a terminal it keeps
  colours and movements within a line, because progress bars use them. In a file or a pipe it stays as it is.

rich draws on the terminal itself, so it gets `raw_stream`, and only texts that went through `one_line`.
"""

import logging
import os
import re
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

from belljar.outputs.terminal_text import without_escapes

BROKEN_PIPE = 128 + 13
"""The exit status that a shell gives a process that SIGPIPE killed; Windows has no such signal."""

_LEAST_CELL = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Line separators, characters that change the direction of text, and lone surrogates, which may be encoded as any byte.
_INVISIBLE = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OWN_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}]")
_CONTROL_SEQUENCE = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]{0,64}m)"
    r"|(?P<within_line>\x1b\[[0-9]{0,4}[CDGK]|[\r\b])"
    r"|(?P<command>"
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # movements elsewhere on the screen, modes, queries
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # what a terminal would run or store
    r"|\x1b[ -/]*[0-~]?)"
    rf"|(?P<invisible>[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}])"
)
_UNFINISHED_COLOUR = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")
_RESET = "\x1b[0m"
_RESET_CODE = re.compile(r"\x1b\[[0;:]*m")


def own_text(text: str) -> str:
    """Return text of ours with every control character but tabs and line ends replaced."""
    return _OWN_CONTROL.sub(_REPLACEMENT, without_escapes(text))


def one_line(text: str) -> str:
    """Return a name or message of somebody else's without what would end a line of ours or act on the terminal."""
    return "".join(character if character.isprintable() else _REPLACEMENT for character in text)


def indented(text: str) -> str:
    """Return a message with all lines but the first indented, so that only the first looks like a line of ours."""
    return text.replace("\n", "\n  ")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, with every column but the last padded to its widest cell."""
    rows = [[*map(one_line, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def table(rows: Sequence[Sequence[str]], *, spare: Sequence[str] = ()) -> str:
    """Return rows, the titles first, as lines that fit the terminal; elsewhere nothing is left out or shortened.

    What is too wide loses the columns in `spare`, one after the other, and then the ends of its longest cells.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    return columns(fitted(rows, width, spare) if width else rows)


def fitted(rows: Sequence[Sequence[str]], width: int, spare: Sequence[str] = ()) -> list[list[str]]:
    """Return the rows of a table without what does not fit the width; the last column may be cut to a few letters."""
    shown = [[one_line(cell) for cell in row] for row in rows]
    for title in spare:
        if _table_width(shown) <= width:
            break
        place = shown[0].index(title)
        shown = [[*row[:place], *row[place + 1 :]] for row in shown]
    while (excess := _table_width(shown) - width) > 0:
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        place = max(range(len(widths)), key=widths.__getitem__)
        if widths[place] <= _LEAST_CELL:
            break
        room = max(_LEAST_CELL, widths[place] - excess)
        for row in shown:
            if len(row[place]) > room:
                row[place] = f"{row[place][: room - 1]}…"
    return shown


def _table_width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2


def shown_output(text: str) -> str:
    """Return output for a terminal: keep colours and movements within a line, drop other control sequences."""

    def shown(found: re.Match[str]) -> str:
        match found.lastgroup:
            case "colour" | "within_line":
                return found[0]
            case "command":
                return ""
            case _:
                return _REPLACEMENT

    return _CONTROL_SEQUENCE.sub(shown, text)


class ColourState:
    """The terminal, if any, on which output left a colour set, because that colour could hide our own lines."""

    def __init__(self) -> None:
        self._coloured: TextIO | None = None

    def update(self, stream: TextIO, text: str) -> None:
        """Record the last colour of a text that was written to a terminal."""
        if codes := re.findall(r"\x1b\[[0-9;:]*m", text):
            self._coloured = None if _RESET_CODE.fullmatch(codes[-1]) else stream

    def reset(self) -> None:
        """Reset the colour that is set, if one is."""
        if self._coloured is not None:
            stream, self._coloured = self._coloured, None
            stream.write(_RESET)
            stream.flush()


class FilteredStream:
    """A text stream that filters both kinds of text; its other attributes are those of the wrapped stream."""

    def __init__(self, stream: TextIO, colours: ColourState) -> None:
        self.stream = stream
        self.colours = colours
        self.is_unread = False
        """Whether whoever read the stream is gone, as `head` is when it has seen enough."""
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Write text of ours."""
        # click writes b"" to learn whether a stream takes bytes. The pattern refuses them, so it has to come first.
        shown = self._encodable(own_text(text))
        if shown:
            self.colours.reset()
        with self._noticing_its_end():
            self.stream.write(shown)
        return len(text)

    def flush(self) -> None:
        """Write out what is buffered."""
        with self._noticing_its_end():
            self.stream.flush()

    def writelines(self, lines: Any) -> None:
        """Write lines of ours."""
        for line in lines:
            self.write(line)

    def write_output(self, text: str) -> None:
        """Write output that the person asked for, and flush it."""
        if self.stream.isatty():
            # A colour code may be split between two writes; the first half alone would be shown as text.
            text = self._unfinished + text
            self._unfinished = ""
            if unfinished := _UNFINISHED_COLOUR.search(text):
                text, self._unfinished = text[: unfinished.start()], unfinished[0]
            text = shown_output(text)
            self.colours.update(self.stream, text)
        with self._noticing_its_end():
            self.stream.write(self._encodable(text))
            self.stream.flush()

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines in place of what the terminal shows, cut to its size."""
        width, height = shutil.get_terminal_size()
        if len(lines) >= height:
            lines = [*lines[: height - 2], f"… and {len(lines) - height + 2} more"]
        text = "".join(f"{one_line(line)[:width]}\x1b[K\n" for line in lines)
        with self._noticing_its_end():
            self.stream.write(self._encodable(f"\x1b[H{text}\x1b[J"))
            self.stream.flush()

    @contextmanager
    def _noticing_its_end(self) -> Generator[None]:
        """Note a broken pipe, and write to /dev/null from there on, because Python would report it again at exit."""
        try:
            yield
        except BrokenPipeError:
            self.is_unread = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            raise

    def _encodable(self, text: str) -> str:
        encoding = self.stream.encoding or "utf-8"
        return text if text.isascii() else text.encode(encoding, "replace").decode(encoding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def filter_streams() -> tuple[FilteredStream, FilteredStream]:
    """Replace `sys.stdout` and `sys.stderr` by filtered streams, for the rest of this process, and return them."""
    colours = ColourState()
    stdout, stderr = (
        stream if isinstance(stream, FilteredStream) else FilteredStream(stream, colours)
        for stream in (sys.stdout, sys.stderr)
    )
    sys.stdout, sys.stderr = cast("TextIO", stdout), cast("TextIO", stderr)
    return stdout, stderr


def reset_colours() -> None:
    """Reset the colours that a session's output left set, before the person's shell prints its prompt."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, FilteredStream):
            stream.colours.reset()


def write_output(stream: TextIO, text: str) -> None:
    """Write output that the person asked for to stdout or stderr."""
    guarded = stream if isinstance(stream, FilteredStream) else FilteredStream(stream, ColourState())
    guarded.write_output(text)


def draw_screen(stream: TextIO, lines: Sequence[str]) -> None:
    """Show lines on a terminal, in place of what it shows."""
    guarded = stream if isinstance(stream, FilteredStream) else FilteredStream(stream, ColourState())
    guarded.draw(lines)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the unfiltered stream, for rich to draw on."""
    return stream.stream if isinstance(stream, FilteredStream) else stream


def log_to_stderr(level: int) -> None:
    """Print log records to stderr as `LEVEL: message`, with further lines of a message indented."""
    handler = logging.StreamHandler()
    handler.setFormatter(_IndentedFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _IndentedFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))
