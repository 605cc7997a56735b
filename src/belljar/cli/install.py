"""`belljar install`: tells an MCP client how to start belljar, by showing the JSON or by writing it."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from belljar.cli.clients import CLIENTS, Client, ClientName, ServerEntry, server_entry
from belljar.errors import UsageError


def command(
    client_name: Annotated[ClientName, typer.Argument(metavar="CLIENT", help="The client to set up.")],
    serve_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENT", help="Passed on to `belljar serve`.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write it into the client's file.")] = False,
    name: Annotated[str, typer.Option(help="What the client calls the server.")] = "belljar",
    path: Annotated[Path | None, typer.Option(help="The client's file, where it is not the usual one.")] = None,
) -> None:
    """Tell an MCP client how to start belljar.

    Prints the JSON for the client's configuration file; with --write, puts it there and keeps what else is in the file.
    """
    client = CLIENTS[client_name]
    target = (path or client.path()).expanduser().absolute()
    entry = server_entry(client, serve_arguments or [])
    if write:
        _write(client, target, name, entry)
        return
    _print_snippet(client, name, entry)
    _note(f"This belongs into {target}; --write puts it there.")


def _write(client: Client, target: Path, name: str, entry: ServerEntry) -> None:
    from belljar.cli.client_files import add_server

    try:
        change = add_server(target, client.key, name, entry)
    except UsageError as refusal:
        _print_snippet(client, name, entry)
        raise UsageError(
            f"{refusal.message}; it was not touched",
            hint="Add the JSON above by hand, or choose another --name or --path",
        ) from refusal
    _note(f"{client.title}: {target} starts {name} now." + (f" Backup: {change}" if change else ""))
    _note(f"{client.then}.")


def _print_snippet(client: Client, name: str, entry: ServerEntry) -> None:
    print(json.dumps({client.key: {name: entry}}, indent=2, ensure_ascii=False), flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
