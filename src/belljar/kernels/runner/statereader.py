"""Reads the file of `stateparts`, which somebody may have changed.

The pickle stream is checked before anything is made of it: code objects out of damaged bytes could crash the process.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from dataclasses import dataclass
from typing import Any

from .stateparts import BUFFER, CHUNK_BYTES, END, FORMAT, HEADER, MAGIC, PART, STREAM, Checksum

# From here on a buffer gets pages of its own, which need not be zeroed first.
OWN_PAGES_BYTES = 1024 * 1024


class Damaged(Exception):
    """The file is not what was written."""


@dataclass(frozen=True)
class _Part:
    offset: int
    length: int
    checksum: int


class StateReader:
    """An opened file, its header read and its parts found. Raises `Damaged` where there is nothing to go on with."""

    def __init__(self, path: str) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Damaged(f"the file cannot be opened: {error.strerror}") from None
        self.size_bytes = 0
        self.header: dict[str, Any] = {}
        self.count: int | None = None
        """How many entries were written; None when the file ends early."""
        self._stream: list[_Part] = []
        self._buffers: list[_Part] = []
        try:
            self._find_parts()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Buffers that were read stay valid."""
        os.close(self._descriptor)

    def stream(self) -> StateStream:
        """The pickle stream, from its beginning."""
        return StateStream(self, self._stream)

    def buffers(self) -> StateBuffers:
        """The buffers, from the first one."""
        return StateBuffers(self, self._buffers)

    def content(self, part: _Part) -> Any:
        """A part's bytes, in memory that can be written to."""
        memory: Any = mmap.mmap(-1, part.length) if part.length >= OWN_PAGES_BYTES else bytearray(part.length)
        view, done = memoryview(memory), 0
        with Checksum(part.length) as checksum:
            while done < part.length:
                chunk = view[done : done + CHUNK_BYTES]
                read = os.preadv(self._descriptor, [chunk], part.offset + done)
                if not read:
                    raise Damaged("the file ends early")
                checksum.add(chunk[:read])
                done += read
        if checksum.value != part.checksum:
            raise Damaged("the file is damaged: a checksum differs")
        return memory

    def _find_parts(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("it is not a regular file")
        self.size_bytes = status.st_size
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            raise Damaged("it is not a file of saved variables")
        offset = len(MAGIC)
        while self.count is None and offset + PART.size <= self.size_bytes:
            kind, length, checksum = PART.unpack(os.pread(self._descriptor, PART.size, offset))
            part = _Part(offset + PART.size, length, checksum)
            offset = part.offset + length
            if offset > self.size_bytes:
                break
            self._add(kind, part)
        if not self.header:
            raise Damaged("the file ends early: not even its header is whole")

    def _add(self, kind: bytes, part: _Part) -> None:
        if kind == STREAM:
            self._stream.append(part)
        elif kind == BUFFER:
            self._buffers.append(part)
        elif kind == HEADER:
            self.header = self._object(part)
            if self.header.get("format") != FORMAT:
                raise Damaged(f"its format is {self.header.get('format')!r}; this version reads {FORMAT}")
        elif kind == END:
            self.count = int(self._object(part)["count"])

    def _object(self, part: _Part) -> dict[str, Any]:
        try:
            return dict(json.loads(bytes(self.content(part))))
        except (ValueError, TypeError) as error:
            raise Damaged(f"the file is damaged: {error}") from None


class StateStream:
    """The file an unpickler reads."""

    def __init__(self, reader: StateReader, parts: list[_Part]) -> None:
        self._reader = reader
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """As a file does, but never less than asked for."""
        content = bytearray(size)
        self.readinto(content)
        return bytes(content)

    def readinto(self, target: Any) -> int:
        """As a file does, but never less than asked for."""
        with memoryview(target).cast("B") as view:
            done = 0
            while done < view.nbytes:
                self._fill()
                taken = self._rest[: view.nbytes - done]
                view[done : done + taken.nbytes] = taken
                self._rest = self._rest[taken.nbytes :]
                done += taken.nbytes
            return done

    def readline(self) -> bytes:
        """Only the oldest opcodes have lines."""
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return bytes(line)

    def _fill(self) -> None:
        if self._rest:
            return
        part = next(self._parts, None)
        if part is None:
            raise Damaged("the file ends early")
        self._rest = memoryview(self._reader.content(part))


class StateBuffers:
    """The buffers in order. One that is damaged is passed over when it is asked for."""

    def __init__(self, reader: StateReader, parts: list[_Part]) -> None:
        self._reader = reader
        self._parts = iter(parts)

    def __iter__(self) -> StateBuffers:
        return self

    def __next__(self) -> Any:
        part = next(self._parts, None)
        if part is None:
            raise Damaged("the file ends early")
        return self._reader.content(part)
