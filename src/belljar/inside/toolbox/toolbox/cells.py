"""Hooks between two cells: close the idle connection, and unload generated modules that have a newer version."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from .connection import host_connection

TREE = "servers"


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
