"""The arguments of a call against what its tool declares, before anything goes out.

Names, presence and plain types at the first level; what is deeper, and patterns above all, is the server's own to
check: its patterns on a session's text would run here, and take as long as the two of them like.
"""

import json
from copy import deepcopy
from typing import Any, cast

from belljar.privacy.vault import TOKEN
from belljar.toolbox.base import JsonObject, ToolDefinition
from belljar.toolbox.code_generation import takes_more
from belljar.toolbox.schemas import as_schema, defaults_of, properties_of, required_of, resolved
from belljar.toolbox.texts import nearest

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
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class BadArguments(Exception):
    """Why they cannot be the tool's."""


class Parameters:
    """What one tool takes, read from its schema once."""

    def __init__(self, tool: ToolDefinition) -> None:
        self.tool = tool
        root = tool.input_schema
        schema = resolved(root, root)
        fields = properties_of(schema)
        required = required_of(schema)
        defaults = defaults_of(schema, root)
        self._filled = {name: defaults[name] for name in required if name in defaults}
        """What is sent where nothing is passed: the server has a default for it, and demands it all the same."""
        self._required = required.difference(self._filled)
        self._takes_more = takes_more(schema)
        self._kinds = {name: _kinds(as_schema(resolved(field, root))) for name, field in fields.items()}
        self._nullable = {name for name, field in fields.items() if _may_be_null(field, root)}

    def checked(self, arguments: JsonObject) -> JsonObject:
        """The arguments to send. A null where none can be meant is one that was left out."""
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
        """Whether a null is one that is meant."""
        return name in self._required or name not in self._kinds or name in self._nullable

    def _check(self, name: str, value: Any) -> None:
        kinds = self._kinds.get(name)
        if not kinds or any(_is_kind(value, kind) for kind in kinds):
            return
        if isinstance(value, str) and TOKEN.fullmatch(value):
            return  # a token for what may be a number: the server sees which
        wanted = " or ".join(kinds)
        raise BadArguments(f"{name!r} is {_WORDS[cast('type', type(value))]}, not of type {wanted}")


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


def _is_kind(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, _KINDS[kind]) if kind in _KINDS else True
