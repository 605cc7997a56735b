"""Starting a Jupyter kernel from a kernelspec, in a sandbox that is open already, and connecting to it.

Owns the connection file and the sockets in the session's scratch folder. Does not choose the kernelspec.
"""

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

# sun_path holds 108 bytes, the last of them a NUL.
_MAX_ADDRESS_BYTES = 107
_PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}


class ConnectionFile:
    """The connection file and the five sockets of one kernel, in the session's scratch folder.

    `scratch` is the folder's path on the host, `inside` its path in the sandbox. Code of the session may write there,
    so names are random and new for every kernel, and nothing is written through a link.
    """

    def __init__(self, scratch: Path, inside: str) -> None:
        self._scratch = scratch
        self._inside = inside
        self._token = secrets.token_hex(4)
        self._short_folder: Path | None = None
        self.key = secrets.token_hex(32)

    @property
    def connection_file(self) -> str:
        """Return the path of the connection file inside the sandbox."""
        return f"{self._inside}/{self._token}.json"

    @property
    def inner_connection_file(self) -> str:
        """Return the path inside of the connection file that a bridge writes for the kernel behind it."""
        return f"{self._inside}/{self._token}-inner.json"

    def socket_path(self, channel: str) -> Path:
        """Return the host's path of a channel's socket."""
        return self._scratch / f"{self._token}-{_PORTS[channel]}"

    def write(self) -> None:
        """Write the connection file."""
        content = {
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
            json.dump(content, file)

    def remove(self) -> None:
        """Remove the connection files and the kernel's sockets; may be called twice."""
        files = (self._scratch / f"{self._token}{ending}.json" for ending in ("", "-inner"))
        for path in (*files, *map(self.socket_path, _PORTS)):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._short_folder is not None:
            shutil.rmtree(self._short_folder, ignore_errors=True)

    def _address_folder(self) -> str:
        """Return the scratch folder's path inside, through a short link if it is too long for a socket's address.

        The link is possible only where paths of the host are the same inside.
        """
        longest = f"{self._inside}/{self._token}-{max(_PORTS.values())}"
        if len(os.fsencode(longest)) <= _MAX_ADDRESS_BYTES or self._inside != str(self._scratch):
            return self._inside
        self._short_folder = Path(tempfile.mkdtemp(prefix="belljar-", dir="/tmp"))
        (self._short_folder / "s").symlink_to(self._scratch)
        return str(self._short_folder / "s")


_OUTPUT_TAIL_BYTES = 2_000
# Linux does not notify when another process begins to listen, so we try again; a try costs a few system calls.
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
    """Start a kernel's process and wait until it answers. The sandbox is closed with the kernel, or when this fails.

    `bridge` is an environment whose Python runs `inside/runner/bridge.py`, for kernels that know nothing but TCP.
    """
    resources = AsyncExitStack()
    output = _OutputTail()
    resources.callback(output.close)
    resources.push_async_callback(sandbox.aclose)
    try:
        async with asyncio.timeout(start_timeout_s):
            return await _start(sandbox, spec, scratch, environment, output, resources, bridge)
    except TimeoutError:
        fact = f"kernel {spec.name} was not ready after {start_timeout_s:g} s"
        raise await _failure(fact, output, resources) from None
    except KernelDied as gone:
        raise await _failure(f"kernel {spec.name} did not start: {gone.message}", output, resources) from None
    except BaseException:
        await resources.aclose()
        raise


async def _failure(fact: str, output: "_OutputTail", resources: AsyncExitStack) -> KernelStartFailed:
    hint = output.hint()
    await resources.aclose()
    return KernelStartFailed(fact, hint=hint)


async def _start(
    sandbox: Sandbox,
    spec: KernelSpec,
    scratch: Path,
    environment: Mapping[str, str],
    output: "_OutputTail",
    resources: AsyncExitStack,
    bridge: Environment | None,
) -> JupyterKernel:
    files = ConnectionFile(scratch, sandbox.scratch)
    resources.callback(files.remove)
    files.write()
    process = await sandbox.spawn(
        _command(spec, files, bridge),
        environment=spec.variables(environment),
        stdout=output.write_end,
        stderr=output.write_end,
    )
    output.close_write_end()
    signer = MessageSigner(files.key)
    connections = await _connect(files, signer, process, resources)
    channels = Channels(connections, signer)
    resources.push_async_callback(channels.aclose)
    kernel = JupyterKernel(spec, sandbox, process, channels, resources)
    await kernel.wait_ready()
    return kernel


def _command(spec: KernelSpec, files: ConnectionFile, bridge: Environment | None) -> list[str]:
    # ipykernel and what is built on it can listen on UNIX sockets; Deno's kernel, for one, cannot.
    if bridge is None or spec.is_python:
        return spec.command(files.connection_file)
    inner = files.inner_connection_file
    return runner_command(bridge, "bridge", files.connection_file, inner, *spec.command(inner))


async def _connect(
    files: ConnectionFile, signer: MessageSigner, process: SandboxProcess, resources: AsyncExitStack
) -> dict[str, ZmtpConnection]:
    exited = asyncio.get_running_loop().create_task(process.wait())
    connections: dict[str, ZmtpConnection] = {}
    try:
        for channel, socket_type in _CHANNELS.items():
            connections[channel] = await _connect_one(files.socket_path(channel), socket_type, signer, exited)
            resources.push_async_callback(connections[channel].aclose)
    finally:
        exited.cancel()
    return connections


async def _connect_one(
    path: Path, socket_type: SocketType, signer: MessageSigner, exited: "asyncio.Task[int]"
) -> ZmtpConnection:
    while True:
        with contextlib.suppress(OSError):
            return await open_connection(path, socket_type, signer.identity)
        await asyncio.wait([exited], timeout=_RETRY_S)
        if exited.done():
            raise KernelDied(f"its process ended with {cause_of(exited.result())}")


class _OutputTail:
    """The end of what a kernel's process writes to its own streams, which is no output of a cell.

    It says why a start failed.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    def hint(self) -> str:
        """Return the end of the output as a hint for an error."""
        self._read()
        text = self._tail.decode("utf-8", "replace").strip()
        return f"It said: {text}" if text else "It said nothing; `belljar doctor` checks the sandbox"

    def close_write_end(self) -> None:
        """Close our copy of the write end, once the kernel has it; may be called twice."""
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
            chunk = os.read(self._read_end, 65_536)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._read_end)
        self._tail = (self._tail + chunk)[-_OUTPUT_TAIL_BYTES:]
