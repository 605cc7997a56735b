"""What widgets say, on its way to one front end: in its place between the outputs of cells, and not without bound.

Outputs are read from the journal when the front end is ready for them. Words of widgets are not kept there, so they
wait here, and those that a front end is too slow for are lost to it.
"""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from belljar.attachments.messages import Said
from belljar.outputs.events import CommMessage, Event, Stream
from belljar.outputs.publishing import OutputKind, output_at_once

MOST_WAITING_BYTES = 64 * 1024 * 1024
# What the shortest word takes in memory while it waits.
WORD_BYTES = 1_000
_LOST = "[belljar: the front end is too slow for its widgets: some of what they said is lost]\n"


@dataclass(frozen=True, slots=True)
class Word:
    """Something said that waits: as text, of which nested data takes many times as much."""

    source_id: str
    output: OutputKind
    content: str
    metadata: str = "{}"
    buffers: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        return WORD_BYTES + len(self.content) + len(self.metadata) + sum(map(len, self.buffers))


class Views:
    """One front end's."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, Word]]] = {}
        self._waiting_bytes = 0
        self._is_behind = False

    def taken(self, source_id: str, event: Event) -> Word | None:
        """An event that is to be told; None for what is not, or one too many."""
        if self._waiting_bytes > MOST_WAITING_BYTES:
            if self._is_behind:
                return None
            self._is_behind, event = True, Stream("stderr", _LOST)
        else:
            self._is_behind = False
        if (output := output_at_once(event)) is None:
            return None
        word = Word(source_id, output[0], json.dumps(output[1]))
        if isinstance(event, CommMessage):
            word = Word(source_id, output[0], word.content, json.dumps(event.metadata), event.buffers)
        self._waiting_bytes += word.size_bytes
        return word

    def keep(self, word: Word, sequence: int) -> None:
        """It comes after so many events of its execution."""
        self._waiting.setdefault(word.source_id, deque()).append((sequence, word))

    def due(self, execution_id: str, sequence: int) -> Iterator[Said]:
        """What was said before the execution's event of that number."""
        waiting = self._waiting.get(execution_id)
        while waiting and waiting[0][0] < sequence:
            yield self.told(waiting.popleft()[1])
        if waiting is not None and not waiting:
            self._waiting.pop(execution_id, None)

    def told(self, word: Word) -> Said:
        """The news of it, which waits no longer."""
        self._waiting_bytes -= word.size_bytes
        return Said(
            execution_id=word.source_id,
            output=word.output,
            content=json.loads(word.content),
            metadata=json.loads(word.metadata),
            buffers=[*word.buffers],
        )
