"""What one execution leaves: its output, screened, numbered, written to the journal and summarized; changed files.

Of figures and of long data: URIs that a cell showed, files are made in the session's folder; they hold what the result
shows, after the screens. Changes of files are found by scans of the folder before and after the cell. Knows nothing of
kernels, or how an execution ends.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from belljar.errors import BelljarError
from belljar.executions.shared_workspace import SharedWorkspace
from belljar.files.disk_usage import DiskQuota, FolderUsage
from belljar.files.file_types import file_uri
from belljar.files.workspace import FolderScan, Workspace, changes, scan_folder
from belljar.journal.journal import Journal
from belljar.models import FileReference, OutputEvent
from belljar.outputs.displays import DisplayStore, read_display
from belljar.outputs.events import Event
from belljar.outputs.forms import extension_of
from belljar.outputs.recorder import Recorder, Screens
from belljar.outputs.summary import Summary
from belljar.settings import Settings

if TYPE_CHECKING:
    from belljar.executions.context import ExecutionContext

MAX_COMPARED = 16
SMALL_FOLDER = 100
LISTED_CHARS = 100_000
_OURS = re.compile(r"figure-\d{1,9}\.\w{1,16}")


def output_uri(execution_id: str) -> str:
    """Return the URI of the whole output of an execution."""
    return f"execution://{execution_id}/output"


class Transcript:
    """The transcript of one execution. `on_change` is called whenever it has grown.

    With `outlives_server` every event is committed at once, because the next server continues from the journal.
    """

    def __init__(
        self,
        execution_id: str,
        *,
        settings: Settings,
        outlives_server: bool,
        journal: Journal,
        displays: Path,
        screens: Screens,
        on_change: Callable[[], None],
    ) -> None:
        self.summary = Summary(budget_chars=settings.output_budget_chars, uri=output_uri(execution_id))
        self.recorder = Recorder(
            DisplayStore(displays, execution_id),
            cap_bytes=settings.output_cap_bytes,
            text_chars=settings.output_budget_chars,
        )
        self._execution_id = execution_id
        self._is_committed_at_once = outlives_server
        self._journal = journal
        self.screens = screens
        self._on_change = on_change

    @property
    def sequence(self) -> int:
        """Return the number of the latest event."""
        return self.recorder.sequence

    def latest_text(self) -> str:
        """Return the latest text of the output."""
        segments = self.summary.segments()
        return segments[-1][1] if segments else ""

    def continue_after(self, events: Iterable[OutputEvent]) -> None:
        """Continue after the events that an earlier server recorded."""
        for event in events:
            self.recorder.continue_after(event)
            self.summary.add(event)

    def record(self, event: Event) -> None:
        """Record an event of the cell, within the caps on output."""
        if (output := self.recorder.record(event)) is not None:
            self._append(output)

    def notice(self, text: str, **data: JsonValue) -> None:
        """Record a notice of belljar's own in the cell's output."""
        self._append(self.recorder.notice(text, **data))

    def flush(self) -> None:
        """Record the text that a screen held back, because the stream is over."""
        for event in self.screens.flush():
            self.record(event)

    def _append(self, output: OutputEvent) -> None:
        self._journal.append(self._execution_id, output)
        if self._is_committed_at_once and output.kind not in ("result", "error"):
            # What a killed server has read and not committed would be missing from the output of a cell that continues
            # under the next server. `result` and `error` are followed by the end of the cell, which is committed.
            self._journal.commit()
        self.summary.add(output)
        self._on_change()


# Changed files


class FileChanges:
    """The file changes of one cell."""

    def __init__(
        self, session_id: str, workspace: Workspace, quota: DiskQuota, sharing: SharedWorkspace | None
    ) -> None:
        self._session_id = session_id
        self._workspace = workspace
        self._quota = quota
        self._sharing = sharing
        self._before = self._after = FolderScan({}, is_complete=True, taken_ns=0)

    async def bring_in(self) -> list[str]:
        """Copy in what the owner's other sessions stored in `workspace/`; return notices for the output."""
        return [] if self._sharing is None else await self._sharing.bring_in(self._quota.room_bytes)

    async def scan_before(self) -> None:
        """Scan the folder before the cell."""
        self._before = await self._scan()

    async def scan_after(self) -> list[str]:
        """Scan the folder after the cell, and copy out what outlives the session; return notices for the output."""
        self._after = await self._scan()
        return [] if self._sharing is None else await self._sharing.take_out(self._after)

    async def scan_again(self) -> None:
        """Scan the folder once more, because belljar itself wrote files after the cell."""
        self._after = await self._scan()

    def pictures(self) -> int:
        """Return how many pictures the cell itself has created or changed."""
        return sum(change.mime_type.startswith("image/") for change in changes(self._before, self._after))

    def names_of_size(self, size: int) -> list[str]:
        """Return the paths of the files with this many bytes."""
        return [name for name, fingerprint in self._after.files.items() if fingerprint[1] == size]

    @property
    def seen(self) -> tuple[FolderUsage, bool]:
        """Return the usage that the scan after the cell found, and whether the scan was complete."""
        files = self._after.files.values()
        return FolderUsage(sum(fingerprint[1] for fingerprint in files), len(files)), self._after.is_complete

    def files(self) -> tuple[list[FileReference], int]:
        """Return the files that the cell created or changed, as many as fit into a message, and how many do not."""
        found = changes(self._before, self._after)
        listed: list[FileReference] = []
        left = LISTED_CHARS
        for change in found:
            file = FileReference(
                uri=file_uri(self._session_id, change.name),
                name=change.name,
                mime_type=change.mime_type,
                size=change.size,
                change=change.change,
            )
            left -= len(file.uri) + len(file.name) + 100
            if left < 0:
                break
            listed.append(file)
        return listed, len(found) - len(listed)

    async def _scan(self) -> FolderScan:
        """Scan the session folder: a small one here, which takes 50 µs, because a thread would cost four times that."""
        small = scan_folder(self._workspace, limit=SMALL_FOLDER)
        return small if small.is_complete else await asyncio.to_thread(scan_folder, self._workspace)


