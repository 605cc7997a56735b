"""Between two cells: let go of the connection, and forget generated modules that there are newer ones of."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from .connection import own

TREE = "servers"


def watch_cells() -> None:
    """Where there are cells."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.events.register("pre_run_cell", _before)
        shell.events.register("post_run_cell", _after)


def _before(*_: Any) -> None:
    module = sys.modules.get(TREE)
    loaded = getattr(module, "CATALOGUE", None)
    if module is None or not isinstance(loaded, str):
        return  # not imported, or the session's own
    # The folder of a version is named after it; what leads there is a link.
    if Path(str(module.__file__)).resolve().parent.parent.name == loaded:
        return
    for name in [name for name in sys.modules if name == TREE or name.startswith(f"{TREE}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _after(*_: Any) -> None:
    own().rest()
