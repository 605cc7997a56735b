"""Undo what a warm-up cell leaves in the shell, so that the session's first cell finds it unused."""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import linecache
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .shell import ZMQShell

_LAST_RESULTS = ("_", "__", "___")
_LAST_INPUTS = ("_i00", "_i", "_ii", "_iii")
_INPUTS = ("input_hist_parsed", "input_hist_raw", "db_input_cache")
_LAST_EXECUTION = ("execution_count", "last_execution_result", "last_execution_succeeded")
_LAST_ERRORS = ("last_type", "last_value", "last_traceback", "last_exc")


@contextmanager
def no_traces(shell: ZMQShell) -> Generator[None, None, None]:
    """Restore names, `In`, `Out`, the count, remembered inputs and results, sources and errors after the block."""
    hook: Any = shell.displayhook
    history: Any = shell.history_manager
    sources: dict[str, int] = getattr(shell.compile, "_filename_map", {})
    shown: dict[int, str] = getattr(history, "output_hist_reprs", {})
    errors: dict[int, Any] = getattr(history, "exceptions", {})
    kept: list[Any] = [shell.user_ns, shell.user_ns_hidden, shell.user_ns["_oh"], shown, errors, sources]
    before: list[tuple[Any, dict[Any, Any]]] = [(mapping, dict(mapping)) for mapping in kept]
    inputs: list[tuple[list[Any], list[Any]]] = [(one, list(one)) for one in map(partial(getattr, history), _INPUTS)]
    attributes = [(hook, name, getattr(hook, name, "")) for name in _LAST_RESULTS]
    attributes += [(history, name, getattr(history, name)) for name in _LAST_INPUTS]
    attributes += [(shell, name, getattr(shell, name, None)) for name in _LAST_EXECUTION]
    attributes.append((shell.InteractiveTB, "tb", getattr(shell.InteractiveTB, "tb", None)))
    try:
        yield
    finally:
        for name in sources.keys() - before[-1][1].keys():
            linecache.cache.pop(name, None)
        for mapping, content in before:
            _restore(mapping, content)
        for values, content in inputs:
            values[:] = content
        for owner, name, value in attributes:
            setattr(owner, name, value)
        for name in _LAST_ERRORS:
            with contextlib.suppress(AttributeError):
                delattr(sys, name)


def _restore(mapping: Any, content: "dict[Any, Any]") -> None:
    """Restore a mapping in place, because others hold the same object."""
    for name in [name for name in mapping if name not in content]:
        del mapping[name]
    mapping.update(content)
