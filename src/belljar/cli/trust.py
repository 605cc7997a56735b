"""`belljar trust`: read the `belljar.toml` of a folder, or its `.env`, until the file changes."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from belljar.errors import InvalidArgument
from belljar.settings import CONFIG_FILE, Settings, trust
from belljar.settings.sources import ENV_FILE, parse_config, parse_env_file, read_config


def command(
    folder: Annotated[Path, typer.Argument(help="The folder whose belljar.toml is meant, or a .env.")] = Path(),
    remove: Annotated[bool, typer.Option("--remove", help="Trust it no longer.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print the files that are trusted.")] = False,
) -> None:
    """Obey the belljar.toml of a folder, or its .env, when belljar is started there.

    Read the file first: it can run commands on this machine. Without trust it is not read at all; after any change to
    it, it has to be trusted again.
    """
    if listing:
        print(json.dumps(trust.trusted_files(), indent=2))
    elif remove:
        _remove(folder)
    else:
        _add(folder)


def _file(named: Path) -> Path:
    """Return the file that is meant: a .env by its path, else the belljar.toml of a folder."""
    named = named.expanduser().absolute()
    return named if named.name == ENV_FILE or named.is_file() else named / CONFIG_FILE


def _add(folder: Path) -> None:
    file = _file(folder)
    if not file.exists():
        raise InvalidArgument(f"{file} is not there", hint="Name the folder that it is in")
    content = read_config(file, is_from_anybody=True)
    values = parse_config(Settings, file, content) if file.name == CONFIG_FILE else parse_env_file(file, content)
    names = ", ".join(values) or "nothing"
    trust.trust(file, content)
    print(f"trusted until it changes: {file}, which sets {names}", file=sys.stderr)


def _remove(folder: Path) -> None:
    file = _file(folder)
    was_trusted = trust.distrust(file)
    print(f"{'no longer trusted' if was_trusted else 'was not trusted'}: {file}", file=sys.stderr)
