"""Puts side by side what forks of this process write to, because each page that a fork writes to is copied for it.

Two things spread a fork's writes over the heap. New objects go into gaps, which imports have left everywhere. And a
function that runs writes to itself and its code object, which lie among those of its module that never run.
"""

import ctypes
import gc
import os
import re
import sys
import time
import types
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

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


@contextmanager
def observed_code() -> "Generator[set[types.CodeType], None, None]":
    """Give the set of the code objects that run in the block, complete after it."""
    found: set[types.CodeType] = set()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code) if event == "call" else None)
    try:
        yield found
    finally:
        sys.setprofile(None)


def renew_code(hot: "set[types.CodeType]") -> None:
    """Give functions new code objects that are equal to their old ones, one after the other in memory."""
    for function in [one for one in gc.get_objects() if type(one) is types.FunctionType and one.__code__ in hot]:
        function.__code__ = _renewed(function.__code__)


def _renewed(code: types.CodeType) -> types.CodeType:
    """Return an equal code object, and renew those among its constants: of inner functions and comprehensions."""
    constants = tuple(_renewed(one) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=constants)


def move_functions(hot: "set[types.CodeType]") -> None:
    """Replace functions by equal ones that lie side by side, because a call writes to its function.

    Only where nobody can tell: where modules and classes hold all references to a function, so that all are replaced.
    A session of Python 3.11 copies 27 pages less, and a state of it that is kept 10.
    """
    functions, places = _find_functions(hot)
    for function in functions.values():
        known = places[id(function)]
        # Three more: `functions`, which keeps the old ones until all new ones are made, `function`, and the argument.
        if sys.getrefcount(function) == len(known) + 3 and not weakref.getweakrefcount(function):
            moved = _moved(function)
            for owner, name in known:
                set_attribute: Any = object.__setattr__ if type(owner) is types.ModuleType else type.__setattr__
                set_attribute(owner, name, moved)


def _find_functions(hot: "set[types.CodeType]") -> "tuple[dict[int, Any], dict[int, list[tuple[Any, str]]]]":
    """Return the functions with this code, by id, and which modules and classes have them under which names."""
    modules = {id(one): one for one in [*sys.modules.values()] if type(one) is types.ModuleType}  # some have two names
    owners: list[Any] = [*modules.values(), *(one for one in gc.get_objects() if issubclass(type(one), type))]
    functions: dict[int, Any] = {}
    places: dict[int, list[tuple[Any, str]]] = {}
    for owner in owners:
        for name, value in cast("dict[str, Any]", vars(owner)).items():
            if type(value) is types.FunctionType and value.__code__ in hot:
                functions[id(value)] = value
                places.setdefault(id(value), []).append((owner, name))
    return functions, places


def _moved(function: types.FunctionType) -> types.FunctionType:
    code, names, closure = function.__code__, function.__globals__, function.__closure__
    moved = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(moved, name, getattr(function, name))
    vars(moved).update(vars(function))
    return moved


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
