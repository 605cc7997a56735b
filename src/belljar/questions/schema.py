"""The flat JSON Schema of an answer: whether a person can be asked for it, its fields, and which values fit.

MCP servers and sessions write such schemas, so each may be hostile: what is read of one is bounded, and values are
checked in time linear in schema and answer. Only keywords of forms count, so no reference is fetched and no pattern is
tried. Does not know how fields are drawn.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from belljar.errors import InvalidArgument
from belljar.json_values import check_values
from belljar.outputs.terminal_text import printable

MAX_FIELDS: Final = 100
"""The most fields of a form of belljar's own: people fill in no longer ones."""
MAX_ANSWER_BYTES: Final = 64 * 1024
CONSENT: Final[dict[str, Any]] = {"type": "object", "properties": {}}
"""The schema of a question that is answered by accepting it, for clients that want one."""
JSON_HINT: Final = "\nAnswer with a JSON object on one line: "
YES: Final = frozenset({"y", "yes", "ok", "true", "allow", "accept", "1"})
_NO: Final = frozenset({"n", "no", "false", "0"})
_NAME_CHARS: Final = 64
_MAX_NAMED: Final = 20
_MAX_SHOWN: Final = 100
_MAX_FAULT: Final = 200
_MAX_DEPTH: Final = 3
# Alternatives of a field that are schemas rather than constants; each value is checked against all of them.
_MAX_ALTERNATIVES: Final = 8
_FLAT: Final = ("string", "number", "integer", "boolean")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_from_zero(value: object) -> bool:
    return _is_number(value) and cast("float", value) >= 0


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_alternatives(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in cast("list[object]", value))


_CHOICES: Final = ("enum", "enumNames", "oneOf", "anyOf", "const", "default")
_KEYWORDS: Final[Mapping[str, Callable[[object], bool]]] = {
    "type": lambda value: value in ("string", "number", "integer", "boolean", "array", "object", "null"),
    "items": lambda value: isinstance(value, dict),
    "multipleOf": lambda value: _is_from_zero(value) and value != 0,
    **dict.fromkeys(("title", "description", "format"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("default", "const"), lambda _: True),
    **dict.fromkeys(("enum", "enumNames"), _is_list),
    **dict.fromkeys(("oneOf", "anyOf"), _is_alternatives),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_from_zero),
}
"""The keywords of a field, and which values they take."""


# Reading a schema, whatever it is


