"""Python names for servers, tools and parameters; the protocol's messages use the original names.

A name that is a valid Python name already keeps it, even if others would map to it; the others get the nearest free
name. The same catalogue gives the same names, in whatever order a server lists its tools.
"""

import builtins
import keyword
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from belljar.toolbox.base import Catalogue

MAX_CHARS = 60
_OTHER = re.compile(r"[^A-Za-z0-9]+")
_PYTHON = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# `from servers.x import list` would hide the built-in `list` in the session.
_BUILTINS = frozenset(name for name in dir(builtins) if not name.startswith("_"))


@dataclass(frozen=True, slots=True)
class PythonNames:
    """The Python names of the servers and tools of one catalogue."""

    packages: Mapping[str, str]
    """Of each server's package, below `servers`."""
    functions: Mapping[tuple[str, str], str]
    modules: Mapping[tuple[str, str], str]
    """Unique without regard to case, which some disks ignore."""


def names_of(catalogue: Catalogue) -> PythonNames:
    """Return the Python names of everything in a catalogue."""
    packages = assigned(catalogue.servers, fallback="server", ignore_case=True)
    functions: dict[tuple[str, str], str] = {}
    modules: dict[tuple[str, str], str] = {}
    for server in catalogue.servers.values():
        tools = [tool.name for tool in server.tools]
        found = assigned(tools, fallback="tool", avoided=_BUILTINS)
        functions |= {(server.server, tool): name for tool, name in found.items()}
        files = assigned(found.values(), fallback="tool", ignore_case=True)
        modules |= {(server.server, tool): files[name] for tool, name in found.items()}
    return PythonNames(packages, functions, modules)


def parameter_names(parameters: Iterable[str]) -> dict[str, str]:
    """Return the Python name of each parameter, in their order. `self` is allowed, because these are no methods."""
    return assigned(parameters, fallback="argument")


def assigned(
    names: Iterable[str], *, fallback: str, avoided: Collection[str] = (), ignore_case: bool = False
) -> dict[str, str]:
    """Return a unique Python name for each name."""
    listed = list(dict.fromkeys(names))
    given: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(listed, key=lambda name: (not _is_python(name, avoided), name)):
        base = name if _is_python(name, avoided) else _nearest(name, fallback, avoided)
        given[name] = _free(base, taken, ignore_case)
        taken.add(given[name].lower() if ignore_case else given[name])
    return {name: given[name] for name in listed}


def _is_python(name: str, avoided: Collection[str]) -> bool:
    is_name = len(name) <= MAX_CHARS and _PYTHON.fullmatch(name) is not None
    return is_name and not keyword.iskeyword(name) and name not in avoided


def _nearest(name: str, fallback: str, avoided: Collection[str]) -> str:
    letters = unicodedata.normalize("NFKD", name[: 4 * MAX_CHARS]).encode("ascii", "ignore").decode()
    base = _OTHER.sub("_", letters).strip("_")[:MAX_CHARS] or fallback
    if base[0].isdigit():
        base = f"{fallback}_{base}"
    return f"{base}_" if keyword.iskeyword(base) or base in avoided else base


def _free(base: str, taken: Collection[str], ignore_case: bool) -> str:
    candidate, number = base, 1
    while (candidate.lower() if ignore_case else candidate) in taken:
        number += 1
        candidate = f"{base.rstrip('_')}_{number}"
    return candidate
