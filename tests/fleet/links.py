"""The network between machines, of which each way from one to another can be cut and healed."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Link:
    """The way from one machine to another: an address that leads to the other's, and that can be cut.

    It has the other's port, at another address of loopback, because a machine tells its port to those who ask it.
    """

    def __init__(self, place: str, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server((place, port))
        self.url = f"http://{place}:{port}"
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_dark = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._is_closed = False
        self._start(self._accept)

    def cut(self, *, is_dark: bool) -> None:
        """Break what is connected and refuse the rest, or, in the dark, have nothing arrive any more."""
        self._is_dark = is_dark
        self._is_open.clear()
        if not is_dark:
            self._break()

    def heal(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._is_closed = True
        self._is_open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break()

    def _break(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        with near:
            if not self._is_open.is_set() and not self._is_dark:
                return
            self._is_open.wait()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                return
            with far:
                with self._lock:
                    self._sockets |= {near, far}
                back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
                back.start()
                self._pump(near, far)
                back.join()
                with self._lock:
                    self._sockets -= {near, far}

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._is_open.wait()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
