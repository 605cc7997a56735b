"""The server's end of a container's start: a folder and a socket that only that container ever sees.

The folder is private on the host and mounted in one container alone. That container's first process is ours
(`inside/container_init.py`) and connects before any code of a session runs. One peer is accepted, if it is the right
user, and then the socket and the folder are removed.
"""

import asyncio
import base64
import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from belljar import ipc
from belljar.errors import InvalidArgument
from belljar.inside import FOLDER
from belljar.sandboxes.namespace.bwrap_args import open_content

MAX_DESCRIPTORS = 250
_PROGRAM = FOLDER / "container_init.py"


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What the container's first process shall start. `descriptors` maps numbers inside to the host's descriptors."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    descriptors: Mapping[int, int]
    program: bytes
    """A filter of system calls; empty for none."""
    shown: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """The user's folders by their paths inside: device and inode of each, which must be there."""

    def check(self) -> None:
        """Refuse what could not be executed, before anything is started for it."""
        if any("\0" in word for pair in (self.command, *self.environment.items()) for word in pair):
            raise InvalidArgument(f"Cannot start {self.command[0]!r}: embedded null byte")
        if any(not name or "=" in name for name in self.environment):
            raise InvalidArgument(f"Cannot start {self.command[0]!r}: illegal environment variable name")
        if len(self.descriptors) > MAX_DESCRIPTORS:
            raise InvalidArgument(f"{len(self.descriptors)} descriptors for a container, {MAX_DESCRIPTORS} can cross")


class ContainerInit:
    """The connected first process of a container."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        """As numbered on the host."""

    def hand_over(self, order: StartOrder, limits: Mapping[int, int]) -> None:
        """Send it the order, so that it starts the command."""
        text = json.dumps(
            {
                "command": [*order.command],
                "environment": dict(order.environment),
                "folder": order.folder,
                "descriptors": [*order.descriptors],
                "limits": dict(limits),
                "shown": {path: [*numbers] for path, numbers in order.shown.items()},
                "filter": base64.b64encode(order.program).decode(),
            }
        )
        with contextlib.ExitStack() as stack:
            order_file = open_content(text.encode(), stack)
            socket.send_fds(self.connection, [b"!"], [order_file, *order.descriptors.values()])


class Handshake:
    """Waits for a container's first process to connect, until it has or until `close`."""

    def __init__(self, uid: int, files: Mapping[str, str]) -> None:
        """Accept only the user `uid`. `files` are put into the folder too, by name."""
        self._uid = uid
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._connected: asyncio.Future[ContainerInit | None] = self._loop.create_future()
        self._private = Path(tempfile.mkdtemp(prefix="belljar-"))
        try:
            self.step = _make_folder(self._private / "step")
            """The folder to mount inside: the program, and the socket that it connects to."""
            self.files = _make_folder(self._private / "files")
            _write(self.step / _PROGRAM.name, _PROGRAM.read_text())
            for name, text in files.items():
                _write(self.files / name, text)
            self._listen()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        ipc.bind(listener, self.step / "init.sock", 0o666)
        listener.listen(1)
        self._loop.add_reader(listener, self._on_connect)

    async def wait_for_init(self) -> ContainerInit | None:
        """Return the first process once it has connected; None when `close` came first."""
        return await asyncio.shield(self._connected)

    def refuse(self) -> None:
        """Accept nobody any more, and drop the first process if it has connected and got no order yet."""
        self.close()
        if init := self._connected.result():
            init.connection.close()

    def close(self) -> None:
        """Accept nobody any more; may be called twice."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        # The container keeps what is mounted in it.
        shutil.rmtree(self._private, ignore_errors=True)
        if not self._connected.done():
            self._connected.set_result(None)

    def _on_connect(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            peer = ipc.peer_of(connection)
            if peer is None or peer.uid != self._uid or self._connected.done():
                connection.close()
                return
            connection.setblocking(False)
            self._connected.set_result(ContainerInit(connection, peer.pid))
            self.close()


def watch(connection: socket.socket, on_end: Callable[[bytes], None]) -> None:
    """Call back once, with what the peer sent, or with nothing if it is gone, and stop reading."""
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        try:
            said = connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        loop.remove_reader(connection)
        on_end(said)

    loop.add_reader(connection, on_readable)


def _make_folder(path: Path) -> Path:
    path.mkdir()
    # Independent of our umask, because another user must read it; the folder above keeps everyone else out.
    path.chmod(0o755)
    return path


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o444)
