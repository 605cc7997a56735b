"""Makes forks of this process cheaper by changing its memory, once everything is imported.

A fork shares its memory with the zygote until one of them writes, and a page that is written to is copied. So the
objects that every cell touches are immortal, new ones go to pages of their own, and the heap is in huge pages.
"""

import contextlib
import ctypes
import gc
import os
import re
import struct
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

# Immortal objects. CPython writes to an object whenever it is referred to. Objects whose count is the greatest possible
# are left alone since Python 3.12 (PEP 683). For those of IPython and the standard library, 100,000 in 0.2 s, an idle
# session takes a seventh less, and a state of it that is kept half.

_FIRST_VERSION = (3, 12)
_IMMORTAL = 0xFFFFFFFF
_OWN = __name__.partition(".")[0]
# Python 3.9, for which this module must compile, does not list its modules.
_PACKAGES = frozenset({"IPython", "traitlets", "pygments", _OWN, *getattr(sys, "stdlib_module_names", ())})


def can_make_immortal() -> bool:
    """Return whether this interpreter keeps the count in the first four bytes of an object, and heeds the greatest."""
    return (
        sys.implementation.name == "cpython"
        and sys.version_info >= _FIRST_VERSION
        and sys.byteorder == "little"
        and struct.calcsize("P") == 8
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and not hasattr(sys, "gettotalrefcount")  # a debug build checks counts
    )


def make_immortal() -> int:
    """Make the hot objects of this process immortal, and return how many there are; 0 where it is not possible."""
    if not can_make_immortal():
        return 0
    found = _reachable()
    set_count = ctypes.c_uint32.from_address
    for address in found:
        set_count(address).value = _IMMORTAL
    return len(found)


def _reachable() -> "set[int]":
    """Return the addresses of what the hot modules refer to, without the contents of other modules."""
    loaded: dict[str, Any] = dict(sys.modules)  # anything can be put there
    modules = {name: one for name, one in loaded.items() if isinstance(one, types.ModuleType)}
    hot = [module for name, module in modules.items() if _is_hot(name)]
    others = {id(module) for module in modules.values()} | {id(vars(module)) for module in modules.values()}
    seen = {*others}
    layer: list[Any] = [value for module in hot for value in vars(module).values() if not _is_foreign_class(value)]
    while layer:
        unseen = {id(one): one for one in layer}
        for address in unseen.keys() & seen:
            del unseen[address]
        seen.update(unseen)
        layer = gc.get_referents(*unseen.values())
    own = {id(module) for module in hot} | {id(vars(module)) for module in hot}
    return (seen - others) | own


def _is_hot(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _is_foreign_class(value: object) -> bool:
    return isinstance(value, type) and not _is_hot(str(value.__module__))


# Filled gaps. Imports leave gaps everywhere in Python's heap, and the new objects of a fork would go into them. Filled
# with objects that stay, on pages that this process has anyway, they leave new ones to lie side by side: on Python 3.12
# an idle session takes a tenth less, and a state of it that is kept a fifth.

_HEADER_BYTES = sys.getsizeof(b"")
_SMALLEST_BYTES = 16
_ROW = re.compile(rb"^ *\d+ +(\d+) +\d+ +\d+ +(\d+)$", re.MULTILINE)
"""A line of Python's statistics: class, size of a block, pools, blocks in use, free blocks."""
_MAX_STATISTICS_BYTES = 65_536

_fillers: "list[Any]" = []


def fill_gaps() -> None:
    """Fill the gaps in Python's heap with objects that stay, so that new ones lie side by side."""
    for size, count in _free_blocks():
        if size <= _SMALLEST_BYTES:
            _fillers.append([object() for _ in range(count)])
        elif size <= _HEADER_BYTES:
            _fillers.append([float(number) for number in range(count)])
        else:
            _fillers.append([bytes(size - _HEADER_BYTES) for _ in range(count)])


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


# Huge pages. A fork copies an entry of the page table for every 4 KiB of memory that is the process's own, and the
# fork's end visits them all again. A huge page, of 2 MiB, is one entry. What a fork writes to is still copied in pieces
# of 4 KiB. A fork of a session takes a tenth less processor time; the zygote takes some 15 MB more, once.

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_COLLAPSE = 25  # since Linux 6.1; older ones refuse it, and nothing changes


def find_heap_parts() -> "list[int]":
    """Return the addresses of the parts of the heap that fit into a huge page each."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            area, rights, _, _, _, *path = line.split(maxsplit=5)
            if "w" in rights and path in ([], ["[heap]"]):
                start, end = (int(number, 16) for number in area.split("-"))
                first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
                found += range(first, end - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES)
    return found


def collapse(address: int) -> None:
    """Move a part into a huge page, if Linux has one to spare and the part is in use; takes some milliseconds."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE)
