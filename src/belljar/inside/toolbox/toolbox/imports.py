"""Importing a server or a tool that is not there: it is waited for while it connects, else said why it is not there."""

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
    """Called by the package of a server that was still connecting: wait for it, and make the package what it is now."""
    __tracebackhide__ = True
    if not patience.waits:
        raise ToolMissing(f"the server {server!r} is still connecting")
    answer = own().ask({"op": "join", "server": server})
    if answer.get("outcome") != "joined":
        told = error_from(answer)
        raise ToolMissing(told.message.replace("the server ", f"the server {server!r} ", 1))
    importlib.invalidate_caches()
    module = sys.modules[name]
    place = str(module.__file__)
    source = Path(place).read_text(encoding="utf-8")
    if _MARK in source:
        raise ToolMissing(f"the server {server!r} is still connecting")
    exec(compile(source, place, "exec"), vars(module))  # the file that Python would have run


class _MissingModule:
    """The last of the finders: what it is asked for, none of the others has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Say why a part of the tree is not there; other names are none of its business."""
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
    """From now on."""
    if not any(isinstance(finder, _MissingModule) for finder in sys.meta_path):
        sys.meta_path.append(_MissingModule())  # pyright: ignore[reportArgumentType]  # what it never finds it need not load
