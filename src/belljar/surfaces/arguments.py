"""Says in our own words what is wrong with the arguments of a tool call.

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
# The least and the greatest value of a schema, and the words for both, for the first and for the second alone.
_BOUNDS: Final = (
    ("minimum", "maximum", "from {0} to {1}", "of at least {0}", "of at most {1}"),
    ("exclusiveMinimum", "exclusiveMaximum", "above {0} and below {1}", "above {0}", "below {1}"),
    ("minLength", "maxLength", "of {0} to {1} characters", "of at least {0} characters", "of at most {1} characters"),
    ("minItems", "maxItems", "of {0} to {1} items", "of at least {0} items", "of at most {1} items"),
)


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
    return f"`{name}` must be {_expected(about, schema)}{description and f' ({description})'}"


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
    items = f", each {_expected(about['items'], schema)}" if about.get("items") else ""
    return f"{' '.join(_type_and_bounds(about))}{items}"


def _type_and_bounds(about: Schema) -> Iterator[str]:
    yield _KINDS.get(str(about.get("type")), "a value")
    for least, most, both, only_least, only_most in _BOUNDS:
        limits = [f"{about[key]:,g}" if key in about else "" for key in (least, most)]
        if any(limits):
            yield (both if all(limits) else only_least if limits[0] else only_most).format(*limits)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text):,} characters)"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    kind = "the argument" if len(names) == 1 else "the arguments"
    return f"{kind} {', '.join(f'`{name}`' for name in names[:_SHOWN_NAMES])}{more}"
