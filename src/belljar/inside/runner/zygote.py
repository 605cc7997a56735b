"""The zygote: a process that never runs a session, has the environment's modules imported, and forks kernels.

Owns the warm-up too: imports and first calls that are slow only once. They leave nothing behind that forks must not
share: no thread, no selector, no socket, no name in the user's namespace.
"""

import array
import asyncio
import contextlib
import ctypes
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

from . import (
    fork,
    fork_losses,
    interpreter_state,
    page_sharing,
    rich_output,
    setns,
    vfork,
)
from .channel import Channel, encode_stream
from .runner import SHELL, Runner
from .shell import no_traces

_UNFIT = "BELLJAR_UNFIT"
"""The environment variable with the modules that a restart leaves out, and why, as JSON."""


class ZygoteRunner:
    """A shell that is built and warmed up, and the loop that forks kernels from it."""

    def __init__(self, modules: "list[str]") -> None:
        self.runner = Runner()
        self.failed = import_all(modules)
        self._folders: list[str] = []
        run_first_times(self.runner, self._rehearse_start)
        self._folders = home_folders()
        self._thread_setters = find_thread_setters()
        self._threads = 1
        freeze_objects()
        page_sharing.make_immortal()
        self._small = page_sharing.find_heap_parts()

    def serve(self, channel: Channel) -> None:
        """Fork kernels on request until the host is gone. Never returns in a fork, which serves and then exits.

        A request says nothing about the session that is to begin, because whatever is read here can be found in the
        memory of all later sessions.
        """
        # Reap at once and not with the next request, because a zombie keeper still counts in its session's group.
        fork.set_handler(signal.SIGCHLD, _reap)
        # Forks ignore it until they are connected.
        fork.set_handler(signal.SIGINT, fork.IGNORE)
        channel.send({"type": "warm", "failed": self.failed, "threads": fork_losses.thread_count()})
        while True:
            # Freeze now, because the first collection in a fork would write to all objects that the zygote has made
            # since it last did this: 64 pages.
            gc.collect(0)
            gc.freeze()
            # Between requests, because each takes as long as a fork does.
            while self._small and not channel.has_message():
                page_sharing.collapse(self._small.pop())
            try:
                message = channel.receive()
            except EOFError:
                return
            received = channel.take_descriptors(message["descriptors"])
            descriptors, (holder, *groups) = received[: fork.DESCRIPTOR_COUNT], received[fork.DESCRIPTOR_COUNT :]
            enter = partial(fork.enter_sandbox, message["entry"], holder, groups)
            try:
                self._use_threads(message["threads"])
                self._fork(descriptors, enter, has_keeper=message["has_keeper"])
            except BaseException as error:
                fork.refuse(descriptors, error)
            for descriptor in received:
                os.close(descriptor)

    def _use_threads(self, count: int) -> None:
        """Let linear algebra use this many threads in all kernels from now on.

        OpenBLAS starts them at once. They are ended here, and started again in a kernel when that has work for them:
        most never have, and a kernel without other threads has checkpoints that take less memory.
        """
        if count != self._threads:
            for set_threads in self._thread_setters:
                set_threads(count)
            fork_losses.end_pools()
            self._threads = count

    def _fork(self, descriptors: "list[int]", enter: "Callable[[], None]", *, has_keeper: bool) -> None:
        become = partial(self._become_kernel_or_exit, descriptors)
        # A thread that a library has started meanwhile would run on in memory that two processes then share.
        if not has_keeper and vfork.is_possible() and fork_losses.thread_count() == 1:
            fork.fork_kernel_at_once(enter, become, is_session=False)
            # The change of user in our memory has made our entry in /proc root's.
            setns.own_proc_entry()
        elif fork.fork_kernel(descriptors, enter=enter, is_hidden=False, has_keeper=has_keeper, is_session=False):
            become()

    def _become_kernel_or_exit(self, descriptors: "list[int]") -> None:
        try:
            self._become_kernel(descriptors)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)  # a fork must not return into the zygote's loop

    def _become_kernel(self, descriptors: "list[int]") -> None:
        fork.set_handler(signal.SIGCHLD, fork.DEFAULT)
        sock = fork.take_streams(descriptors)
        fork.close_inherited({sock.fileno()})
        setns.own_proc_entry()
        self.runner.attach(Channel(sock))
        self._serve_session()
        os._exit(0)

    def _serve_session(self) -> None:
        """Read who this fork is, and serve it."""
        self.runner.serve(self._adopt_identity(self.runner.channel.receive()))

    def _adopt_identity(self, identity: "dict[str, Any]") -> "dict[str, str]":
        """Give a fork its own paths, working directory, seeds, folders and environment variables; return the last."""
        environment = {"SHELL": SHELL, **identity["environment"], "PWD": identity["folder"]}
        _replace_environment(environment)
        _prepend_path(environment.get("PYTHONPATH", ""))
        os.chdir(environment["PWD"])
        fork.reseed()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                os.mkdir(folder)  # noqa: PTH102 - a path object touches 40 pages of its class
        return environment

    def _rehearse_start(self) -> None:
        """Do in this process what a kernel does from its fork to the end of its first cells.

        So kernels find in Python's caches, and in the dynamic linker's, what they would write there otherwise.
        """
        with contextlib.suppress(OSError):
            os.setsid()
        fork.own_thread_id()
        ours, theirs = socket.socketpair()
        descriptors = [theirs.detach(), os.dup(1), os.dup(2), os.dup(2)]
        with ours, fork.take_streams(descriptors):
            fork.close_inherited(fork.open_descriptors())
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        setns.own_proc_entry()
        identity = {"environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 - as above
        rehearse(self.runner, PLAIN_CELLS, self._serve_session, identity)
        interpreter_state.forget_start()


def _reap(_number: int, _frame: Any) -> None:
    fork.reap()


def _replace_environment(wanted: "dict[str, str]") -> None:
    """Make the environment variables these. Most are the zygote's own: each that is set anew takes memory.

    They are compared as bytes, as `os.environ` holds them, because its own methods touch 40 pages.
    """
    held: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    values = {os.fsencode(name): os.fsencode(value) for name, value in wanted.items()}
    for name in [name for name in held if name not in values]:
        del os.environ[os.fsdecode(name)]
    for name, value in values.items():
        if held.get(name) != value:
            os.environ[os.fsdecode(name)] = os.fsdecode(value)


def _prepend_path(paths: str) -> None:
    """Add paths to `sys.path` where a cold start would have them: before the environment's own packages."""
    wanted = [path for path in paths.split(os.pathsep) if path and path not in sys.path]
    sys.path[:] = [*sys.path[:1], *wanted, *sys.path[1:]]


def _own_command() -> "list[bytes]":
    """Return the command line of this process; Python 3.9 has no `sys.orig_argv`."""
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]


