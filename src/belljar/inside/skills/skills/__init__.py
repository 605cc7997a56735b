"""The skills of this session: `from skills.sales_report import monthly`; `ls skills/` lists what there is.

A skill's folder `sales-report` is imported as `skills.sales_report`: the modules of its `scripts/`, and the functions
of the one that is named like the skill, or is the only one. What the host adds is found by the next import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_VARIABLE = "BELLJAR_SKILLS"
_HERE = Path(__file__).parent.parent
# Imports of submodules go by the finder below, because the folder of a session that was forked is another one.
__path__: list[str] = []


def _root() -> Path:
    return Path(os.environ.get(_VARIABLE, ""))


def _find_folder(folder: Path, part: str) -> Path | None:
    """Return the folder below another one that is named like the part, perhaps with hyphens for underscores."""
    try:
        names = [entry for entry in folder.iterdir() if entry.name.replace("-", "_") == part and entry.is_dir()]
    except OSError:
        return None
    return min(names, key=lambda entry: (entry.name != part, entry.name), default=None)


def _find_skill(parts: Sequence[str]) -> tuple[Path, int] | None:
    """Return the skill that a dotted name leads to: the folder of its modules, and how many parts name it."""
    folder = _root()
    for number, part in enumerate(parts, 1):
        entry = _find_folder(folder, part)
        if entry is None:
            return None
        folder = entry
        if (folder / "SKILL.md").is_file():
            scripts = folder / "scripts"
            return (scripts if scripts.is_dir() else folder), number
    return None


class _SkillFinder(importlib.abc.MetaPathFinder):
    """Finds `skills.*` in the session's folder of skills as it is now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; None for all that are not skills."""
        if not fullname.startswith("skills."):
            return None
        parts = fullname.split(".")[1:]
        found = _find_skill(parts)
        if found is None:
            return _find_plain(fullname, parts)
        folder, number = found
        if number < len(parts):
            return PathFinder.find_spec(fullname, [str(folder.joinpath(*parts[number:-1]))])
        own = folder / "__init__.py"
        if own.is_file():
            return importlib.util.spec_from_file_location(fullname, own, submodule_search_locations=[str(folder)])
        spec = ModuleSpec(fullname, _Loader(), is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def _find_plain(fullname: str, parts: Sequence[str]) -> ModuleSpec | None:
    """Return where a plain module is, or a folder that leads to skills."""
    spec = PathFinder.find_spec(fullname, [str(_root().joinpath(*parts[:-1]))])
    if spec is not None:
        return spec
    folder: Path | None = _root()
    for part in parts:
        folder = _find_folder(folder, part) if folder is not None else None
    if folder is None:
        # A folder `skills` of the session's own: what it holds and the host does not is imported from there.
        places = [str(Path(entry, "skills", *parts[:-1])) for entry in sys.path if Path(entry) != _HERE]
        return PathFinder.find_spec(fullname, places)
    spec = ModuleSpec(fullname, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


class _Loader(importlib.abc.Loader):
    """Makes the module of a skill whose scripts are no package."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Have attributes of the module looked for in the skill's own modules."""

        def attribute(name: str) -> Any:
            return _attribute(module, name)

        functions: Any = module
        functions.__getattr__ = attribute
        functions.__dir__ = lambda: sorted({*vars(module), *_modules(module)})


def _modules(module: ModuleType) -> list[str]:
    """Return the names of a skill's modules that can be imported."""
    locations = (module.__spec__ and module.__spec__.submodule_search_locations) or []
    names = [path.stem for folder in locations for path in Path(folder).glob("*.py")]
    return [name for name in names if name.isidentifier()]


def _attribute(module: ModuleType, name: str) -> Any:
    """Return a module of a skill, or what its main module defines."""
    if name.startswith("__"):
        raise AttributeError(name)
    modules = _modules(module)
    if name in modules:
        return importlib.import_module(module.__name__ + "." + name)
    own = module.__name__.rpartition(".")[2]
    main = own if own in modules else modules[0] if len(modules) == 1 else ""
    if main:
        inner = importlib.import_module(module.__name__ + "." + main)
        if hasattr(inner, name):
            return getattr(inner, name)
    there = ", ".join(sorted(modules)) or "no Python"
    raise AttributeError(f"the skill {module.__name__} has no {name!r}; it has {there}")


def _run_own_init() -> None:
    """Run the `__init__.py` of the operator's folder, if it has one, as the package itself."""
    own = _root() / "__init__.py"
    if _VARIABLE in os.environ and own.is_file():
        exec(compile(own.read_bytes(), str(own), "exec"), globals())


sys.meta_path.insert(0, _SkillFinder())
_run_own_init()