# Files that are made of what a cell showed


async def keep_uris(session: "ExecutionContext", transcript: Transcript) -> None:
    """Make files of the data: URIs that the result has no room for, and say which."""
    for uri in transcript.summary.uris_left_out():
        if (content := uri.content()) is not None:
            with suppress(BelljarError):  # without room for it there is still the whole output
                name = await session.add_file("data", extension_of(uri.mime), content)
                transcript.notice(
                    f"the data: URI of {uri.chars:,} characters that was printed is the file {name}: "
                    f"{file_uri(session.id, name)}"
                )


async def keep_figures(session: "ExecutionContext", transcript: Transcript, changes: FileChanges) -> None:
    """Make files of the figures that the cell showed, unless its code has saved as many pictures itself.

    A shown figure and a saved one differ in their margins, so their bytes do not tell which figure was saved.
    """
    summary = transcript.summary
    figures = {shown.uri: shown.mime for shown in summary.displays if shown.uri and shown.mime.startswith("image/")}
    if not figures or changes.pictures() >= len(figures):
        return
    with suppress(BelljarError):  # without room for them there are still the displays
        for uri, mime in figures.items():
            content = await asyncio.to_thread(read_display, session.displays, uri)
            if content is not None and not await asyncio.to_thread(_is_in, session, changes, content):
                name = await session.add_file("figure", extension_of(mime), content)
                summary.note_file(uri, file_uri(session.id, name))
    await changes.scan_again()


def _is_in(session: "ExecutionContext", changes: FileChanges, content: bytes) -> bool:
    """Return whether a file that code made has this content, as where a cell shows a picture from the folder."""
    for name in changes.names_of_size(len(content))[:MAX_COMPARED]:
        with suppress(BelljarError):
            if not _OURS.fullmatch(name) and session.workspace.read(name, len(content)) == content:
                return True
    return False
