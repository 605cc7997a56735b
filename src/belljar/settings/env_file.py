"""The `.env` of the working directory: `NAME=value` lines that every command of belljar takes as variables of its own.

A variable that is set already stays as it is. Values are never logged and never reach a session, which gets none of the
server's variables. A `.env` that nobody named is read only if the user trusts it, like the `belljar.toml` beside it.
"""

import io
import os
from pathlib import Path

from belljar.errors import SettingsError
from belljar.settings.sources import ALIASES, PREFIX, read_config, read_if_trusted

ENV_FILE = ".env"


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
