"""Converts servers' JSON Schemas to Python types as text: unions, literals, and a TypedDict for each object.

Schemas are untrusted: references are followed only within the same schema, depth and number are bounded, and whatever
is odd becomes `Any`. The types help whoever writes calls; `arguments.py` checks the values.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from belljar.toolbox.base import JsonObject
from belljar.toolbox.names import assigned
from belljar.toolbox.server_text import one_line

ANY = "Any"
MAX_DEPTH = 8
MAX_CLASSES = 40
MAX_FIELDS = 100
# Unions of unions that refer to each other would take millions of steps.
MAX_STEPS = 2_000
_MAX_PARTS = 8
_MAX_LITERALS = 24
_LITERAL_CHARS = 200
_COMMENT_CHARS = 100
_REFERENCE_CHARS = 500
_SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_RESERVED = frozenset({"Any", "Literal", "NotRequired", "TypedDict", "None", "True", "False"})
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def as_schema(value: object) -> JsonObject:
    """Return a value as a schema; an empty one for `true` and for anything that is no object."""
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def properties_of(schema: Mapping[str, Any]) -> dict[str, JsonObject]:
    """Return the fields of an object schema, in their order."""
    given = as_schema(schema.get("properties"))
    return {str(name): as_schema(field) for name, field in list(given.items())[:MAX_FIELDS]}


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the required fields of an object schema."""
    given: object = schema.get("required")
    return frozenset(str(name) for name in cast("list[object]", given)) if isinstance(given, list) else frozenset()


def defaults_of(schema: Mapping[str, Any], root: JsonObject) -> JsonObject:
    """Return the default values of an object schema's fields, by name."""
    fields = {name: (field, resolved(field, root)) for name, field in properties_of(schema).items()}
    # A default beside a reference counts too, because pydantic writes the default of a model that way.
    found = {name: next((each for each in two if "default" in each), None) for name, two in fields.items()}
    return {name: each["default"] for name, each in found.items() if each is not None}


