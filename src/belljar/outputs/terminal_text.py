"""What a cell wrote for a terminal, as plain text or HTML: what would be on the screen, without control characters.

Output is hostile: escape sequences could retitle a terminal or hide lines, and controls could end a comment early.
"""

import re
from html import escape

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)
# Control characters, Unicode's line ends, what reverses the direction of text, lone surrogates.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def as_plain(text: str) -> str:
    """Return the text as a person would have seen it in a terminal without colours."""
    return printable(without_escapes(folded(text.replace("\r\n", "\n"))))


def without_escapes(text: str) -> str:
    """Return the text without colours and other commands to a terminal."""
    return _ESCAPES.sub("", text)


def printable(text: str) -> str:
    """Return the text with a visible sign for every character that would control rather than show something."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


# Lines that are written over, as progress bars do

_TO_START = re.compile(r"\x1b\[[01]?G|\x1b\[1?A\n")
"""What takes a bar back to the beginning of its line beside a carriage return. The second form, one line up and down
again, is between two updates of a bar below another one (tqdm with `position=1`)."""
_LINE_ERASED = re.compile(r"\x1b\[2K")
_REST_ERASED = re.compile(r"\x1b\[0?K")
_MAX_OPEN_CHARS = 8_192


def folded(text: str) -> str:
    """Return the text with carriage returns, backspaces and erased lines carried out, as progress bars mean them.

    Lines without them stay as they are, with their colours and their `\\r\\n`.
    """
    if "\x1b" in text:
        text = _TO_START.sub("\r", text)
    if "\r" not in text and "\b" not in text:
        return text
    *lines, last = text.split("\n")
    return "\n".join([*map(_folded_whole_line, lines), _folded_line(last)])


class LineFolder:
    """Folds streams that come piece by piece: of each it holds the line that has not ended, which may be replaced.

    A bar of one stream may be updated between whole lines of the other. It comes after them, because it holds on.
    """

    def __init__(self) -> None:
        self._open: dict[str, str] = {}

    def add(self, name: str, text: str) -> list[tuple[str, str]]:
        """Add text of a stream; return pairs of stream and text that nothing can replace any more."""
        settled = [
            (other, self._open.pop(other)) for other in [*self._open] if other != name and not self._is_bar(other)
        ]
        whole = self._open.pop(name, "") + text
        if "\x1b" in whole:
            whole = _TO_START.sub("\r", whole)
        lines, end, line = whole.rpartition("\n")
        if end:
            settled.append((name, folded(lines + end)))
        before, mark, latest = line.rpartition("\r")
        # As short as it can be, because a bar is read and updated again and again.
        line = f"{_folded_line(before)}{mark}{latest}"
        if len(line) > _MAX_OPEN_CHARS:
            settled.append((name, folded(line)))
        elif line:
            self._open[name] = line
        return settled

    def held(self) -> list[tuple[str, str]]:
        """Return the lines that have not ended, as they look now."""
        return [(name, folded(line)) for name, line in self._open.items()]

    def settle(self) -> list[tuple[str, str]]:
        """Return the lines that have not ended, because what comes next does not replace them."""
        held = self.held()
        self._open = {}
        return held

    def _is_bar(self, name: str) -> bool:
        return "\r" in self._open[name] or "\b" in self._open[name]


def _folded_whole_line(line: str) -> str:
    """Return a line that has ended. A carriage return at its end belongs to the end."""
    return f"{_folded_line(line[:-1])}\r" if line.endswith("\r") else _folded_line(line)


def _folded_line(line: str) -> str:
    if "\r" not in line and "\b" not in line:
        return line
    parts: list[str] = []
    covered = 0
    # From the last part backwards, so that a line overwritten a million times costs no more than its length.
    for part in reversed(line.split("\r")):
        fresh = _LINE_ERASED.split(part)
        written = _without_backspaces(without_escapes(fresh[-1]))
        if len(written) > covered:
            parts.append(written[covered:])
            covered = len(written)
        if len(fresh) > 1 or _REST_ERASED.search(part):
            break
    return "".join(parts)


def _without_backspaces(text: str) -> str:
    if "\b" not in text:
        return text
    kept: list[str] = []
    for character in text:
        if character != "\b":
            kept.append(character)
        elif kept:
            kept.pop()
    return "".join(kept)


# Terminal colours to HTML: the sixteen that themes have, bold, italic and underlined; other codes are dropped

_COLOUR_CODE = re.compile(r"\x1b\[([0-9;]{0,64})m")
_STYLES = {1: "bold", 3: "italic", 4: "underline"}
_ENDED = {22: "bold", 23: "italic", 24: "underline"}
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def coloured(text: str) -> str:
    """Return the text as HTML, escaped, with `ansi-…` classes for what was coloured."""
    text = folded(text.replace("\r\n", "\n"))
    parts: list[str] = []
    classes: dict[str, str] = {}
    for place, part in enumerate(_COLOUR_CODE.split(text)):
        if place % 2:
            classes = _changed(classes, part)
        elif part:
            parts.append(_span(escape(printable(without_escapes(part))), classes))
    return "".join(parts)


def _changed(classes: dict[str, str], codes: str) -> dict[str, str]:
    numbers = [int(number or 0) for number in codes.split(";")]
    changed = dict(classes)
    while numbers:
        number = numbers.pop(0)
        if number == 0:
            changed.clear()
        elif number in _STYLES:
            changed[_STYLES[number]] = f"ansi-{_STYLES[number]}"
        elif number in _ENDED:
            changed.pop(_ENDED[number], None)
        elif number in (38, 48):
            # A colour out of 256, or an RGB colour: its numbers follow, and are not codes.
            del numbers[: 2 if numbers[:1] == [5] else 4]
        elif 30 <= number <= 37 or 90 <= number <= 97:
            changed["colour"] = f"ansi-{_NAMES[number % 10]}"
        elif number == 39:
            changed.pop("colour", None)
    return changed


def _span(content: str, classes: dict[str, str]) -> str:
    return f'<span class="{" ".join(classes.values())}">{content}</span>' if classes else content
