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
from collections.abc import Callable, Iterable, Mapping

PORT = 3128
_CHUNK_BYTES = 65_536
Connect = Callable[[], socket.socket]


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

    def __init__(self, doors: Mapping[socket.socket, Connect]) -> None:
        self._doors = doors
        self._selector = selectors.DefaultSelector()
        for listener in doors:
            self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """For ever."""
        while True:
            for key, events in self._selector.select():
                if key.data is None:
                    self._accept(next(door for door in self._doors if door is key.fileobj))
                elif not key.data.is_shut or key.data.sock.fileno() >= 0:
                    self._move(key.data, events)

    def _accept(self, listener: socket.socket) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = self._doors[listener]()
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


def _connect_to(path: str) -> Connect:
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


def _let_go(kept: Iterable[int]) -> None:
    """Hold nothing of the session's: not its pipes, whose end the host waits for, and not the runner's socket."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    lowest = 3
    for descriptor in sorted(kept):
        os.closerange(lowest, descriptor)
        lowest = descriptor + 1
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(lowest, min(highest, 65_536) if highest > 0 else 65_536)


def _serve(listeners: "list[socket.socket]", open_doors: "Callable[[], Mapping[socket.socket, Connect]]") -> None:
    try:
        _let_go(listener.fileno() for listener in listeners)
        Relay(open_doors()).serve()
    finally:
        os._exit(1)


def become(
    command: "list[str]", listeners: "list[socket.socket]", open_doors: "Callable[[], Mapping[socket.socket, Connect]]"
) -> None:
    """Leave a relay behind that answers at these listeners, then become the command."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            _serve(listeners, open_doors)
        os._exit(0)
    os.waitpid(child, 0)
    for listener in listeners:
        listener.close()
    # Python ignores SIGPIPE, and an ignored signal crosses an exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


def main(path: str, command: "list[str]") -> None:
    """Listen for what the session's programs have to say to the proxy, and become the command."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=128)
    become(command, [listener], lambda: {listener: _connect_to(path)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
