"""`belljar key`: make a bearer key, and the hashed line with which a server accepts it without storing it."""

import json
import secrets
import sys
from typing import Annotated

import typer

from belljar.errors import InvalidArgument
from belljar.settings import hash_key, is_key_name, parse_key


def command(
    name: Annotated[str, typer.Argument(help="Whom the key stands for; keys of one name share their sessions.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the key and its hashed form as JSON.")] = False,
) -> None:
    """Make a bearer key for HTTP.

    Prints the key itself, shown only now, then its hashed line for belljar.toml.
    """
    if name and not is_key_name(name):
        raise InvalidArgument(
            f"{name!r} cannot name a key", hint="Use up to 64 letters, digits and . _ @ -, and not sha256"
        )
    key = f"bj_{secrets.token_urlsafe(32)}"
    name = name or parse_key(key).name
    entry = f"{name}:sha256:{hash_key(key)}"
    if as_json:
        print(json.dumps({"name": name, "key": key, "entry": entry}, indent=2))
        return
    _note("the key, shown only now, for the client:")
    print(key, flush=True)
    _note(f"for the server's belljar.toml (where api_keys is there already, add the entry; {name} is its name):")
    print(f"api_keys = {json.dumps([entry])}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
