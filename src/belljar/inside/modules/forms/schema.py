"""Fields and their values: a flat JSON Schema for each, and the check of a value against it, with faults in words.

Knows the keywords that forms need and that a question to a person can carry, not the whole of JSON Schema.
"""

from __future__ import annotations

import datetime
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, cast

MAX_FIELDS = 2_000
MAX_OPTIONS = 2_000
MAX_CHARS = 100_000
"""The longest value of one field."""
_LABEL_CHARS = 300
_SHOWN = 8
_TRUE = frozenset({"true", "yes", "on", "1", "x"})
_FALSE = frozenset({"false", "no", "off", "0", ""})
_EMAIL = re.compile(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)*")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")


@dataclass
class Field:
    """One field of a form: the schema of its value, and how its target addresses it."""

    name: str
    schema: dict[str, Any]
    is_required: bool = False
    value: Any = None
    """What the form has in it already."""
    native: dict[str, Any] = field(default_factory=dict[str, Any])
    """For the target alone; plain data, so that a form can be saved with its session."""

    @property
    def label(self) -> str:
        """Return the words that a person knows the field by."""
        return str(self.schema.get("title") or self.name)


def object_schema(fields: list[Field], title: str = "") -> dict[str, Any]:
    """Return the JSON Schema of all values of a form."""
    schema: dict[str, Any] = {"type": "object", "properties": {one.name: one.schema for one in fields}}
    schema["required"] = [one.name for one in fields if one.is_required]
    return {**schema, "title": title} if title else schema


def fields_of(schema: dict[str, Any]) -> list[Field]:
    """Return the fields of a flat JSON Schema that code wrote; ValueError for one that is none."""
    properties: Any = schema.get("properties")
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):  # pyright: ignore
        raise ValueError("the schema has no `properties`: pass {'type': 'object', 'properties': {name: {'type': …}}}")
    properties = cast("dict[str, dict[str, Any]]", properties)
    if len(properties) > MAX_FIELDS:
        raise ValueError(f"the schema has {len(properties):,} fields, the most is {MAX_FIELDS:,}")
    required = schema.get("required") or ()
    fields = [
        Field(str(name), dict(one), name in required, value=one.get("default")) for name, one in properties.items()
    ]
    for one in fields:
        if one.schema.get("type", "string") not in ("string", "integer", "number", "boolean", "array"):
            raise ValueError(f"the field {one.name!r} is of type {one.schema['type']!r}: a form is flat")
    return fields


def tidy(text: Any, most: int = _LABEL_CHARS) -> str:
    """Return a label of a hostile document as one line of visible characters, cut to a length."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text or "")[: most * 4]).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def options_of(schema: dict[str, Any]) -> list[tuple[Any, str]]:
    """Return the values that a field can have, each with its title; empty for a free one."""
    holder = schema.get("items") or {} if schema.get("type") == "array" else schema
    listed = holder.get("oneOf") or holder.get("anyOf")
    if listed:
        return [(one.get("const"), str(one.get("title", one.get("const")))) for one in listed]
    return [(one, str(one)) for one in holder.get("enum") or ()]


def one_of(options: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the schema keywords for a choice between values, with titles where these say more than the values."""
    kept = list(dict(options[:MAX_OPTIONS]).items())
    if any(title and title != value for value, title in kept):
        return {"oneOf": [{"const": value, "title": title or value} for value, title in kept]}
    return {"enum": [value for value, _ in kept]}


def some_of(options: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the schema keywords for a choice of any number of values."""
    choice = one_of(options)
    return {
        "type": "array",
        "items": {"type": "string", **({"anyOf": choice["oneOf"]} if "oneOf" in choice else choice)},
    }


def as_list(value: Any) -> list[Any]:
    """Return the values of a field that may have several: none, one, or those of a list."""
    if isinstance(value, (list, tuple, set)):
        return [*cast("list[Any]", value)]
    return [] if value is None or value == "" else [value]


def is_empty(value: Any) -> bool:
    """Return whether a value is as good as none."""
    return value is None or value == "" or value == []


def converted(one: Field, value: Any) -> Any:
    """Return a value as the field's type; ValueError says in words why it does not fit."""
    schema = one.schema
    kind = schema.get("type", "string")
    if kind == "array":
        values = [_chosen(each, options_of(schema)) for each in as_list(value)]
        _check_count(values, schema)
        return values
    if kind == "boolean":
        answer = _as_boolean(value, schema)
        if schema.get("const") is True and not answer:
            raise ValueError("has to be ticked")
        return answer
    if kind in ("integer", "number"):
        number = _as_number(value, kind)
        _check_range(number, schema)
        return number
    if options := options_of(schema):
        return _chosen(value, options)
    text = _as_text(value)
    _check_text(text, schema)
    return text


def expected_value(one: Field) -> str:
    """Return what a field takes, for a person or a model."""
    schema = one.schema
    kind = schema.get("type", "string")
    if options := options_of(schema):
        shown = ", ".join(
            str(value) if str(value) == title else f"{value} ({title})" for value, title in options[:_SHOWN]
        )
        more = f", … {len(options) - _SHOWN} more" if len(options) > _SHOWN else ""
        return f"{'any of' if kind == 'array' else 'one of'}: {shown}{more}"
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "yes or no", "array": "a list"}
    named = kinds.get(kind) or {
        "email": "an e-mail address",
        "uri": "a URL",
        "date": "a date as YYYY-MM-DD",
        "date-time": "a time as YYYY-MM-DDTHH:MM:SSZ",
    }.get(str(schema.get("format")), "text")
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None or most is not None:
        named += f" from {least}" if least is not None else ""
        named += f" to {most}" if most is not None else ""
    if schema.get("maxLength"):
        named += f" of at most {schema['maxLength']} characters"
    return named


