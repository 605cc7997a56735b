"""From a kernelspec to a kernel that answers, inside a sandbox that is there already."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from belljar.environments.base import Environment
from belljar.errors import KernelDied, KernelStartFailed
from belljar.kernels.jupyter.channels import Channels
from belljar.kernels.jupyter.kernel import JupyterKernel
from belljar.kernels.jupyter.messages import MessageSigner
from belljar.kernels.jupyter.specs import KernelSpec
from belljar.kernels.jupyter.zmtp import SocketType, ZmtpConnection, open_connection
from belljar.kernels.launch import cause_of, runner_command
from belljar.sandboxes.base import Sandbox, SandboxProcess

# Where host and kernel meet: a connection file and five socket names in the session's scratch folder.
# Code of the session may write there: names are random and new for every kernel, and nothing is written through a
# link.

# sun_path holds 108 bytes, the last of them a NUL.
_MAX_ADDRESS_BYTES = 107
_PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}


class ConnectionFile:
    """The files of one kernel; `scratch` is the host's name of the folder, `inside` the session's."""

    def __init__(self, scratch: Path, inside: str) -> None:
        self._scratch = scratch
        self._inside = inside
        self._token = secrets.token_hex(4)
        self._detour: Path | None = None
        self.key = secrets.token_hex(32)

    @property
    def connection_file(self) -> str:
        """The connection file as the kernel sees it."""
        return f"{self._inside}/{self._token}.json"

    @property
    def inner_connection_file(self) -> str:
        """The connection file of a kernel behind a bridge, which writes it."""
        return f"{self._inside}/{self._token}-inner.json"

    def socket_path(self, channel: str) -> Path:
        """A channel's socket as the host sees it."""
        return self._scratch / f"{self._token}-{_PORTS[channel]}"

    def write(self) -> None:
        """Write the connection file."""
        told = {
            "transport": "ipc",
            "ip": f"{self._address_folder()}/{self._token}",
            "key": self.key,
            "signature_scheme": "hmac-sha256",
            **{f"{channel}_port": port for channel, port in _PORTS.items()},
        }
        descriptor = os.open(self._scratch / f"{self._token}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            folder = self._scratch.stat()
            if folder.st_uid != os.geteuid():
                os.fchown(descriptor, folder.st_uid, folder.st_gid)
            json.dump(told, file)

    def remove(self) -> None:
        """Remove what was written and what the kernel left; may be called twice."""
        files = (self._scratch / f"{self._token}{ending}.json" for ending in ("", "-inner"))
        for path in (*files, *map(self.socket_path, _PORTS)):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._detour is not None:
            shutil.rmtree(self._detour, ignore_errors=True)

    def _address_folder(self) -> str:
        """The scratch folder under a name short enough for a socket's address, where the host's names hold inside."""
        longest = f"{self._inside}/{self._token}-{max(_PORTS.values())}"
        if len(os.fsencode(longest)) <= _MAX_ADDRESS_BYTES or self._inside != str(self._scratch):
            return self._inside
        self._detour = Path(tempfile.mkdtemp(prefix="belljar-", dir="/tmp"))
        (self._detour / "s").symlink_to(self._scratch)
        return str(self._detour / "s")


_WORDS_BYTES = 2_000
# Nothing tells when another process begins to listen; trying costs a few system calls.
_RETRY_S = 0.02
_CHANNELS: dict[str, SocketType] = {"iopub": "SUB", "shell": "DEALER", "stdin": "DEALER", "control": "DEALER"}


async def start_jupyter(
    sandbox: Sandbox,
    spec: KernelSpec,
    *,
    scratch: Path,
    environment: Mapping[str, str],
    start_timeout_s: float,
    bridge: Environment | None = None,
) -> JupyterKernel:
    """Start a kernel cold and wait until it answers; it owns the sandbox from here on, also when it fails.

    With a `bridge`, an environment whose Python can run one, a kernel that may know nothing but TCP is met too.
    """
    resources = AsyncExitStack()
    words = _LastWords()
    resources.callback(words.close)
    resources.push_async_callback(sandbox.aclose)
    try:
        async with asyncio.timeout(start_timeout_s):
            return await _start(sandbox, spec, scratch, environment, words, resources, bridge)
    except TimeoutError:
        fact = f"kernel {spec.name} was not ready after {start_timeout_s:g} s"
        raise await _failure(fact, words, resources) from None
    except KernelDied as gone:
        raise await _failure(f"kernel {spec.name} did not start: {gone.message}", words, resources) from None
    except BaseException:
        await resources.aclose()
        raise


async def _failure(fact: str, words: "_LastWords", resources: AsyncExitStack) -> KernelStartFailed:
    hint = words.hint()
    await resources.aclose()
    return KernelStartFailed(fact, hint=hint)


async def _start(
    sandbox: Sandbox,
    spec: KernelSpec,
    scratch: Path,
    environment: Mapping[str, str],
    words: "_LastWords",
    resources: AsyncExitStack,
    bridge: Environment | None,
) -> JupyterKernel:
    meeting = ConnectionFile(scratch, sandbox.scratch)
    resources.callback(meeting.remove)
    meeting.write()
    process = await sandbox.spawn(
        _command(spec, meeting, bridge),
        environment=spec.variables(environment),
        stdout=words.write_end,
        stderr=words.write_end,
    )
    words.close_write_end()
    seal = MessageSigner(meeting.key)
    connections = await _connect(meeting, seal, process, resources)
    channels = Channels(connections, seal)
    resources.push_async_callback(channels.aclose)
    kernel = JupyterKernel(spec, sandbox, process, channels, resources)
    await kernel.wait_ready()
    return kernel


def _command(spec: KernelSpec, meeting: ConnectionFile, bridge: Environment | None) -> list[str]:
    # ipykernel and what is built on it take sockets in the file system; Deno's kernel, for one, does not.
    if bridge is None or spec.is_python:
        return spec.command(meeting.connection_file)
    inner = meeting.inner_connection_file
    return runner_command(bridge, "bridge", meeting.connection_file, inner, *spec.command(inner))


async def _connect(
    meeting: ConnectionFile, seal: MessageSigner, process: SandboxProcess, resources: AsyncExitStack
) -> dict[str, ZmtpConnection]:
    exited = asyncio.get_running_loop().create_task(process.wait())
    connections: dict[str, ZmtpConnection] = {}
    try:
        for channel, socket_type in _CHANNELS.items():
            connections[channel] = await _connect_one(meeting.socket_path(channel), socket_type, seal, exited)
            resources.push_async_callback(connections[channel].aclose)
    finally:
        exited.cancel()
    return connections


async def _connect_one(
    path: Path, socket_type: SocketType, seal: MessageSigner, exited: "asyncio.Task[int]"
) -> ZmtpConnection:
    while True:
        with contextlib.suppress(OSError):
            return await open_connection(path, socket_type, seal.identity)
        await asyncio.wait([exited], timeout=_RETRY_S)
        if exited.done():
            raise KernelDied(f"its process ended with {cause_of(exited.result())}")


class _LastWords:
    """What a kernel says on its own streams is no output of a cell; the end of it tells why a start failed."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    def hint(self) -> str:
        """The end of what was said."""
        self._read()
        text = self._tail.decode("utf-8", "replace").strip()
        return f"It said: {text}" if text else "It said nothing; `belljar doctor` checks the sandbox"

    def close_write_end(self) -> None:
        """Once the kernel has it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Release the pipe; may be called twice."""
        self.close_write_end()
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    def _read(self) -> None:
        try:
            said = os.read(self._read_end, 65_536)
        except BlockingIOError:
            return
        if not said:
            self._loop.remove_reader(self._read_end)
        self._tail = (self._tail + said)[-_WORDS_BYTES:]
