"""Writes the file of `stateparts`, within a limit, so that a part of the variables is whole whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

from .stateparts import BUFFER, CHUNK_BYTES, END, FORMAT, HEADER, MAGIC, PART, STREAM, Checksum

# Smaller buffers travel in the stream: a part costs more than a copy.
OUT_OF_BAND_BYTES = 64 * 1024
GATHERED_BYTES = 256 * 1024
_MODE = 0o600


class TooLarge(Exception):
    """One variable alone is over the limit: nothing else could be kept beside it."""


class CannotWrite(Exception):
    """The disk is full, or the folder does not take the file."""


class StateWriter:
    """Writes under a temporary name until `commit`. A pickler's file, and the taker of its buffers.

    Past the limit it only counts, so that the sizes of all variables are known when it is chosen which to drop.
    """

    def __init__(self, path: str, limit_bytes: int | None) -> None:
        self._path = path
        self._partial = Path(f"{path}.part")
        self._limit = limit_bytes
        self._gathered = bytearray()
        self._start = self._border = self.size_bytes = 0
        self._whole_bytes = self.whole_count = 0
        self._partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._partial, flags, _MODE)

    @property
    def is_over(self) -> bool:
        """Whether more was given than may be kept."""
        return self._limit is not None and self.size_bytes > self._limit

    def restart(self, header: dict[str, Any]) -> None:
        """Begin the file, again if need be."""
        limit, self._limit = self._limit, None
        self._gathered.clear()
        self._put(0, memoryview(MAGIC))
        self.size_bytes = len(MAGIC)
        self._part(HEADER, memoryview(json.dumps({**header, "format": FORMAT}).encode()))
        self._start = self._border = self._whole_bytes = self.size_bytes
        self.whole_count = 0
        self._limit = limit

    def write(self, data: Any) -> int:
        """A piece of the pickle stream."""
        view = memoryview(data).cast("B")
        if len(self._gathered) + view.nbytes > GATHERED_BYTES:
            self._flush()
        if view.nbytes > GATHERED_BYTES:
            for start in range(0, view.nbytes, CHUNK_BYTES):
                self._part(STREAM, view[start : start + CHUNK_BYTES])
        else:
            self._gathered += view
        return view.nbytes

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """True has the pickler put the buffer into the stream."""
        with buffer.raw() as view:
            if view.nbytes < OUT_OF_BAND_BYTES:
                return True
            self._part(BUFFER, view)
        return False

    def end_variable(self) -> int:
        """What came since the last one is whole; its size is returned."""
        self._flush()
        size, self._border = self.size_bytes - self._border, self.size_bytes
        if not self.is_over:
            self._whole_bytes = self._border
            self.whole_count += 1
        return size

    def commit(self) -> int:
        """The file takes its name, with the `whole_count` variables that are whole. Its size is returned."""
        self._gathered.clear()
        self._limit, self.size_bytes = None, self._whole_bytes
        self._part(END, memoryview(json.dumps({"count": self.whole_count}).encode()))
        os.ftruncate(self._descriptor, self.size_bytes)
        self._partial.replace(self._path)
        return self.size_bytes

    def close(self) -> None:
        """Nothing stays behind of a file that was not committed."""
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._part(STREAM, memoryview(gathered))

    def _part(self, kind: bytes, content: memoryview) -> None:
        at = self.size_bytes
        self.size_bytes += PART.size + content.nbytes
        if self._limit is not None and self.size_bytes - self._border > self._limit - self._start:
            raise TooLarge(f"over the limit of {self._limit:,} bytes on its own")
        if self.is_over:
            return
        with Checksum(content.nbytes) as checksum:
            for start in range(0, content.nbytes, CHUNK_BYTES):
                chunk = content[start : start + CHUNK_BYTES]
                checksum.add(chunk)
                self._put(at + PART.size + start, chunk)
        self._put(at, memoryview(PART.pack(kind, content.nbytes, checksum.value)))

    def _put(self, offset: int, data: memoryview) -> None:
        try:
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise CannotWrite(f"the file could not be written: {error.strerror}") from None


class CountingSink:
    """Takes what a pickler gives and keeps nothing: for finding out whether something can be pickled."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._size = 0

    def restart(self) -> None:
        """For the next variable."""
        self._size = 0

    def write(self, data: Any) -> int:
        """A piece of the pickle stream."""
        size = memoryview(data).nbytes
        self._count(size)
        return size

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """As `StateWriter.take_buffer`, so that what fails there fails here."""
        with buffer.raw() as view:
            self._count(view.nbytes)
            return view.nbytes < OUT_OF_BAND_BYTES

    def _count(self, size: int) -> None:
        self._size += size
        if self._limit is not None and self._size > self._limit:
            raise TooLarge(f"over the limit of {self._limit:,} bytes on its own")
