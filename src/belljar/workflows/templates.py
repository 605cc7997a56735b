"""Expressions in the texts of a workflow: `{{ … }}` holds CEL, which cannot loop and reaches nothing but its values.

A text that is one expression has that expression's value; in other texts the values take the place of expressions.
"""

import json
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, cast

from belljar.policy.expressions import Expression, ExpressionFailed

MAX_VALUE_BYTES = 256 * 1024
"""The largest value of a step or an expression, as JSON."""
MAX_SHOWN_CHARS = 100
_QUOTES = "\"'"


class TemplateFailed(Exception):
    """An expression has no value, or one that cannot be used. The message says which and why."""


def parts_of(text: str) -> list[tuple[bool, str]]:
    """Return the pieces of a text: (True, expression) and (False, text). Raises ValueError for one without an end."""
    parts: list[tuple[bool, str]] = []
    place = 0
    while (begin := text.find("{{", place)) >= 0:
        if begin > place:
            parts.append((False, text[place:begin]))
        end = _end_of(text, begin + 2)
        if end < 0:
            raise ValueError(f"{text[begin : begin + MAX_SHOWN_CHARS]!r} has no closing }}}}")
        parts.append((True, text[begin + 2 : end].strip()))
        place = end + 2
    if place < len(text):
        parts.append((False, text[place:]))
    return parts


def _end_of(text: str, place: int) -> int:
    """Return where the `}}` of an expression is, not one of its own maps or texts; -1 if there is none."""
    depth, quote = 0, ""
    while place < len(text):
        character = text[place]
        if quote:
            place += 1 if character == "\\" else 0
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character == "{":
            depth += 1
        elif character == "}":
            if depth == 0:
                return place if text.startswith("}}", place) else -1
            depth -= 1
        place += 1
    return -1


def expressions_in(value: Any) -> list[str]:
    """Return every expression in a value, however deep. Raises ValueError for one without an end."""
    if isinstance(value, str):
        return [piece for is_expression, piece in parts_of(value) if is_expression] if "{{" in value else []
    if isinstance(value, Mapping):
        nested = cast("Mapping[str, Any]", value).values()
    elif isinstance(value, list | tuple):
        nested = cast("list[Any]", value)
    else:
        return []
    return [found for each in nested for found in expressions_in(each)]


def has_expression(value: Any) -> bool:
    """Return whether there is an expression in a value."""
    return bool(expressions_in(value))


@lru_cache(maxsize=4_096)
def _compiled(text: str, names: frozenset[str]) -> Expression:
    return Expression(text, sorted(names))


def compile_expression(text: str, names: Collection[str]) -> Expression:
    """Return a compiled expression over these names; raises ValueError with what is wrong."""
    return _compiled(text, frozenset(names))


def evaluated(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of one expression."""
    try:
        expression = compile_expression(text, values)
    except ValueError as error:
        raise TemplateFailed(str(error)) from None
    needed = {name: values[name] for name in expression.names}
    try:
        # What the author wrote into the expression counts as values to go through: the author may be hostile.
        found = expression.value(needed, literals=len(text))
    except ExpressionFailed as error:
        raise TemplateFailed(
            f"{{{{ {text[:MAX_SHOWN_CHARS]} }}}} has no value: {_with_size(str(error), needed)}"
        ) from None
    try:
        return plain_value(found)
    except ValueError as error:
        raise TemplateFailed(f"{{{{ {text[:MAX_SHOWN_CHARS]} }}}}: {error}") from None


def _with_size(reason: str, values: Mapping[str, Any]) -> str:
    """Return the reason, with what is known of a step whose result was too large to be kept."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(size := cast("Mapping[str, Any]", value).get("result_bytes"), int):
            return (
                f"{reason}; the result of {name} has {size:,} bytes, more than the {MAX_VALUE_BYTES:,} that are kept: "
                "leave large data in variables or files of the session, and return what decides"
            )
    return reason


def rendered(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with its expressions replaced by what they are."""
    if isinstance(value, str):
        return _rendered_text(value, values) if "{{" in value else value
    if isinstance(value, Mapping):
        return {key: rendered(each, values) for key, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [rendered(each, values) for each in cast("list[Any]", value)]
    return value


def _rendered_text(text: str, values: Mapping[str, Any]) -> Any:
    parts = parts_of(text)
    if [is_expression for is_expression, piece in parts if is_expression or piece.strip()] == [True]:
        return evaluated(next(piece for is_expression, piece in parts if is_expression), values)
    pieces = [as_text(evaluated(piece, values)) if is_expression else piece for is_expression, piece in parts]
    whole = "".join(pieces)
    if len(whole) > MAX_VALUE_BYTES:
        raise TemplateFailed(f"a text has {len(whole):,} characters with its values, the limit is {MAX_VALUE_BYTES:,}")
    return whole


def as_text(value: Any) -> str:
    """Return a value as it stands in a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; raises ValueError for one that JSON has not, or that is too large."""
    plain = _plain(value, 0)
    size = len(json.dumps(plain))
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"the value has {size:,} bytes, the limit is {MAX_VALUE_BYTES:,}")
    return plain


def _plain(value: Any, depth: int) -> Any:
    if depth > 64:
        raise ValueError("the value is nested more than 64 deep")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the value is no finite number")
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in cast("list[Any]", value)]
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if hasattr(value, "total_seconds"):
        return float(value.total_seconds())
    raise ValueError(f"the value is a {type(value).__name__}, which JSON has not")
