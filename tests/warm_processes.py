"""Starts `python -m belljar …`, and MCP servers of the tests, from a process that has imported everything already.

The imports take most of the processor time of a test that starts a server: belljar's two seconds, those of an MCP
server that is a script of the tests nearly as much. So each pytest worker has one process that imports them once, and a
server is a copy of it: a child of the worker like any other, with its own arguments, variables, folder and descriptors.
`with_warm_processes` makes `subprocess` do this for exactly these commands. How belljar starts from nothing is tested
by those that start it otherwise, and by all tests when BELLJAR_COLD=1.

The workers of `pytest -n` are such copies themselves, of one process of the controller: what they import takes ten
seconds of a processor each. A worker leaves a copy of itself behind before it begins, which is its own warm process.
"""

import array
import ctypes
import gc
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_COMMAND = [sys.executable, "-m", "belljar"]
_WORKER = [sys.executable, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How execnet starts a worker."""
_TESTS = Path(__file__).parent
_SOCKET = "WARM_PROCESS_SOCKET"
"""The variable that tells a worker the descriptor by which it speaks with its warm process."""
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_REQUEST_BYTES = 1 << 18
_MODULES = (
    "belljar.python.local",
    "belljar.cli.run",
    "belljar.cli.serve_http",
    "belljar.http.app",
    "belljar.mcp.stdio",
    "IPython.core.inputtransformer2",
    "mcp.server.mcpserver",
    "mcp.server.stdio",
)
_MODULES_OF_WORKERS = (
    *("pytest", "hypothesis", "httpx", "jupyter_client", "nbformat", "PIL.Image", "playwright.async_api"),
    *(
        "belljar.cli.container",
        "belljar.cli.doctor",
        "belljar.console.app",
        "belljar.engine.remote_attachments",
        "belljar.workflows",
    ),
)


class WarmProcess:
    """The process that is copied; started when the first copy is asked for."""

    def __init__(self) -> None:
        number = os.environ.pop(_SOCKET, "")
        self._socket = socket.socket(fileno=int(number)) if number else None
        self._process: subprocess.Popen[bytes] | None = None
        self.is_for_workers = False

    def start_copy(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Return the id of a copy that runs the command of the order with these descriptors."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                words = [str(theirs.fileno()), *(["workers"] if self.is_for_workers else [])]
                self._process = subprocess.Popen(
                    [sys.executable, __file__, *words], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self._socket.sendmsg([json.dumps(order).encode()], rights)
        return int(self._socket.recv(32))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()


@contextmanager
def with_warm_processes(*, is_for_workers: bool = False) -> Generator[None]:
    """Copy the warm process wherever the command would be started, until the block ends."""
    usual: Callable[..., None] = getattr(subprocess.Popen, "_execute_child")  # noqa: B009 - it is private
    names = [*inspect.signature(usual).parameters][1:]
    warm = WarmProcess()
    warm.is_for_workers = is_for_workers

    def execute_child(self: "subprocess.Popen[bytes]", *values: Any) -> None:
        given = dict(zip(names, values, strict=True))
        if not _can_be_a_copy(given):
            usual(self, *values)
            return
        ends = [given[name] if given[name] >= 0 else number for number, name in enumerate(_ENDS)]
        words = [*map(os.fsdecode, given["args"])]
        is_worker = words == _WORKER
        script = words[1] if not is_worker and words[1] != "-m" else ""
        order = {
            "is_worker": is_worker,
            "script": script,
            "arguments": words[2:] if script else words[len(_COMMAND) :],
            "variables": {os.fsdecode(k): os.fsdecode(v) for k, v in (given["env"] or os.environ).items()},
            "folder": os.fsdecode(given["cwd"] or Path.cwd()),
            "numbers": [0, 1, 2, *given["pass_fds"]],
            "is_leader": bool(given["start_new_session"]),
            "heeds_hangups": given["preexec_fn"] is heed_hangups,
        }
        self.pid = warm.start_copy(order, [*ends, *given["pass_fds"]])
        vars(self)["_child_created"] = True
        close: Callable[..., None] = getattr(self, "_close_pipe_fds")  # noqa: B009 - it is private
        close(*(given[name] for name in _PIPES))

    setattr(subprocess.Popen, "_execute_child", execute_child)  # noqa: B010 - it is private
    try:
        yield
    finally:
        setattr(subprocess.Popen, "_execute_child", usual)  # noqa: B010
        warm.close()


_ENDS = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _can_be_a_copy(given: dict[str, Any]) -> bool:
    words: Any = given["args"]
    if isinstance(words, str | bytes):
        return False
    decoded = [*map(os.fsdecode, words)]
    if decoded[: len(_COMMAND)] != _COMMAND and decoded != _WORKER and not _is_script(decoded):
        return False
    variables = given["env"] if given["env"] is not None else os.environ
    changed = {name for name in variables if name.startswith("PYTHON") and variables[name] != os.environ.get(name)}
    is_usual = (
        given["preexec_fn"] in {None, heed_hangups} and not given["shell"] and given["executable"] in {None, words[0]}
    )
    return bool(_SYS_CLONE) and is_usual and not changed and given["uid"] in {None, -1}


def _is_script(words: list[str]) -> bool:
    """Return whether this starts a program of the tests; the process that is copied is one, too."""
    if len(words) < 2 or words[0] != sys.executable or words[1] == __file__:
        return False
    return words[1].endswith(".py") and Path(words[1]).is_relative_to(_TESTS)


def heed_hangups() -> None:
    """Let hangups end the process that is started: whoever runs the tests may ignore them, and so would it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def main() -> None:
    """Import what servers need, then make copies until the other end is closed."""
    number, *rest = sys.argv[1:]
    del sys.path[0]  # the folder of this file
    for name in _MODULES:
        __import__(name)
    for name in _MODULES_OF_WORKERS if rest else ():
        with suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()
    _make_copies(socket.socket(fileno=int(number)))


def _make_copies(orders: socket.socket) -> None:
    """Make copies as they are ordered, until nobody orders any more; return in a copy, too, when it has ended."""
    while True:
        data, ancillary, _, _ = orders.recvmsg(_REQUEST_BYTES, socket.CMSG_SPACE(64 * 4))
        if not data:
            return None
        descriptors = array.array("i")
        for _, _, rights in ancillary:
            descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        if (pid := _copy()) == 0:
            orders.close()
            return _become(json.loads(data), [*descriptors])
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _copy() -> int:
    """Fork, but as a child of this process's parent: the worker waits for it as for any it started."""
    library = ctypes.PyDLL(None)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(library.syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def _become(order: dict[str, Any], descriptors: list[int]) -> None:
    if order["is_leader"]:
        os.setsid()
    if order["heeds_hangups"]:
        heed_hangups()
    # First out of the way of the numbers they shall have.
    high = [os.dup2(one, 500 + index) for index, one in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for one, number in zip(high, order["numbers"], strict=True):
        os.dup2(one, number)
        os.close(one)
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - it is a text file
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    if order["is_worker"]:
        _become_worker()
    elif script := order["script"]:
        sys.argv = [script, *order["arguments"]]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        sys.argv = ["belljar", *order["arguments"]]
        runpy.run_module("belljar", run_name="__main__", alter_sys=True)


def _become_worker() -> None:
    """Leave a copy behind that makes the copies this worker orders, and go on as execnet says."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        # The pipes are the worker's: the controller must see when it ends.
        with Path(os.devnull).open("r+b") as nothing:
            for number in (0, 1):
                os.dup2(nothing.fileno(), number)
        return _make_copies(theirs)
    theirs.close()
    os.environ[_SOCKET] = str(ours.detach())
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    exec(_WORKER[-1], vars(main_module))
    return None


if __name__ == "__main__":
    main()
