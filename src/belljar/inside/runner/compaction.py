"""Puts side by side what forks of this process write to, because each page that a fork writes to is copied for it.

Imports have left gaps everywhere in the heap, and the new objects of a fork would go into them.
"""

import ctypes
import os
import re
import sys
import time
from typing import Any

_HEADER_BYTES = sys.getsizeof(b"")
_SMALLEST_BYTES = 16
_ROW = re.compile(rb"^ *\d+ +(\d+) +\d+ +\d+ +(\d+)$", re.MULTILINE)
"""A line of Python's statistics: class, size of a block, pools, blocks in use, free blocks."""
_CHUNK_BYTES = tuple(1 << power for power in range(16, 4, -1))

_MAX_STATISTICS_BYTES = 65_536
_MAX_FILL_S = 0.5
_LARGEST_CACHED_BYTES, _CACHED_STEP_BYTES, _CACHED_CHUNKS = 1_040, 16, 7
"""What the GNU C library caches for a thread: seven chunks of each size."""

_fillers: "list[Any]" = []


def fill_gaps() -> None:
    """Fill the gaps in Python's heap and in C's with objects that stay, so that new ones lie side by side.

    The gaps are on pages that this process has anyway, and its forks share.
    """
    for size, count in _free_blocks():
        if size <= _SMALLEST_BYTES:
            _fillers.append([object() for _ in range(count)])
        elif size <= _HEADER_BYTES:
            _fillers.append([float(number) for number in range(count)])
        else:
            _fillers.append([bytes(size - _HEADER_BYTES) for _ in range(count)])
    _fill_c_heap()


def _free_blocks() -> "list[tuple[int, int]]":
    """Return how many free blocks of each size are in pools that are in use; empty where Python does not tell."""
    memory, kept = os.memfd_create("statistics"), os.dup(2)
    try:
        os.dup2(memory, 2)
        sys._debugmallocstats()  # pyright: ignore[reportPrivateUsage]
        text = os.pread(memory, _MAX_STATISTICS_BYTES, 0)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(memory)
    return [(int(size), int(count)) for size, count in _ROW.findall(text)]


class _Usage(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library; `keepcost` is the free memory at the end of the heap, after all gaps."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _fill_c_heap() -> None:
    """Allocate, from large to small, until only the end of the heap is left to take from."""
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return
    library.mallinfo2.restype = _Usage
    deadline = time.monotonic() + _MAX_FILL_S
    for size in _CHUNK_BYTES:
        usage = library.mallinfo2()
        # Several at once, because `mallinfo2` visits every gap.
        at_once = max(1, _CHUNK_BYTES[0] // size)
        for _ in range((usage.fordblks - usage.keepcost) // (size * at_once) + 1):
            for _ in range(at_once):
                library.malloc(size)
            if library.mallinfo2().keepcost != usage.keepcost or time.monotonic() > deadline:
                break
    # What was freed last is kept for the next of the same size, and counts as used.
    for size in range(_CHUNK_BYTES[-1], _LARGEST_CACHED_BYTES, _CACHED_STEP_BYTES):
        for _ in range(_CACHED_CHUNKS):
            library.malloc(size)
