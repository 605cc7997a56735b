"""The file that holds a session's variables while no process does: its format, reader and writer, and the report.

The file is a magic line, then parts: a kind, a length, a checksum, the content. The pickle stream is cut into parts;
large buffers are parts of their own, written straight from the memory that they are in and read straight into the
memory that they will be in. What the pickled bytes mean is known to `state_save` and `state_load` only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import pickle
import queue
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"belljar state\n"
FORMAT = 1
HEADER, STREAM, BUFFER, END = b"H", b"S", b"B", b"E"
CHUNK_BYTES = 8 * 1024 * 1024
THREADED_BYTES = 4 * CHUNK_BYTES
PART = struct.Struct("!cQI")


class Checksum:
    """The checksum of a content that comes in chunks. For a large one, a thread computes it beside the transfer.

    Computing takes as long as writing to the page cache, about 1 GB/s each.
    """

    def __init__(self, size: int) -> None:
        self.value = 0
        self._chunks: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._update, daemon=True) if size > THREADED_BYTES else None

    def __enter__(self) -> Checksum:
        if self._thread is not None:
            try:
                self._thread.start()
            except RuntimeError:  # the sandbox's limit of threads is reached
                self._thread = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()

    def add(self, chunk: memoryview) -> None:
        """Add the next chunk, which must not change any more."""
        if self._thread is None:
            self.value = zlib.crc32(chunk, self.value)
        else:
            self._chunks.put(chunk)

    def _update(self) -> None:
        for chunk in iter(self._chunks.get, None):
            self.value = zlib.crc32(chunk, self.value)


# Common to saving and loading: the entries of the stream, and the report.
# What cannot be saved or loaded is reported with its name, its type and the reason; whatever a variable does when it is
# pickled or unpickled, only that variable is lost. Both run the session's own code, so both can be interrupted like a
# cell: `run` is the part that may be interrupted, `finish` the part that must not.

# Variables may have any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


# The host refuses larger reports.
MAX_KEPT = 10_000
MAX_LOST = 1_000
MAX_NAME = 200
MAX_REASON = 600
WHOLE_FILE = "*"
INTERRUPTED = "it was interrupted before this was done"
VARIABLE, IMPORTS, SURROUNDING = "variable", "imports", "surrounding"


class VariableLoss(NamedTuple):
    """A variable, or a part of the interpreter's state, that could not be saved or loaded."""

    name: str
    type: str
    reason: str


class StateEntry(NamedTuple):
    """One object that is pickled by a `dump` of its own."""

    kind: str
    name: str
    value: Any


class VariableReport:
    """Which variables were saved or loaded, and which were lost and why."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.lost: list[VariableLoss] = []
        self.size_bytes = 0

    def message(self) -> dict[str, Any]:
        """Return the report as a message to the host, within the host's limits."""
        lost = [[one.name[:MAX_NAME], one.type[:MAX_NAME], one.reason[:MAX_REASON]] for one in self.lost]
        if len(lost) > MAX_LOST:
            lost[MAX_LOST - 1 :] = [[WHOLE_FILE, "", f"{len(lost) - MAX_LOST + 1:,} more could not be kept"]]
        kept = [name[:MAX_NAME] for name in self.kept[:MAX_KEPT]]
        return {"type": "state", "kept": kept, "lost": lost, "size_bytes": self.size_bytes}


