"""Cleans text that servers wrote, for use in source code, in prompts to a model, and in questions to a person.

Invisible characters are removed, because control characters could end a line of code, and others could tell a model
what a person does not see.
"""

import difflib
import json
import unicodedata
from collections.abc import Collection, Mapping
from heapq import nlargest
from itertools import pairwise
from typing import Any

_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})
_MAX_SHOWN = 40
_FEWEST_SHOWN = 100
_NAME_CHARS = 100
_MAX_ALIKE = 20
_MAX_LISTED = 20


def shortened(text: str, limit: int) -> str:
    """Return a text no longer than `limit`; an ellipsis stands for the end of one that was longer."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def visible(text: object, limit: int) -> str:
    """Return printable lines of a text, no longer than `limit`; an empty text for anything that is no text."""
    if not isinstance(text, str):
        return ""
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text.strip()  # the fast path, for names of tools, thousands of times
    lines = text[: 2 * limit].replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    shown = "".join(character for character in lines if character == "\n" or _is_shown(character))
    shown = "\n".join(line.rstrip() for line in shown.strip().split("\n"))
    return shortened(shown, limit)


def one_line(text: object, limit: int) -> str:
    """Return printable text in one line, no longer than `limit`."""
    return shortened(" ".join(visible(text, 4 * limit).split()), limit)


def first_sentence(text: object, limit: int) -> str:
    """Return the first sentence of a text in one line, no longer than `limit`."""
    line = one_line(text, 4 * limit)
    end = line.find(". ")
    return one_line(line[: end + 1] if end > 0 else line, limit)


def plain_arguments(arguments: Mapping[str, Any], limit: int) -> str:
    """Return arguments for a person who has to approve them: names, the start of each value, and what is left out.

    Invisible characters are written as their codes, because a person must not approve what they cannot see.
    """
    if not arguments:
        return "no arguments"
    shown = shown_arguments(arguments, limit)
    lines = [f"{name}: {value}" for name, value in shown]
    if (left_out := len(arguments) - len(shown)) > 0:
        lines.append(f"… and {left_out:,} more arguments that are not shown here")
    return "\n".join(lines)


def shown_arguments(arguments: Mapping[str, Any], limit: int) -> list[tuple[str, str]]:
    """Return the first arguments as a person may see them: each name, and the start of its value as JSON."""
    whole = [(_cut(_unhidden(name), _NAME_CHARS), _unhidden(value)) for name, value in arguments.items()]
    room = max(_FEWEST_SHOWN, limit // max(1, len(whole)))
    is_short = sum(len(name) + len(value) for name, value in whole) <= limit
    return [(name, value if is_short else _cut(value, room)) for name, value in whole[:_MAX_SHOWN]]


def _unhidden(value: Any) -> str:
    """Return a value as JSON in one line, with codes for invisible characters."""
    return unhidden(json.dumps(value, ensure_ascii=False))


def unhidden(text: str) -> str:
    """Return a line of text with codes for invisible characters, because a person must not approve them unseen."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _is_shown(each) or each == "\t" else f"\\u{ord(each):04x}" for each in text)


def _cut(text: str, limit: int) -> str:
    left_out = len(text) - limit
    return f"{text[:limit]}… and {left_out:,} more characters that are not shown here" if left_out > 0 else text


def nearest(name: str, known: Collection[str]) -> str:
    """Return the known name that is most similar, or an empty text if none is similar."""
    # The comparison takes a millisecond for each name, and all sessions wait for it, so compare only the likeliest.
    name, pairs = name[:_NAME_CHARS], set(pairwise(name[:_NAME_CHARS]))
    alike = nlargest(_MAX_ALIKE, known, key=lambda each: len(pairs.intersection(pairwise(each[:_NAME_CHARS]))))
    return next(iter(difflib.get_close_matches(name, alike, n=1, cutoff=0.7)), "")


def suggestion(name: str, known: Collection[str]) -> str:
    """Return a suggestion to add after an unknown name: the most similar known name, or a list of the known ones."""
    if near := nearest(name, known):
        return f": did you mean {near!r}?"
    more = f" and {len(known) - _MAX_LISTED:,} more" if len(known) > _MAX_LISTED else ""
    return f": there is {', '.join(map(repr, list(known)[:_MAX_LISTED]))}{more}" if known else ""


def docstring(text: str, indent: str) -> str:
    """Return a docstring with exactly this text, escaped so that nothing in it can end the docstring."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"') if '"""' in text or "\\" in text else text
    # A quote directly before the closing quotes would be read as one of them.
    escaped = f'{escaped[:-1]}\\"' if escaped.endswith('"') and not escaped.endswith('\\"') else escaped
    lines = escaped.split("\n")
    if len(lines) == 1:
        return f'{indent}"""{escaped}"""'
    body = [f"{indent}{line}" if line else "" for line in lines[1:]]
    return "\n".join([f'{indent}"""{lines[0]}', *body, f'{indent}"""'])


def _is_shown(character: str) -> bool:
    return (character.isascii() and character.isprintable()) or unicodedata.category(character) not in _HIDDEN
