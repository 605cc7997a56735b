"""What one execution says, on its way to whoever reads it: screened, numbered, kept in the journal, summed up.

Knows nothing of cells, kernels, or how an execution ends.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import JsonValue

from belljar.journal.journal import Journal
from belljar.models import OutputEvent
from belljar.outputs.displays import DisplayStore
from belljar.outputs.events import Event
from belljar.outputs.recorder import Recorder
from belljar.outputs.screens import Screens
from belljar.outputs.summary import Summary
from belljar.settings import Settings


def output_uri(execution_id: str) -> str:
    """Where the whole output of an execution is."""
    return f"execution://{execution_id}/output"


class Transcript:
    """One execution's. `on_change` is called whenever it has grown.

    `outlives_server`: the next server goes on with it, from what is in the journal.
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
        """The number of the latest event."""
        return self.recorder.sequence

    def latest_text(self) -> str:
        """The last words."""
        segments = self.summary.segments()
        return segments[-1][1] if segments else ""

    def continue_after(self, events: Iterable[OutputEvent]) -> None:
        """After what an earlier server has kept of it."""
        for event in events:
            self.recorder.continue_after(event)
            self.summary.add(event)

    def record(self, event: Event) -> None:
        """Keep what the cell said, within its bounds."""
        if (output := self.recorder.record(event)) is not None:
            self._keep(output)

    def notice(self, text: str, **data: JsonValue) -> None:
        """Say something of our own between the words of the cell."""
        self._keep(self.recorder.notice(text, **data))

    def flush(self) -> None:
        """Record what a screen held back of a stream that is over."""
        for event in self.screens.flush():
            self.record(event)

    def _keep(self, output: OutputEvent) -> None:
        self._journal.append(self._execution_id, output)
        if self._is_committed_at_once and output.kind not in ("result", "error"):
            # What a killed server has read and not committed is missing in the middle of a cell that goes on. Those two
            # are followed by the end, which is committed.
            self._journal.commit()
        self.summary.add(output)
        self._on_change()
