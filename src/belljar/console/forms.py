"""The form for a question to a person, made of the JSON Schema of its answer, and the values of one that was sent.

Knows strings, numbers, booleans and lists of choices; anything else is given as JSON text. Values are checked by
whoever takes the answer, against the question's own schema.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from belljar.errors import InvalidArgument
from belljar.json_values import check_values

MAX_FIELDS: Final = 100
MAX_CHOICES: Final = 500
_INPUTS: Final = {"email": "email", "uri": "url", "date": "date", "date-time": "datetime-local"}
PREFIX: Final = "value-"


@dataclass(frozen=True, slots=True)
class FormField:
    """One field."""

    name: str
    label: str
    kind: str
    """The type of its `input`, or `choice`, `json` or `text`."""
    hint: str = ""
    value: str = ""
    is_required: bool = False
    choices: tuple[tuple[str, str], ...] = ()


def fields_of(schema: Mapping[str, Any], *, is_password: bool = False) -> list[FormField]:
    """Return the fields of a form."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    required = schema.get("required")
    needed = {str(name) for name in cast("list[object]", required)} if isinstance(required, list) else set[str]()
    entries = [*cast("dict[str, Any]", properties).items()][:MAX_FIELDS]
    return [
        _field(name, cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}, name in needed, is_password)
        for name, entry in entries
    ]


def _field(name: str, entry: dict[str, Any], is_required: bool, is_password: bool) -> FormField:
    default = entry.get("default")
    kind, choices = _kind(entry), _choices(entry)
    if is_password and kind == "text":
        kind = "password"
    return FormField(
        name=name,
        label=str(entry.get("title") or name),
        kind="choice" if choices else kind,
        hint=str(entry.get("description") or ""),
        # What is secret is not sent to the browser, not even as a default.
        value=""
        if default is None or kind == "password"
        else default
        if isinstance(default, str)
        else json.dumps(default),
        is_required=is_required and kind != "checkbox",
        choices=choices,
    )


def _kind(entry: dict[str, Any]) -> str:
    match entry.get("type"):
        case "boolean":
            return "checkbox"
        case "integer" | "number":
            return "number"
        case "string":
            return _INPUTS.get(str(entry.get("format")), "text")
        case _:
            return "json"


def _choices(entry: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if entry.get("type") != "string":
        return ()
    titled, listed = entry.get("oneOf"), entry.get("enum")
    if isinstance(titled, list):  # as `forms.ask` and MCP's elicitation write choices with titles
        options = [cast("dict[str, object]", each) for each in cast("list[object]", titled) if isinstance(each, dict)]
        found = [(str(one["const"]), str(one.get("title", one["const"]))) for one in options if "const" in one]
        return tuple(found[:MAX_CHOICES])
    if not isinstance(listed, list):
        return ()
    values = [str(value) for value in cast("list[object]", listed)][:MAX_CHOICES]
    names = entry.get("enumNames")
    labels = [str(label) for label in cast("list[object]", names)] if isinstance(names, list) else values
    return tuple(zip(values, labels, strict=False))


def sent_values(schema: Mapping[str, Any], sent: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a form that was sent; a field that was left empty is not given."""
    values: dict[str, Any] = {}
    for field in fields_of(schema):
        text = sent.get(PREFIX + field.name, "")
        if field.kind == "checkbox":
            values[field.name] = bool(text)
        elif text or (field.is_required and field.kind == "text"):
            values[field.name] = _value(field, text)
    return values


def _value(field: FormField, text: str) -> Any:
    if field.kind not in ("number", "json"):
        return text
    try:
        check_values(text)
        return json.loads(text)
    except (ValueError, RecursionError):
        wanted = "a number" if field.kind == "number" else "JSON"
        raise InvalidArgument(f"{field.label[:64]} is {text[:64]!r}, which is not {wanted}") from None