def _as_boolean(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip()
    states = schema.get("states") or ()
    if text in states:
        return text != "Off"
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{_short(value)} is neither yes nor no")


def _as_number(value: Any, kind: str) -> int | float:
    name = "a whole number" if kind == "integer" else "a number"
    try:
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else float(str(value).strip())
        # Keep large integers exact, which a float would round.
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,300}\s*", value):
            number = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{_short(value)} is not {name}") from None
    if not math.isfinite(number) or (kind == "integer" and number != int(number)):
        raise ValueError(f"{_short(value)} is not {name}")
    return int(number) if kind == "integer" else number


def _as_text(value: Any) -> str:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return str(os.fspath(cast("os.PathLike[str]", value)))
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{_short(value)} is not text")  # noqa: TRY004  - a fault of the value, as all here
    text = str(value)
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text):,} characters, the most is {MAX_CHARS:,}")
    return text


def _chosen(value: Any, options: list[tuple[Any, str]]) -> Any:
    """Return the option that a value means: by its value, else by its title where only one has it."""
    if not options:
        return _as_text(value)
    text = str(value)
    for option, _ in options:
        if option == value or str(option) == text:
            return option
    titled = [option for option, title in options if title.strip().lower() == text.strip().lower()]
    if len(titled) == 1:
        return titled[0]
    shown = ", ".join(repr(option) for option, _ in options[:_SHOWN])
    more = f" and {len(options) - _SHOWN} more" if len(options) > _SHOWN else ""
    raise ValueError(f"{_short(value)} is not one of {shown}{more}")


def _check_count(values: list[Any], schema: dict[str, Any]) -> None:
    least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_OPTIONS)
    if not least <= len(values) <= most:
        raise ValueError(f"{len(values)} are chosen, it takes {least} to {most}")


def _check_range(number: float, schema: dict[str, Any]) -> None:
    if number < schema.get("minimum", -math.inf):
        raise ValueError(f"{number} is less than {schema['minimum']}")
    if number > schema.get("maximum", math.inf):
        raise ValueError(f"{number} is more than {schema['maximum']}")


def _check_text(text: str, schema: dict[str, Any]) -> None:
    if len(text) < schema.get("minLength", 0):
        raise ValueError(f"it has {len(text)} characters, the least is {schema['minLength']}")
    if len(text) > schema.get("maxLength", MAX_CHARS):
        raise ValueError(f"it has {len(text)} characters, the most is {schema['maxLength']}")
    fault = _format_fault(text, str(schema.get("format", "")))
    if fault:
        raise ValueError(f"{_short(text)} is not {fault}")
    pattern = schema.get("pattern")
    if pattern and _compiled(pattern) is not None and not re.search(pattern, text):
        raise ValueError(f"{_short(text)} does not have the form {schema.get('x-hint') or pattern}")


def _compiled(pattern: str) -> Any:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError):
        return None  # a pattern that only JavaScript understands; the target checks it


def _format_fault(text: str, form: str) -> str:
    if form == "email":
        return "" if _EMAIL.fullmatch(text) else "an e-mail address"
    if form == "uri":
        return "" if _URI.fullmatch(text) else "a URL"
    try:
        if form == "date":
            datetime.datetime.strptime(text, "%Y-%m-%d")
        elif form == "date-time":
            # Python 3.9 does not know the Z.
            datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))  # noqa: FURB162
    except ValueError:
        return "a date as YYYY-MM-DD" if form == "date" else "a time as YYYY-MM-DDTHH:MM:SSZ"
    return ""


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
