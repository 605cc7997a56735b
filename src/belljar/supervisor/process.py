"""The supervisor: parent of what a server starts, and keeper of descriptors that are to outlive it.

Run as a script with Python alone: `process.py LISTENER FOLDER`. It serves one server at a time, over a socket that only
its own user can reach, one packet a request and one an answer. When the server is gone it ends what is in nobody's
deposit, waits so long as it was told for another server, and then ends everything. It starts nothing by itself, reads
no file of a session's and holds no secret.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

FORM = 1
"""Of requests and answers. Raised when an earlier or later server could not make sense of them."""
PACKET_BYTES = 196_608
BUFFER_BYTES = 1_048_576
WELCOME, TAKEN = b"welcome", b"taken"
LOG = "log"
"""What it complains of, in its folder; it has a lock on the file."""
MOST_DESCRIPTORS = 253
"""In one packet, as Linux has it."""
_NUMBERS = array.array("i")
_CREDENTIALS = struct.Struct("3i")
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0
_RETRY_S = 0.01
_USUAL_FILES: "list[tuple[int, int]]" = []
"""The limit of descriptors that it was started with, where it has one of its own."""


class Deposit:
    """What is kept under a key: words for the next server, descriptors, and the children that go with them."""

    def __init__(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        self.words: dict[str, Any] = request["words"]
        self.children: set[int] = set(request["children"])
        self.is_session = bool(request["is_session"])
        self.folders: list[str] = request["folders"]
        """Control groups, to be removed when everything ends."""
        self.descriptors = descriptors

    def close(self) -> None:
        """Let go of the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class Supervisor:
    """One for a data directory, as long as there is something to keep or a server to serve."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: socket.socket | None = None
        self._children: dict[int, int] = {}
        """By number, with a descriptor of each."""
        self._deposits: dict[str, Deposit] = {}
        self._patience_s = 0.0
        self._deadline = time.monotonic() + _END_S
        self._is_over = False

    def serve(self) -> None:
        """Until there is nothing to keep and nobody to serve."""
        bell, ringing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(ringing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, self._on_end)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while not self._is_over:
            poll = select.poll()
            sockets = [self._listener, *([self._server] if self._server else [])]
            for descriptor in (bell, *(sock.fileno() for sock in sockets)):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(self._wait_ms())}
            if bell in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(bell, 4096)
                self._reap_strangers()
            if self._server is not None and self._server.fileno() in ready:
                self._hear(self._server)
            if self._listener.fileno() in ready:
                self._meet()
            if self._server is None and time.monotonic() >= self._deadline:
                self._is_over = True

    def _on_end(self, _number: int, _frame: object) -> None:
        self._is_over = True

    def _wait_ms(self) -> "float | None":
        return None if self._server else max(0.0, self._deadline - time.monotonic()) * 1000

    def _reap_strangers(self) -> None:
        """Those whose parents have ended are ours by now; our own stay until their server has asked how they ended."""
        for pid in _children_of_ours() - self._children.keys():
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)

    # Servers

    def _meet(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has thought better of it
            return
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if self._server is not None and _has_hung_up(self._server):
            self._lose()
        is_welcome = uid == os.geteuid() and self._server is None
        with contextlib.suppress(OSError):
            # Said first: a line that is closed on somebody's words is reset, and ours would not be read.
            sock.send(WELCOME if is_welcome else TAKEN)
        if not is_welcome:
            sock.close()
            return
        widen(sock)
        self._server = sock

    def _lose(self) -> None:
        """The server is gone: what it did not deposit ends now, the rest when nobody comes for it."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if not any(deposit.is_session for deposit in self._deposits.values()):
            self._is_over = True
            return
        kept = {pid for deposit in self._deposits.values() for pid in deposit.children}
        for pid in self._children.keys() - kept:
            _kill_group(pid)
            self._reap(pid)
        self._deadline = time.monotonic() + self._patience_s

    def _hear(self, server: socket.socket) -> None:
        answered: tuple[dict[str, Any], list[int]]
        try:
            packet, descriptors = receive(server, socket.MSG_DONTWAIT)
            if not packet:
                self._lose()
                return
            request = json.loads(packet)
            answered = getattr(self, f"_on_{request['op']}")(request, descriptors)
        except BlockingIOError:
            return
        except ConnectionError:
            self._lose()
            return
        except Exception as error:  # noqa: BLE001 - told to the server, which knows what to do about it
            answered = {"error": f"{type(error).__name__}: {error}"}, []
        with contextlib.suppress(OSError):  # it is gone: the next look tells
            socket.send_fds(server, [json.dumps(answered[0]).encode()], answered[1])

    # What a server asks for

    def _on_attend(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """A server introduces itself; it is told what there is."""
        self._patience_s = float(request["patience_s"])
        return {"keys": [*self._deposits], "pid": os.getpid(), "form": FORM}, []

    def _on_start(self, request: "dict[str, Any]", descriptors: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """Start a command; the descriptors are to have the numbers that `targets` says."""
        try:
            pid = _start(request, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            self._children[pid] = os.pidfd_open(pid)
        except OSError:
            _kill_group(pid)
            os.waitpid(pid, 0)
            raise
        return {"pid": pid}, [self._children[pid]]

    def _on_find(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """A descriptor of a child."""
        pidfd = self._children.get(request["pid"])
        return ({"error": f"{request['pid']} is no child of mine"}, []) if pidfd is None else ({}, [pidfd])

    def _on_ask(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """How a child ended; it stays until it is forgotten."""
        outcome = os.waitid(os.P_PID, request["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if outcome is None:
            return {"status": None}, []
        return {"status": outcome.si_status if outcome.si_code == os.CLD_EXITED else -outcome.si_status}, []

    def _on_kill(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """End a child and its process group."""
        if request["pid"] in self._children:
            _kill_group(request["pid"])
        return {}, []

    def _on_forget(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """A child has ended and nobody asks about it any more."""
        if request["pid"] in self._children:
            self._reap(request["pid"])
        return {}, []

    def _on_keep(self, request: "dict[str, Any]", descriptors: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """Keep something under a key, in place of what was there."""
        before = self._deposits.get(request["key"])
        self._deposits[request["key"]] = Deposit(request, descriptors)
        if before is not None:
            before.close()
        return {}, []

    def _on_take(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """Copies of what is kept under a key, which stays there."""
        deposit = self._deposits.get(request["key"])
        return ({"words": deposit.words}, deposit.descriptors) if deposit else ({"words": None}, [])

    def _on_drop(self, request: "dict[str, Any]", _: "list[int]") -> "tuple[dict[str, Any], list[int]]":
        """Keep it no longer; on demand its children end with it."""
        deposit = self._deposits.pop(request["key"], None)
        if deposit is not None:
            deposit.close()
        for pid in deposit.children & self._children.keys() if deposit and request["ends"] else ():
            _kill_group(pid)
            self._reap(pid)
        return {}, []

    # Ends

    def _reap(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(self._children.pop(pid))

    def end(self) -> None:
        """Kill everyone, and leave no control group behind. What runs in their namespaces ends with them."""
        for pid in self._children:
            _kill_group(pid)
        for pid in [*self._children]:
            self._reap(pid)
        deadline = time.monotonic() + _END_S
        folders = [Path(folder) for deposit in self._deposits.values() for folder in deposit.folders]
        while not all(map(_is_removed, folders)) and time.monotonic() < deadline:
            self._reap_strangers()
            time.sleep(_RETRY_S)  # nothing tells when the kernel has taken the last of them apart


def receive(sock: socket.socket, flags: int = 0) -> "tuple[bytes, list[int]]":
    """One packet with its descriptors, which no exec passes on; EMFILE or EMSGSIZE when not all of it is there."""
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * _NUMBERS.itemsize)
    packet, ancillary, found, _ = sock.recvmsg(PACKET_BYTES, space, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % _NUMBERS.itemsize
            descriptors += array.array("i", data[:whole])
    # Linux leaves out the descriptors that this process has no room for, and says nothing else about it.
    for flag, number in ((socket.MSG_CTRUNC, errno.EMFILE), (socket.MSG_TRUNC, errno.EMSGSIZE)):
        if found & flag:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(number, os.strerror(number))
    return packet, descriptors


def widen(sock: socket.socket) -> None:
    """Make room for whole packets."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def _has_hung_up(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _children_of_ours() -> "set[int]":
    try:
        return {int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _is_removed(folder: Path) -> bool:
    try:
        for below in [path for path in folder.iterdir() if path.is_dir()]:
            below.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _start(request: "dict[str, Any]", descriptors: "list[int]") -> int:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        above: int = max(request["targets"]) + 1
        complaints = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, above)
        try:
            _become(request, [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors])
        except BaseException as error:  # noqa: BLE001 - a fork must not go on as its parent
            os.write(complaints, str(error).encode()[:4096])
        finally:
            os._exit(127)
    os.close(writing)
    try:
        # Closed by the exec: silence means that it went well.
        complaint = os.read(reading, 4096)
    finally:
        os.close(reading)
    if complaint:
        os.waitpid(pid, 0)
        raise OSError(complaint.decode(errors="replace"))
    return pid


def _become(request: "dict[str, Any]", descriptors: "list[int]") -> None:
    """The command: in a session of its own, with these descriptors and no others, which are all closed by an exec."""
    if _USUAL_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, _USUAL_FILES[0])
    for descriptor, target in zip(descriptors, request["targets"], strict=True):
        os.dup2(descriptor, target)
    os.setsid()
    # An ignored signal crosses an exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606 - a list of words


def _make_room() -> None:
    """For the descriptors of all sessions together, ten or so of each; what it starts gets the limit of its server."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))
        _USUAL_FILES.append(usual)


def main(descriptor: str, folder: str) -> None:
    """Leave the server that started it, and serve."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    _make_room()
    # For as long as it lives; others may look whether somebody has it.
    fcntl.flock(os.open(Path(folder) / LOG, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    listener.setblocking(False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = Supervisor(listener)
    try:
        supervisor.serve()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # In this order: who finds nobody here makes a socket of its own under that name, which must stay.
        with contextlib.suppress(OSError):
            (Path(folder) / "socket").unlink()
        listener.close()
        supervisor.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
