"""Loads the settings in force, and explains where each came from.

`table.py` declares all settings; `sources.py` reads files and variables.
"""

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from belljar.errors import SettingsError
from belljar.settings import fields, sources
from belljar.settings.environments import EnvironmentEntry, Kind
from belljar.settings.keys import ApiKey, hash_key, is_key_name, parse_key
from belljar.settings.kinds import NONE
from belljar.settings.sources import CONFIG_FILE, config_files, flag, variable
from belljar.settings.table import MEBIBYTE, Settings

__all__ = [
    "CONFIG_FILE",
    "MEBIBYTE",
    "NONE",
    "ApiKey",
    "EnvironmentEntry",
    "Kind",
    "SettingOrigin",
    "Settings",
    "config_files",
    "explain",
    "flag",
    "given_flags",
    "hash_key",
    "is_key_name",
    "load_command_settings",
    "load_settings",
    "load_with_env_file",
    "parse_key",
    "unknown_variables",
    "unread_files",
    "variable",
]

log = logging.getLogger(__name__)
_warned: set[Path] = set()


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """One line of `belljar config`; `origin` is "default", a file, a variable or a flag."""

    name: str
    value: JsonValue
    origin: str
    description: str


def load_settings(flags: Mapping[str, object] = {}) -> Settings:
    """Return the settings in force. A flag that is None was not given, except for a limit, where it means no limit."""
    given = given_flags(flags)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise _explained(error, given) from None
    _warn_of(sources.unread_config())
    return settings


def load_command_settings(flags: Mapping[str, object] = {}) -> Settings:
    """Return the settings in force for a command of belljar, each of which obeys `env_file`."""
    return load_with_env_file(flags)[0]


def load_with_env_file(flags: Mapping[str, object] = {}) -> tuple[Settings, str]:
    """Set the variables of `env_file` in this process, and return the settings in force then and what was read.

    The latter names variables, never their values.
    """
    settings = load_settings(flags)
    said = sources.apply_env_file(settings.env_file, is_named=_is_env_file_named(settings))
    _warn_of(_unread_env_file(settings))
    return (load_settings(flags) if said else settings), said


def unread_files(settings: Settings) -> list[Path]:
    """Return the files of the working directory that are not read, because the user does not trust them."""
    return [file for file in (sources.unread_config(), _unread_env_file(settings)) if file]


def _unread_env_file(settings: Settings) -> Path | None:
    return None if _is_env_file_named(settings) else sources.unread_env_file(settings.env_file)


def _is_env_file_named(settings: Settings) -> bool:
    return "env_file" in settings.model_fields_set


def _warn_of(unread: Path | None) -> None:
    """Say once that a file is not read, and how to trust it."""
    if unread and unread not in _warned:
        _warned.add(unread)
        how = f"belljar trust {shlex.quote(str(unread))}"
        log.warning("%s is not read, because it is not trusted. If you have read it: %s", unread, how)


def explain(flags: Mapping[str, object] = {}) -> list[SettingOrigin]:
    """Return every setting with its value, secrets masked, and where the value came from."""
    settings = load_settings(flags)
    layers = [sources.Layer(given_flags(flags), flag), *sources.layers(Settings)]
    return [
        SettingOrigin(
            name,
            fields.shown(getattr(settings, name)),
            sources.winner(name, layers)[1],
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
    ]


def given_flags(flags: Mapping[str, object]) -> dict[str, Any]:
    """Return the flags that were given: None counts only for limits."""
    return {name: value for name, value in flags.items() if value is not None or fields.may_be_none(Settings, name)}


def unknown_variables() -> list[str]:
    """Return variables that have the prefix of settings and are none, which are probably misspelled."""
    known = {variable(name) for name in Settings.model_fields} | {sources.CONFIG_VARIABLE}
    looks_so = (name for name in os.environ if name.startswith(sources.PREFIX))
    return sorted(name for name in looks_so if name not in known and not name.startswith(sources.SECRETS))


def _explained(error: ValidationError, flags: dict[str, Any]) -> SettingsError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    value, origin = sources.winner(name, [sources.Layer(flags, flag), *sources.layers(Settings)])
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return fields.unknown(Settings, name, origin)
    reason = first["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
    reason = "there is no such field" if first["type"] == "extra_forbidden" else reason
    if fields.is_table(Settings, name):
        reason = ": ".join([*map(str, first["loc"][1:]), reason])
    return fields.unusable(Settings, name, value, origin, reason)
