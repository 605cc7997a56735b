"""The `.env` of the working directory: `NAME=value` lines that every command of belljar takes as variables of its own.

A variable that is set already stays as it is. Values are never logged and never reach a session, which gets none of the
server's variables. A `.env` that nobody named is read only if the user trusts it, because its variables can do whatever
settings can, and a folder may come from anybody.
"""

import io
import os
import shlex
from pathlib import Path

from belljar.errors import SettingsError
from belljar.settings.sources import ALIASES, PREFIX, read_config
from belljar.settings.trust import is_trusted

ENV_FILE = ".env"


def apply_env_file(path: str, *, is_named: bool) -> tuple[str, str]:
    """Set the variables of a file that are not set yet; `is_named` if the user named the file.

    Returns what was read, and a warning where the file is not obeyed. A named one that is not there is an error.
    """
    if not path:
        return "", ""
    file = Path(path).expanduser().absolute()
    if not file.exists():
        if is_named:
            raise SettingsError(f"env_file {file} is not there", hint="Make it, or name another one")
        return "", ""
    content = read_config(file)
    if not is_named and not is_trusted(file, content):
        # Many projects have a `.env` that is none of belljar's business.
        is_ours = any(name.encode() in content for name in (PREFIX, *ALIASES.values()))
        how = f"belljar trust {shlex.quote(str(file))}"
        return "", f"{file} is not read, because it is not trusted. If you have read it: {how}" if is_ours else ""
    values = parse_env_file(file, content)
    new = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in new})
    kept = ", ".join(name for name in values if name not in new)
    return f"read {file}: {', '.join(new) or 'nothing new'}{f'; set already: {kept}' if kept else ''}", ""


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
