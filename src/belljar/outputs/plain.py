"""What a cell wrote for a terminal, as plain text: what would be on the screen at the end, with nothing that acts.

Output is hostile: escape sequences could retitle a terminal or hide lines, and controls could end a comment early.
"""

import re

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)
# Controls, the line ends of Unicode, what turns the direction of text around, halves of characters.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def as_plain(text: str) -> str:
    """The text as a person would have seen it in a terminal without colours."""
    return printable(folded(without_escapes(text)))


def without_escapes(text: str) -> str:
    """The text without colours and other commands to a terminal."""
    return _ESCAPES.sub("", text)


def folded(text: str) -> str:
    """The text with carriage returns and backspaces carried out, as progress bars mean them."""
    if "\r" not in text and "\b" not in text:
        return text
    return "\n".join(map(_folded_line, text.split("\n")))


def printable(text: str) -> str:
    """The text with a visible sign for every character that would act rather than show."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def _folded_line(line: str) -> str:
    if "\b" in line:
        line = _without_backspaces(line)
    parts: list[str] = []
    covered = 0
    # From the last backwards, so that a line written over a million times costs no more than its length.
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
