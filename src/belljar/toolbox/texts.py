"""Text that servers wrote, made fit to stand in source code and in front of a model.

What nobody can see is taken out: control characters could end a line of code, and invisible ones could say to a model
what a person does not read.
"""

import difflib
import json
import unicodedata
from collections.abc import Collection, Mapping
from heapq import nlargest
from itertools import pairwise
from typing import Any

_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})
_MOST_SHOWN = 40
_FEWEST_SHOWN = 100
_NAME_CHARS = 100
_MOST_ALIKE = 20


def visible(text: object, limit: int) -> str:
    """Lines of printable text, no longer than `limit`; anything that is no text is none."""
    if not isinstance(text, str):
        return ""
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text.strip()  # names of tools, thousands of times
    lines = text[: 2 * limit].replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    shown = "".join(character for character in lines if character == "\n" or _is_shown(character))
    shown = "\n".join(line.rstrip() for line in shown.strip().split("\n"))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def one_line(text: object, limit: int) -> str:
    """The same in one line."""
    line = " ".join(visible(text, 4 * limit).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def first_sentence(text: object, limit: int) -> str:
    """What a line of a list has room for."""
    line = one_line(text, 4 * limit)
    end = line.find(". ")
    return one_line(line[: end + 1] if end > 0 else line, limit)


def plain_arguments(arguments: Mapping[str, Any], limit: int) -> str:
    """Arguments for a person who is to allow them: every name, of each value the beginning, and what is left out.

    Characters that nobody can see are written as their codes: a person must not agree to what they do not see.
    """
    if not arguments:
        return "no arguments"
    whole = [(_cut(_unhidden(name), _NAME_CHARS), _unhidden(value)) for name, value in arguments.items()]
    room = max(_FEWEST_SHOWN, limit // len(whole))
    is_short = sum(len(name) + len(value) for name, value in whole) <= limit
    lines = [f"{name}: {value if is_short else _cut(value, room)}" for name, value in whole[:_MOST_SHOWN]]
    if (left_out := len(whole) - _MOST_SHOWN) > 0:
        lines.append(f"… and {left_out:,} more arguments that are not shown here")
    return "\n".join(lines)


def _unhidden(value: Any) -> str:
    """JSON in one line."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isascii():
        return text.replace("\x7f", "\\u007f")
    return "".join(each if _is_shown(each) else f"\\u{ord(each):04x}" for each in text)


def _cut(text: str, limit: int) -> str:
    left_out = len(text) - limit
    return f"{text[:limit]}… and {left_out:,} more characters that are not shown here" if left_out > 0 else text


def nearest(name: str, known: Collection[str]) -> str:
    """The one that is most like a name, if any is like it."""
    # The comparison takes a millisecond for each, and every session waits for it: few of thousands are worth it.
    name, pairs = name[:_NAME_CHARS], set(pairwise(name[:_NAME_CHARS]))
    alike = nlargest(_MOST_ALIKE, known, key=lambda each: len(pairs.intersection(pairwise(each[:_NAME_CHARS]))))
    return next(iter(difflib.get_close_matches(name, alike, n=1, cutoff=0.7)), "")


def meant(name: str, known: Collection[str], most: int = 20) -> str:
    """What a name that nobody has may have been meant for, to be said behind it: one that is like it, or all."""
    if near := nearest(name, known):
        return f": did you mean {near!r}?"
    more = f" and {len(known) - most:,} more" if len(known) > most else ""
    return f": there is {', '.join(map(repr, list(known)[:most]))}{more}" if known else ""


def docstring(text: str, indent: str) -> str:
    """A docstring with exactly this text: nothing in it can end it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"') if '"""' in text or "\\" in text else text
    # A quote right before the closing ones would be one of them.
    escaped = f'{escaped[:-1]}\\"' if escaped.endswith('"') and not escaped.endswith('\\"') else escaped
    lines = escaped.split("\n")
    if len(lines) == 1:
        return f'{indent}"""{escaped}"""'
    body = [f"{indent}{line}" if line else "" for line in lines[1:]]
    return "\n".join([f'{indent}"""{lines[0]}', *body, f'{indent}"""'])


def _is_shown(character: str) -> bool:
    return (character.isascii() and character.isprintable()) or unicodedata.category(character) not in _HIDDEN
