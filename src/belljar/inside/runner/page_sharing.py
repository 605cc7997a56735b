"""Makes forks of this process cheaper by changing its memory, once everything is imported.

Forks write to fewer pages, because the objects that every cell touches are immortal. They copy fewer mappings, because
those of each library are joined. They copy fewer entries of the page table, because the heap is in huge pages.
"""

import contextlib
import ctypes
import gc
import struct
import sys
import sysconfig
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

# Immortal objects. A fork shares its memory with the zygote until one of them writes, and CPython writes to an object
# whenever it is referred to. Objects whose count is the greatest possible are left alone since Python 3.12 (PEP 683).
# For those of IPython and the standard library, 100,000 in 0.2 s, this makes a session's checkpoint smaller by 1.5 MB
# of 3.8.

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


# Joined mappings. A library has five mappings, which differ in their rights only: its head, code, constants, what is
# constant once it is loaded, and data. A fork copies each mapping by itself, and the usual modules bring 120 libraries.
# Given the rights of its neighbours, a mapping becomes one with it: 340 are left of 680. Nothing becomes writable that
# is executable.

_READ, _WRITE, _EXECUTE = 1, 2, 4


class _Mapping(NamedTuple):
    start: int
    end: int
    rights: str
    offset: int
    path: str

    def is_followed_by(self, other: "_Mapping") -> bool:
        """Return whether the other one continues this one, in memory and in the file."""
        length = self.end - self.start
        return (self.end, self.offset + length, self.path) == (other.start, other.offset, other.path)


def join_mappings() -> None:
    """Join the mappings of the libraries that are loaded by now; Linux may refuse any, and nothing changes then."""
    mappings = [mapping for mapping in _mappings() if ".so" in mapping.path]
    change: Any = ctypes.CDLL(None).mprotect
    for number, mapping in enumerate(mappings):
        if mapping.rights != "r--p":
            continue
        before, after = mappings[max(number - 1, 0)], mappings[min(number + 1, len(mappings) - 1)]
        if after.rights == "rw-p" and mapping.is_followed_by(after):
            wanted = _READ | _WRITE
        elif (after.rights == "r-xp" and mapping.is_followed_by(after)) or (
            before.rights == "r-xp" and before.is_followed_by(mapping)
        ):
            wanted = _READ | _EXECUTE
        else:
            continue
        change(ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.end - mapping.start), wanted)


def _mappings() -> "Generator[_Mapping, None, None]":
    """Yield the mappings of this process; those without a file or a name have an empty path."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            area, rights, offset, _, _, *path = line.split(maxsplit=5)
            start, end = (int(number, 16) for number in area.split("-"))
            yield _Mapping(start, end, rights, int(offset, 16), path[0] if path else "")


# Huge pages. A fork copies an entry of the page table for every 4 KiB of memory that is the process's own, and the
# fork's end visits them all again. A huge page, of 2 MiB, is one entry. What a fork writes to is still copied in pieces
# of 4 KiB.

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_COLLAPSE = 25  # since Linux 6.1; older ones refuse it, and nothing changes


def find_heap_parts() -> "list[int]":
    """Return the addresses of the parts of the heap that fit into a huge page each."""
    found: list[int] = []
    for mapping in _mappings():
        if "w" in mapping.rights and mapping.path in ("", "[heap]"):
            start = -(-mapping.start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            found += range(start, mapping.end - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES)
    return found


def collapse(address: int) -> None:
    """Move a part into a huge page, if Linux has one to spare and the part is in use; takes some milliseconds."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE)
