"""What widgets say, on its way to one front end: in its place between the outputs of cells, and not without bound.

Outputs are read from the journal when the front end is ready for them. Words of widgets are not kept there, so they
wait here, and those that a front end is too slow for are lost to it.
"""

import json
from collections import deque
from collections.abc import Iterator

from belljar.attachments.messages import Said
from belljar.outputs.events import CommMessage, Event, Stream
from belljar.outputs.publishing import output_at_once

MOST_WAITING_BYTES = 64 * 1024 * 1024
_LOST = "[belljar: the front end is too slow for its widgets: some of what they said is lost]\n"


class Views:
    """One front end's."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, Said]]] = {}
        self._waiting_bytes = 0
        self._is_behind = False

    def taken(self, source_id: str, event: Event) -> Said | None:
        """An event as the news of it; None for what is none, or one too many."""
        if self._waiting_bytes > MOST_WAITING_BYTES:
            if self._is_behind:
                return None
            self._is_behind, event = True, Stream("stderr", _LOST)
        else:
            self._is_behind = False
        if (output := output_at_once(event)) is None:
            return None
        said = Said(execution_id=source_id, output=output[0], content=output[1])
        if isinstance(event, CommMessage):
            said = said.model_copy(update={"metadata": event.metadata, "buffers": [*event.buffers]})
        self._waiting_bytes += _size(said)
        return said

    def keep(self, said: Said, sequence: int) -> None:
        """It comes after so many events of its execution."""
        self._waiting.setdefault(said.execution_id, deque()).append((sequence, said))

    def due(self, execution_id: str, sequence: int) -> Iterator[Said]:
        """What was said before the execution's event of that number."""
        waiting = self._waiting.get(execution_id)
        while waiting and waiting[0][0] < sequence:
            _, said = waiting.popleft()
            self.forget(said)
            yield said
        if waiting is not None and not waiting:
            self._waiting.pop(execution_id, None)

    def forget(self, said: Said) -> None:
        """It was told."""
        self._waiting_bytes -= _size(said)


def _size(said: Said) -> int:
    return len(json.dumps(said.content)) + sum(map(len, said.buffers)) + len(json.dumps(said.metadata))
