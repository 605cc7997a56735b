"""`belljar sessions`: the sessions of every server that uses this data directory."""

import asyncio
import json
import sys
from typing import Annotated

import typer

from belljar.cli.streams import columns
from belljar.control import ask_sessions
from belljar.models import SessionInfo
from belljar.settings import load_settings

_TITLES = (
    "session",
    "state",
    "environment",
    "sandbox",
    "memory",
    "cells",
    "files",
    "checkpoints",
    "age",
    "expires",
    "owner",
    "server",
    "last",
)
_CAUSE_CHARACTERS = 60


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the sessions of all running servers of this data directory."""
    folder = load_settings().data_directory
    found, silent = asyncio.run(ask_sessions(folder))
    for pid in silent:
        print(f"warning: the server with pid {pid} did not answer", file=sys.stderr)
    if as_json:
        lines = [{"server": pid, "owner": owner, **info.model_dump(mode="json")} for pid, owner, info in found]
        print(json.dumps(lines, indent=2))
    elif found:
        print(columns([_TITLES, *(_row(pid, owner, info) for pid, owner, info in found)]))
    else:
        print(f"no sessions: no running server uses {folder}, or none has any", file=sys.stderr)


def _row(pid: int, owner: str, info: SessionInfo) -> tuple[str, ...]:
    return (
        info.session_id,
        info.state,
        info.environment,
        info.sandbox,
        f"{info.memory_mb:.0f} MB",
        str(info.executions),
        str(info.files),
        str(info.checkpoints),
        duration(info.age_s),
        info.expires_at,
        owner,
        str(pid),
        _last(info),
    )


def _last(info: SessionInfo) -> str:
    """Return why the session last failed, or else how its last cell ended."""
    text = info.last_cause or info.last_status or "-"
    return text if len(text) <= _CAUSE_CHARACTERS else f"{text[: _CAUSE_CHARACTERS - 1]}…"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
