"""One command in its container: starts the container, hands the command over, watches it, and kills everything inside.

`run_arguments.py` says what the container looks like; `Handshake` connects to its first process.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from belljar import ipc
from belljar.errors import InvalidArgument, SandboxUnavailable
from belljar.inside import FOLDER
from belljar.sandboxes.base import Incident, Limits
from belljar.sandboxes.child import Child, open_pidfd, start_child, wait_readable
from belljar.sandboxes.container.engines import EngineSilent, ask, error_line
from belljar.sandboxes.container.run_arguments import INIT_FOLDER, RunArguments, file_name, find_interpreter
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups, read_membership
from belljar.sandboxes.limits.cgroups import ControlGroup, adopt
from belljar.sandboxes.limits.enforcement import Enforcement
from belljar.sandboxes.limits.table import CONTROLLERS
from belljar.sandboxes.namespace.bwrap_args import open_content

MAX_DESCRIPTORS = 250
_PROGRAM = FOLDER / "container_init.py"
_KILLED = -signal.SIGKILL
# A container that was started and does not connect within this time may be dead, so the engine is asked.
_CONNECT_S = 2.0
_LEVELS = 3
_INIT_ARGUMENTS = ("-I", "-S", "-B", f"{INIT_FOLDER}/container_init.py", f"{INIT_FOLDER}/init.sock")
_ELSEWHERE = "Its processes are not this host's: the server and the engine must run on the same machine"


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


class ContainerProcess:
    """A command in a container; `pid` is the container's first process."""

    pid = 0

    def __init__(
        self, run_arguments: RunArguments, enforcement: Enforcement, *, on_end: Callable[["ContainerProcess"], None]
    ) -> None:
        self._run_arguments = run_arguments
        self._enforcement = enforcement
        self._on_end = on_end
        self._handshake: Handshake | None = None
        self._child: Child | None = None
        self._init: ContainerInit | None = None
        self._first: int | None = None
        self._meter: Enforcement | None = None
        self._group: ControlGroup | None = None
        self._status = _KILLED
        self._has_ended = asyncio.Event()

    async def start(self, order: StartOrder) -> None:
        """Make the container and hand the command to its first process."""
        handshake = self._handshake = self._open_handshake()
        await self._run(self._arguments(handshake, order, _INIT_ARGUMENTS))
        init = await self._wait_for_init(handshake)
        if self._has_ended.is_set():
            raise SandboxUnavailable("The sandbox was ended before its container had started")
        if init is None:
            complaint = await self._explain(order)
            raise SandboxUnavailable(
                f"The container ended before its first process was there: {complaint}",
                hint=f"Its Python must run in the image {self._run_arguments.image}",
            )
        self._receive(init, order)

    def _open_handshake(self) -> Handshake:
        spec = self._run_arguments.spec
        uid = spec.identity.uid if spec.identity else os.geteuid()
        return Handshake(uid, {file_name(path): text for path, text in self._run_arguments.files().items()})

    def _arguments(self, handshake: Handshake, order: StartOrder, program: Sequence[str], name: str = "") -> list[str]:
        run_arguments = replace(self._run_arguments, name=name or self._run_arguments.name)
        mounts = run_arguments.mounts(order.command, handshake.step, handshake.files)
        return run_arguments.arguments(find_interpreter(run_arguments.spec, order.command), mounts, program)

    async def _run(self, arguments: list[str]) -> None:
        engine = self._run_arguments.engine
        # Not a pipe, because processes that the engine leaves running would hold it open.
        output_fd = os.memfd_create("belljar")
        try:
            child = self._child = start_child(
                engine.command("run", "--detach", *arguments),
                environment=os.environ,
                folder="/",
                stdin=output_fd,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=(),
            )
            status = await child.wait()
            child.release()
            if status != 0:
                said = os.pread(output_fd, 65536, 0).decode(errors="replace")
                complaint = error_line(said) or f"status {status}"
                raise SandboxUnavailable(
                    f"{engine.kind} made no container: {complaint}", hint="`belljar doctor` checks the engine"
                )
        finally:
            os.close(output_fd)

    async def _wait_for_init(self, handshake: Handshake) -> ContainerInit | None:
        """Return the first process, which usually connects before the engine is done; None when it never will."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                return await handshake.wait_for_init()
        # It is slow or dead: wait until it connects or the engine says that it has ended, whichever comes first.
        waiting = self._run_arguments.engine.command("wait", self._run_arguments.name)
        ending = asyncio.create_task(asyncio.to_thread(_wait_for_end, waiting))
        ending.add_done_callback(lambda _: handshake.close())
        try:
            return await handshake.wait_for_init()
        finally:
            ending.cancel()

    async def _explain(self, order: StartOrder) -> str:
        """Return the error of its Python, run again in the foreground, because an ended container is removed."""
        handshake = self._open_handshake()
        try:
            name = f"{self._run_arguments.name}-again"
            arguments = self._arguments(handshake, order, ["-I", "-S", "-c", "import ctypes, resource, socket"], name)
            return await asyncio.to_thread(_complaint, self._run_arguments.engine.command("run", *arguments))
        finally:
            handshake.close()

    def _receive(self, init: ContainerInit, order: StartOrder) -> None:
        self._init = init
        self.pid = init.pid
        watch(init.connection, self._on_said)
        if init.pid == 0:
            raise SandboxUnavailable(_ELSEWHERE)
        self._first = open_pidfd(init.pid)
        limits = self._enforcement.limits
        offer = read_membership(Path(f"/proc/{init.pid}"))
        self._group = adopt(limiting(offer, limits), is_unified=offer.is_unified)
        self._meter = Enforcement(self._enforcement.groups, self._group, limits, None)
        with contextlib.suppress(OSError):
            self._enforcement.place(init.pid)
        is_alone = self._run_arguments.spec.identity is not None
        init.hand_over(order, self._meter.process_limits(is_alone=is_alone))

    def incidents(self) -> list[Incident]:
        """Return the limits that were hit since the last call."""
        return self._meter.incidents() if self._meter else []

    def memory_peak_mb(self) -> float:
        """Return the most memory that all its processes held since the last call; 0 where that is not measured."""
        return self._meter.memory_peak_mb() if self._meter else 0.0

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        await self._has_ended.wait()
        return self._status

    async def kill_all(self) -> None:
        """Kill every process in the container, and return when they are gone; may be called twice."""
        if self._init is None:
            await self._abort()
        else:
            self._close(self._status)
            await self._end_first()

    async def _abort(self) -> None:
        """End a container that is about to start, before any code can run in it."""
        self._has_ended.set()
        if self._handshake is not None:
            # A first process that finds the socket closed ends by itself.
            self._handshake.refuse()
        if self._child is not None:
            # Not killed, because the engine would leave half a container.
            await self._child.wait()
            self._child.release()
            await asyncio.to_thread(self._run_arguments.engine.remove, self._run_arguments.name)

    async def _end_first(self) -> None:
        """Kill the first process: Linux ends all others with it, before it reports that this one has ended."""
        if self._first is None:
            await asyncio.to_thread(self._run_arguments.engine.remove, self._run_arguments.name)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        await wait_readable(self._first)
        os.close(self._first)
        self._first = None

    def _on_said(self, said: bytes) -> None:
        """Take the status it sent. Nothing means the first process is gone, which only a SIGKILL from outside does."""
        status = _KILLED
        with contextlib.suppress(ValueError):
            status = max(-64, min(int(said), 255))
        self._close(status)

    def _close(self, status: int) -> None:
        if self._init is None or self._has_ended.is_set():
            return
        self._status = status
        # The container exists, and its group can be read, while the connection is open.
        self._on_end(self)
        self._meter = None
        if self._group is not None:
            self._group.release()
        asyncio.get_running_loop().remove_reader(self._init.connection)
        self._init.connection.close()
        self._has_ended.set()


def limiting(offer: ControlGroups, limits: Limits) -> dict[str, Path]:
    """Return the groups that really limit the process: its own, or one just above that the engine made.

    Only those whose incidents are told are looked for.
    """
    found: dict[str, Path] = {}
    for name, limit in CONTROLLERS.items():
        own, most = offer.folders.get(name), getattr(limits, limit.field) * limit.unit
        file = next(iter((limit.v2 if offer.is_unified else limit.v1).limits))
        for folder in (own, *own.parents)[:_LEVELS] if own and most and limit.incident else ():
            with contextlib.suppress(OSError):
                if (folder / file).read_text().strip() == str(most):
                    found[name] = folder
                    break
    return found


def _wait_for_end(command: list[str]) -> None:
    # If the engine does not answer in time, the container has not ended; whoever waits for it gives up as well.
    with contextlib.suppress(EngineSilent):
        ask(command)


def _complaint(command: list[str]) -> str:
    """Return the error of its Python when it is started the same way, in the foreground."""
    try:
        ask(command)
    except EngineSilent as silence:
        return str(silence)
    return "its Python starts, but did not stay"
