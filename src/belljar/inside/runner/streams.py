"""`sys.stdout` and `sys.stderr` on the real descriptors 1 and 2, in the order in which the cell wrote them.

The descriptors are pipes that the host reads, so output of C code, subprocesses and threads needs nothing here. Two
pipes have no common order, so when the main thread switches between them, the host first reads both empty.
"""

import contextlib
import ctypes
import io
import sys
from collections.abc import Callable
from typing import Any, cast

# Switching between the streams costs a round trip of about 0.1 ms. For a cell that switches more often than this, speed
# matters more than the exact order.
MAX_TURNS = 2_000
_LINE_BUFFERED = 1  # _IOLBF


class Streams:
    """The two streams, and which of them was written to last."""

    def __init__(self, synchronise: Callable[[], bool], is_due: Callable[[], bool]) -> None:
        self._synchronise = synchronise
        self._is_due = is_due
        self._last: _Pipe | None = None
        self._turns = 0
        self._kept: list[io.TextIOWrapper] = []
        self.is_discarding = False
        """Whether what is written now goes nowhere."""
        self._c = _CStream()
        self.install()

    def install(self) -> None:
        """Put new text streams into `sys`, or the old ones if they are still open."""
        # Names that are put together here are not in Python's cache of what a class has.
        for name, original_name, descriptor in (("stdout", "__stdout__", 1), ("stderr", "__stderr__", 2)):
            original = getattr(sys, original_name)
            if isinstance(original, io.TextIOWrapper) and original in self._kept and not original.closed:
                setattr(sys, name, original)
                continue
            # No BufferedWriter between, because an interrupt inside its write makes it keep the bytes and write them
            # again.
            raw: Any = _Pipe(descriptor, self)
            text = io.TextIOWrapper(
                raw,
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
            )
            self._kept.append(text)
            setattr(sys, name, text)
            setattr(sys, original_name, text)

    def restore(self) -> None:
        """Restore the streams for a new cell, because the last one may have replaced or closed them."""
        self._turns = 0
        self.install()

    def flush(self) -> None:
        """Write everything that is buffered to the pipes."""
        for text in (sys.__stdout__, sys.__stderr__):
            _flush(text)
        self._c.flush()

    def discard(self) -> None:
        """Drop buffered text in a fork: a thread of the origin had not finished printing it, and will there."""
        self.is_discarding = True
        try:
            for text in self._kept:
                with contextlib.suppress(OSError, ValueError):
                    io.TextIOWrapper.flush(text)
        finally:
            self.is_discarding = False

    def turn_to(self, pipe: "_Pipe") -> None:
        """Synchronise with the host if needed, before a write to a pipe: a held result, or output on the other pipe."""
        if self._is_due():
            self._synchronise()
        previous, self._last = self._last, pipe
        if previous is None or previous is pipe or self._turns >= MAX_TURNS:
            return
        self._last = previous  # because flushing writes to the previous pipe, which must not count as a switch
        other = sys.__stdout__ if previous.descriptor == 1 else sys.__stderr__
        _flush(other)
        self._last = pipe
        if self._synchronise():
            self._turns += 1


def _flush(text: object) -> None:
    """Flush a stream by its class's own method, because a cell may have given the object a `flush` that raises."""
    if isinstance(text, io.TextIOWrapper):
        stream: Any = cast("Any", text)
        if not stream.closed:
            io.TextIOWrapper.flush(stream)


class _CStream:
    """C's own `stdout`, which libraries print to. On a pipe, C would write only when its buffer is full."""

    def __init__(self) -> None:
        self._stream: ctypes.c_void_p | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            library: Any = ctypes.PyDLL(None)
            self._stream = ctypes.c_void_p.in_dll(library, "stdout")
            self._flush = library.fflush
            # Line by line, so that C's lines appear between Python's in the order in which they were written.
            library.setvbuf(self._stream, None, _LINE_BUFFERED, 0)

    def flush(self) -> None:
        """Flush `stdout`. Not `fflush(NULL)`, because that would wait for a thread that reads from another stream."""
        if self._stream is not None:
            self._flush(self._stream)


class _Pipe(io.FileIO):
    """The raw file of a stream; the text layer above it makes this one call for each line or block."""

    def __init__(self, descriptor: int, streams: Streams) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.descriptor = descriptor  # `fileno()` raises once a cell has closed the stream
        self._streams = streams

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        __tracebackhide__ = True
        left = memoryview(data).cast("B")
        if self._streams.is_discarding:
            return len(left)
        self._streams.turn_to(self)
        size = len(left)
        while left:
            left = left[super().write(left) or 0 :]
        return size
