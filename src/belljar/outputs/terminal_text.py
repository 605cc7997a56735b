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
    return printable(folded(without_escapes(text)))


def without_escapes(text: str) -> str:
    """Return the text without colours and other commands to a terminal."""
    return _ESCAPES.sub("", text)


def folded(text: str) -> str:
    """Return the text with carriage returns and backspaces carried out, as progress bars mean them."""
    if "\r" not in text and "\b" not in text:
        return text
    return "\n".join(map(_folded_line, text.split("\n")))


def printable(text: str) -> str:
    """Return the text with a visible sign for every character that would control rather than show something."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def _folded_line(line: str) -> str:
    if "\b" in line:
        line = _without_backspaces(line)
    parts: list[str] = []
    covered = 0
    # From the last part backwards, so that a line overwritten a million times costs no more than its length.
    for written in reversed(line.split("\r")):
        if len(written) > covered:
            parts.append(written[covered:])
            covered = len(written)
    return "".join(parts)


def _without_backspaces(line: str) -> str:
    kept: list[str] = []
    for character in line:
        if character != "\b":
            kept.append(character)
        elif kept and kept[-1] != "\r":
            kept.pop()
    return "".join(kept)


# Terminal colours to HTML: the sixteen that themes have, bold, italic and underlined; other codes are dropped

_COLOUR_CODE = re.compile(r"\x1b\[([0-9;]{0,64})m")
_STYLES = {1: "bold", 3: "italic", 4: "underline"}
_ENDED = {22: "bold", 23: "italic", 24: "underline"}
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def coloured(text: str) -> str:
    """Return the text as HTML, escaped, with `ansi-…` classes for what was coloured."""
    text = "\n".join(folded(without_escapes(line)) if "\r" in line or "\b" in line else line for line in _lines(text))
    parts: list[str] = []
    classes: dict[str, str] = {}
    for place, part in enumerate(_COLOUR_CODE.split(text)):
        if place % 2:
            classes = _changed(classes, part)
        elif part:
            parts.append(_span(escape(printable(without_escapes(part))), classes))
    return "".join(parts)


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").split("\n")


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