def resolved(schema: JsonObject, root: JsonObject) -> JsonObject:
    """Follow references to the schema they mean, up to a bound; return {} for one that leads out or nowhere."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref")
        if reference is None:
            return schema
        schema = _target(reference, root)
    return {}


def _target(reference: object, root: JsonObject) -> JsonObject:
    if not isinstance(reference, str) or not reference.startswith("#") or len(reference) > _REFERENCE_CHARS:
        return {}
    found: object = root
    for part in filter(None, reference[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        found = as_schema(found).get(key)
    return as_schema(found)


class TypeWriter:
    """Writes the types of one file; `classes` are the definitions they need, in an order that reads well."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.classes: list[str] = []
        self.used: set[str] = set()
        """The names from `typing` that the text needs."""
        self.steps_left = MAX_STEPS
        self._taken = {*_RESERVED, *taken}
        self._named: dict[int, tuple[str, JsonObject]] = {}
        """Classes by the identity of their schema, so that a schema that refers to itself finds its own class.

        The schema is kept with its class, so that its identity is not reused.
        """

    def write(self, schema: JsonObject, root: JsonObject, name: str, depth: int = 0) -> str:
        """Return the type of a schema; `name` is used if it needs a class."""
        self.steps_left -= 1
        if depth > MAX_DEPTH or self.steps_left < 0:
            return self._any()
        schema = resolved(schema, root)
        if literal := self._literal(schema):
            return literal
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._union([as_schema(part) for part in schema[key]], root, name, depth)
        if isinstance(schema.get("allOf"), list):
            return self.write(_merged(schema, root), root, name, depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds: list[JsonObject] = [{**schema, "type": one} for one in cast("list[object]", kind)]
            return self._union(kinds, root, name, depth)
        return self._plain(schema, kind, root, name, depth)

    def _plain(self, schema: JsonObject, kind: object, root: JsonObject, name: str, depth: int) -> str:
        if isinstance(kind, str) and kind in _SIMPLE:
            return _SIMPLE[kind]
        if kind == "array":
            return f"list[{self.write(as_schema(schema.get('items')), root, f'{name}Item', depth + 1)}]"
        if kind == "object" or "properties" in schema:
            return self._object(schema, root, name, depth)
        return self._any()

    def _any(self) -> str:
        self.used.add(ANY)
        return ANY

    def _literal(self, schema: JsonObject) -> str:
        """Return a `Literal` of the allowed values if they are few and simple; else an empty text."""
        values: object = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return ""
        listed = cast("list[object]", values)
        texts = [repr(value) for value in listed if isinstance(value, str | int | bool) or value is None]
        is_fit = 0 < len(texts) == len(listed) <= _MAX_LITERALS and sum(map(len, texts)) <= _LITERAL_CHARS
        if not is_fit:
            return ""
        self.used.add("Literal")
        return f"Literal[{', '.join(dict.fromkeys(texts))}]"

    def _union(self, parts: list[JsonObject], root: JsonObject, name: str, depth: int) -> str:
        if not 0 < len(parts) <= _MAX_PARTS:
            return self._any()
        written = dict.fromkeys(self.write(part, root, name, depth + 1) for part in parts)
        if ANY in written:
            return ANY
        return " | ".join(sorted(written, key=lambda text: text == "None"))

    def _object(self, schema: JsonObject, root: JsonObject, name: str, depth: int) -> str:
        fields = properties_of(schema)
        if not fields or len(self.classes) >= MAX_CLASSES:
            values = as_schema(schema.get("additionalProperties"))
            return f"dict[str, {self.write(values, root, f'{name}Value', depth + 1)}]"
        if id(schema) in self._named:
            return self._named[id(schema)][0]
        given = self._class_name(name)
        self._named[id(schema)] = given, schema
        place = len(self.classes)
        self.classes.append("")
        self.classes[place] = self._definition(given, fields, required_of(schema), root, depth)
        self.used.add("TypedDict")
        return given

    def _class_name(self, name: str) -> str:
        (given,) = assigned([name], fallback="Value").values()
        candidate, number = given, 1
        while candidate in self._taken:
            number += 1
            candidate = f"{given}{number}"
        self._taken.add(candidate)
        return candidate

    def _definition(
        self, given: str, fields: dict[str, JsonObject], required: frozenset[str], root: JsonObject, depth: int
    ) -> str:
        types: dict[str, str] = {}
        for field, schema in fields.items():
            written = self.write(schema, root, f"{given}{camel(field)}", depth + 1)
            if field not in required:
                self.used.add("NotRequired")
                written = f"NotRequired[{written}]"
            types[field] = written
        if all(_is_field(field) and field not in self._taken for field in fields):
            lines = [f"    {field}: {types[field]}{_comment(schema)}" for field, schema in fields.items()]
            return "\n".join([f"class {given}(TypedDict):", *lines])
        lines = [f"        {field!r}: {types[field]!r},{_comment(schema)}" for field, schema in fields.items()]
        return "\n".join([f"{given} = TypedDict(", f"    {given!r},", "    {", *lines, "    },", ")"])


def camel(name: str) -> str:
    """Return a name in camel case, as a part of a class's name."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", name[:60]) if part)


def _is_field(name: str) -> bool:
    (given,) = assigned([name], fallback="field").values()
    # In a class body, an annotation would find a field of that name instead of the type.
    return (
        given == name and name not in ("str", "int", "float", "bool", "list", "dict") and bool(_FIELD.fullmatch(name))
    )


def _comment(schema: JsonObject) -> str:
    text = one_line(schema.get("description"), _COMMENT_CHARS)
    return f"  # {text}" if text else ""


def _merged(schema: JsonObject, root: JsonObject) -> JsonObject:
    """Return one schema for `allOf`, with the fields of all its parts."""
    parts = [resolved(as_schema(part), root) for part in schema["allOf"][:_MAX_PARTS]]
    own = {key: value for key, value in schema.items() if key != "allOf"}
    if len(parts) == 1 and not own.get("properties"):
        return {**parts[0], **{key: value for key, value in own.items() if key in ("description", "default")}}
    fields: JsonObject = {}
    required: set[str] = set()
    for part in (*parts, own):
        fields |= properties_of(part)
        required |= required_of(part)
    return {"type": "object", "properties": fields, "required": sorted(required)} if fields else {}
