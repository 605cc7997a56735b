"""Making a process worth forking: modules imported and first times over, so that its copies need not repeat them.

Everything here runs in the environment's own code and leaves nothing behind that copies must not share: no thread, no
event loop, no socket, no name in the user's namespace.
"""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import contextlib
import gc
import importlib
import io
import os
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import forking
from .shell import Shell
from .traces import no_traces

# Standard library modules that cells use most; each saves its import in every session.
_COMMON = (
    *("base64", "collections", "concurrent.futures", "csv", "dataclasses", "datetime", "decimal", "email", "enum"),
    *("functools", "glob", "hashlib", "http.client", "inspect", "itertools", "json", "logging", "math"),
    *("multiprocessing", "multiprocessing.process", "pathlib", "pickle", "random", "re", "shutil", "sqlite3"),
    *("statistics", "string", "subprocess", "tempfile", "textwrap", "time", "typing", "urllib.request", "uuid"),
    *("zipfile", "ctypes"),
)
# Cells of the kinds that every session runs: an expression, an error, a page of output, an `await`.
_CELLS = ("1 + 1", "print('', end='')", "raise ValueError", "%pwd", "import asyncio\nawait asyncio.sleep(0)")
_BLAS_CALLS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")

SetThreads = Callable[[int], Any]


class Unfit(Exception):
    """A module has made this process one that must not be forked."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module = module


def import_all(modules: "list[str]") -> "dict[str, str]":
    """Import them, and the common ones; those that fail are told why. What is not installed is no failure."""
    failed: dict[str, str] = {}
    for name in (*_COMMON, *modules):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                failed[name] = f"{type(error).__name__}: {error}"[:500]
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
        if reason := _unfitness():
            raise Unfit(name, reason)
    return failed


def _unfitness() -> str:
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it starts threads, which no session would have: {', '.join(threads)}"[:500]
    return forking.obstacle()


def run_first_times(shell: Shell) -> None:
    """What is slow only once."""
    loop = asyncio.new_event_loop()
    shell.loop_runner = loop.run_until_complete
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with no_traces(shell):
            for cell in _CELLS:
                shell.run_cell(cell, store_history=False, silent=False)
        _draw_once()
    loop.close()
    asyncio.set_event_loop(None)
    ssl.RAND_bytes(8)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None)


def _draw_once() -> None:
    """A figure and a table: fonts, backends and formatters."""
    with contextlib.suppress(Exception):
        if "matplotlib.pyplot" in sys.modules:
            pyplot = sys.modules["matplotlib.pyplot"]
            figure, axes = pyplot.subplots()
            axes.plot([1, 2])
            axes.set_title("x")
            figure.savefig(io.BytesIO(), format="png")
            pyplot.close("all")
        if "pandas" in sys.modules:
            frame = sys.modules["pandas"].DataFrame({"a": [1.5], "b": ["x"]})
            frame._repr_html_()
            repr(frame)
            frame.describe()


def home_folders() -> "list[str]":
    """Folders that libraries made in HOME and remember: a copy makes them again in its own."""
    home = os.environ.get("HOME", "")
    return [folder for folder, _, _ in os.walk(home)][1:100] if home else []


def find_thread_setters() -> "list[SetThreads]":
    """Of each OpenBLAS there is: they were started with one thread, so that this process stays forkable."""
    import ctypes

    found: list[SetThreads] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        for path in sorted({"/" + line.partition("/")[2] for line in lines if "openblas" in line}):
            library = ctypes.CDLL(path)
            found += [getattr(library, name) for name in _BLAS_CALLS if hasattr(library, name)][:1]
    return found


def settle() -> None:
    """Nothing that is here now is ever looked at by the garbage collector again: copies share it unread."""
    # What modules printed would be printed once more by every copy.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    gc.collect()
    gc.freeze()
