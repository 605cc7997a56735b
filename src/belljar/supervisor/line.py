"""The server's line to its supervisor: found or started, asked one thing at a time, and done without once it is gone.

Requests are answered within a fraction of a millisecond by a process that does nothing else, so they are made on the
event loop's thread, as starting a child is.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belljar.errors import SandboxUnavailable, SettingsError
from belljar.supervisor import process
from belljar.supervisor.process import FORM, LOG, PACKET_BYTES, TAKEN, WELCOME, receive, widen

ANSWER_S = 10.0
_NAME = "socket"
_TRIES = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deposit:
    """What is kept under one key for the next server."""

    words: dict[str, Any]
    descriptors: list[int] = field(default_factory=list[int])
    children: list[int] = field(default_factory=list[int])
    """Of the supervisor's: those in no deposit end with the server."""
    is_session: bool = False
    """Whether it is worth waiting for another server with it."""
    folders: list[str] = field(default_factory=list[str])
    """Control groups that the supervisor removes when it ends everything."""


class Supervisor:
    """Made by `open_supervisor`."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._sock: socket.socket | None = None
        self._kept: set[str] = set()
        # What is tried at the start of a server is tried in a thread of its own.
        self._turn = threading.Lock()
        self.found: list[str] = []
        """The keys that an earlier server left."""

    @property
    def is_there(self) -> bool:
        """Whether it was there when it was asked last."""
        return self._sock is not None

    def attend(self) -> bool:
        """Find the supervisor or start it; False when another server has it."""
        with _alone(self._folder):
            for _ in range(_TRIES):
                # One that is about to end may still be found, and hang up: then another one is started.
                self._sock = _connect(self._folder) or _start(self._folder)
                greeting = _greeting(self._sock)
                if greeting != WELCOME:
                    self.close()
                if greeting == TAKEN:
                    return False
                answer, _ = self._ask({"op": "attend", "patience_s": self._patience_s})
                if "error" not in answer and answer.get("form") != FORM:
                    self._replace(answer["pid"])
                elif "error" not in answer:
                    self.found = answer["keys"]
                    self._kept = set(self.found)
                    return True
        raise SandboxUnavailable(
            "the supervisor for keep_alive does not answer", hint=f"Look into {self._folder / LOG}"
        )

    def _replace(self, pid: int) -> None:
        """It speaks the words of another version: what it keeps cannot be taken over."""
        log.warning("the supervisor is of another version of belljar, so the sessions that it keeps end")
        os.kill(pid, signal.SIGTERM)
        _greeting(self._sock)  # none comes: it hangs up when it has ended
        self.close()

    # Children

    def start_child(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
    ) -> "SupervisedChild":
        """Start a command as a child of the supervisor, in a session and process group of its own."""
        if self._sock is None and not self.attend():
            raise SandboxUnavailable("the supervisor for keep_alive is another server's by now")
        request = {
            "op": "start",
            "command": [*command],
            "environment": dict(environment),
            "folder": folder,
            "targets": [0, 1, 2, *pass_fds],
        }
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            streams = [nothing if one == subprocess.DEVNULL else one for one in (stdin, stdout, stderr)]
            answer, descriptors = self._ask(request, [*streams, *pass_fds])
        finally:
            os.close(nothing)
        if "error" in answer:
            raise SandboxUnavailable(f"Cannot start {command[0]}: {answer['error']}")
        return SupervisedChild(self, answer["pid"], descriptors[0])

    def find_child(self, pid: int) -> "SupervisedChild":
        """A child that an earlier server started."""
        answer, descriptors = self._ask({"op": "find", "pid": pid})
        if "error" in answer:
            raise SandboxUnavailable(f"A kept process is gone: {answer['error']}")
        return SupervisedChild(self, pid, descriptors[0])

    def status_of(self, pid: int) -> int:
        """How a child ended; with the supervisor, by its signal."""
        status = self._ask({"op": "ask", "pid": pid})[0].get("status")
        return -signal.SIGKILL if status is None else status

    def kill_group_of(self, pid: int) -> None:
        """End a child and who stayed in its process group."""
        self._ask({"op": "kill", "pid": pid})

    def forget_child(self, pid: int) -> None:
        """Nobody asks about it any more."""
        self._ask({"op": "forget", "pid": pid})

    # Deposits

    def keep(self, key: str, deposit: Deposit) -> None:
        """Keep something, in place of what was under this key."""
        request = {
            "op": "keep",
            "key": key,
            "words": deposit.words,
            "children": deposit.children,
            "is_session": deposit.is_session,
            "folders": deposit.folders,
        }
        if self._sock is None:
            # The one that there was has ended. What it kept went with it; this is to outlive us all the same.
            with contextlib.suppress(SandboxUnavailable, OSError):
                self.attend()
        answer, _ = self._ask(request, deposit.descriptors)
        if "error" in answer:
            log.warning("%s is not kept: %s", key, answer["error"])
        else:
            self._kept.add(key)

    def take(self, key: str) -> Deposit:
        """What is kept under a key, with descriptors of the caller's own."""
        answer, descriptors = self._ask({"op": "take", "key": key})
        if answer.get("words") is None:
            raise SandboxUnavailable(f"{key} is not kept")
        return Deposit(answer["words"], descriptors)

    def has(self, key: str) -> bool:
        """Whether there is something under a key."""
        return self._sock is not None and key in self._kept

    def drop(self, key: str, *, ends: bool = False) -> None:
        """Keep it no longer; on demand its children end with it. May be called twice."""
        if key in self._kept:
            self._kept.discard(key)
            self._ask({"op": "drop", "key": key, "ends": ends})

    def close(self) -> None:
        """Hang up: the supervisor waits with what it keeps, and ends with nothing to keep. May be called twice."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        with self._turn:
            return self._ask_in_turn(request, descriptors)

    def _ask_in_turn(self, request: dict[str, Any], descriptors: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        if self._sock is None:
            return {"error": "the supervisor is gone"}, []
        packet = json.dumps(request).encode()
        if len(packet) > PACKET_BYTES:
            return {"error": f"{request['op']}: {len(packet):,} bytes, and {PACKET_BYTES:,} is the most"}, []
        try:
            socket.send_fds(self._sock, [packet], descriptors)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EMSGSIZE, errno.ETOOMANYREFS):  # nothing was sent, and it is there
                return {"error": f"{request['op']}: {error.strerror}"}, []
        try:
            packet, received = receive(self._sock)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.EMSGSIZE):  # an answer came, and this server has no room for it
                return {"error": f"{request['op']}: {error.strerror}"}, []
            packet, received = b"", []
            log.warning("the supervisor does not answer, sessions end with it: %s", error)
        if not packet:
            self.close()
            self._kept.clear()
            return {"error": "the supervisor is gone"}, []
        return json.loads(packet), received


class SupervisedChild:
    """A process whose parent is the supervisor, as `sandboxes/child.py` has those of the server's own."""

    def __init__(self, supervisor: Supervisor, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._supervisor = supervisor
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._status = 0
        self._has_ended = asyncio.Event()
        self._loop.add_reader(pidfd, self._on_exit)

    async def wait(self) -> int:
        """Exit status when it ends; negative for a signal."""
        await self._has_ended.wait()
        return self._status

    def kill_group(self) -> None:
        """Send SIGKILL to the child and to whoever stayed in its process group."""
        self._supervisor.kill_group_of(self.pid)

    def release(self) -> None:
        """Have it reaped, once it has ended; may be called twice."""
        if self._pidfd >= 0:
            self.leave()
            self._supervisor.forget_child(self.pid)

    def leave(self) -> None:
        """Look at it no longer; may be called twice."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._status = self._supervisor.status_of(self.pid)
        self._has_ended.set()


@contextmanager
def open_supervisor(data_directory: Path, patience_s: float) -> Generator[Supervisor | None]:
    """The line to the supervisor of a data directory; None when another server has it."""
    folder = data_directory / "keep"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_own(folder)
    folder.chmod(0o700)
    supervisor = Supervisor(folder, patience_s)
    try:
        yield supervisor if supervisor.attend() else None
    finally:
        supervisor.close()


def has_supervisor(data_directory: Path) -> bool:
    """Whether one lives there, with or without a server; it is not disturbed."""
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


def _check_own(folder: Path) -> None:
    """Whoever owns it answers there in the supervisor's place, and is told what to start."""
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        whose = f"belongs to user {status.st_uid}" if stat.S_ISDIR(status.st_mode) else "is no folder"
        raise SettingsError(
            f"{folder} {whose}, so nothing can be kept alive there",
            hint="Choose a data_directory of your own, or remove it",
        )


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """While servers that start together look for a supervisor, one after the other."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _connect(folder: Path) -> socket.socket | None:
    sock = _new_socket()
    with _short(folder) as reachable:
        try:
            sock.connect(str(reachable / _NAME))
        except OSError:
            sock.close()
            return None
    return sock


def _greeting(sock: socket.socket | None) -> bytes:
    with contextlib.suppress(OSError):
        return sock.recv(PACKET_BYTES) if sock else b""
    return b""


def _start(folder: Path) -> socket.socket | None:
    """Start one on a socket that is there before it is: who connects need not wait for it."""
    with _new_socket() as listener, _short(folder) as reachable, (folder / LOG).open("wb") as complaints:
        with contextlib.suppress(FileNotFoundError):
            (folder / _NAME).unlink()
        listener.bind(str(reachable / _NAME))
        (folder / _NAME).chmod(0o600)
        listener.listen(8)
        # Without `site`, and with none of the server's variables: it needs nothing but Python's own library.
        command = [sys.executable, "-I", "-S", process.__file__, str(listener.fileno()), str(folder)]
        subprocess.run(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=[listener.fileno()],
            timeout=ANSWER_S,
            check=True,
        )
    return _connect(folder)


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(ANSWER_S)
    widen(sock)
    return sock


@contextmanager
def _short(folder: Path) -> Generator[Path]:
    """The folder under a name that leaves room in a socket's address, which holds 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
