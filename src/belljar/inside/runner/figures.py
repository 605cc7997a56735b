"""Figures of matplotlib: shown as pictures, also where code has chosen the backend Agg, which shows nothing by itself.

Code that was written for scripts often chooses Agg, and then calls `pyplot.show` all the same.
"""

import contextlib
import importlib
import sys
import weakref
from typing import Any

_INLINE = "matplotlib_inline.backend_inline"
_CHOICES = ("use(", "switch_backend(", "MPLBACKEND")
_shown: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The figures that `_show` has shown."""


def prepare() -> None:
    """Have figures shown as pictures, as importing pyplot does."""
    if _INLINE not in sys.modules:
        # A session's own file of that name may raise anything.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(_INLINE)


def may_choose_agg(code: str) -> bool:
    """Return whether code with the letters `gg` looks as if it chose Agg."""
    return ("matplotlib" in code or "plt" in code) and any(word in code for word in _CHOICES)


def show_with_agg() -> None:
    """Have `pyplot.show` show figures where the backend is Agg; called before code that may choose it."""
    prepare()
    with contextlib.suppress(Exception, SystemExit):
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        # pyplot copies the `show` of a backend when code chooses it, so ours has to be there before.
        backend.show = _show


def _show(*_: Any, **__: Any) -> None:
    """Show the current figure, and those that were not shown yet. None is closed, because Agg closes none either."""
    display: Any = importlib.import_module("IPython.display").display
    figures: Any = importlib.import_module("matplotlib._pylab_helpers").Gcf
    for manager in figures.get_all_fig_managers():
        figure = manager.canvas.figure
        if manager is figures.get_active() or figure not in _shown:
            _shown.add(figure)
            display(figure)
