"""Expressions in the texts of a workflow: `{{ … }}` holds CEL, which reaches nothing but its values.

A text that is one expression has that expression's value; in other texts the values take the place of expressions.
"""

import asyncio
import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, cast

from belljar.inside.expressions import MAX_VALUE_BYTES
from belljar.policy.expressions import Expression, ExpressionFailed

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


@lru_cache(maxsize=256)
def _compiled(text: str, names: frozenset[str]) -> Expression:
    return Expression(text, sorted(names))


def compile_expression(text: str, names: Collection[str]) -> Expression:
    """Return a compiled expression over these names; raises ValueError with what is wrong."""
    return _compiled(text, frozenset(names))


async def evaluated(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of one expression."""
    await asyncio.sleep(0)  # a value may have thousands of them
    try:
        expression = compile_expression(text, values)
    except ValueError as error:
        raise TemplateFailed(str(error)) from None
    needed = {name: values[name] for name in expression.names}
    try:
        return await expression.value(needed)
    except ExpressionFailed as error:
        raise TemplateFailed(
            f"{{{{ {text[:MAX_SHOWN_CHARS]} }}}} has no value: {_with_size(str(error), needed)}"
        ) from None


def _with_size(reason: str, values: Mapping[str, Any]) -> str:
    """Return the reason, with what is known of a step whose result was too large to be kept."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(size := cast("Mapping[str, Any]", value).get("result_bytes"), int):
            return (
                f"{reason}; the result of {name} has {size:,} bytes, more than the {MAX_VALUE_BYTES:,} that are kept: "
                "leave large data in variables or files of the session, and return what decides"
            )
    return reason


async def rendered(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with its expressions replaced by what they are."""
    return await _Rendering(values).of(value)


class _Rendering:
    """Replaces the expressions of one value, and stops when what they are becomes too much together."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._bytes_left = MAX_VALUE_BYTES

    async def of(self, value: Any) -> Any:
        if isinstance(value, str):
            return await self._text(value) if "{{" in value else value
        if isinstance(value, Mapping):
            return {key: await self.of(each) for key, each in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [await self.of(each) for each in cast("list[Any]", value)]
        return value

    async def _text(self, text: str) -> Any:
        parts = parts_of(text)
        if [is_expression for is_expression, piece in parts if is_expression or piece.strip()] == [True]:
            return await self._value(next(piece for is_expression, piece in parts if is_expression))
        pieces = [as_text(await self._value(piece)) if is_expression else piece for is_expression, piece in parts]
        return "".join(pieces)

    async def _value(self, expression: str) -> Any:
        value = await evaluated(expression, self._values)
        self._bytes_left -= len(json.dumps(value))
        if self._bytes_left < 0:
            raise TemplateFailed(f"the values of its expressions have more than {MAX_VALUE_BYTES:,} bytes together")
        return value


def as_text(value: Any) -> str:
    """Return a value as it stands in a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
