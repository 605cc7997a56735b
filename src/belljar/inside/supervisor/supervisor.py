"""The supervisor's main loop: it serves one server at a time, with one answer packet for each request packet, in order.

When its server is gone, it kills the children that are in no deposit, waits for another server for as long as the last
one asked for, and then kills the rest. It starts nothing by itself, reads no file of a session, and does not look into
the memory that it holds for sessions.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
import traceback
from pathlib import Path
from typing import Any

from .children import Answer, Children, raise_descriptor_limit
from .packets import FORM, LOG, SOCKET, TAKEN, WELCOME, receive, widen

_CREDENTIALS = struct.Struct("3i")
_END_S = 5.0
_RETRY_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


class SupervisorProcess:
    """The supervisor of one data directory; it runs while there is something to keep or a server to serve."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: socket.socket | None = None
        self._children = Children()
        self._deposits = Deposits()
        self._version = ""
        """The version of the belljar that started this process."""
        self._patience_s = 0.0
        self._deadline = time.monotonic() + _END_S
        self._is_over = False

    def serve(self) -> None:
        """Serve until there is nothing to keep and nobody to serve."""
        wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, self._on_end)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while not self._is_over:
            poll = select.poll()
            sockets = [self._listener, *([self._server] if self._server else [])]
            for descriptor in (wakeup_read, *(sock.fileno() for sock in sockets)):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(self._wait_ms())}
            if wakeup_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup_read, 4096)
                self._children.kill_orphans()
            if self._server is not None and self._server.fileno() in ready:
                self._handle_request(self._server)
            if self._listener.fileno() in ready:
                self._accept_server()
            if self._server is None and time.monotonic() >= self._deadline:
                self._is_over = True

    def _on_end(self, _number: int, _frame: object) -> None:
        self._is_over = True

    def _wait_ms(self) -> "float | None":
        return None if self._server else max(0.0, self._deadline - time.monotonic()) * 1000

    # Servers

    def _accept_server(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the server has hung up already
            return
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        # Read what the previous server sent last, because it may be gone already.
        while self._server is not None and _is_readable(self._server):
            self._handle_request(self._server)
        is_welcome = uid == os.geteuid() and self._server is None
        with contextlib.suppress(OSError):
            # Send before closing, because closing a socket with unread data in it resets the connection, and then
            # the peer could not read our answer.
            sock.send(WELCOME if is_welcome else TAKEN)
        if not is_welcome:
            sock.close()
            return
        widen(sock)
        self._server = sock

    def _drop_server(self) -> None:
        """Kill what the server that is gone did not deposit, and wait for another server to come for the rest."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if not self._deposits.have_session:
            self._is_over = True
            return
        self._children.end_all_but(self._deposits.children)
        self._deadline = time.monotonic() + self._patience_s

    def _handle_request(self, server: socket.socket) -> None:
        answer: Answer
        descriptors: list[int] = []
        try:
            packet, descriptors = receive(server, socket.MSG_DONTWAIT)
            if not packet:
                self._drop_server()
                return
            request = json.loads(packet)
            answer = getattr(self, f"_on_{request['op']}")(request, descriptors)
        except (BlockingIOError, ConnectionResetError):
            # Reset: the server left without reading our last answer. What it sent before can still be read, and then
            # comes the end of the stream.
            return
        except ConnectionError:
            self._drop_server()
            return
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}, []
        # A handler that uses descriptors has removed them from the list.
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the server is gone; the next poll reports it
            socket.send_fds(server, [json.dumps(answer[0]).encode()], answer[1])

    # Requests: `op` names the handler

    def _on_attend(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Answer a server that introduces itself, or tests whether we are here, with the keys of the deposits."""
        self._patience_s = float(request["patience_s"])
        self._version = self._version or request.get("version", "")
        return {"keys": self._deposits.keys, "pid": os.getpid(), "form": FORM, "version": self._version}, []

    def _on_start(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Start a command, which gets the descriptors under the numbers in `targets`."""
        return self._children.start(request, descriptors)

    def _on_find(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Answer with the pidfd of a child."""
        return self._children.find(request["pid"])

    def _on_ask(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Answer with how a child ended, or None while it runs."""
        return {"status": self._children.status(request["pid"])}, []

    def _on_kill(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Kill a child and its process group."""
        self._children.kill(request["pid"])
        return {}, []

    def _on_forget(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Reap a child that has ended and that the server will not ask about any more."""
        self._children.forget(request["pid"])
        return {}, []

    def _on_keep(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Store a deposit under a key, in place of what was there."""
        self._deposits.store(request, descriptors)
        return {}, []

    def _on_take(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Answer with what a key holds, its descriptors duplicated; the deposit stays."""
        deposit = self._deposits.find(request["key"])
        return ({"words": deposit.fields}, deposit.descriptors) if deposit else ({"words": None}, [])

    def _on_drop(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Remove a deposit and, if the request says so, kill its children."""
        children = self._deposits.drop(request["key"])
        if request["ends"]:
            self._children.kill_and_reap(children)
        return {}, []

    def shut_down(self) -> None:
        """Kill all children and remove all control groups. What runs in the children's namespaces ends with them."""
        self._children.end_all_but(set())
        deadline = time.monotonic() + _END_S
        while (
            self._children.kill_orphans() or not all([*map(is_removed, self._deposits.folders)])
        ) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)  # no event reports when the kernel has removed the last process from a group


def _is_readable(sock: socket.socket) -> bool:
    """Return whether the socket has data or has ended."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class StoredDeposit:
    """What one key holds. It takes the descriptors over, so the list that it was given is empty afterwards."""

    def __init__(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        self.fields: dict[str, Any] = request["words"]
        self.children: set[int] = set(request["children"])
        self.is_session = bool(request["is_session"])
        self.folders: list[str] = request["folders"]
        """Control groups, to be removed when the supervisor shuts down."""
        self.descriptors = [*descriptors]
        descriptors.clear()

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class Deposits:
    """All deposits of a supervisor."""

    def __init__(self) -> None:
        self._deposits: dict[str, StoredDeposit] = {}

    @property
    def keys(self) -> "list[str]":
        """Return the keys that hold something."""
        return [*self._deposits]

    @property
    def have_session(self) -> bool:
        """Return whether a session is among them, which is worth waiting for another server."""
        return any(deposit.is_session for deposit in self._deposits.values())

    @property
    def children(self) -> "set[int]":
        """Return the children that are not killed when the server goes."""
        return {pid for deposit in self._deposits.values() for pid in deposit.children}

    @property
    def folders(self) -> "list[Path]":
        """Return the control groups of all deposits."""
        return [Path(folder) for deposit in self._deposits.values() for folder in deposit.folders]

    def store(self, request: "dict[str, Any]", descriptors: "list[int]") -> None:
        """Store a deposit under its key, in place of what was there."""
        deposit = StoredDeposit(request, descriptors)
        self.drop(request["key"])
        self._deposits[request["key"]] = deposit

    def find(self, key: str) -> "StoredDeposit | None":
        """Return the deposit under a key, or None."""
        return self._deposits.get(key)

    def drop(self, key: str) -> "set[int]":
        """Remove the deposit under a key, and return its children."""
        deposit = self._deposits.pop(key, None)
        if deposit is None:
            return set()
        deposit.close()
        return deposit.children


def is_removed(folder: Path) -> bool:
    """Try to remove a control group and those in it, and return whether it is gone."""
    try:
        for below in [path for path in folder.iterdir() if path.is_dir()]:
            below.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


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
