"""`belljar sessions`: the sessions of every server that uses this data directory, and those that sleep in it."""

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never

import typer

from belljar.cli.streams import draw_screen, table
from belljar.control import ask_sessions
from belljar.models import SessionInfo
from belljar.settings import Settings, load_command_settings
from belljar.toolbox.server_text import shortened

if TYPE_CHECKING:
    from belljar.journal.session_records import SessionRecord

_TITLES = (
    "session",
    "state",
    "environment",
    "sandbox",
    "memory",
    "gpu",
    "cells",
    "files",
    "checkpoints",
    "age",
    "expires",
    "owner",
    "server",
    "last",
)
# What a narrow terminal is spared, the least needed first.
_SPARE = ("expires", "sandbox", "checkpoints", "server", "owner", "gpu", "environment", "files", "age")
_CAUSE_CHARACTERS = 60
_ABANDONED = "its server was killed; the next one recovers it"
_ID_CHARACTERS = 12
_WATCH_S = 1.0


def command(
    action: Annotated[
        Literal["import"] | None,
        typer.Argument(help="import: have what sleeps in the store, or in a directory, sleep here as well."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Argument(help="For import: a data directory that no server uses any more; what sleeps there comes too."),
    ] = None,
    lost: Annotated[
        str,
        typer.Option(help="For import: a machine that will not come back, by name or tag; what it had awake comes."),
    ] = "",
    has_asleep: Annotated[
        bool, typer.Option("--all", help="Also those that sleep on disk, which any call wakes, and folders of others.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON, with nothing left out or shortened; with --watch, a line a look."),
    ] = False,
    is_watching: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second; Ctrl-C ends.")] = False,
    data_directory: Annotated[Path | None, typer.Option(help="Data directory of the servers.")] = None,
) -> None:
    """List the sessions of all running servers of this data directory, once or, with --watch, every second.

    With --all also those that sleep on disk, and folders that the journal has no record of. On a terminal the table
    fits it: ids are cut to what other commands need, and columns that do not fit are left out. In a pipe or a file it
    is whole.

    With import, every session that sleeps in the store sleeps in this data directory as well: in lists, and on disk.
    """
    settings = load_command_settings({"data_directory": data_directory})
    if action == "import":
        # Imported here, because few have a store.
        from belljar.cli.session_import import import_sessions

        import_sessions(settings, directory and directory.expanduser().absolute(), lost)
        return
    if is_watching:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(settings, has_asleep=has_asleep, as_json=as_json)
        return
    look = _look(settings, has_asleep=has_asleep)
    _print_notes(look.notes)
    if as_json:
        print(json.dumps(look.as_json(), indent=2))
    elif look.rows:
        print(look.table())


@dataclass(frozen=True, slots=True)
class _Look:
    """The sessions at one moment, and what to say beside them."""

    rows: list[tuple[int | None, str, SessionInfo]]
    """Server (None for one that is only on disk), owner and session."""
    notes: list[str]

    def as_json(self) -> list[dict[str, Any]]:
        return [{"server": pid, "owner": owner, **info.model_dump(mode="json")} for pid, owner, info in self.rows]

    def table(self) -> str:
        """Return the table; empty when there is no session."""
        rows = [_row(pid, owner, info) for pid, owner, info in self.rows]
        return table([_TITLES, *rows], spare=_SPARE) if rows else ""


def _look(settings: Settings, *, has_asleep: bool) -> _Look:
    folder = settings.data_directory
    found, silent = asyncio.run(ask_sessions(folder))
    rows: list[tuple[int | None, str, SessionInfo]] = [*found]
    notes = [f"warning: the server with pid {pid} did not answer" for pid in silent]
    if silent:
        notes.append("hint: a server of an earlier version of belljar has to be started again to be asked")
    if has_asleep:
        live = {info.session_id for _, _, info in found}
        # A server that does not answer may have the sessions that are on disk as live ones.
        on_disk = _on_disk(settings, has_abandoned=not silent)
        rows += [(None, owner, info) for owner, info in on_disk if info.session_id not in live]
        notes += _on_unrecorded(folder, sum(not owner for owner, _ in on_disk))
    if not rows and has_asleep:
        notes.append(f"no sessions in {folder}, awake or asleep")
    elif not rows:
        notes.append(f"no sessions: no running server uses {folder}, or none has any")
        notes.append("hint: --all also lists those that sleep on disk")
    return _Look(rows, notes)


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def _watch(settings: Settings, *, has_asleep: bool, as_json: bool) -> Never:
    """Look every second: on a terminal the table stays in its place, elsewhere one follows the other."""
    notes: list[str] = []
    while True:
        look = _look(settings, has_asleep=has_asleep)
        if sys.stdout.isatty() and not as_json:
            draw_screen(sys.stdout, [*look.table().splitlines(), *look.notes])
        else:
            if look.notes != notes:
                _print_notes(look.notes)
            notes = look.notes
            if as_json:
                print(json.dumps(look.as_json()), flush=True)
            elif look.rows:
                print(f"{look.table()}\n", flush=True)
        time.sleep(_WATCH_S)


def live_sessions(incomplete: str) -> list[tuple[str, str]]:
    """Return the live sessions whose id begins so, and what each is, for the completion of a shell."""
    found, _ = asyncio.run(ask_sessions(load_command_settings().data_directory))
    shown = [(info.session_id, f"{info.state}, {info.executions} cells {info.reason}") for _, _, info in found]
    return [(session_id, text) for session_id, text in shown if session_id.startswith(incomplete)]


def _on_disk(settings: Settings, *, has_abandoned: bool) -> list[tuple[str, SessionInfo]]:
    """Return the sessions that are only on disk, with their owners, from the journal.

    `has_abandoned`: those of servers that were killed, too; of a server that runs, the caller knows better.
    """
    # The journal's modules are imported here, because the sessions of running servers need none of them.
    from belljar.journal.archive import open_archive
    from belljar.journal.session_records import session_folders, sleeping_info, unrecorded_session

    unrecorded = session_folders(settings.data_directory / "sessions")
    entries: list[SessionRecord] = []
    if (settings.data_directory / "journal.sqlite").exists():
        with open_archive(settings.data_directory) as archive:
            entries = archive.records.all_asleep()
            if has_abandoned:
                abandoned = [entry for entry in archive.records.abandoned(()) if entry.state == "live"]
                entries += [replace(entry, end=_ABANDONED) for entry in abandoned]
            unrecorded = archive.records.unrecorded(settings.data_directory / "sessions")
    entries += map(unrecorded_session, unrecorded)
    sandbox, keep_days = settings.sandbox, settings.keep_days
    return [(entry.principal, sleeping_info(entry, sandbox=sandbox, keep_days=keep_days)) for entry in entries]


def _on_unrecorded(folder: Path, count: int) -> list[str]:
    """Return where the files of sessions without a record are."""
    if not count:
        return []
    some = "1 folder" if count == 1 else f"{count} folders"
    return [
        f"the journal has no record of {some}: files are in {folder}/sessions/ID/workspace",
        "hint: `belljar journal salvage --owner NAME` lets somebody use them again",
    ]


def _row(pid: int | None, owner: str, info: SessionInfo) -> tuple[str, ...]:
    return (
        info.session_id[:_ID_CHARACTERS] if sys.stdout.isatty() else info.session_id,
        info.state,
        info.environment,
        info.sandbox,
        f"{info.memory_mb:.0f} MB",
        f"{info.gpu_memory_mb:.0f} MB" if info.gpus else "-",
        str(info.executions),
        "-" if info.files is None else str(info.files),
        str(info.checkpoints),
        duration(info.age_s),
        info.expires_at,
        owner,
        "-" if pid is None else str(pid),
        _last(info),
    )


def _last(info: SessionInfo) -> str:
    """Return why the session last failed, or else how its last cell ended."""
    return shortened(info.last_cause or info.last_status or "-", _CAUSE_CHARACTERS)


def duration(seconds: float) -> str:
    """Return a time span in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
