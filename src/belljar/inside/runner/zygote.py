"""The zygote: a process that never runs a session, has the environment's modules imported, and forks kernels.

Owns the warm-up too: imports and first calls that are slow only once. They leave nothing behind that copies must not
share: no thread, no event loop, no socket, no name in the user's namespace.
"""

import asyncio
import contextlib
import gc
import importlib
import io
import json
import os
import signal
import socket
import ssl
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import fork, huge_pages, immortal, namespaces, vfork
from .channel import Channel
from .pristine import no_traces
from .serving import Runner
from .shell import Shell

_UNFIT = "BELLJAR_UNFIT"
"""The environment variable with the modules that a restart leaves out, and why, as JSON."""


class ZygoteRunner:
    """A shell that is built and warmed up, and the loop that forks kernels from it."""

    def __init__(self, modules: "list[str]") -> None:
        self.runner = Runner()
        self.failed = import_all(modules)
        run_first_times(self.runner.shell)
        self.runner.open_streams()
        self._folders = home_folders()
        self._set_threads = find_thread_setters()
        freeze_objects()
        immortal.make_immortal()
        self._small = huge_pages.find_parts()

    def serve(self, channel: Channel) -> None:
        """Fork kernels on request until the host is gone. Never returns in a copy, which serves and then exits."""
        # Reap at once and not with the next request, because a zombie keeper still counts in its session's group.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: fork.reap())
        channel.send({"type": "warm", "failed": self.failed, "threads": fork.thread_count()})
        while True:
            # Between requests, because each takes as long as a fork does.
            while self._small and not channel.has_message():
                huge_pages.collapse(self._small.pop())
            try:
                message = channel.receive()
            except EOFError:
                return
            received = channel.take_descriptors(message["descriptors"])
            descriptors, (holder, *groups) = received[: fork.MOST], received[fork.MOST :]
            enter = partial(fork.enter_sandbox, message["entry"], holder, groups)
            try:
                self._fork(descriptors, message, enter)
            except BaseException as error:
                fork.refuse(descriptors, error)
            for descriptor in received:
                os.close(descriptor)

    def _fork(self, descriptors: "list[int]", message: "dict[str, Any]", enter: "Callable[[], None]") -> None:
        become = partial(self._become_kernel_or_exit, descriptors, message)
        has_keeper = message["has_keeper"]
        # A thread that a library has started meanwhile would run on in memory that two processes then share.
        if not has_keeper and vfork.is_possible() and fork.thread_count() == 1:
            fork.fork_kernel_at_once(enter, become)
            # The change of user in our memory has made our entry in /proc root's.
            namespaces.own_proc_entry()
        elif fork.fork_kernel(descriptors, enter=enter, is_hidden=False, has_keeper=has_keeper, is_session=False):
            become()

    def _become_kernel_or_exit(self, descriptors: "list[int]", message: "dict[str, Any]") -> None:
        try:
            self._become_kernel(descriptors, message)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)  # a copy must not return into the zygote's loop

    def _become_kernel(self, descriptors: "list[int]", message: "dict[str, Any]") -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock = fork.take_streams(descriptors)
        fork.close_inherited({sock.fileno()})
        namespaces.own_proc_entry()
        os.environ.clear()
        os.environ.update(message["environment"], PWD=message["folder"])
        _prepend_path(message["environment"].get("PYTHONPATH", ""))
        os.chdir(message["folder"])
        fork.reseed()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                Path(folder).mkdir(parents=True, exist_ok=True)
        for set_threads in self._set_threads if message["threads"] > 1 else ():
            set_threads(message["threads"])
        self.runner.attach(sock)
        self.runner.serve()
        os._exit(0)


def _prepend_path(paths: str) -> None:
    """Add paths to `sys.path` where a cold start would have them: before the environment's own packages."""
    wanted = [path for path in paths.split(os.pathsep) if path and path not in sys.path]
    sys.path[:] = [*sys.path[:1], *wanted, *sys.path[1:]]


def _own_command() -> "list[bytes]":
    """Return the command line of this process; Python 3.9 has no `sys.orig_argv`."""
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]


def main(descriptor: str, *modules: str) -> None:
    """Warm up, then fork kernels on request.

    A separate process keeps the sandbox open, because sessions outlive a zygote.
    """
    unfit: dict[str, str] = json.loads(os.environ.pop(_UNFIT, "{}"))
    if not unfit and os.fork():
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        os.execvp("sleep", ["sleep", "infinity"])
    try:
        zygote = ZygoteRunner([module for module in modules if module not in unfit])
    except Unfit as error:
        # An import cannot be undone, so start this program again without that module.
        os.environ[_UNFIT] = json.dumps({**unfit, error.module: str(error)})
        os.execv(sys.executable, _own_command())
    zygote.failed.update(unfit)
    zygote.serve(Channel(socket.socket(fileno=int(descriptor))))


# Warm-up

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


# The standard library modules that cells use most; each one here saves its import in every session.
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
    """A module has put this process into a state in which it must not be forked."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module = module


def import_all(modules: "list[str]") -> "dict[str, str]":
    """Import these and the common modules, and return the errors by module. A missing module is no error."""
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
    return fork.obstacle()


def run_first_times(shell: Shell) -> None:
    """Do what is slow only the first time: cells, figures, tables, random bytes."""
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
    """Draw a figure and format a table, which loads fonts, backends and formatters."""
    with contextlib.suppress(Exception):
        if "matplotlib.pyplot" in sys.modules:
            pyplot = sys.modules["matplotlib.pyplot"]
            figure, axes = pyplot.subplots()
            axes.plot([1, 2])
            axes.set_title("x")
            figure.savefig(io.BytesIO(), format="png")
            pyplot.close("all")
            # Every copy would empty this cache as its first act, which takes 1 ms and 100 pages.
            sys.modules["matplotlib.font_manager"]._get_font.cache_clear()
        if "pandas" in sys.modules:
            frame = sys.modules["pandas"].DataFrame({"a": [1.5], "b": ["x"]})
            frame._repr_html_()
            repr(frame)
            frame.describe()


def home_folders() -> "list[str]":
    """Return the folders that libraries made in HOME and remember; a copy makes them again in its own HOME."""
    home = os.environ.get("HOME", "")
    return [folder for folder, _, _ in os.walk(home)][1:100] if home else []


def find_thread_setters() -> "list[SetThreads]":
    """Return the function of each loaded OpenBLAS and OpenMP that sets its number of threads.

    They were started with one thread, so that this process can be forked.
    """
    import ctypes

    found: list[SetThreads] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        for path in sorted({"/" + line.partition("/")[2] for line in lines if "openblas" in line}):
            library = ctypes.CDLL(path)
            found += [getattr(library, name) for name in _BLAS_CALLS if hasattr(library, name)][:1]
        # Not torch.set_num_threads, which also starts the threads of a second pool, and then the session has no states
        # to go back to.
        for path in sorted({"/" + line.partition("/")[2] for line in lines if "libgomp" in line}):
            found.append(ctypes.CDLL(path).omp_set_num_threads)
    return found


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection, so that copies keep sharing their memory pages."""
    gc.collect()
    gc.freeze()
