"""Moves the heap of this process into huge pages, so that forks of it are cheaper.

A fork copies an entry of the page table for every 4 KiB of memory that is the process's own, and the fork's end visits
them all again. A huge page, of 2 MiB, is one entry. What a fork writes to is still copied in pieces of 4 KiB.
"""

import contextlib
import ctypes
from pathlib import Path

_SIZE = 2 * 1024 * 1024
_MADV_COLLAPSE = 25  # since Linux 6.1; older ones refuse it, and nothing changes


def find_parts() -> "list[int]":
    """Return the addresses of the parts of the heap that fit into a huge page each."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            area, rights, _, _, _, *name = line.split(maxsplit=5)
            if "w" in rights and (not name or name == ["[heap]"]):
                start, end = (int(number, 16) for number in area.split("-"))
                found += range(-(-start // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE)
    return found


def collapse(address: int) -> None:
    """Move a part into a huge page, if Linux has one to spare and the part is in use; takes some milliseconds."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(_SIZE), _MADV_COLLAPSE)
