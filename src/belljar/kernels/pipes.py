"""The pipes that a runner's streams come through, read without waiting for them. They hold what the session wrote."""

import asyncio
import codecs
import contextlib
import fcntl
import os
from typing import Literal

from belljar.outputs.events import Stream

PIPE_BYTES = 1024 * 1024


class Pipe:
    """One of the streams; the reader never waits, so a slow reader slows the cell and loses nothing."""

    def __init__(self, name: Literal["stdout", "stderr"], kept: int = -1) -> None:
        self.name: Literal["stdout", "stderr"] = name
        self.read_end, self.write_end = (kept, -1) if kept >= 0 else os.pipe()
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(OSError, AttributeError):  # past the user's pipe quota it stays at 64 kB
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_ended = False

    def read(self) -> Stream | None:
        """All it holds now, up to its capacity: a writer that never stops cannot keep us here."""
        if self.is_ended:
            return None
        try:
            chunk = os.read(self.read_end, PIPE_BYTES)
        except BlockingIOError:
            return None
        self.is_ended = not chunk
        text = self._decoder.decode(chunk, final=not chunk)
        return Stream(self.name, text) if text else None

    def close_write_end(self) -> None:
        """Once the runner has it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close_read_end(self) -> None:
        """At the end."""
        self.is_ended = True
        if self.read_end >= 0:
            with contextlib.suppress(RuntimeError):  # outside a loop nobody listens
                asyncio.get_running_loop().remove_reader(self.read_end)
            os.close(self.read_end)
            self.read_end = -1
