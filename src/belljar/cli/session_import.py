"""`belljar sessions import`: have sessions of other data directories sleep in this one as well.

They come by the store. With a directory, what sleeps there is put into the store first, as its own server would have.
"""

import asyncio
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from belljar.errors import BelljarError, InvalidArgument, SettingsError
from belljar.files.private import make_folder, open_data_directory, way_mode
from belljar.journal.journal import open_journal
from belljar.journal.session_records import SessionRecords
from belljar.models import iso
from belljar.servers import run_folder
from belljar.sessions.stored import StoredSessions, open_stored
from belljar.sessions.takeover import recover
from belljar.settings import Settings


def import_sessions(settings: Settings, directory: Path | None, lost: str) -> None:
    """Bring every sleeping session of the store into the data directory, and tell of those that cannot be brought."""
    if not settings.store:
        raise SettingsError(
            "there is no store through which sessions could come",
            hint='Set store, to a folder for instance: store = "file:///srv/belljar-store", and store_key',
        )
    asyncio.run(_import(settings, directory, lost))


async def _import(settings: Settings, directory: Path | None, lost: str) -> None:
    if directory is not None:
        await _put_all(settings.model_copy(update={"data_directory": directory}))
    with _opened(settings) as stored:
        try:
            counts = await _bring_all(stored, lost)
        finally:
            await stored.aclose()
    print(f"{counts} sessions were brought; `belljar sessions --all` lists them")


async def _put_all(settings: Settings) -> None:
    """Put what sleeps in another data directory into the store."""
    folder = settings.data_directory
    if not (folder / "journal.sqlite").is_file():
        raise InvalidArgument(f"{folder} is no data directory of belljar: it has no journal")
    with _opened(settings, is_alone=True) as stored:
        try:
            is_done = await stored.put_all()
            left = sum(stored.waiting().values())
        finally:
            await stored.aclose()
    if not is_done or left:
        _note(f"warning: {left} sessions of {folder} could not be put into the store {stored.problem}".rstrip())


async def _bring_all(stored: StoredSessions, lost: str) -> int:
    brought = 0
    for session_id, standing in sorted((await stored.objects.all()).items()):
        try:
            if standing.is_asleep:
                brought += await stored.keep(session_id)
                continue
            owner = await stored.objects.owner(session_id, standing.owner)
            if owner.end or owner.directory == stored.directory:
                continue
            if standing.head and lost and lost in (owner.tag, owner.host):
                head = await stored.objects.head(session_id, standing.head)
                await stored.bring(session_id, head.principal, _without_room, after_loss=True)
                brought += 1
            else:
                _note(f"note: session {session_id} is open at {owner.host} ({owner.tag}) since {iso(owner.at)}")
        except BelljarError as error:
            _note(f"warning: session {session_id} is not brought: {error}")
    return brought


async def _without_room() -> None:
    """Make no room: what is brought sleeps on."""


@contextmanager
def _opened(settings: Settings, *, is_alone: bool = False) -> Generator[StoredSessions]:
    """Open what a data directory has of sessions in the store."""
    open_data_directory(settings.data_directory)
    sessions = settings.data_directory / "sessions"
    with (
        run_folder(settings.data_directory) as run,
        open_journal(settings.data_directory / "journal.sqlite") as journal,
    ):
        if is_alone and len(run.living) > 1:
            raise SettingsError(
                f"a server still runs on {settings.data_directory}", hint="Stop it: it puts its sessions itself"
            )
        make_folder(sessions, way_mode())
        if is_alone:
            records = SessionRecords(journal, run.folder.name)
            recover(journal, records, sessions, run.living, budget_chars=settings.output_budget_chars)
        yield open_stored(settings, sessions, journal, run.folder.name)


def _note(text: str) -> None:
    print(text, file=sys.stderr)
