"""`belljar journal`: check the journal's file, and recover what can be read of a damaged one."""

import sqlite3
import sys
from pathlib import Path
from typing import Annotated

import typer

from belljar.errors import InvalidArgument
from belljar.journal.archive import open_archive
from belljar.journal.damage import SALVAGE_HINT, FileCheck
from belljar.journal.journal import open_journal
from belljar.journal.salvage import Salvaged, salvage
from belljar.journal.session_records import SessionRecords, session_folders
from belljar.servers import describe_server, other_servers
from belljar.settings import Settings, load_command_settings
from belljar.supervisor import has_supervisor

_DataDirectory = Annotated[Path | None, typer.Option(help="Data directory of the server.")]


def check_command(data_directory: _DataDirectory = None) -> None:
    """Read the whole journal and say whether it is in order; exits with 1 if it is damaged.

    Servers may be running. Changes nothing.
    """
    settings = load_command_settings({"data_directory": data_directory})
    path = _journal(settings)
    if damage := _damage(path):
        print(f"damaged: {path}: {damage}")
        print(f"hint: {SALVAGE_HINT}", file=sys.stderr)
        raise typer.Exit(1)
    with open_archive(settings.data_directory) as archive:
        unrecorded = archive.records.unrecorded(settings.data_directory / "sessions")
    print(f"ok: {path}: {path.stat().st_size:,} bytes; {len(unrecorded)} session folders without a record")


def salvage_command(
    owner: Annotated[
        str, typer.Option(help="Who gets the session folders that no record is left of, such as local or key:ada.")
    ] = "",
    data_directory: _DataDirectory = None,
) -> None:
    """Recover what can be read of a damaged journal into a new file, which takes its place.

    The damaged file is kept beside it. No server may use the data directory meanwhile.
    """
    settings = load_command_settings({"data_directory": data_directory})
    sessions, path = settings.data_directory / "sessions", settings.data_directory / "journal.sqlite"
    if not session_folders(sessions):  # otherwise a journal that was removed is made again
        _journal(settings)
    _check_unused(settings.data_directory)
    if path.exists() and (damage := _damage(path)):
        print(f"damaged: {damage}", file=sys.stderr)
        _report(path, salvage(path, settings.environment))
    else:
        print(f"{path} is in order: there is nothing to recover", file=sys.stderr)
    with open_journal(path) as journal:
        records = SessionRecords(journal, "")
        unrecorded = records.unrecorded(sessions)
        for folder in unrecorded if owner else ():
            records.adopt(folder, owner, settings.environment)
    if unrecorded and owner:
        print(f"{len(unrecorded)} session folders without a record are {owner}'s: any call with their id wakes them")
    elif unrecorded:
        print(f"{len(unrecorded)} session folders have no record: `belljar sessions --all` lists them", file=sys.stderr)
        print("hint: --owner NAME gives them to somebody, who can use them again", file=sys.stderr)


def _journal(settings: Settings) -> Path:
    path = settings.data_directory / "journal.sqlite"
    if not path.is_file():
        raise InvalidArgument(
            f"there is no journal at {path}", hint="Name the server's data directory with --data-directory"
        )
    return path


def _damage(path: Path) -> str:
    try:
        return FileCheck(path).run().damage
    except sqlite3.Error as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error


def _check_unused(data_directory: Path) -> None:
    """Refuse to replace a file that a server has open, because what it writes would go into the old one."""
    runs = data_directory / "runs"
    if others := [describe_server(runs, name) for name in (other_servers(runs, own="")[0] if runs.exists() else ())]:
        raise InvalidArgument(f"a server uses {data_directory}: {'; '.join(others)}", hint="Stop it first")
    if has_supervisor(data_directory):
        print("warning: sessions are kept alive for the next server; those without a record end", file=sys.stderr)


def _report(path: Path, salvaged: Salvaged) -> None:
    rows = salvaged.rows
    known, cells, events = (rows.get(table, 0) for table in ("sessions", "executions", "events"))
    print(f"recovered: {known} sessions, {cells} executions, {events} pieces of output")
    if salvaged.remade:
        print(f"{salvaged.remade} more sessions are known by their executions alone")
    print(f"not everything could be read of: {', '.join(salvaged.unreadable) or 'nothing'}")
    print(f"the damaged file is kept: {salvaged.kept}")
    print(f"the new journal is in its place: {path}", file=sys.stderr)
