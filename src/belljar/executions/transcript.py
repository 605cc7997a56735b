"""The output of one execution: screened, numbered, written to the journal, summarized.

Knows nothing of cells, kernels, or how an execution ends.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import JsonValue

from belljar.journal.journal import Journal
from belljar.models import OutputEvent
from belljar.outputs.displays import DisplayStore
from belljar.outputs.events import Event
from belljar.outputs.recorder import Recorder, Screens
from belljar.outputs.summary import Summary
from belljar.settings import Settings


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
