"""The interpreter's state besides variables: folder, paths, environment, random states, library options, history.

For each part, `_take_*` returns what the session has changed, as a value that can be pickled, and `_give_*` sets it in
a new process. Libraries that were not imported are left alone. Does not know the file that the values go into.
"""

# IPython and the libraries are typed in part only, and may not be there at all.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import importlib
import linecache
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_HISTORY_CHARACTERS = 4_000_000
_NUMPY_PRINTING = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "formatter": None,
}
_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_OWN_OF_IPYTHON = re.compile(r"_+|_i+|_i?\d+|_[iod]h|__warningregistry__|__conditional_annotations__")


@dataclass
class _Start:
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    path: list[str] = field(default_factory=list[str])
    filters: list[Any] = field(default_factory=list[Any])


_start: _Start | None = None


def remember_start(shell: Any, environment: dict[str, str]) -> None:
    """Record the state before the first cell, to know later what the session changed. Only the first call counts."""
    global _start  # one for each process; a fork of a session keeps that of the origin
    if _start is None:
        _start = _Start(dict(shell.user_ns), environment, list(sys.path), list(warnings.filters))


def forget_start() -> None:
    """Forget the state before the first cell, because those cells were a rehearsal."""
    global _start  # as above
    _start = None


def move_start(environment: dict[str, str]) -> None:
    """Record the environment variables that a fork was started with, because the session has not set them itself."""
    if _start is not None:
        _start.environment.update(environment)


def variable_at_start(name: str) -> str:
    """Return an environment variable as the sandbox gave it, whatever the session has set since; empty for others."""
    return _started().environment.get(name, "")


def variables(shell: Any) -> dict[str, Any]:
    """Return the session's variables, without those of IPython and those from before the first cell."""
    start = _started().names
    return {
        name: value
        for name, value in list(shell.user_ns.items())
        if isinstance(name, str)
        and not _OWN_OF_IPYTHON.fullmatch(name)
        and not (name in start and start[name] is value)
    }


def _started() -> _Start:
    return _start or _Start()


# The process


def _take_folder(_shell: Any) -> Any:
    return str(Path.cwd())


def _give_folder(_shell: Any, folder: str) -> None:
    os.chdir(folder)


def _take_path(_shell: Any) -> Any:
    at_start = set(_started().path)
    first = next((index for index, entry in enumerate(sys.path) if entry in at_start), 0)
    added = [(index < first, entry) for index, entry in enumerate(sys.path) if entry not in at_start]
    return added or None


def _give_path(_shell: Any, added: list[tuple[bool, str]]) -> None:
    sys.path[:0] = [entry for is_before, entry in added if is_before and entry not in sys.path]
    sys.path += [entry for is_before, entry in added if not is_before and entry not in sys.path]
    importlib.invalidate_caches()


def _take_environment(_shell: Any) -> Any:
    now, then = dict(os.environ), _started().environment
    changed = {name: value for name, value in now.items() if then.get(name) != value}
    removed = [name for name in then if name not in now]
    return (changed, removed) if changed or removed else None


def _give_environment(_shell: Any, state: tuple[dict[str, str], list[str]]) -> None:
    changed, removed = state
    os.environ.update(changed)
    for name in removed:
        os.environ.pop(name, None)
    if "TZ" in changed or "TZ" in removed:
        time.tzset()


def _take_filters(_shell: Any) -> Any:
    at_start = _started().filters
    added = [one for one in warnings.filters if one not in at_start]
    return [
        (action, _pattern(text), category, _pattern(module), line) for action, text, category, module, line in added
    ]


def _pattern(compiled: Any) -> str:
    return getattr(compiled, "pattern", compiled) or ""


def _give_filters(_shell: Any, added: list[tuple[Any, str, Any, str, int]]) -> None:
    for action, text, category, module, line in reversed(added):
        warnings.filterwarnings(action, text, category, module, line)


# Random states


def _take_random(_shell: Any) -> Any:
    return random.getstate()


def _give_random(_shell: Any, state: Any) -> None:
    random.setstate(state)


def _take_numpy_random(_shell: Any) -> Any:
    if "numpy.random" not in sys.modules:
        return None
    return sys.modules["numpy.random"].get_state(legacy=False)


