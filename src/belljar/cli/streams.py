"""Stdout and stderr of every command: nothing that is written to them acts on the person's terminal.

What sessions, servers and files say may hold commands to a terminal: titles, the clipboard, questions that it answers
as if the person had typed. `guard_streams` puts a filter between all commands and both streams, for two kinds of text:

- Our own lines, which may quote names and messages of others. They have no colours; whatever would act becomes
  `U+FFFD`, on a terminal and elsewhere alike.
- Output that somebody asked for (`write_output`): what code prints, an exported document. On a terminal it keeps
  colours and movements within a line, as progress bars use them. In a file or a pipe it stays as it is.

Programs that draw on the terminal themselves (rich) get `raw_stream`, and texts that `one_line` has made harmless.
"""

import logging
import re
import sys
from typing import Any, TextIO, cast

from belljar.outputs.plain import without_escapes

_SIGN = "\N{REPLACEMENT CHARACTER}"
# Unicode's line ends, what turns the direction of text around, and halves of characters, which may become bytes.
_INVISIBLE = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OWN_UNSEEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}]")
_ACTING = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]{0,64}m)"
    r"|(?P<within_line>\x1b\[[0-9]{0,4}[CDGK]|[\r\b])"
    r"|(?P<command>"
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # elsewhere on the screen, modes, questions
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # what a terminal would run or store
    r"|\x1b[ -/]*[0-~]?)"
    rf"|(?P<unseen>[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")
_RESET = "\x1b[0m"
_PLAIN = re.compile(r"\x1b\[[0;:]*m")


def own_text(text: str) -> str:
    """Return text of ours, in lines, with nothing in it that acts."""
    return _OWN_UNSEEN.sub(_SIGN, without_escapes(text))


def one_line(text: str) -> str:
    """Return a name or message of somebody else's for a line of ours, which it cannot leave."""
    return "".join(character if character.isprintable() else _SIGN for character in text)


def indented(text: str) -> str:
    """Return a message of several lines so that only its first looks like a line of ours."""
    return text.replace("\n", "\n  ")


def shown_output(text: str) -> str:
    """Return output as a terminal may have it: colours and movements within a line stay, other commands are dropped."""

    def shown(found: re.Match[str]) -> str:
        match found.lastgroup:
            case "colour" | "within_line":
                return found[0]
            case "command":
                return ""
            case _:
                return _SIGN

    return _ACTING.sub(shown, text)


class Colours:
    """Which terminal, if any, has a colour on that the output did not take off: our lines must not be hidden by it."""

    def __init__(self) -> None:
        self._on: TextIO | None = None

    def notice(self, stream: TextIO, text: str) -> None:
        """Take in what was written to a terminal."""
        if codes := re.findall(r"\x1b\[[0-9;:]*m", text):
            self._on = None if _PLAIN.fullmatch(codes[-1]) else stream

    def reset(self) -> None:
        """Take off what is on."""
        if self._on is not None:
            stream, self._on = self._on, None
            stream.write(_RESET)
            stream.flush()


class GuardedStream:
    """A stream of text that can be written to in the two ways of the module; everything else is the stream's own."""

    def __init__(self, stream: TextIO, colours: Colours) -> None:
        self.stream = stream
        self.colours = colours
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Write text of ours."""
        # Whether it takes bytes is tried by click, with none at all: what it is given goes through the pattern first.
        shown = self._encodable(own_text(text))
        if shown:
            self.colours.reset()
        self.stream.write(shown)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write text of ours."""
        for line in lines:
            self.write(line)

    def write_output(self, text: str) -> None:
        """Write output that was asked for, and let it be seen at once."""
        if self.stream.isatty():
            # A colour may come in two parts; half of it would be shown as text.
            text = self._unfinished + text
            self._unfinished = ""
            if unfinished := _UNFINISHED.search(text):
                text, self._unfinished = text[: unfinished.start()], unfinished[0]
            text = shown_output(text)
            self.colours.notice(self.stream, text)
        self.stream.write(self._encodable(text))
        self.stream.flush()

    def _encodable(self, text: str) -> str:
        encoding = self.stream.encoding or "utf-8"
        return text if text.isascii() else text.encode(encoding, "replace").decode(encoding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard_streams() -> None:
    """Put the filter before stdout and stderr, for the rest of this process."""
    colours = Colours()
    if not isinstance(sys.stdout, GuardedStream):
        sys.stdout = cast("TextIO", GuardedStream(sys.stdout, colours))
    if not isinstance(sys.stderr, GuardedStream):
        sys.stderr = cast("TextIO", GuardedStream(sys.stderr, colours))


def reset_colours() -> None:
    """Take off what the output of a session left on, before the person's own prompt."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, GuardedStream):
            stream.colours.reset()


def write_output(stream: TextIO, text: str) -> None:
    """Write output that was asked for to stdout or stderr."""
    guarded = stream if isinstance(stream, GuardedStream) else GuardedStream(stream, Colours())
    guarded.write_output(text)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream itself, for a program that draws on the terminal."""
    return stream.stream if isinstance(stream, GuardedStream) else stream


def log_to_stderr(level: int) -> None:
    """Show the log of a command for people: a line a message, whatever is in it."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("%(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))
