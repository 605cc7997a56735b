"""Imports of servers and tools that are not there: wait while a server connects, or raise why it is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .connection import host_connection
from .errors import ToolMissing, error_from, suggestion
from .tools import Tool, thread_imports

TREE = "servers"
_MARK = "from toolbox import connect\n"


def connect(server: str, name: str) -> None:
    """Wait for a server, then run its package's source again, which the host has rewritten meanwhile.

    The generated package of a server that was still connecting calls this.
    """
    __tracebackhide__ = True
    if not thread_imports.waits:
        raise ToolMissing(f"the server {server!r} is still connecting")
    answer = host_connection().ask({"op": "join", "server": server})
    if answer.get("outcome") != "joined":
        error = error_from(answer)
        raise ToolMissing(error.message.replace("the server ", f"the server {server!r} ", 1))
    importlib.invalidate_caches()
    module = sys.modules[name]
    path = str(module.__file__)
    source = Path(path).read_text(encoding="utf-8")
    if _MARK in source:
        raise ToolMissing(f"the server {server!r} is still connecting")
    exec(compile(source, path, "exec"), vars(module))


class _MissingModuleFinder:
    """The last finder on `sys.meta_path`, so that it is asked only for modules that no other finder has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise why a module below `servers` is missing; ignore other names."""
        __tracebackhide__ = True
        tree, _, rest = name.partition(".")
        root = sys.modules.get(tree)
        if tree != TREE or not rest or root is None or not hasattr(root, "CATALOGUE"):
            return
        package, _, tool = rest.partition(".")
        if not tool:
            listed = sorted(entry.parent.name for entry in Path(str(root.__file__)).parent.glob("*/__init__.py"))
            raise ToolMissing(f"there is no server {package!r}{suggestion(package, listed)}")
        module = sys.modules.get(f"{TREE}.{package}")
        if module is not None and "." not in tool:
            raise _missing_tool(module, package, tool)


class _StaleTreeFinder:
    """The first finder on `sys.meta_path`: refuses modules of tools that the loaded package of their server lacks.

    The host may have replaced the tree since the package was loaded. Python would find the file of a tool that is new
    there, and `from servers.SERVER import TOOL` would give the module instead of the function.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise that the server has no such tool; ignore other names, and a package that is being loaded."""
        __tracebackhide__ = True
        tree, _, rest = name.partition(".")
        package, _, tool = rest.partition(".")
        if tree != TREE or not tool or "." in tool:
            return
        # Looked up in their dictionaries, because the session may have a package of its own with the same name.
        root, module = sys.modules.get(tree), sys.modules.get(f"{tree}.{package}")
        if not isinstance(root, ModuleType) or not isinstance(module, ModuleType) or "CATALOGUE" not in vars(root):
            return
        if tool not in vars(module) and not getattr(module.__spec__, "_initializing", False):
            raise _missing_tool(module, package, tool)


def _missing_tool(module: ModuleType, package: str, tool: str) -> ToolMissing:
    reason = getattr(module, "UNREACHABLE", "")
    known = sorted(name for name, value in vars(module).items() if isinstance(value, Tool))
    return ToolMissing(reason or f"the server has no such tool{suggestion(tool, known)}", package, tool)


def explain_imports() -> None:
    """Put the finders that explain missing modules on `sys.meta_path`, once."""
    if not any(isinstance(finder, _MissingModuleFinder) for finder in sys.meta_path):
        # Neither ever returns a spec to load.
        sys.meta_path.insert(0, _StaleTreeFinder())  # pyright: ignore[reportArgumentType]
        sys.meta_path.append(_MissingModuleFinder())  # pyright: ignore[reportArgumentType]
