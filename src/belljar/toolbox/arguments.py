"""The arguments of a call against what its tool declares, before anything goes out.

Names, presence and plain types at the first level; what is deeper, and patterns above all, is the server's own to
check: its patterns on a session's text would run here, and take as long as the two of them like.
"""

import json
from typing import Any, cast

from belljar.privacy.vault import TOKEN
from belljar.toolbox.base import JsonObject, ToolDefinition
from belljar.toolbox.generating import takes_more
from belljar.toolbox.schemas import as_schema, properties_of, required_of, resolved

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_WORDS: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class BadArguments(Exception):
    """Why they cannot be the tool's."""


def checked(tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
    """The arguments to send. A null where none can be meant is one that was left out."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"the arguments are not JSON: {error}") from error
    schema = resolved(tool.input_schema, tool.input_schema)
    fields, required = properties_of(schema), required_of(schema)
    kept = {
        name: value
        for name, value in arguments.items()
        if value is not None or name in required or name not in fields or _may_be_null(fields[name], tool.input_schema)
    }
    unknown = [name for name in kept if name not in fields]
    if unknown and not takes_more(schema):
        raise BadArguments(f"there is no parameter {', '.join(map(repr, unknown))}")
    missing = [name for name in required if name not in kept]
    if missing:
        raise BadArguments(f"{', '.join(map(repr, sorted(missing)))} is missing")
    for name, value in kept.items():
        if isinstance(value, str) and TOKEN.fullmatch(value):
            continue  # a token for what may be a number: the server sees which
        if name in fields and (wanted := _mismatch(value, resolved(fields[name], tool.input_schema))):
            raise BadArguments(f"{name!r} is {_WORDS[cast('type', type(value))]}, not {wanted}")
    return kept


def _may_be_null(schema: JsonObject, root: JsonObject) -> bool:
    schema = resolved(schema, root)
    if any(isinstance(schema.get(key), list) for key in ("anyOf", "oneOf", "allOf")):
        return True  # as it may be; the server will say
    if "enum" in schema:
        return isinstance(schema["enum"], list) and None in schema["enum"]
    kinds = _kinds(schema)
    return not kinds or "null" in kinds


def _kinds(schema: JsonObject) -> list[str]:
    kind: object = schema.get("type")
    listed = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    return [each for each in listed if isinstance(each, str)]


def _mismatch(value: Any, schema: JsonObject) -> str:
    """What it should be instead; empty when it may be that."""
    kinds = _kinds(as_schema(schema))
    if not kinds or any(_is_kind(value, kind) for kind in kinds):
        return ""
    return f"of type {' or '.join(kinds)}"


def _is_kind(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, _KINDS[kind]) if kind in _KINDS else True
