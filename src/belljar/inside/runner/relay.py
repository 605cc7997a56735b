"""Connect 127.0.0.1 inside the sandbox to the host's proxy, then execute a command: `relay.py SOCKET COMMAND…`.

The relay is a grandchild of the command's process, so that a cell's `os.wait` does not see it. It holds none of the
session's descriptors and ends with the sandbox's namespaces. It forwards bytes and decides nothing; the proxy does.
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
    """One socket of a pair. What it reads goes to the other, and no more is read until the other has sent it."""

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
    """All connections, in one thread, because threads would count against the session's limit of processes."""

    def __init__(self, routes: Mapping[socket.socket, Connect]) -> None:
        self._routes = routes
        self._selector = selectors.DefaultSelector()
        for listener in routes:
            self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Accept and forward connections for ever."""
        while True:
            for key, events in self._selector.select():
                if key.data is None:
                    self._accept(next(listener for listener in self._routes if listener is key.fileobj))
                elif not key.data.is_shut or key.data.sock.fileno() >= 0:
                    self._move(key.data, events)

    def _accept(self, listener: socket.socket) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = self._routes[listener]()
        except OSError:
            near.close()
            return
        sides = (_Side(near), _Side(far))
        sides[0].other, sides[1].other = sides[1], sides[0]
        for side in sides:
            side.sock.setblocking(False)
            self._selector.register(side.sock, selectors.EVENT_READ, side)

    def _move(self, side: _Side, events: int) -> None:
        if side.sock.fileno() < 0:  # closed together with the other side, earlier in this round
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
    os.chdir(folder)  # because a UNIX socket's address holds 107 bytes, and the folder's path may be longer

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(name)
        except OSError:
            sock.close()
            raise
        return sock

    return connect


def _close_all_but(kept: Iterable[int]) -> None:
    """Close the session's descriptors: its pipes, because the host waits for their end, and the runner's socket."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    lowest = 3
    for descriptor in sorted(kept):
        os.closerange(lowest, descriptor)
        lowest = descriptor + 1
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(lowest, min(highest, 65_536) if highest > 0 else 65_536)


def _serve(listeners: "list[socket.socket]", open_routes: "Callable[[], Mapping[socket.socket, Connect]]") -> None:
    try:
        _close_all_but(listener.fileno() for listener in listeners)
        Relay(open_routes()).serve()
    finally:
        os._exit(1)


def become(
    command: "list[str]", listeners: "list[socket.socket]", open_routes: "Callable[[], Mapping[socket.socket, Connect]]"
) -> None:
    """Start a relay that accepts at these listeners, then execute the command."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            _serve(listeners, open_routes)
        os._exit(0)
    os.waitpid(child, 0)
    for listener in listeners:
        listener.close()
    # Python ignores SIGPIPE, and an ignored signal stays ignored after an exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


def main(path: str, command: "list[str]") -> None:
    """Listen for the connections of the session's programs to the proxy, and execute the command."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=128)
    become(command, [listener], lambda: {listener: _connect_to(path)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
