"""What a session has asked for and does not fetch: some of it waits in memory, the rest on disk.

A process of the session's that does not read is waited for, but not for ever.
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Iterator
from typing import IO, Final

from belljar.toolbox.base import JsonObject
from belljar.toolbox.encoding import encoded

MOST_BYTES: Final = 8 * 1024 * 1024
"""Of one session, in memory."""
_PIECE_BYTES: Final = 262_144
"""More is not given to a transport at once: what it cannot send it keeps."""
_WRITE_S: Final = 60

log = logging.getLogger(__name__)


class Unsent:
    """One session's, over all its connections."""

    def __init__(self) -> None:
        self.waiting = 0
        """Answers that wait."""
        self.size_bytes = 0
        """Of them, in memory."""

    def of(self, transport: asyncio.Transport) -> "Outgoing":
        """That of one connection."""
        return Outgoing(self, transport)

    async def keep(self, line: bytes) -> "_Kept":
        """Until it can be sent. Raises OSError where the disk has no room for it."""
        file = None
        if self.size_bytes + len(line) > MOST_BYTES:
            file, line = await asyncio.to_thread(_on_disk, line), b""
        self.waiting += 1
        self.size_bytes += len(line)
        return _Kept(self, line, file)


class _Kept:
    def __init__(self, unsent: Unsent, line: bytes, file: IO[bytes] | None) -> None:
        self._unsent = unsent
        self._line = line
        self._file = file

    def pieces(self) -> Iterator[bytes | memoryview]:
        if self._file is None:
            line = memoryview(self._line)
            yield from (line[start : start + _PIECE_BYTES] for start in range(0, len(line), _PIECE_BYTES))
            return
        while piece := self._file.read(_PIECE_BYTES):
            yield piece

    def drop(self) -> None:
        self._unsent.waiting -= 1
        self._unsent.size_bytes -= len(self._line)
        self._line = b""
        if self._file is not None:
            self._file.close()


def _on_disk(line: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by who keeps it)
    try:
        file.write(line)
        file.seek(0)
    except OSError:
        with contextlib.suppress(OSError):  # what it still holds cannot be written either
            file.close()
        raise
    return file


class Outgoing:
    """Lines to one process, one after the other."""

    def __init__(self, unsent: Unsent, transport: asyncio.Transport) -> None:
        self._unsent = unsent
        self._transport = transport
        self._turn = asyncio.Lock()
        self._is_read = asyncio.Event()
        self._is_read.set()

    def pause(self) -> None:
        """It does not read."""
        self._is_read.clear()

    def resume(self) -> None:
        """It reads again."""
        self._is_read.set()

    close = resume

    def say(self, message: JsonObject) -> None:
        """A few words that nobody waits for."""
        self._transport.write(encoded(message) + b"\n")

    async def send(self, line: bytes) -> None:
        """Returns when it was read, as far as can be told, or when nobody will."""
        if len(line) <= _PIECE_BYTES and not self._turn.locked() and self._is_read.is_set():
            self._transport.write(line)
            if self._is_read.is_set():
                return  # it went out whole, and nobody has to wait
            line = b""
        try:
            kept = await self._unsent.keep(line)
        except OSError as error:
            log.warning("an answer to a session is lost: %s", error.strerror)
            self._transport.abort()  # or whoever asked would wait for it for ever
            return
        del line
        try:
            async with asyncio.timeout(_WRITE_S), self._turn:
                await self._is_read.wait()
                for piece in kept.pieces():
                    self._transport.write(piece)
                    await self._is_read.wait()
        except TimeoutError:
            self._transport.abort()
        finally:
            kept.drop()
