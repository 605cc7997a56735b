"""The supervisor's process: it leaves the server that started it, serves, and ends with nothing left of it."""

import contextlib
import ctypes
import fcntl
import os
import socket
import traceback
from pathlib import Path

from .children import make_room
from .packets import LOG, SOCKET
from .serving import SupervisorProcess

_PR_SET_CHILD_SUBREAPER = 36


def main(descriptor: str, folder: str) -> None:
    """Leave the server that started it, and serve at a listening socket."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    make_room()
    # For as long as it lives; others may look whether somebody has it.
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
        # In this order: who finds nobody here makes a socket of its own under that name, which must stay.
        with contextlib.suppress(OSError):
            (Path(folder) / SOCKET).unlink()
        listener.close()
        supervisor.shut_down()