def main(descriptor: str, own_variables: str, *modules: str) -> None:
    """Warm up, then fork kernels on request. Forks do not get the environment variables `own_variables`.

    A separate process keeps the sandbox open, because sessions outlive a zygote.
    """
    unfit: dict[str, str] = json.loads(os.environ.pop(_UNFIT, "{}"))
    if not unfit and os.fork():
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        os.execvp("sleep", ["sleep", "infinity"])
    try:
        zygote = ZygoteRunner([module for module in modules if module not in unfit])
    except UnforkableModule as error:
        # An import cannot be undone, so start this program again without that module.
        os.environ[_UNFIT] = json.dumps({**unfit, error.module: str(error)})
        os.execv(sys.executable, _own_command())
    zygote.failed.update(unfit)
    # Here, so that no fork has to. The libraries have read them.
    for name in own_variables.split(","):
        os.environ.pop(name, None)
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
# Cells of the kinds that every session runs: an error, an `await`, a magic, a print, an expression.
CELLS = (
    "raise ValueError",
    "import asyncio\nawait asyncio.sleep(0)",
    "%pwd",
    "print('', end='')",
    "import sys\n1 + 1",
)
PLAIN_CELLS = CELLS[-2:]
"""Those that run the same code as most cells do."""
_BLAS_CALLS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")

SetThreads = Callable[[int], Any]


class UnforkableModule(Exception):
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
            raise UnforkableModule(name, reason)
    return failed


def _unfitness() -> str:
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it starts threads, which no session would have: {', '.join(threads)}"[:500]
    return fork_losses.obstacle(fork_losses.thread_count())


