"""Imports of servers and tools that are not there: wait while a server connects, or raise why it is missing.

Between two cells, hooks close the idle connection and unload generated modules that have a newer version.
"""

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


def watch_cells() -> None:
    """Register the hooks with IPython, where this process is an IPython shell."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.events.register("pre_run_cell", _unload_outdated)
        shell.events.register("post_run_cell", _close_connection)


def _unload_outdated(*_: Any) -> None:
    module = sys.modules.get(TREE)
    loaded = getattr(module, "CATALOGUE", None)
    if module is None or not isinstance(loaded, str):
        return  # not imported, or a module of the session's own with the same name
    # `servers` is reached through a link to the newest version's folder, which has the version as its name.
    if Path(str(module.__file__)).resolve().parent.parent.name == loaded:
        return
    for name in [name for name in sys.modules if name == TREE or name.startswith(f"{TREE}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _close_connection(*_: Any) -> None:
    host_connection().close_if_idle()
