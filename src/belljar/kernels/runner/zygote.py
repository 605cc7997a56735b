"""A process that is never a session's: it has everything imported, and forks kernels on the host's word."""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from . import entering, forking, warming
from .channel import Channel
from .serving import Runner

_UNFIT = "BELLJAR_UNFIT"
"""Modules that an earlier start has left out, and why."""


class Zygote:
    """One shell, built and warmed, waiting to be copied."""

    def __init__(self, modules: "list[str]") -> None:
        self.runner = Runner()
        self.failed = warming.import_all(modules)
        warming.run_first_times(self.runner.shell)
        self._folders = warming.home_folders()
        self._set_threads = warming.find_thread_setters()
        warming.settle()

    def serve(self, channel: Channel) -> None:
        """Fork until the host is gone. Returns in no copy: those serve until their own host is gone."""
        # At once, not with the next request: a keeper that nobody has waited for still counts in its session's group.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: forking.reap())
        channel.send({"type": "warm", "failed": self.failed, "threads": forking.thread_count()})
        while True:
            try:
                message = channel.receive()
            except EOFError:
                return
            descriptors = channel.take_descriptors(forking.MOST)
            try:
                is_copy = forking.divide(
                    descriptors,
                    is_elsewhere=True,
                    is_hidden=False,
                    has_keeper=message["has_keeper"],
                    is_session=False,
                )
            except OSError as error:
                is_copy = False
                forking.refuse(descriptors, error)
            if is_copy:
                try:
                    self._become_kernel(descriptors, message)
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
                finally:
                    os._exit(1)  # never back into the zygote's own loop
            for descriptor in descriptors:
                os.close(descriptor)

    def _become_kernel(self, descriptors: "list[int]", message: "dict[str, Any]") -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock = forking.take_streams(descriptors)
        forking.close_inherited({sock.fileno()})
        entering.own_proc_entry()
        os.environ.clear()
        os.environ.update(message["environment"], PWD=message["folder"])
        _prepend_path(message["environment"].get("PYTHONPATH", ""))
        os.chdir(message["folder"])
        forking.reseed()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                Path(folder).mkdir(parents=True, exist_ok=True)
        for set_threads in self._set_threads if message["threads"] > 1 else ():
            set_threads(message["threads"])
        self.runner.attach(sock)
        self.runner.serve()
        os._exit(0)


def _prepend_path(paths: str) -> None:
    """Where a cold start would have them: before the environment's own packages."""
    wanted = [path for path in paths.split(os.pathsep) if path and path not in sys.path]
    sys.path[:] = [*sys.path[:1], *wanted, *sys.path[1:]]


def _own_command() -> "list[bytes]":
    """The words that this process was started with: `sys.orig_argv` came with Python 3.10."""
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]


def main(descriptor: str, *modules: str) -> None:
    """Warm up, then fork on request. What holds the sandbox open is another process: sessions outlive a zygote."""
    unfit: dict[str, str] = json.loads(os.environ.pop(_UNFIT, "{}"))
    if not unfit and os.fork():
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        os.execvp("sleep", ["sleep", "infinity"])
    try:
        zygote = Zygote([module for module in modules if module not in unfit])
    except warming.Unfit as error:
        # There is no undoing an import: once more from the start, without that module.
        os.environ[_UNFIT] = json.dumps({**unfit, error.module: str(error)})
        os.execv(sys.executable, _own_command())
    zygote.failed.update(unfit)
    zygote.serve(Channel(socket.socket(fileno=int(descriptor))))
