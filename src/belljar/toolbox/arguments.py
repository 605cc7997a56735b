"""Checks the arguments of a call against the tool's schema before the call goes out.

It checks names, presence and plain types at the first level. The server checks deeper levels and patterns, because
a server's pattern on a session's text could take any amount of time here.
"""

import json
from copy import deepcopy
from typing import Any, cast

from belljar.privacy.vault import TOKEN
from belljar.toolbox.base import JsonObject, ToolDefinition
from belljar.toolbox.code_generation import takes_more
from belljar.toolbox.schemas import as_schema, defaults_of, properties_of, required_of, resolved
from belljar.toolbox.server_text import nearest

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_TYPE_NAMES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class BadArguments(Exception):
    """The arguments do not fit the tool. The message says why."""


class Parameters:
    """The parameters of one tool, read from its schema once."""

    def __init__(self, tool: ToolDefinition) -> None:
        self.tool = tool
        root = tool.input_schema
        schema = resolved(root, root)
        fields = properties_of(schema)
        required = required_of(schema)
        defaults = defaults_of(schema, root)
        self._filled = {name: defaults[name] for name in required if name in defaults}
        """Values to send for parameters that are not passed: required ones for which the server declares a default."""
        self._required = required.difference(self._filled)
        self._takes_more = takes_more(schema)
        self._kinds = {name: _kinds(as_schema(resolved(field, root))) for name, field in fields.items()}
        self._nullable = {name for name, field in fields.items() if _may_be_null(field, root)}

    def checked(self, arguments: JsonObject) -> JsonObject:
        """Return the arguments to send. A null that the parameter does not accept counts as not passed."""
        try:
            _JSON.encode(arguments).encode()
        except (ValueError, RecursionError) as error:
            raise BadArguments(f"the arguments are not JSON: {error}") from error
        kept = {name: value for name, value in arguments.items() if value is not None or self._may_be_sent(name)}
        if not self._takes_more and (unknown := [name for name in kept if name not in self._kinds]):
            near = nearest(unknown[0], self._kinds)
            guess = f", did you mean {near!r}?" if near else ""
            raise BadArguments(f"there is no parameter {', '.join(map(repr, unknown))}{guess}")
        if missing := [name for name in self._required if name not in kept]:
            raise BadArguments(f"{', '.join(map(repr, sorted(missing)))} is missing")
        for name, value in kept.items():
            self._check(name, value)
        left_out = {name: deepcopy(value) for name, value in self._filled.items() if name not in kept}
        return {**kept, **left_out} if left_out else kept

    def _may_be_sent(self, name: str) -> bool:
        """Return whether a null is sent: if the parameter is required, undeclared, or accepts null."""
        return name in self._required or name not in self._kinds or name in self._nullable

    def _check(self, name: str, value: Any) -> None:
        kinds = self._kinds.get(name)
        if not kinds or any(_is_kind(value, kind) for kind in kinds):
            return
        if isinstance(value, str) and TOKEN.fullmatch(value):
            return  # a privacy token may stand for a number; the server checks the value
        wanted = " or ".join(kinds)
        raise BadArguments(f"{name!r} is {_TYPE_NAMES[cast('type', type(value))]}, not of type {wanted}")


def _may_be_null(schema: JsonObject, root: JsonObject) -> bool:
    schema = resolved(schema, root)
    if any(isinstance(schema.get(key), list) for key in ("anyOf", "oneOf", "allOf")):
        return True  # possibly; the server checks it
    if "enum" in schema:
        return isinstance(schema["enum"], list) and None in schema["enum"]
    kinds = _kinds(schema)
    return not kinds or "null" in kinds


def _kinds(schema: JsonObject) -> list[str]:
    kind: object = schema.get("type")
    listed = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    return [each for each in listed if isinstance(each, str)]


def _is_kind(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, _KINDS[kind]) if kind in _KINDS else True
