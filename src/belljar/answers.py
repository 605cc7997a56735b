"""What a person typed, as the answer to a form: for front ends that have a line to type on and no form to show."""

import json
from collections.abc import Mapping
from typing import Any, cast

from belljar.json_values import check_values

_YES = frozenset({"y", "yes", "ok", "true", "allow", "accept"})


JSON_HINT = "\nAnswer with a JSON object on one line: "


def typed_prompt(message: str, schema: Mapping[str, Any]) -> str:
    """Return a question for somebody who answers with a line: several fields are named, because they take JSON."""
    fields: Mapping[str, Mapping[str, Any]] = schema.get("properties") or {}
    if len(fields) < 2:
        return message
    shown = ", ".join(f"{json.dumps(name)}: {field.get('type', 'string')}" for name, field in fields.items())
    return f"{message}{JSON_HINT}{{{shown}}}\n"


def values_of(schema: Mapping[str, Any], text: str | None) -> dict[str, Any] | None:
    """Return a typed line as the answer to a form; None declines.

    Consent takes a yes, a single field the text itself, and more than one field a JSON object.
    """
    fields: Mapping[str, Any] = schema.get("properties") or {}
    if text is None or (not fields and text.strip().lower() not in _YES):
        return None
    if not fields:
        return {}
    try:
        check_values(text)
        value: Any = json.loads(text)
    except ValueError:
        value = text
    if len(fields) > 1:
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None
    ((name, field),) = fields.items()
    return {name: text if field.get("type") == "string" else value}
