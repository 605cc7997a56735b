"""The entry point of the supervisor's process: detach from the server that started it, serve, clean up."""

import contextlib
import ctypes
import fcntl
import os
import socket
import traceback
from pathlib import Path

from .children import raise_descriptor_limit
from .packets import LOG, SOCKET
from .supervisor import SupervisorProcess

_PR_SET_CHILD_SUBREAPER = 36


def main(descriptor: str, folder: str) -> None:
    """Detach from the server that started this process, and serve at the listening socket `descriptor`."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    raise_descriptor_limit()
    # Held until this process ends, because others test this lock to find out whether a supervisor runs.
    fcntl.flock(os.open(Path(folder) / LOG, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    listener.setblocking(False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = SupervisorProcess(listener)
    try:
        supervisor.serve()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Unlink before closing, because whoever finds nobody listening makes a socket of its own under that name,
        # and that one must not be unlinked.
        with contextlib.suppress(OSError):
            (Path(folder) / SOCKET).unlink()
        listener.close()
        supervisor.shut_down()
