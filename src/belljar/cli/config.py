"""`belljar config`: every setting, its value, and where the value came from."""

import json
import shlex
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from belljar import settings
from belljar.cli.streams import columns


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, descriptions included.")] = False,
) -> None:
    """Show every setting and where its value comes from, and which files are read."""
    in_force, read = settings.load_with_env_file()
    lines = settings.explain()
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        rows = [(line.name, json.dumps(line.value, ensure_ascii=False), line.origin) for line in lines]
        print(columns([("setting", "value", "from"), *rows]))
    unread = settings.unread_files(in_force)
    for path in settings.config_files():
        if path not in unread:
            print(f"{'read' if path.is_file() else 'not there'}: {path}", file=sys.stderr)
    if read:
        print(read, file=sys.stderr)
    for path in unread:
        print(f"not read, because it is not trusted: {path}; belljar trust {shlex.quote(str(path))}", file=sys.stderr)
    for name in settings.unknown_variables():
        print(f"warning: {name} is set and is no setting", file=sys.stderr)
