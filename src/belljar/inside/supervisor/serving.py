"""The supervisor at work: one server at a time, a packet a request and one an answer, in their order.

When its server is gone it ends what is in nobody's deposit, waits so long as it was told for another server, and then
ends everything. It starts nothing by itself and reads no file of a session's; what it holds of memory it does not look
into.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any

from .children import Answer, Children
from .deposits import Deposits, is_removed
from .packets import FORM, TAKEN, WELCOME, receive, widen

_CREDENTIALS = struct.Struct("3i")
_END_S = 5.0
_RETRY_S = 0.01


class SupervisorProcess:
    """One for a data directory, as long as there is something to keep or a server to serve."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: socket.socket | None = None
        self._children = Children()
        self._deposits = Deposits()
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
                self._children.end_strangers()
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

    # Servers

    def _meet(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has thought better of it
            return
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        # The server that there was may have gone, and what it said last is not heard yet.
        while self._server is not None and _has_word(self._server):
            self._hear(self._server)
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
        if not self._deposits.have_session:
            self._is_over = True
            return
        self._children.end_all_but(self._deposits.children)
        self._deadline = time.monotonic() + self._patience_s

    def _hear(self, server: socket.socket) -> None:
        answered: Answer
        descriptors: list[int] = []
        try:
            packet, descriptors = receive(server, socket.MSG_DONTWAIT)
            if not packet:
                self._lose()
                return
            request = json.loads(packet)
            answered = getattr(self, f"_on_{request['op']}")(request, descriptors)
        except (BlockingIOError, ConnectionResetError):
            # Reset: it went without hearing us out. What it had said before is there still, and then its end.
            return
        except ConnectionError:
            self._lose()
            return
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {error}"}, []
        # Whoever has use for them has taken them out.
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it is gone: the next look tells
            socket.send_fds(server, [json.dumps(answered[0]).encode()], answered[1])

    # What a server asks for

    def _on_attend(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """A server introduces itself, or looks whether anybody is there; it is told what there is."""
        self._patience_s = float(request["patience_s"])
        return {"keys": self._deposits.keys, "pid": os.getpid(), "form": FORM}, []

    def _on_start(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Start a command; the descriptors are to have the numbers that `targets` says."""
        return self._children.start(request, descriptors)

    def _on_find(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """A descriptor of a child."""
        return self._children.find(request["pid"])

    def _on_ask(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """How a child ended."""
        return {"status": self._children.status(request["pid"])}, []

    def _on_kill(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """End a child and its process group."""
        self._children.kill(request["pid"])
        return {}, []

    def _on_forget(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """A child has ended and nobody asks about it any more."""
        self._children.forget(request["pid"])
        return {}, []

    def _on_keep(self, request: "dict[str, Any]", descriptors: "list[int]") -> Answer:
        """Keep something under a key, in place of what was there."""
        self._deposits.store(request, descriptors)
        return {}, []

    def _on_take(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Copies of what is kept under a key, which stays there."""
        deposit = self._deposits.find(request["key"])
        return ({"words": deposit.words}, deposit.descriptors) if deposit else ({"words": None}, [])

    def _on_drop(self, request: "dict[str, Any]", _: "list[int]") -> Answer:
        """Keep it no longer; on demand its children end with it."""
        children = self._deposits.drop(request["key"])
        if request["ends"]:
            self._children.kill_and_reap(children)
        return {}, []

    def shut_down(self) -> None:
        """Kill everyone, and leave no control group behind. What runs in their namespaces ends with them."""
        self._children.end_all_but(set())
        deadline = time.monotonic() + _END_S
        while (
            self._children.end_strangers() or not all([*map(is_removed, self._deposits.folders)])
        ) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)  # nothing tells when the kernel has taken the last of them apart


def _has_word(sock: socket.socket) -> bool:
    """Whether there is something to hear, be it the end."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