def fields_of(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields by name; a field that is no schema is empty, and takes any value."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    entries = cast("dict[str, Any]", properties)
    return {name: cast("dict[str, Any]", each) if isinstance(each, dict) else {} for name, each in entries.items()}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that an answer must have, in their order."""
    required: list[Any] = schema["required"] if _is_list(schema.get("required")) else []
    needed = {each for each in required if isinstance(each, str)}
    return [name for name in fields_of(schema) if name in needed]


def choices_of(entry: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Return the values that a field can have, each with its title; empty for one with free values."""
    for key in ("oneOf", "anyOf"):
        if _is_list(entry.get(key)):
            options = [cast("dict[str, Any]", each) for each in entry[key] if isinstance(each, dict)]
            return [(one["const"], str(one.get("title", one["const"]))) for one in options if "const" in one]
    values: list[Any] = entry["enum"] if _is_list(entry.get("enum")) else []
    titles: list[Any] = entry["enumNames"] if _is_list(entry.get("enumNames")) else []
    return [(value, str(titles[place] if place < len(titles) else value)) for place, value in enumerate(values)]


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Return why a schema cannot be asked for; empty when it can. It must be flat, as elicitation has it."""
    properties = schema.get("properties")
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping) or not properties:
        return "the schema is no object with properties"
    named = cast("Mapping[str, Any]", properties)
    if len(named) > MAX_FIELDS:
        return f"the schema has {len(named)} fields, the limit is {MAX_FIELDS}"
    for name, entry in named.items():
        if problem := _field_problem(entry):
            return f"field {_named(name)} {problem}"
    required: Any = schema.get("required", [])
    if not isinstance(required, list) or not all(
        isinstance(name, str) and name in named for name in cast("list[Any]", required)
    ):
        return "required names a field that is not there"
    return ""


def _field_problem(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return "is no schema"
    given = cast("Mapping[str, Any]", entry)
    kind = given.get("type", "string")
    if kind != "array" and kind not in _FLAT:
        shown = str(kind)[:_MAX_SHOWN]
        return f"is of type {shown}; a person can be asked for {', '.join(_FLAT)} or a choice of several"
    if problem := _keyword_problem(given):
        return problem
    items: Mapping[str, Any] = given.get("items", {})
    if kind == "array" and not any(items.get(key) for key in ("enum", "anyOf", "oneOf")):
        return "is a list of anything; give its items an enum"
    return "is a list of lists" if "items" in items else _keyword_problem(items)


def _keyword_problem(given: Mapping[str, Any]) -> str:
    if unknown := next((key for key in given if key not in _KEYWORDS), None):
        return f"has the keyword {unknown[:_NAME_CHARS]!r}, which a form cannot show"
    for key, value in given.items():
        if not _KEYWORDS[key](value):
            return f"has no value of JSON Schema for {key}: {json.dumps(value)[:_MAX_SHOWN]}"
        listed = cast("list[Any]", value) if isinstance(value, list) else [value]
        if key in _CHOICES and not all(map(_is_option, listed)):
            return f"has more than plain values in {key}, which a form cannot show"
    return ""


def _is_option(value: Any) -> bool:
    inner = cast("dict[str, Any]", value).values() if isinstance(value, dict) else [value]
    return not any(isinstance(each, dict | list) for each in inner)


# The check of an answer


def checked_values(schema: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an answer; raise `InvalidArgument` for one that does not fit the question's schema."""
    try:
        size = len(json.dumps(values, allow_nan=False))
    except RecursionError:
        raise InvalidArgument("the answer is nested too deeply", hint="Give plain values") from None
    except ValueError:
        raise InvalidArgument("the answer has a number that is not finite", hint="Give a plain number") from None
    if size > MAX_ANSWER_BYTES:
        raise InvalidArgument(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes", hint="Answer with less text")
    fields = fields_of(schema)
    if unknown := next((name for name in values if name not in fields), None):
        hint = f"It asks for {_listed(fields)}" if fields else "It asks for consent, without any value"
        raise InvalidArgument(f"the answer has a field {unknown[:_NAME_CHARS]!r} that was not asked for", hint=hint)
    if missing := [name for name in required_of(schema) if name not in values]:
        raise InvalidArgument(f"the answer lacks {_listed(missing)}", hint="Give all required fields")
    for name, value in values.items():
        if fault := fault_of(fields[name], value):
            shown = json.dumps(value)[:_MAX_SHOWN]
            raise InvalidArgument(f"{_named(name)} is {shown}: {fault}", hint="Give a value that fits")
    return dict(values)


def fault_of(entry: Mapping[str, Any], value: Any) -> str:
    """Return why a value does not fit a field; empty if it does."""
    return _rule(entry).fault(value)[:_MAX_FAULT]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a field demands. Choices are sets, because a list may have as many values as there are choices."""

    validator: Any
    choices: "list[tuple[frozenset[object], list[_Rule], str]]"
    """For each keyword with choices: those that are constants, the others, and what is said of a value that is none."""
    items: "_Rule | None"

    def fault(self, value: Any) -> str:
        """Return why a value does not fit; empty if it does."""
        try:
            if fault := next(self.validator.iter_errors(value), None):
                return str(fault.message)
        except ArithmeticError:
            return "it is larger than any number that can be checked"
        for constants, others, words in self.choices:
            if _key(value) not in constants and all(each.fault(value) for each in others):
                return f"{repr(value)[:_MAX_FAULT]} is not {words}"
        if self.items is None or not isinstance(value, list):
            return ""
        return next((fault for each in cast("list[Any]", value) if (fault := self.items.fault(each))), "")


def _rule(entry: Mapping[str, Any], depth: int = 0) -> _Rule:
    from jsonschema import Draft202012Validator  # it takes 80 ms to import, and few servers are asked

    given = {key: value for key, value in entry.items() if key in _KEYWORDS and _KEYWORDS[key](value)}
    items = _rule(given.pop("items"), depth + 1) if "items" in given and depth < _MAX_DEPTH else None
    choices: list[tuple[frozenset[object], list[_Rule], str]] = []
    if "enum" in given:
        values = given.pop("enum")
        choices.append((frozenset(map(_key, values)), [], f"one of {repr(values)[:_MAX_FAULT]}"))
    for key in ("oneOf", "anyOf"):
        options: list[dict[str, Any]] = given.pop(key, [])
        others = [each for each in options if "const" not in each]
        if options and len(others) <= (_MAX_ALTERNATIVES if depth < _MAX_DEPTH else 0):
            constants = frozenset(_key(each["const"]) for each in options if "const" in each)
            inner = [_rule(each, _MAX_DEPTH) for each in others]
            choices.append((constants, inner, "valid under any of the given schemas"))
    plain = {key: value for key, value in given.items() if key != "items"}
    return _Rule(Draft202012Validator(plain), choices, items)


def _key(value: object) -> object:
    """Return what is equal for equal values of JSON only; True is not 1."""
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return isinstance(value, bool), isinstance(value, str), value


def chosen_text(schema: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return what of an answer may be kept: choices, yes and no. What is typed may be a secret."""
    told: list[str] = []
    for name, entry in fields_of(schema).items():
        value: object = values.get(name)
        titles = {_key(known): title for known, title in choices_of(entry)}
        if isinstance(value, bool):
            told.append("yes" if value else "no")
        elif isinstance(value, str) and _key(value) in titles:
            told.append(titles[_key(value)])
    return printable(", ".join(told))[:_MAX_FAULT]


# Answers that somebody types on a line


def typed_value(entry: Mapping[str, Any], text: str) -> Any:
    """Return what somebody typed as the type that a field wants; text that is none stays text."""
    if entry.get("type") == "string":
        return text
    if entry.get("type") == "boolean" and text.strip().lower() in (*YES, *_NO):
        return text.strip().lower() in YES
    try:
        check_values(text)
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


def typed_prompt(message: str, schema: Mapping[str, Any]) -> str:
    """Return a question for somebody who answers with a line: several fields are named, because they take JSON."""
    fields = fields_of(schema)
    if len(fields) < 2:
        return message
    shown = ", ".join(f"{json.dumps(name)}: {field.get('type', 'string')}" for name, field in fields.items())
    return f"{message}{JSON_HINT}{{{shown}}}\n"


def values_of(schema: Mapping[str, Any], text: str | None) -> dict[str, Any] | None:
    """Return a typed line as the answer to a form; None declines.

    Consent takes a yes, a single field the text itself, and more than one field a JSON object.
    """
    fields = fields_of(schema)
    if text is None or (not fields and text.strip().lower() not in YES):
        return None
    if len(fields) > 1:
        value = typed_value({}, text)
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None
    return {name: typed_value(entry, text) for name, entry in fields.items()}


# How names and values are shown, which others choose


def _listed(names: Iterable[str]) -> str:
    all_names = [*names]
    more = f" and {len(all_names) - _MAX_NAMED:,} more" if len(all_names) > _MAX_NAMED else ""
    return f"{', '.join(map(_named, all_names[:_MAX_NAMED]))}{more}"


def _named(name: str) -> str:
    return printable(" ".join(name[:_NAME_CHARS].splitlines()))
