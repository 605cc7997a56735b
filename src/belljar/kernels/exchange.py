"""Requests to a runner, numbered, and the answers to them. Between cells nothing else is read from it.

Knows nothing of processes, nor of what the requests are about.
"""

import secrets
from collections.abc import Mapping
from typing import TypeVar

from belljar.kernels.frames import Wire
from belljar.kernels.messages import Message
from belljar.kernels.protocol import Protocol
from belljar.outputs.events import Stream

Answer = TypeVar("Answer", bound=Message)

MOST_EARLY_BYTES = 4_000_000
# What the shortest piece takes in memory.
PIECE_BYTES = 100
_MOST_NUMBERS = 2**53 - 1


class Exchange:
    """One kernel's, over its wire."""

    def __init__(self, wire: Wire) -> None:
        self.last_id = 0
        """The number of the latest request."""
        self.protocol = Protocol()
        self._wire = wire
        self._early: list[Stream] = []
        self._early_bytes = 0

    def number(self) -> int:
        """For a request that is about to be made. Random: code of an earlier cell cannot leave an answer to it."""
        self.last_id = 1 + secrets.randbelow(_MOST_NUMBERS)
        return self.last_id

    async def send(self, request: Mapping[str, object], answer: type[Message]) -> None:
        """Make a request, to which there is an answer of this kind."""
        request_id = self.number()
        self.protocol.begin_question(request_id, answer)
        await self._wire.send({**request, "id": request_id})

    async def answer(self, kind: type[Answer], *, keeps_output: bool = True) -> Answer:
        """The answer to the last request; output that comes meanwhile is the next cell's, or nobody's."""
        while True:
            for item in await self._wire.receive():
                if isinstance(item, Stream):
                    if keeps_output:
                        self.keep(item)
                    continue
                self.protocol.check(item)
                if isinstance(item, kind) and item.id == self.last_id:
                    return item

    # Output that came too early

    def keep(self, stream: Stream) -> None:
        """It waits for the next cell; of a flood only the beginning does."""
        if self._early_bytes < MOST_EARLY_BYTES:
            self._early.append(stream)
            self._early_bytes += len(stream.text) + PIECE_BYTES

    def take_early(self) -> list[Stream]:
        """What waited for the cell that begins now."""
        early, self._early, self._early_bytes = self._early, [], 0
        return early