def _give_numpy_random(_shell: Any, state: Any) -> None:
    import numpy.random

    numpy.random.set_state(state)


# Options of libraries


def _take_numpy(_shell: Any) -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    printing = numpy.get_printoptions()
    changed = {name: printing[name] for name, usual in _NUMPY_PRINTING.items() if printing.get(name, usual) != usual}
    errors = {name: value for name, value in numpy.geterr().items() if _NUMPY_ERRORS.get(name) != value}
    return (changed, errors) if changed or errors else None


def _give_numpy(_shell: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    import numpy

    printing, errors = state
    numpy.set_printoptions(**printing)
    numpy.seterr(**errors)


def _take_pandas(_shell: Any) -> Any:
    if "pandas" not in sys.modules:
        return None
    # Use private names, because the only public way to the defaults is to parse help texts.
    from pandas._config import config

    options: Any = vars(config)["_registered_options"]
    dated: Any = vars(config)["_deprecated_options"]
    now = {name: config.get_option(name) for name in options if name not in dated}
    changed = {name: value for name, value in now.items() if value is not options[name].defval}
    return {name: value for name, value in changed.items() if value != options[name].defval} or None


def _give_pandas(_shell: Any, changed: dict[str, Any]) -> None:
    import pandas

    for name, value in changed.items():
        pandas.set_option(name, value)


def _take_matplotlib(_shell: Any) -> Any:
    matplotlib: Any = sys.modules.get("matplotlib")
    if matplotlib is None:
        return None
    now, then = matplotlib.rcParams, matplotlib.rcParamsOrig
    # Skip the backend, because reading it would choose one.
    return {name: now[name] for name in now if not name.startswith("backend") and now[name] != then.get(name)} or None


def _give_matplotlib(_shell: Any, changed: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.rcParams.update(changed)


# IPython


def _take_history(shell: Any) -> Any:
    """Return inputs and cells' sources; tracebacks and `inspect` need the sources of functions from earlier cells."""
    cells: dict[str, str] = getattr(shell.compile, "_filename_map", {})
    sources = {name: entry for name, entry in linecache.cache.items() if name in cells and len(entry) == 4}
    inputs = list(shell.history_manager.input_hist_parsed)
    size = sum(map(len, inputs)) + sum(entry[0] or 0 for entry in sources.values())
    if size > MAX_HISTORY_CHARACTERS:
        inputs, sources = [], {}
    names = {name: cells[name] for name in sources}
    return {"count": shell.execution_count, "inputs": inputs, "sources": sources, "names": names}


def _give_history(shell: Any, state: dict[str, Any]) -> None:
    shell.execution_count = int(state["count"])
    shell.history_manager.input_hist_parsed[:] = state["inputs"]
    linecache.cache.update(state["sources"])
    getattr(shell.compile, "_filename_map", {}).update(state["names"])


class InterpreterPart(NamedTuple):
    """One part of the interpreter's state."""

    name: str
    """The expression for it in Python; reports use it when the part could not be saved or loaded."""
    take: Callable[[Any], Any]
    """Returns the part's state in this process; None when there is nothing to save."""
    give: Callable[[Any, Any], None]
    """Sets the part's state in this process."""


BEFORE_VARIABLES = (
    InterpreterPart("os.getcwd()", _take_folder, _give_folder),
    InterpreterPart("sys.path", _take_path, _give_path),
    InterpreterPart("os.environ", _take_environment, _give_environment),
)
# After the variables, because loading them runs code, which must not use up random numbers or meet a warnings filter
# that raises errors.
AFTER_VARIABLES = (
    InterpreterPart("random.getstate()", _take_random, _give_random),
    InterpreterPart("numpy.random.get_state()", _take_numpy_random, _give_numpy_random),
    InterpreterPart("numpy.get_printoptions()", _take_numpy, _give_numpy),
    InterpreterPart("pandas.options", _take_pandas, _give_pandas),
    InterpreterPart("matplotlib.rcParams", _take_matplotlib, _give_matplotlib),
    InterpreterPart("warnings.filters", _take_filters, _give_filters),
    InterpreterPart("In", _take_history, _give_history),
)
