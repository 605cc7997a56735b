"""Checks the arguments of a tool call against the tool's schema, and says in our own words what is wrong with them.

The SDK validates them with pydantic, whose text names classes of ours and a web page. A model needs the name of the
argument, the value it sent, and what the argument must be.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from pydantic import ValidationError

from belljar.errors import InvalidArgument

Schema = Mapping[str, Any]

_SHOWN_NAMES: Final = 5
_SHOWN_CHARS: Final = 64
_KINDS: Final = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "of at least {} characters",
    "maxLength": "of at most {} characters",
    "minItems": "of at least {} items",
    "maxItems": "of at most {} items",
}


def known_arguments(tool: str, schema: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without the nulls that stand for a default; raise InvalidArgument for unknown ones."""
    known: Schema = schema.get("properties", {})
    if unknown := [name for name in arguments if name not in known]:
        named = ", ".join(repr(name[:_SHOWN_CHARS]) for name in unknown[:_SHOWN_NAMES])
        raise InvalidArgument(f"{tool} has no argument {named}", hint=f"It takes {', '.join(known) or 'none'}")
    required = schema.get("required", ())
    return {name: value for name, value in arguments.items() if value is not None or name in required}


def wrong_arguments(tool: str, schema: Schema, arguments: Mapping[str, Any], error: ValidationError) -> InvalidArgument:
    """Return what is wrong with the arguments that the SDK refused, and what they must be."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    names = [*dict.fromkeys(str(fault["loc"][0]) for fault in faults if fault["loc"])]
    missing = [name for name in names if name not in arguments]
    wrong = [f"{name}={_shown(arguments[name])}" for name in names if name in arguments][:_SHOWN_NAMES]
    facts = [f"{tool} needs {_listed(missing)}"] if missing else []
    facts += [f"{tool} cannot take {', '.join(wrong)}"] if wrong else []
    hint = "; ".join(_described(name, schema) for name in names[:_SHOWN_NAMES])
    return InvalidArgument("; ".join(facts) or f"{tool} cannot take these arguments", hint=hint)


def _described(name: str, schema: Schema) -> str:
    about = _property(schema, name)
    description = str(about.get("description", ""))
    return f"{name} must be {_expected(about, schema)}{description and f' ({description})'}"


def _property(schema: Schema, name: str) -> Schema:
    return schema.get("properties", {}).get(name, {})


def _expected(about: Schema, schema: Schema) -> str:
    """Return in words what a JSON schema asks for, as far as the schemas of our tools go."""
    if reference := str(about.get("$ref", "")):
        return _expected(schema.get("$defs", {}).get(reference.rpartition("/")[2], {}), schema)
    if "enum" in about or "const" in about:
        return "one of " + ", ".join(_shown(choice) for choice in about.get("enum", [about.get("const")]))
    if choices := cast("list[Schema]", about.get("anyOf", [])):
        return " or ".join(_expected(choice, schema) for choice in choices if choice.get("type") != "null")
    return " ".join(_words(about, schema))


def _words(about: Schema, schema: Schema) -> Iterator[str]:
    yield _KINDS.get(str(about.get("type")), "a value")
    if about.get("type") == "array" and about.get("items"):
        yield f"(each {_expected(about['items'], schema)})"
    if bounds := [words.format(f"{about[key]:,}") for key, words in _BOUNDS.items() if key in about]:
        yield " and ".join(bounds)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text):,} characters)"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    kind = "the argument" if len(names) == 1 else "the arguments"
    return f"{kind} {', '.join(names[:_SHOWN_NAMES])}{more}"
