"""The skills of this session: `from skills.sales_report import monthly`; `ls skills/` lists what there is.

A skill's folder `sales-report` is imported as `skills.sales_report`: the modules of its `scripts/`, and the functions
of the one that is named like the skill, or is the only one. What the host adds is found by the next import.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_VARIABLE = "BELLJAR_SKILLS"
__path__ = []  # imports of submodules go by the finder below, because the folder of a forked session is another one


def _root():
    return os.environ.get(_VARIABLE, "")


def _place(parts):
    """Return the skill that a dotted name leads to: its folder for modules and how many parts name it; else None."""
    folder = _root()
    for number, part in enumerate(parts, 1):
        folder = _entry(folder, part)
        if folder is None:
            return None
        if os.path.isfile(os.path.join(folder, "SKILL.md")):
            scripts = os.path.join(folder, "scripts")
            return (scripts if os.path.isdir(scripts) else folder), number
    return None


def _entry(folder, part):
    """Return the folder below another one whose name is the part, with hyphens for underscores."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in sorted(names, key=lambda each: (each != part, each)):
        if name.replace("-", "_") == part and os.path.isdir(os.path.join(folder, name)):
            return os.path.join(folder, name)
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `skills.*` in the session's folder of skills as it is now."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("skills."):
            return None
        parts = fullname.split(".")[1:]
        found = _place(parts)
        if found is None:
            return self._plain(fullname, parts)
        folder, number = found
        if number < len(parts):
            return importlib.machinery.PathFinder.find_spec(fullname, [os.path.join(folder, *parts[number:-1])])
        own = os.path.join(folder, "__init__.py")
        if os.path.isfile(own):
            return importlib.util.spec_from_file_location(fullname, own, submodule_search_locations=[folder])
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)
        spec.submodule_search_locations = [folder]
        return spec

    def _plain(self, fullname, parts):
        """Find a plain module, or a folder that leads to skills."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, [os.path.join(_root(), *parts[:-1])])
        if spec is not None:
            return spec
        folder = _root()
        for part in parts:
            folder = folder and _entry(folder, part)
        if not folder:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [folder]
        return spec


class _Loader(importlib.abc.Loader):
    """Makes the module of a skill whose scripts are no package."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: _attribute(module, name)
        module.__dir__ = lambda: sorted({*vars(module), *_modules(module)})


def _modules(module):
    """Return the names of a skill's modules that can be imported."""
    folder = module.__spec__.submodule_search_locations[0]
    names = [os.path.splitext(name)[0] for name in os.listdir(folder) if name.endswith(".py")]
    return [name for name in names if name.isidentifier()]


def _attribute(module, name):
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


def _own_init():
    """Run the `__init__.py` of the operator's folder, if it has one, as the package itself."""
    own = os.path.join(_root(), "__init__.py")
    if _root() and os.path.isfile(own):
        with open(own, "rb") as file:
            exec(compile(file.read(), own, "exec"), globals())


sys.meta_path.insert(0, _Finder())
_own_init()