@contextlib.contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Suppress warnings of variables that are pickled, and the garbage collector, which would scan each new object."""
    was_enabled = gc.isenabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


# Reading. The file may have been changed, so each part of the pickle stream is checked before it is unpickled, because
# code objects made from damaged bytes could crash the process.

# A buffer of at least this size gets pages of its own, which need not be zeroed first.
OWN_PAGES_BYTES = 1024 * 1024


class StateDamaged(Exception):
    """The file is not what was written."""


@dataclass(frozen=True)
class _Part:
    offset: int
    length: int
    checksum: int


class StateReader:
    """An open file whose header is read and whose parts are found. Raises StateDamaged where nothing can be read."""

    def __init__(self, path: str) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StateDamaged(f"the file cannot be opened: {error.strerror}") from None
        self.size_bytes = 0
        self.header: dict[str, Any] = {}
        self.count: int | None = None
        """The number of entries in the file; None when the file ends early."""
        self._stream: list[_Part] = []
        self._buffers: list[_Part] = []
        try:
            self._find_parts()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; buffers that were read stay valid."""
        os.close(self._descriptor)

    def stream(self) -> StateStream:
        """Return the pickle stream, from its beginning."""
        return StateStream(self, self._stream)

    def buffers(self) -> StateBuffers:
        """Return the buffers, from the first one."""
        return StateBuffers(self, self._buffers)

    def content(self, part: _Part) -> Any:
        """Return a part's bytes in writable memory, after comparing their checksum."""
        memory: Any = mmap.mmap(-1, part.length) if part.length >= OWN_PAGES_BYTES else bytearray(part.length)
        view, done = memoryview(memory), 0
        with Checksum(part.length) as checksum:
            while done < part.length:
                chunk = view[done : done + CHUNK_BYTES]
                read = os.preadv(self._descriptor, [chunk], part.offset + done)
                if not read:
                    raise StateDamaged("the file ends early")
                checksum.add(chunk[:read])
                done += read
        if checksum.value != part.checksum:
            raise StateDamaged("the file is damaged: a checksum differs")
        return memory

    def _find_parts(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StateDamaged("it is not a regular file")
        self.size_bytes = status.st_size
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            raise StateDamaged("it is not a file of saved variables")
        offset = len(MAGIC)
        while self.count is None and offset + PART.size <= self.size_bytes:
            kind, length, checksum = PART.unpack(os.pread(self._descriptor, PART.size, offset))
            part = _Part(offset + PART.size, length, checksum)
            offset = part.offset + length
            if offset > self.size_bytes:
                break
            self._add(kind, part)
        if not self.header:
            raise StateDamaged("the file ends early: not even its header is whole")

    def _add(self, kind: bytes, part: _Part) -> None:
        if kind == STREAM:
            self._stream.append(part)
        elif kind == BUFFER:
            self._buffers.append(part)
        elif kind == HEADER:
            self.header = self._object(part)
            if self.header.get("format") != FORMAT:
                raise StateDamaged(f"its format is {self.header.get('format')!r}; this version reads {FORMAT}")
        elif kind == END:
            self.count = int(self._object(part)["count"])

    def _object(self, part: _Part) -> dict[str, Any]:
        try:
            return dict(json.loads(bytes(self.content(part))))
        except (ValueError, TypeError) as error:
            raise StateDamaged(f"the file is damaged: {error}") from None


class StateStream:
    """The pickle stream as a file that an unpickler reads."""

    def __init__(self, reader: StateReader, parts: list[_Part]) -> None:
        self._reader = reader
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Read as a file does, but never less than asked for."""
        content = bytearray(size)
        self.readinto(content)
        return bytes(content)

    def readinto(self, target: Any) -> int:
        """Read into a buffer as a file does, but never less than asked for."""
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
        """Read a line, which only pickle's oldest opcodes have."""
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return bytes(line)

    def _fill(self) -> None:
        if self._rest:
            return
        part = next(self._parts, None)
        if part is None:
            raise StateDamaged("the file ends early")
        self._rest = memoryview(self._reader.content(part))


class StateBuffers:
    """An iterator over the buffers. One that is damaged raises StateDamaged, and the next call gets the next one."""

    def __init__(self, reader: StateReader, parts: list[_Part]) -> None:
        self._reader = reader
        self._parts = iter(parts)

    def __iter__(self) -> StateBuffers:
        return self

    def __next__(self) -> Any:
        part = next(self._parts, None)
        if part is None:
            raise StateDamaged("the file ends early")
        return self._reader.content(part)


# Writing, within a limit, so that some of the variables are complete whatever happens

# Smaller buffers go into the stream, because a part of their own costs more than a copy.
OUT_OF_BAND_BYTES = 64 * 1024
GATHERED_BYTES = 256 * 1024
_MODE = 0o600


class StateTooLarge(Exception):
    """One variable alone is over the limit, so that nothing else could be saved beside it."""


class CannotWrite(Exception):
    """The file cannot be written, as when the disk is full."""


class StateWriter:
    """The file that a pickler writes to, and the receiver of its buffers; it has a temporary name until `commit`.

    Past the limit it only counts, so that the sizes of all variables are known when `StateSaver` chooses which to drop.
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
        """Return whether more was written than the limit allows."""
        return self._limit is not None and self.size_bytes > self._limit

    def restart(self, header: dict[str, Any]) -> None:
        """Start the file with its header, again if necessary."""
        limit, self._limit = self._limit, None
        self._gathered.clear()
        self._put(0, memoryview(MAGIC))
        self.size_bytes = len(MAGIC)
        self._part(HEADER, memoryview(json.dumps({**header, "format": FORMAT}).encode()))
        self._start = self._border = self._whole_bytes = self.size_bytes
        self.whole_count = 0
        self._limit = limit

    def write(self, data: Any) -> int:
        """Write a piece of the pickle stream."""
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
        """Write a large buffer as a part and return False; return True to let the pickler put it into the stream."""
        with buffer.raw() as view:
            if view.nbytes < OUT_OF_BAND_BYTES:
                return True
            self._part(BUFFER, view)
        return False

    def end_variable(self) -> int:
        """Note that a variable is complete, and return its size."""
        self._flush()
        size, self._border = self.size_bytes - self._border, self.size_bytes
        if not self.is_over:
            self._whole_bytes = self._border
            self.whole_count += 1
        return size

    def commit(self) -> int:
        """Move the file to its name, with the `whole_count` variables that are complete, and return its size."""
        self._gathered.clear()
        self._limit, self.size_bytes = None, self._whole_bytes
        self._part(END, memoryview(json.dumps({"count": self.whole_count}).encode()))
        os.ftruncate(self._descriptor, self.size_bytes)
        self._partial.replace(self._path)
        return self.size_bytes

    def close(self) -> None:
        """Close the file, and remove it if it was not committed."""
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
            raise StateTooLarge(f"over the limit of {self._limit:,} bytes on its own")
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
    """A pickler's file that keeps nothing, for finding out whether something can be pickled."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._size = 0

    def restart(self) -> None:
        """Count from zero again, for the next variable."""
        self._size = 0

    def write(self, data: Any) -> int:
        """Count a piece of the pickle stream."""
        size = memoryview(data).nbytes
        self._count(size)
        return size

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Decide as `StateWriter.take_buffer` does, so that what fails there fails here."""
        with buffer.raw() as view:
            self._count(view.nbytes)
            return view.nbytes < OUT_OF_BAND_BYTES

    def _count(self, size: int) -> None:
        self._size += size
        if self._limit is not None and self._size > self._limit:
            raise StateTooLarge(f"over the limit of {self._limit:,} bytes on its own")
