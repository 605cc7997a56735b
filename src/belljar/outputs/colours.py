"""Terminal colours to HTML: the sixteen that themes have, bold, italic and underlined; other codes are dropped."""

import re
from html import escape

from belljar.outputs.plain import folded, printable, without_escapes

_COLOUR_CODE = re.compile(r"\x1b\[([0-9;]{0,64})m")
_STYLES = {1: "bold", 3: "italic", 4: "underline"}
_ENDED = {22: "bold", 23: "italic", 24: "underline"}
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def coloured(text: str) -> str:
    """The text as HTML, escaped, with `ansi-…` classes for what was coloured."""
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
            # A colour of 256 or of all: its numbers follow, and are not codes of their own.
            del numbers[: 2 if numbers[:1] == [5] else 4]
        elif 30 <= number <= 37 or 90 <= number <= 97:
            changed["colour"] = f"ansi-{_NAMES[number % 10]}"
        elif number == 39:
            changed.pop("colour", None)
    return changed


def _span(content: str, classes: dict[str, str]) -> str:
    return f'<span class="{" ".join(classes.values())}">{content}</span>' if classes else content
