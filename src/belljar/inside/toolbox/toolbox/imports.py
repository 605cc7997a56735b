"""Imports of servers and tools that are not there: wait while a server connects, or raise why it is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from .connection import own
from .errors import ToolMissing, error_from, meant
from .tools import Tool, patience

TREE = "servers"
_MARK = "from toolbox import connect\n"


def connect(server: str, name: str) -> None:
    """Wait for a server, then run its package's source again, which the host has rewritten meanwhile.

    The generated package of a server that was still connecting calls this.
    """
    __tracebackhide__ = True
    if not patience.waits:
        raise ToolMissing(f"the server {server!r} is still connecting")
    answer = own().ask({"op": "join", "server": server})
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


class _MissingModule:
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
            raise ToolMissing(f"there is no server {package!r}{meant(package, listed)}")
        module = sys.modules.get(f"{TREE}.{package}")
        if module is None or "." in tool:
            return
        reason = getattr(module, "UNREACHABLE", "")
        known = sorted(name for name, value in vars(module).items() if isinstance(value, Tool))
        raise ToolMissing(reason or f"the server has no such tool{meant(tool, known)}", package, tool)


def explain_imports() -> None:
    """Append the finder that explains missing modules to `sys.meta_path`, once."""
    if not any(isinstance(finder, _MissingModule) for finder in sys.meta_path):
        sys.meta_path.append(_MissingModule())  # pyright: ignore[reportArgumentType]  # it never returns a spec to load
