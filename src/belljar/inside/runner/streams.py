"""`sys.stdout` and `sys.stderr` on the real descriptors 1 and 2, in the order the cell wrote them.

The descriptors are pipes read by the host, so output of C code, sub-processes and threads needs nothing here. Two pipes
have no common order, so when the main thread turns from one stream to the other, the host is asked to empty both first.
"""

import contextlib
import ctypes
import io
import sys
from collections.abc import Callable
from typing import Any

# Turning between streams costs a round trip of about 0.1 ms. A cell that alternates more often than this is a flood,
# and its speed matters more than the exact order.
MAX_TURNS = 2_000
_LINE_BUFFERED = 1  # _IOLBF


class Streams:
    """The pair of streams and which of them was written last."""

    def __init__(self, synchronise: Callable[[], bool], is_due: Callable[[], bool]) -> None:
        self._synchronise = synchronise
        self._is_due = is_due
        self._last: _Pipe | None = None
        self._turns = 0
        self._kept: list[io.TextIOWrapper] = []
        self._c = _CStream()
        self.install()

    def install(self) -> None:
        """Put fresh text streams where programs look for them, unless ours are still there and open."""
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            original = getattr(sys, f"__{name}__")
            if isinstance(original, io.TextIOWrapper) and original in self._kept and not original.closed:
                setattr(sys, name, original)
                continue
            # No BufferedWriter between: an interrupt inside its write makes it keep the bytes and write them again.
            raw: Any = _Pipe(descriptor, self)
            text = io.TextIOWrapper(
                raw,
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
            )
            self._kept.append(text)
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)

    def restore(self) -> None:
        """A new cell: streams that the last one replaced or closed are back."""
        self._turns = 0
        self.install()

    def flush(self) -> None:
        """Hand everything written so far to the pipes."""
        for text in (sys.__stdout__, sys.__stderr__):
            if text is not None and not text.closed:
                text.flush()
        self._c.flush()

    def turn_to(self, pipe: "_Pipe") -> None:
        """Called before every write to a pipe. What is due comes before what is written now."""
        if self._is_due():
            self._synchronise()
        previous, self._last = self._last, pipe
        if previous is None or previous is pipe or self._turns >= MAX_TURNS:
            return
        self._last = previous  # flushing writes to the previous pipe, which is no turn
        other = sys.__stdout__ if previous.descriptor == 1 else sys.__stderr__
        if other is not None and not other.closed:
            other.flush()
        self._last = pipe
        if self._synchronise():
            self._turns += 1


class _CStream:
    """C's own `stdout`, which code of libraries prints to: into a pipe C would write only what fills its buffer."""

    def __init__(self) -> None:
        self._stream: ctypes.c_void_p | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            library: Any = ctypes.PyDLL(None)
            self._stream = ctypes.c_void_p.in_dll(library, "stdout")
            self._flush = library.fflush
            # Line by line, so that its lines stand between Python's where they were written.
            library.setvbuf(self._stream, None, _LINE_BUFFERED, 0)

    def flush(self) -> None:
        """Write what is waiting. Not `fflush(NULL)`: that waits for a thread which reads from any other stream."""
        if self._stream is not None:
            self._flush(self._stream)


class _Pipe(io.FileIO):
    """The raw end of a stream; buffering above it makes this one call per line or per block."""

    def __init__(self, descriptor: int, streams: Streams) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.descriptor = descriptor  # `fileno()` raises once a cell has closed the stream
        self._streams = streams

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        __tracebackhide__ = True
        self._streams.turn_to(self)
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            left = left[super().write(left) or 0 :]
        return size
