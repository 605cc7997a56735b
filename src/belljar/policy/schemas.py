"""Checks arguments against the policy's JSON Schemas, and bounds the values that are checked at all.

Values come from code in a session, so nothing deeper or larger than the bounds is handed to a validator.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

from belljar.policy.expressions import compiled

MAX_DEPTH = 64
MAX_VALUES = 100_000
MAX_REASON_CHARS = 300


class ArgumentSchema:
    """A JSON Schema that arguments must satisfy."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        # Imported with the first schema, because most policies have none.
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError

        self._schema = dict(schema)
        try:
            Draft202012Validator.check_schema(self._schema)
        except SchemaError as error:
            place = ".".join(map(str, error.absolute_path)) or "the schema"
            raise ValueError(f"{place} is no JSON Schema: {error.message[:MAX_REASON_CHARS]}") from None
        for reference in (*_under(self._schema, "$ref"), *_under(self._schema, "$dynamicRef")):
            if not reference.startswith("#"):
                raise ValueError(f"$ref {reference!r} leads out of the file; only # references are followed")
        for pattern in _under(self._schema, "pattern"):
            compiled(pattern, may_be_empty=True)
        if _under(self._schema, "patternProperties"):
            raise ValueError("patternProperties is not taken: use propertyNames with a pattern")

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator, validators
        from referencing import Registry

        # With an empty registry the validator fetches nothing, whatever a schema refers to.
        registry: Registry[Any] = Registry()
        own = {"pattern": _check_pattern, "uniqueItems": _check_unique}
        kind = cast("Any", validators).extend(Draft202012Validator, own)
        return kind(self._schema, registry=registry, format_checker=Draft202012Validator.FORMAT_CHECKER)

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """Return where the arguments do not fit and what is required, without the value; empty if they fit."""
        try:
            error = next(iter(self._validator.iter_errors(dict(arguments))), None)
        except (ArithmeticError, RecursionError, ValueError):
            # Numbers too large for a float, and other values that the library was not written for.
            return "the arguments hold a value that cannot be checked"
        if error is None:
            return ""
        place = ".".join(["arguments", *map(str, error.absolute_path)])
        if error.validator in ("additionalProperties", "required", "unevaluatedProperties"):
            return f"{place}: {error.message}"[:MAX_REASON_CHARS]
        return f"{place} does not satisfy {error.validator}: {error.validator_value!r}"[:MAX_REASON_CHARS]


def unfit(value: object) -> str:
    """Return why a value cannot be checked at all, or an empty text if it can."""
    seen = 0
    layer: list[object] = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in layer:
            if isinstance(item, dict):
                entries = cast("dict[object, object]", item)
                below += [*entries.keys(), *entries.values()]
            elif isinstance(item, list | tuple):
                below += cast("list[object]", item)
            elif isinstance(item, str) and not _is_text(item):
                return "text with a lone surrogate"
        seen += len(below)
        if seen > MAX_VALUES:
            return f"more than {MAX_VALUES:,} values"
        if not below:
            return ""
        layer = below
    return f"values more than {MAX_DEPTH} levels deep"


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_pattern(_validator: object, pattern: str, value: object, _schema: object) -> Iterator[Exception]:
    """Check `pattern` with RE2, because with the library's own check a value could keep the server busy forever."""
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and compiled(pattern, may_be_empty=True).search(value) is None:
        yield ValidationError("the pattern does not match")


def _check_unique(_validator: object, is_wanted: bool, value: object, _schema: object) -> Iterator[Exception]:
    """Check `uniqueItems` by canonical texts.

    The library's own check compares each item with each, so a few thousand objects keep the server busy for a minute.
    """
    from jsonschema.exceptions import ValidationError

    if is_wanted and isinstance(value, list):
        items = cast("list[object]", value)
        if len({_canonical(item) for item in items}) < len(items):
            yield ValidationError("two of the items are the same")


def _canonical(value: object) -> str:
    """Return a text that is the same for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value).items()
        return "{" + ",".join(f"{key!r}:{_canonical(item)}" for key, item in sorted(entries)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, cast("list[object]", value))) + "]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return repr(value)
    return hex(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def _under(schema: object, key: str) -> list[str]:
    """Return all values of a keyword anywhere in a schema."""
    if isinstance(schema, list):
        return [found for item in cast("list[object]", schema) for found in _under(item, key)]
    if not isinstance(schema, dict):
        return []
    table = cast("dict[str, object]", schema)
    # A property may have the name of a keyword; then its value is a schema, not a text.
    own = [str(table[key])] if key in table and not (isinstance(table[key], dict) and key == "pattern") else []
    return [*own, *(found for item in table.values() for found in _under(item, key))]
