"""The host's side of `threshold.py`: carries bytes between descriptors of ours and one connection for each.

What is given is duplicated: the caller may close its own. A descriptor that is a socket is carried both ways, any other
only towards us. Threads, because the descriptors are blocking ones that others hold too. Knows no virtual machine.
"""

import contextlib
import os
import socket
import stat
import threading
from pathlib import Path

_CHUNK_BYTES = 65_536


class Crossing:
    """One descriptor and the UNIX socket that its connection comes to, once."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._ours = os.dup(descriptor)
        self._is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        self._listener = socket.socket(socket.AF_UNIX)
        self._peer: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._listener.bind(str(path))
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            os.close(self._ours)
            raise
        self._thread = threading.Thread(target=self._serve, name=f"crossing-{path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut it, and wait until nothing is carried any more; may be called twice."""
        with self._lock:
            self._is_closed = True
            for sock in filter(None, (self._listener, self._peer)):
                with contextlib.suppress(OSError):  # not connected, or closed by the other thread
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self) -> None:
        try:
            with contextlib.suppress(OSError):
                peer = self._accept()
                with peer:
                    self._carry(peer)
        finally:
            os.close(self._ours)

    def _accept(self) -> socket.socket:
        with self._listener:
            peer, _ = self._listener.accept()
        with self._lock:
            self._peer = peer
            if self._is_closed:
                peer.shutdown(socket.SHUT_RDWR)
        return peer

    def _carry(self, peer: socket.socket) -> None:
        back = threading.Thread(target=self._carry_back, args=(peer,), name=f"{self._thread.name}-back", daemon=True)
        if self._is_socket:
            back.start()
        with contextlib.suppress(OSError):
            while chunk := peer.recv(_CHUNK_BYTES):
                _write_all(self._ours, chunk)
        if self._is_socket:
            # The other end of ours sees the end, and the thread that waits for it wakes.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._ours)) as ours:
                ours.shutdown(socket.SHUT_RDWR)
            back.join()

    def _carry_back(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._ours, _CHUNK_BYTES):
                peer.sendall(chunk)
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_WR)


def _write_all(descriptor: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
