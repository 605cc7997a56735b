"""Undo what a warm-up cell leaves in the shell, so that the session's first cell finds it unused."""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import linecache
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from .shell import Shell

_LAST_RESULTS = ("_", "__", "___")
_LAST_ERRORS = ("last_type", "last_value", "last_traceback", "last_exc")


@contextmanager
def no_traces(shell: Shell) -> Generator[None, None, None]:
    """Restore names, `Out`, remembered results, sources and errors after the block."""
    hook: Any = shell.displayhook
    sources: dict[str, int] = getattr(shell.compile, "_filename_map", {})
    shown: dict[int, str] = getattr(shell.history_manager, "output_hist_reprs", {})
    kept: list[Any] = [shell.user_ns, shell.user_ns_hidden, shell.user_ns["_oh"], shown, sources]
    before: list[tuple[Any, dict[Any, Any]]] = [(mapping, dict(mapping)) for mapping in kept]
    results = {name: getattr(hook, name, "") for name in _LAST_RESULTS}
    try:
        yield
    finally:
        for name in sources.keys() - before[-1][1].keys():
            linecache.cache.pop(name, None)
        for mapping, content in before:
            _restore(mapping, content)
        for name, value in results.items():
            setattr(hook, name, value)
        for name in _LAST_ERRORS:
            with contextlib.suppress(AttributeError):
                delattr(sys, name)


def _restore(mapping: Any, content: "dict[Any, Any]") -> None:
    """Restore a mapping in place, because others hold the same object."""
    for name in [name for name in mapping if name not in content]:
        del mapping[name]
    mapping.update(content)
