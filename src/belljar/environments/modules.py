"""Which modules a distribution brings, from the list of its files; nothing is imported."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from belljar.environments.base import Environment, inspect_interpreter
from belljar.environments.inventory import Shelf
from belljar.environments.prefixes import layer_shelves, own_record

_FILES_LIMIT = 100_000
_MODULES_LIMIT = 5
_PACKAGES = "/site-packages/"
_MODULE = re.compile(r"[^\W\d]\w*")
# Folders that some packages leave beside their own by mistake; nobody means them by the package's name.
_BESIDE = frozenset({"test", "tests", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "scripts"})


def modules_of(environment: Environment, layer: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The modules to import for each distribution, the session's layer before the environment; blocks for a moment."""
    interpreter = inspect_interpreter(environment.python)
    shelves = [*layer_shelves(layer, interpreter.version), *map(Shelf, interpreter.paths)]
    return {name: _modules(name, shelves) or _modules_of_conda(name, layer) for name in names}


def _modules(name: str, shelves: Iterable[Shelf]) -> list[str]:
    for shelf in shelves:
        if distribution := shelf.find(name):
            return _meant(name, _listed(_rows(shelf.read_record(distribution))))
    return []


def _modules_of_conda(name: str, layer: Path) -> list[str]:
    """Of a package whose distribution is called otherwise, by the files that conda has put there for it."""
    files = (path.partition(_PACKAGES) for path in own_record(layer, name.lower()))
    return _meant(name, _listed([inside for _, found, inside in files if found]))


def _rows(record: str) -> list[str]:
    try:
        return [row[0] for row in islice(csv.reader(record.splitlines()), _FILES_LIMIT) if row]
    except csv.Error:
        return []


def _listed(rows: Iterable[str]) -> Iterator[str]:
    """Modules at the top, and packages that lie in no other package: namespace folders have no code of their own."""
    paths = [PurePosixPath(row) for row in rows if not row.startswith(("/", "..")) and row.endswith((".py", ".so"))]
    packages = {path.parent for path in paths if path.stem == "__init__"}
    for path in paths:
        folder = path.parent
        if path.stem == "__init__":
            if not any(parent in packages for parent in folder.parents) and _is_name(folder):
                yield ".".join(folder.parts)
        elif folder == PurePosixPath() and _is_name(PurePosixPath(path.name.partition(".")[0])):
            yield path.name.partition(".")[0]


def _is_name(path: PurePosixPath) -> bool:
    return bool(path.parts) and all(_MODULE.fullmatch(part) for part in path.parts)


def _meant(name: str, found: Iterable[str]) -> list[str]:
    """The module that is called like the distribution; else those that are not private."""
    modules = list(dict.fromkeys(found))
    same = [module for module in modules if canonicalize_name(module) == canonicalize_name(name)]
    public = [module for module in modules if not module.startswith("_") and module not in _BESIDE]
    return (same or public or modules)[:_MODULES_LIMIT]
