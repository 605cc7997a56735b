"""What code is told that imports a server or a tool that is not there: why, and what there is instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .errors import ToolMissing, meant
from .tools import Tool

TREE = "servers"


class _Missing:
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
    if not any(isinstance(finder, _Missing) for finder in sys.meta_path):
        sys.meta_path.append(_Missing())  # pyright: ignore[reportArgumentType]  # what it never finds it need not load
