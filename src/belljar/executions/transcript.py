"""The output of one execution: screened, numbered, written to the journal, summarized.

Of figures and of long data: URIs that a cell showed, files are made in the session's folder; they hold what the result
shows, after the screens. Knows nothing of kernels, or how an execution ends.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from belljar.errors import BelljarError
from belljar.executions.file_changes import FileChanges, file_uri
from belljar.journal.journal import Journal
from belljar.models import OutputEvent
from belljar.outputs.displays import DisplayStore, read_display
from belljar.outputs.events import Event
from belljar.outputs.forms import extension_of
from belljar.outputs.recorder import Recorder, Screens
from belljar.outputs.summary import Summary
from belljar.settings import Settings

if TYPE_CHECKING:
    from belljar.executions.context import ExecutionContext

MAX_COMPARED = 16
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
