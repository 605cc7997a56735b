"""Reads the values of settings from files and variables.

From lowest to highest: defaults, the user's `belljar.toml`, the working directory's (or `BELLJAR_CONFIG`), `BELLJAR_*`
variables, flags. The working directory's file is read only if the user trusts it (`trust.py`). This module knows the
names and types of a table of settings, not what they are for.

The `.env` of the working directory has `NAME=value` lines that every command takes as variables of its own. A variable
that is set already stays as it is. Values are never logged and never reach a session, which gets none of the server's
variables. A `.env` that nobody named is read only if the user trusts it, too.
"""

import io
import json
import os
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from belljar.errors import SettingsError
from belljar.settings.azure import VARIABLES as AZURE_VARIABLES
from belljar.settings.fields import SettingsTable, kind, may_be_none, takes_text, unknown, unusable
from belljar.settings.keys import is_hashed
from belljar.settings.kinds import NONE
from belljar.settings.trust import is_trusted, user_folder

CONFIG_FILE = "belljar.toml"
ENV_FILE = ".env"
PREFIX = "BELLJAR_"
CONFIG_VARIABLE = "BELLJAR_CONFIG"
SECRETS = "BELLJAR_SECRET_"
"""Variables with this prefix are values for tools, and not settings."""

ALIASES = {
    "log_level": "LOG_LEVEL",
    "download_directory": "AZURE_DOWNLOAD_DIRECTORY",
    "guardrails": "GUARDRAILS_ENABLED",
    "guardrails_strict": "GUARDRAILS_STRICT_MODE",
    "blocked_patterns": "BLOCKED_PATTERNS",
    "allow_network_access": "ALLOW_NETWORK_ACCESS",
    "egress": "ALLOWED_NETWORKS",
    "execution_timeout_s": "MAX_EXECUTION_TIME",
    "memory_mb": "MAX_MEMORY_MB",
    "workspace_directory": "WORKSPACE_DIR",
    "servers_directory": "SERVERS_DIR",
    "skills_directory": "SKILLS_DIR",
    **AZURE_VARIABLES,
}
"""Variables of other projects that are read if ours is not set, for settings that the table has."""

_FLAGS = {"surfaces": "--surface"}
_LARGEST_FILE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: the values it sets, and for each name what to call the source."""

    values: dict[str, Any]
    origin: Callable[[str], str]


class _Environment(EnvSettingsSource):
    """Reads variables: lists are separated by commas or JSON, and other projects' names are aliases."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if kind(field.annotation) is dict:
            return _table(self.settings_cls, field_name, value)
        return _list(self.settings_cls, field_name, value)

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        for name, other in ALIASES.items():
            field = self.settings_cls.model_fields.get(name)
            if field is not None and name not in values and (said := self.env_vars.get(other.lower())):
                is_list = kind(field.annotation) is list
                values[name] = self.decode_complex_value(name, field, said) if is_list else said
        return values

    def origin(self, name: str) -> str:
        own = variable(name)
        return own if own.lower() in self.env_vars or name not in ALIASES else ALIASES[name]


