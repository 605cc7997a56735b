"""Questions to the person: only for values that are missing or do not fit, as one form, while the cell's clock stands.

The session's kernel passes a form on as MCP's elicitation. Another kernel, or plain Python, has only `input()`: then
each field is a question of its own.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable
from typing import Any

from .errors import Declined, InvalidValues, NobodyToAsk
from .schema import Field, converted, expected_value, fields_of, is_empty, options_of, tidy

_BATCH = 25
"""The most fields of one question: people do not fill in longer ones, and the host has a limit of its own."""
_BATCH_CHARS = 40_000
_MAX_ROUNDS = 3
_MAX_ASKED_OPTIONS = 200
_KEYWORDS = ("title", "description", "format", "minLength", "maxLength", "minimum", "maximum")
_FORMATS = ("email", "uri", "date", "date-time")


def ask(schema: dict[str, Any], values: dict[str, Any] | None = None, message: str = "") -> dict[str, Any]:
    """Return values for all fields of a flat JSON Schema; the person is asked for what is missing or does not fit.

    Fields that are not required are not asked for. Raises NobodyToAsk, Declined, or InvalidValues after three tries.
    """
    fields = fields_of(schema)
    known = {one.name for one in fields}
    unknown = [name for name in values or {} if name not in known]
    if unknown:
        raise InvalidValues(
            f"the schema has no field {', '.join(map(repr, unknown))}; it has {', '.join(map(repr, known))}",
            dict.fromkeys(unknown, "is not in the schema"),
        )
    found, faults = sorted_out(fields, values or {})
    found.update(
        ask_for([one for one in fields if one.name in faults], faults, message or str(schema.get("title", "")))
    )
    return {one.name: found[one.name] for one in fields if one.name in found}


def sorted_out(fields: list[Field], values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that fit, as their types, and for each other field that matters why it has none."""
    found: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for one in fields:
        value = values.get(one.name, one.value)
        if is_empty(value):
            if one.is_required:
                faults[one.name] = "is required"
            elif one.name in values:
                found[one.name] = value
            continue
        try:
            found[one.name] = converted(one, value)
        except ValueError as error:
            faults[one.name] = str(error)
    return found, faults


def ask_for(fields: list[Field], faults: dict[str, str], message: str) -> dict[str, Any]:
    """Return the person's values for these fields; `faults` says for each why it is asked."""
    answers: dict[str, Any] = {}
    for field in [one for one in fields if one.schema.get("writeOnly")]:
        # What must not be shown is never put into a form: the protocol forbids it.
        answers[field.name] = _ask_secret(field, message)
    shown = [one for one in fields if not one.schema.get("writeOnly")]
    ask_together: Callable[[str, dict[str, Any]], Any] | None = getattr(_shell(), "ask_form", None)
    for batch in _batches(shown):
        if ask_together is None:
            answers.update({one.name: _ask_line(one, faults[one.name]) for one in batch})
        else:
            answers.update(_ask_batch(ask_together, batch, faults, message))
    return answers


def _batches(fields: list[Field]) -> list[list[Field]]:
    """Return the fields in questions that people can fill in, and that the host takes: few fields, few characters."""
    batches: list[list[Field]] = []
    room = 0
    for one in fields:
        size = 2 * len(json.dumps(one.name)) + len(json.dumps(_field_schema(one)))
        if size > _BATCH_CHARS:
            raise NobodyToAsk(f"the field {tidy(one.name)!r} is too large for a question: pass its value in the code")
        if not batches or len(batches[-1]) == _BATCH or size > room:
            batches.append([])
            room = _BATCH_CHARS
        batches[-1].append(one)
        room -= size
    return batches


def _shell() -> Any:
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _ask_batch(
    ask_together: Callable[[str, dict[str, Any]], Any], fields: list[Field], faults: dict[str, str], message: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    missing, reasons = fields, faults
    for _ in range(_MAX_ROUNDS):
        try:
            answer = ask_together(_message(missing, reasons, message), asked_schema(missing))
        except EOFError:
            raise NobodyToAsk(_nobody(missing, reasons)) from None
        if answer is None:
            raise Declined(f"the person did not give {_named(missing)}")
        given, reasons = sorted_out(missing, dict(answer))
        found.update(given)
        missing = [one for one in missing if one.name in reasons]
        if not missing:
            return found
    raise InvalidValues(f"what the person gave does not fit: {_listed(missing, reasons)}", reasons)


def _ask_line(field: Field, fault: str) -> Any:
    for _ in range(_MAX_ROUNDS):
        try:
            text = input(f"{field.label} ({expected_value(field)}; {fault}): ")
        except (EOFError, RuntimeError, NotImplementedError):
            # ipykernel raises StdinNotImplementedError, a RuntimeError, where its front end cannot ask.
            raise NobodyToAsk(_nobody([field], {field.name: fault})) from None
        found, faults = sorted_out([field], {field.name: text})
        if not faults:
            return found.get(field.name)
        fault = faults[field.name]
    raise InvalidValues(f"{field.label} {fault}", {field.name: fault})


def _ask_secret(field: Field, message: str) -> str:
    try:
        text = getpass.getpass(f"{message}\n{field.label}: " if message else f"{field.label}: ")
    except (EOFError, RuntimeError, NotImplementedError):
        raise NobodyToAsk(_nobody([field], {field.name: "is required"})) from None
    if not text:
        raise Declined(f"the person did not give {field.label}")
    return text


def _message(fields: list[Field], faults: dict[str, str], message: str) -> str:
    wrong = [one for one in fields if faults[one.name] != "is required"]
    lines = [message or "Some values are needed."]
    lines += [f"- {tidy(one.label)}: {tidy(faults[one.name])}" for one in wrong]
    return "\n".join(lines)


def asked_schema(fields: list[Field]) -> dict[str, Any]:
    """Return the schema in the form that elicitation has: flat, with its keywords only, and without passwords."""
    shown = [one for one in fields if not one.schema.get("writeOnly")]
    required = [one.name for one in shown if one.is_required]
    return {"type": "object", "properties": {one.name: _field_schema(one) for one in shown}, "required": required}


def _field_schema(field: Field) -> dict[str, Any]:
    schema = field.schema
    kind = schema.get("type", "string")
    asked: dict[str, Any] = {"type": kind, **{key: schema[key] for key in _KEYWORDS if key in schema}}
    asked["title"] = tidy(field.label)
    if "description" in asked:
        asked["description"] = tidy(asked["description"], 1_000)
    if asked.get("format") not in _FORMATS:
        asked.pop("format", None)
    options = options_of(schema)
    if not options:
        return {"type": "string", "title": asked["title"]} if kind == "array" else asked
    if len(options) > _MAX_ASKED_OPTIONS or len(json.dumps(options, default=str)) > _BATCH_CHARS / 2:
        # Too long a list to choose from: it is typed, and checked afterwards.
        return {"type": "string", "title": asked["title"], "description": tidy(expected_value(field), 1_000)}
    titled = [{"const": str(value), "title": tidy(title)} for value, title in options]
    if kind == "array":
        return {**asked, "items": {"anyOf": titled}}
    return {**asked, "oneOf": titled}


def _named(fields: list[Field]) -> str:
    return ", ".join(one.label for one in fields)


def _listed(fields: list[Field], faults: dict[str, str]) -> str:
    return "; ".join(f"{one.name!r} {faults[one.name]}, takes {expected_value(one)}" for one in fields)


def _nobody(fields: list[Field], faults: dict[str, str]) -> str:
    return f"nobody can be asked here, so pass these values in the code: {_listed(fields, faults)}"
