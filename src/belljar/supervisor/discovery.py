"""Finds the supervisor of a data directory: its folder and its socket; starts one when there is none."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

from belljar import ipc
from belljar.errors import SettingsError
from belljar.inside import FOLDER, package_command
from belljar.inside.supervisor.packets import LOG, PACKET_BYTES, SOCKET, widen

PROCESS = FOLDER / "supervisor"
TIMEOUT_S = 10.0


def has_supervisor(data_directory: Path) -> bool:
    """Return whether a supervisor runs there, with or without a server; it does not notice."""
    try:
        descriptor = os.open(data_directory / "keep" / LOG, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def own_folder(data_directory: Path) -> Path:
    """Return the supervisor's folder, made if missing. It must be ours: its owner would be told what to start."""
    folder = data_directory / "keep"
    data_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        whose = f"belongs to user {status.st_uid}" if stat.S_ISDIR(status.st_mode) else "is no folder"
        raise SettingsError(
            f"{folder} {whose}, so nothing can be kept alive there",
            hint="Choose a data_directory of your own, or remove it",
        )
    folder.chmod(0o700)
    return folder


def connect(folder: Path) -> socket.socket | None:
    """Connect to the supervisor that runs there; None when there is none."""
    sock = _new_socket()
    try:
        ipc.connect(sock, folder / SOCKET)
    except OSError:
        sock.close()
        return None
    return sock


def greeting(sock: socket.socket | None) -> bytes:
    """Return its first message; empty when it hangs up. TimeoutError when it does neither."""
    if sock is None:
        return b""
    try:
        return sock.recv(PACKET_BYTES)
    except TimeoutError:
        raise
    except OSError:
        return b""


def start(folder: Path) -> socket.socket | None:
    """Start a supervisor on a socket that already listens, so that connecting need not wait for it."""
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(log, "wb") as complaints, _new_socket() as listener:
        ipc.bind(listener, folder / SOCKET, replaces=True)
        listener.listen(8)
        # Without `site`, and with none of the server's environment variables.
        command = [*package_command(sys.executable, PROCESS, "supervisor"), str(listener.fileno()), str(folder)]
        subprocess.run(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=[listener.fileno()],
            timeout=TIMEOUT_S,
            check=True,
        )
    return connect(folder)


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(TIMEOUT_S)
    widen(sock)
    return sock
