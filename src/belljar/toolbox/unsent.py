"""Answers that a session has asked for and not read yet: they wait in memory, in bounded number, size and time.

A process of the session that does not read its answers is hung up on, because they take the server's memory. Its
pending calls end with an error, and it connects again for the next one.
"""

import asyncio
import logging
from typing import Final

from belljar.toolbox.base import JsonObject
from belljar.toolbox.encoding import encoded

MOST_BYTES: Final = 8 * 1024 * 1024
"""Of one session, over all its connections: two of the largest answers (`tool_result_bytes`) by default."""
BACKLOG_S: Final = 10.0
"""For which more than that may wait: many large answers may come at once, and code that reads needs time for them."""
ANSWER_S: Final = 60.0
"""For which any one answer may wait: a cell may compute for a while before it reads."""
_PIECE_BYTES: Final = 262_144
"""More is not given to a transport at once: what it cannot send it keeps."""
_MOST_SAID_BYTES: Final = 4 * _PIECE_BYTES

log = logging.getLogger(__name__)


class Unsent:
    """One session's, over all its connections."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._behind: set[Outgoing] = set()
        """The connections that have answers waiting."""
        self._hanging_up: asyncio.TimerHandle | None = None
        self.waiting = 0
        """Answers that wait."""
        self.size_bytes = 0
        """Of them."""

    @property
    def is_full(self) -> bool:
        """Whether more waits than may wait for long; no request of the session begins meanwhile."""
        return self.size_bytes > MOST_BYTES

    def add(self, outgoing: "Outgoing", size_bytes: int) -> None:
        """Count an answer that has to wait."""
        self.waiting += 1
        self.size_bytes += size_bytes
        outgoing.waiting_bytes += size_bytes
        self._behind.add(outgoing)
        self._watch()

    def remove(self, outgoing: "Outgoing", size_bytes: int) -> None:
        """Count an answer no longer: it was sent, or never will be."""
        self.waiting -= 1
        self.size_bytes -= size_bytes
        outgoing.waiting_bytes -= size_bytes
        if not outgoing.waiting_bytes:
            self._behind.discard(outgoing)
        self._watch()

    def _watch(self) -> None:
        if self.is_full and self._hanging_up is None:
            self._hanging_up = asyncio.get_running_loop().call_later(BACKLOG_S, self._hang_up)
        elif not self.is_full and self._hanging_up is not None:
            self._hanging_up.cancel()
            self._hanging_up = None

    def _hang_up(self) -> None:
        """Close the connection that is furthest behind; if that is not enough, the next follows `BACKLOG_S` later."""
        self._hanging_up = None
        furthest = max(self._behind, key=lambda outgoing: outgoing.waiting_bytes)
        log.warning(
            "session %s leaves %d bytes of tools' answers unread: a connection of it is closed",
            self._session_id,
            furthest.waiting_bytes,
        )
        furthest.hang_up()


class Outgoing:
    """Lines to one process, one after the other."""

    def __init__(self, unsent: Unsent, transport: asyncio.Transport) -> None:
        self._unsent = unsent
        self._transport = transport
        self._turn = asyncio.Lock()
        self._is_read = asyncio.Event()
        self._is_read.set()
        self.waiting_bytes = 0
        """Of the answers that wait for this process."""

    def pause(self) -> None:
        """It does not read."""
        self._is_read.clear()

    def resume(self) -> None:
        """It reads again."""
        self._is_read.set()

    close = resume

    def hang_up(self) -> None:
        """Close the connection, and drop what was not sent."""
        self._transport.abort()

    def say(self, message: JsonObject) -> None:
        """A few words that nobody waits for."""
        self._transport.write(encoded(message) + b"\n")
        if self._transport.get_write_buffer_size() > _MOST_SAID_BYTES:
            self.hang_up()

    async def send(self, line: bytes) -> None:
        """Returns when it was read, as far as can be told, or when nobody will."""
        if len(line) <= _PIECE_BYTES and not self._turn.locked() and self._is_read.is_set():
            self._transport.write(line)
            if self._is_read.is_set():
                return  # it went out whole, and nobody has to wait
            line = b""
        self._unsent.add(self, len(line))
        try:
            async with asyncio.timeout(ANSWER_S), self._turn:
                await self._is_read.wait()
                for start in range(0, len(line), _PIECE_BYTES):
                    self._transport.write(memoryview(line)[start : start + _PIECE_BYTES])
                    await self._is_read.wait()
        except TimeoutError:
            self.hang_up()
        finally:
            self._unsent.remove(self, len(line))