def _table(table: SettingsTable, name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise unusable(table, name, text, variable(name), f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise unusable(table, name, text, variable(name), "it is not a JSON object")
    return cast("dict[str, Any]", value)


def _list(table: SettingsTable, name: str, text: str) -> Any:
    """Return the entries of a list that is written with commas, or as JSON like `belljar config` prints it."""
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError as error:
            # An address like [::1]:8000 and a pattern of code begin with a bracket too, but with no quote after it.
            if text.lstrip().startswith('["'):
                raise unusable(table, name, text, variable(name), f"it is not JSON: {error}") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def layers(table: SettingsTable) -> list[Layer]:
    """Return the sources below the flags, highest first."""
    environment = _Environment(table)
    return [Layer(environment(), environment.origin), *_file_layers(table)]


def config_files() -> list[Path]:
    """Return the files that are looked for, highest first; they need not exist."""
    chosen = os.environ.get(CONFIG_VARIABLE)
    nearest = Path(chosen).expanduser() if chosen else Path(CONFIG_FILE)
    own = user_folder()
    return list(dict.fromkeys([nearest.absolute(), *([own / CONFIG_FILE] if own else [])]))


def unread_config() -> Path | None:
    """Return the working directory's file of settings if there is one that is not read."""
    nearest = config_files()[0]
    is_unread = _is_from_anybody(nearest) and _is_wanted(nearest) and read_if_trusted(nearest) is None
    return nearest if is_unread else None


def read_if_trusted(path: Path) -> bytes | None:
    """Return the content of a file that anybody may have put there; None if the user does not trust just that."""
    try:
        content = read_config(path, is_from_anybody=True)
    except SettingsError:
        return None
    return content if is_trusted(path, content) else None


def read_config(path: Path, *, is_from_anybody: bool = False) -> bytes:
    """Read a file of settings. One that anybody may have put there must be a regular file, or is refused."""
    # Windows has no pipes among its files, and reads text of others unless it is told that the file is binary.
    waits_not = getattr(os, "O_NONBLOCK", 0) if is_from_anybody else 0
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | waits_not)
        with os.fdopen(descriptor, "rb") as file:
            if is_from_anybody and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingsError(f"{path} cannot be read: it is not a file")
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if len(content) > _LARGEST_FILE:
        raise SettingsError(f"{path} cannot be read: it has more than {_LARGEST_FILE:,} bytes")
    return content


def parse_config(table: SettingsTable, path: Path, content: bytes) -> dict[str, Any]:
    """Parse a file of settings, and check its names and types."""
    try:
        values = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}", hint="Write one `name = value` a line") from error
    for name, value in values.items():
        _check_from_file(table, name, value, str(path))
    return values


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """Return the flag of a setting, for the commands that take it."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def winner(name: str, layers: list[Layer]) -> tuple[Any, str]:
    """Return the value from the highest layer that has one, before validation, and its origin."""
    for layer in layers:
        if name in layer.values:
            return layer.values[name], layer.origin(name)
    return None, "default"


def _is_wanted(path: Path) -> bool:
    """Tell whether a file exists; a missing or inaccessible one is an error only if BELLJAR_CONFIG names it."""
    try:
        if path.exists():
            return True
    except PermissionError:
        pass
    if os.environ.get(CONFIG_VARIABLE) and path == config_files()[0]:
        raise SettingsError(
            f"{path}, named by {CONFIG_VARIABLE}, does not exist", hint=f"Make it, or unset {CONFIG_VARIABLE}"
        )
    return False


def _file_layers(table: SettingsTable) -> list[Layer]:
    nearest, *own = config_files()
    below = [_file_layer(table, path, read_config(path)) for path in own if _is_wanted(path)]
    if not _is_wanted(nearest):
        return below
    content = read_if_trusted(nearest) if _is_from_anybody(nearest) else read_config(nearest)
    return below if content is None else [_file_layer(table, nearest, content), *below]


def _is_from_anybody(path: Path) -> bool:
    """Tell whether a file is read only because it is in the working directory, and not because the user named it."""
    own = user_folder()
    return not os.environ.get(CONFIG_VARIABLE) and (own is None or path != own / CONFIG_FILE)


def _file_layer(table: SettingsTable, path: Path, content: bytes) -> Layer:
    return Layer(parse_config(table, path, content), lambda _: str(path))


def _check_from_file(table: SettingsTable, name: str, value: Any, origin: str) -> None:
    """Refuse an unknown name or a wrong type in a file; variables are always text, so their types are not checked."""
    if name not in table.model_fields:
        raise unknown(table, name, origin)
    written_as = kind(table.model_fields[name].annotation)
    fitting: set[type] = {int, float} if written_as is float else {written_as}
    if takes_text(table, name):
        fitting.add(str)
    if type(value) not in fitting and not (value == NONE and may_be_none(table, name)):
        raise unusable(table, name, value, origin, "it has the wrong type")
    if name == "api_keys" and not all(isinstance(entry, str) and is_hashed(entry) for entry in value):
        raise SettingsError(
            f"api_keys in {origin} holds a key in plain text",
            hint="Run `belljar key` and put the line it prints there: NAME:sha256:HEX",
        )
    if name in ("azure_key", "fleet_key", "inbox_webhook_secret", "store_key") and value:
        raise SettingsError(
            f"{name} in {origin} is a key in plain text", hint=f"Set the variable {variable(name)} instead"
        )


# The `.env` of the working directory


def apply_env_file(path: str, *, is_named: bool) -> str:
    """Set the variables of a file that are not set yet, and return what was read, with names and without values.

    `is_named`: the user named the file, so that it need not be trusted, and it is an error if it is not there.
    """
    if not path:
        return ""
    file = Path(path).expanduser().absolute()
    if is_named and not file.exists():
        raise SettingsError(f"env_file {file} is not there", hint="Make it, or name another one")
    content = read_config(file) if is_named else read_if_trusted(file)
    if content is None:
        return ""
    values = parse_env_file(file, content)
    new = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in new})
    kept = ", ".join(name for name in values if name not in new)
    return f"read {file}: {', '.join(new) or 'nothing new'}{f'; set already: {kept}' if kept else ''}"


def unread_env_file(path: str) -> Path | None:
    """Return a `.env` that nobody named if it is not read and has something to say to belljar."""
    file = Path(path).expanduser().absolute()
    try:
        content = read_config(file, is_from_anybody=True)
    except SettingsError:
        return None  # none is there, or it is the folder of a virtual environment
    # Many projects have a `.env` that is none of belljar's business.
    is_ours = any(name.encode() in content for name in (PREFIX, *ALIASES.values()))
    return file if is_ours and read_if_trusted(file) is None else None


def parse_env_file(file: Path, content: bytes) -> dict[str, str]:
    """Return the variables of a file; SettingsError names the line that is none. No value refers to another."""
    from dotenv.parser import parse_stream  # loaded where there is a file

    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    values: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.error or (binding.key and "\0" in f"{binding.key}{binding.value}"):
            raise SettingsError(f"line {binding.original.line} of {file} is not NAME=value", hint="Mend or remove it")
        if binding.key and binding.value is not None:
            values[binding.key] = binding.value
    return values


class LayeredSettings(BaseSettings):
    """Settings whose values are those of flags, and below them of the layers."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of values: flags, then the layers below them. Called by pydantic-settings."""
        return (init_settings, *(InitSettingsSource(cls, layer.values) for layer in layers(cls)))
