"""What the declaration of a setting says: its type, values and default; and errors for values that it does not take."""

import difflib
import json
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from belljar.errors import SettingsError
from belljar.settings.keys import MASK, masked
from belljar.settings.kinds import NONE

_SECRET = ("api_keys", "fleet_key", "inbox_webhook", "inbox_webhook_secret", "mcp_servers", "store_key")
SettingsTable = type[BaseSettings]


def allowed(table: SettingsTable, name: str) -> str:
    """Return the values that a setting takes, in words."""
    field = table.model_fields[name]
    return _note(field, "allowed") or _allowed_type(field.annotation) + _bounds(field)


def default(table: SettingsTable, name: str) -> str:
    """Return the default of a setting, in Markdown and without this machine's paths."""
    field = table.model_fields[name]
    return _note(field, "default") or f"`{json.dumps(shown(field.get_default()))}`"


def unknown(table: SettingsTable, name: str, origin: str) -> SettingsError:
    """Return the error for a name that no setting has."""
    near = difflib.get_close_matches(name, table.model_fields, n=1)
    hint = f"Did you mean {near[0]}?" if near else "`belljar config` lists every setting"
    return SettingsError(f"unknown setting {name} from {origin}", hint=hint)


def unusable(table: SettingsTable, name: str, value: object, origin: str, reason: str) -> SettingsError:
    """Return the error for a value that a setting does not take."""
    shown = MASK if name in _SECRET else json.dumps(value, default=str, ensure_ascii=False)
    return SettingsError(f"{name} = {shown} from {origin}: {reason}", hint=f"{name} takes {allowed(table, name)}")


def shown(value: Any) -> JsonValue:
    """Return a value as it may be printed, with secrets masked."""
    if isinstance(value, list | tuple):
        return [shown(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        # Tables without a model may hold variables and headers, and with them secrets.
        parts = cast("dict[str, Any]", value).items()
        return {name: shown(item) if isinstance(item, BaseModel) else MASK for name, item in parts}
    if isinstance(value, BaseModel):
        return {name: shown(item) for name, item in value.model_dump(exclude_defaults=True).items()}
    if value is None:
        return NONE
    if isinstance(value, SecretStr):
        return masked(value.get_secret_value())
    return str(value) if isinstance(value, Path) else value


def may_be_none(table: SettingsTable, name: str) -> bool:
    """Tell whether a setting is a limit that can be none."""
    return name in table.model_fields and type(None) in get_args(table.model_fields[name].annotation)


def takes_text(table: SettingsTable, name: str) -> bool:
    """Tell whether a setting that is a list may also be written as one text."""
    return name in table.model_fields and bool(_note(table.model_fields[name], "is_text"))


def is_table(table: SettingsTable, name: str) -> bool:
    """Tell whether a setting is a table with named entries."""
    return name in table.model_fields and kind(table.model_fields[name].annotation) is dict


def kind(annotation: Any) -> type:
    """Return the type that a setting has in a file: list, dict, bool, int, float, or else str."""
    if get_origin(annotation) in (list, dict):
        return get_origin(annotation) or list
    if type(None) in get_args(annotation):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not type(None))
    return annotation if annotation in (bool, int, float) else str


def _allowed_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        return f"a list of {_allowed_type(item)}" if get_origin(item) is Literal else "a list of text"
    return {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}.get(annotation, "text")


def _bounds(field: FieldInfo) -> str:
    comparisons = {"ge": ", at least", "gt": ", above"}
    return "".join(
        f"{text} {getattr(bound, name)}"
        for bound in field.metadata
        for name, text in comparisons.items()
        if hasattr(bound, name)
    )


def _note(field: FieldInfo, name: str) -> str:
    extra = field.json_schema_extra
    return str(cast("dict[str, object]", extra).get(name, "")) if isinstance(extra, dict) else ""
