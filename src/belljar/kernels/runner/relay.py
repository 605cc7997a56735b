"""Joins 127.0.0.1 inside the sandbox to the host's proxy, then becomes the command it was given.

Run as a script: `relay.py SOCKET COMMAND…`. The relay is a grandchild, so that no cell's `os.wait` meets it; it holds
none of the session's descriptors and ends with the namespaces. What it carries is the proxy's to judge, not its own.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable

PORT = 3128
_CHUNK_BYTES = 65_536


class _Side:
    """One socket of a pair: what it reads goes to the other, and no more is read until the other has taken it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.other: _Side = self
        self.pending = b""
        self.has_ended = False
        self.is_shut = False

    def wanted(self) -> int:
        reading = 0 if self.has_ended or self.other.pending else selectors.EVENT_READ
        return reading | (selectors.EVENT_WRITE if self.pending else 0)


class Relay:
    """All connections, in one thread: threads would count against the session's processes."""

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self._listener = listener
        self._connect = connect
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """For ever."""
        while True:
            for key, events in self._selector.select():
                if key.data is None:
                    self._accept()
                elif not key.data.is_shut or key.data.sock.fileno() >= 0:
                    self._move(key.data, events)

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        try:
            far = self._connect()
        except OSError:
            near.close()
            return
        sides = (_Side(near), _Side(far))
        sides[0].other, sides[1].other = sides[1], sides[0]
        for side in sides:
            side.sock.setblocking(False)
            self._selector.register(side.sock, selectors.EVENT_READ, side)

    def _move(self, side: _Side, events: int) -> None:
        if side.sock.fileno() < 0:  # closed with its other half, earlier in this round
            return
        try:
            if events & selectors.EVENT_WRITE:
                side.pending = side.pending[side.sock.send(side.pending) :]
            if events & selectors.EVENT_READ and not side.other.pending:
                self._read(side)
            for each in (side, side.other):
                if each.other.has_ended and not each.pending and not each.is_shut:
                    each.is_shut = True
                    each.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._close(side)
            return
        if side.is_shut and side.other.is_shut:
            self._close(side)
            return
        for each in (side, side.other):
            self._watch(each)

    def _read(self, side: _Side) -> None:
        chunk = side.sock.recv(_CHUNK_BYTES)
        if chunk:
            side.other.pending = chunk
        else:
            side.has_ended = True

    def _watch(self, side: _Side) -> None:
        wanted = side.wanted()
        is_watched = side.sock in self._selector.get_map()
        if wanted and is_watched:
            self._selector.modify(side.sock, wanted, side)
        elif wanted:
            self._selector.register(side.sock, wanted, side)
        elif is_watched:
            self._selector.unregister(side.sock)

    def _close(self, side: _Side) -> None:
        for each in (side, side.other):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each.sock)
            each.sock.close()


def _connect_to(path: str) -> Callable[[], socket.socket]:
    folder, name = os.path.split(path)
    os.chdir(folder)  # a socket's address holds 107 bytes, and the folder's name may be longer

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(name)
        except OSError:
            sock.close()
            raise
        return sock

    return connect


def _let_go(listener: socket.socket) -> None:
    """Hold nothing of the session's: not its pipes, whose end the host waits for, and not the runner's socket."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, min(highest, 65_536) if highest > 0 else 65_536)


def _serve(listener: socket.socket, path: str) -> None:
    try:
        _let_go(listener)
        Relay(listener, _connect_to(path)).serve()
    finally:
        os._exit(1)


def main(path: str, command: list[str]) -> None:
    """Listen, leave a relay behind, become the command."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=128)
    child = os.fork()
    if child == 0:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            _serve(listener, path)
        os._exit(0)
    os.waitpid(child, 0)
    listener.close()
    # Python ignores SIGPIPE, and an ignored signal crosses an exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
