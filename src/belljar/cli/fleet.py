"""`belljar fleet`: the machines that share their sessions, as the running server of this data directory knows them."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from belljar.cli.streams import table
from belljar.control import ask_fleet
from belljar.errors import EngineError, UsageError
from belljar.settings import load_command_settings

_TITLES = ("tag", "state", "sessions", "room", "memory", "version", "at", "why")
_SPARE = ("version", "memory", "room")
_Folder = Annotated[Path | None, typer.Option(help="Data directory of the servers.")]


def status_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with nothing left out.")] = False,
    data_directory: _Folder = None,
) -> None:
    """List the servers of the fleet and how they are, as the one of this data directory knows them.

    States: ready, draining (takes no new sessions, and with a store those that it has go there), drained (has none any
    more), away (does not answer; calls for it wait), lost (given up), left (has ended in order), refused (nothing is
    passed on to it; why says the reason), starting (never heard yet).
    """
    rows = _ask("GET", "/fleet/status", data_directory)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(table([_TITLES, *map(_row, rows)], spare=_SPARE))


def drain_command(
    tag: Annotated[str, typer.Argument(help="The three letters of the server, as `belljar fleet status` shows them.")],
    undo: Annotated[bool, typer.Option("--undo", help="Have it take sessions again.")] = False,
    data_directory: _Folder = None,
) -> None:
    """Empty a server, so that its machine can be taken away.

    It takes no new sessions. With a store, cells have drain_s to end, and its sessions go to sleep there: other servers
    wake them with the next call. Once it is drained, as `belljar fleet status` shows, it can be ended. Without a store
    its sessions stay until they end.
    """
    if not (len(tag) == 3 and tag.isascii() and tag.islower() and tag.isalpha()):
        raise UsageError(f"{tag!r} is no tag of a server", hint="`belljar fleet status` shows the tags: three letters")
    rows = _ask("GET", "/fleet/status", data_directory)
    if tag not in {row["tag"] for row in rows}:
        raise UsageError(f"no server of the fleet has the tag {tag}", hint="`belljar fleet status` shows the tags")
    answer = _ask("POST", f"/fleet/drain?tag={quote(tag)}{'&undo=1' if undo else ''}", data_directory)
    print(f"{tag} is {answer['state']}")


def _ask(method: str, target: str, data_directory: Path | None) -> Any:
    settings = load_command_settings({"data_directory": data_directory})
    answer = asyncio.run(ask_fleet(settings.data_directory, method, target))
    if answer is None:
        raise EngineError(
            f"no running server of {settings.data_directory} is one of a fleet, or the one that is meant is silent",
            hint="Run this where the server runs, with --data-directory if it has another one",
        )
    return answer


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    memory = f"{server['memory_mb']:,} MB" if server.get("memory_mb") else ""
    counts = (str(server.get("sessions", "")), str(server.get("room", "")))
    return (server["tag"], server["state"], *counts, memory, server.get("version", ""), server["at"], server["why"])