def run_first_times(runner: Runner, rehearse_start: "Callable[[], None]") -> None:
    """Do what is slow only the first time: random bytes, figures, tables, cells, a checkpoint, a kernel's start."""
    ssl.RAND_bytes(8)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _draw_once()
    runner.prepare()
    rehearse(runner, CELLS)
    rehearse_start()
    gc.collect()
    page_sharing.fill_gaps()
    rich_output.gather_printers(runner.shell.display_formatter)
    # Python caches which attribute a type has. A fork that replaces an entry also writes to the entry's old name, on a
    # page of its own: 250 pages by the end of the first cell. So the cache holds what cells look up, and nothing else.
    ctypes.pythonapi.PyType_ClearCache()
    rehearse(runner, CELLS)
    rehearse_start()


def rehearse(
    runner: Runner,
    cells: "tuple[str, ...]",
    serve: "Callable[[], None] | None" = None,
    identity: "dict[str, Any] | None" = None,
) -> None:
    """Serve cells, then fork a checkpoint, which ends at once. `serve` is told the `identity` first."""
    ours, theirs = socket.socketpair()
    with ours, theirs, no_traces(runner.shell):
        runner.attach(_RehearsalChannel(ours, theirs, cells, identity))
        (serve or runner.serve_requests)()
        runner.loop.close()
        asyncio.set_event_loop(None)
        _rehearsed.append((runner.loop, runner.channel))


_rehearsed: "list[Any]" = []
"""The loops and channels of rehearsals, held because each fork would free them otherwise, which writes to 70 pages."""


class _RehearsalChannel(Channel):
    """A connection to a host that sends cells and acknowledges outputs, asks for one checkpoint, and closes."""

    def __init__(
        self,
        sock: socket.socket,
        peer: socket.socket,
        cells: "tuple[str, ...]",
        identity: "dict[str, Any] | None",
    ) -> None:
        super().__init__(sock)
        self._peer = peer
        self._host = Channel(peer)
        self._cells = [*cells]
        if identity:
            self._host.send(identity)

    def send(self, *messages: "dict[str, Any]", if_room: bool = False) -> None:
        """Send messages, and let the host answer."""
        super().send(*messages, if_room=if_room)
        for message in messages:
            if message.get("ack"):
                self._host.send({"op": "ack"})
            elif message["type"] in ("ready", "finished") and self._cells:
                cell = {"op": "execute", "id": "", "code": self._cells.pop(0), "awaits_go": True}
                self._host.send(cell, {"op": "go", "id": ""})
            elif message["type"] == "finished":
                self._fork_checkpoint()
                self._peer.shutdown(socket.SHUT_WR)

    def _fork_checkpoint(self) -> None:
        """Ask for a checkpoint, which ends at once, because nobody has the other end of its socket."""
        host, own = socket.socketpair()
        with host, own:
            descriptors = array.array("i", [own.fileno()])
            request = encode_stream({"op": "fork", "id": ""})
            self._peer.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])


def _draw_once() -> None:
    """Draw a figure and format a table, which loads fonts and formatters."""
    with contextlib.suppress(Exception):
        if "matplotlib.figure" in sys.modules:
            # Not by pyplot, which would choose the backend and become interactive: that happens with a session's first
            # figure, and undoes an earlier `plt.ioff()`, after which figures would not be shown by themselves.
            figure = sys.modules["matplotlib.figure"].Figure()
            axes = figure.subplots()
            axes.plot([1, 2])
            axes.set_title("x")
            figure.savefig(io.BytesIO(), format="png")
            # Every fork would empty this cache as its first act, which takes 1 ms and 100 pages.
            sys.modules["matplotlib.font_manager"]._get_font.cache_clear()
        if "pandas" in sys.modules:
            frame = sys.modules["pandas"].DataFrame({"a": [1.5], "b": ["x"]})
            frame._repr_html_()
            repr(frame)
            frame.describe()


def home_folders() -> "list[str]":
    """Return the folders that libraries made in HOME and remember; a fork makes them again in its own HOME."""
    home = os.environ.get("HOME", "")
    return [folder for folder, _, _ in os.walk(home)][1:100] if home else []


def find_thread_setters() -> "list[SetThreads]":
    """Return the function of each loaded OpenBLAS and OpenMP that sets its number of threads.

    They were started with one thread, so that this process can be forked.
    """
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
    """Exclude all present objects from garbage collection, so that forks keep sharing their memory pages."""
    gc.collect()
    page_sharing.fill_gaps()
    gc.freeze()
