"""From a kernelspec to a kernel that answers, inside a sandbox that is there already."""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from belljar.environments.base import Environment
from belljar.errors import KernelDied, KernelStartFailed
from belljar.kernels.jupyter.channels import Channels
from belljar.kernels.jupyter.kernel import JupyterKernel
from belljar.kernels.jupyter.meeting import Meeting
from belljar.kernels.jupyter.messages import Seal
from belljar.kernels.jupyter.specs import KernelSpec
from belljar.kernels.jupyter.zmtp import Connection, SocketType, open_connection
from belljar.kernels.launching import cause_of, runner_command
from belljar.sandboxes.base import Sandbox, SandboxProcess

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
    meeting = Meeting(scratch, sandbox.scratch)
    resources.callback(meeting.remove)
    meeting.write()
    process = await sandbox.spawn(
        _command(spec, meeting, bridge),
        environment=spec.variables(environment),
        stdout=words.write_end,
        stderr=words.write_end,
    )
    words.close_write_end()
    seal = Seal(meeting.key)
    connections = await _connect(meeting, seal, process, resources)
    channels = Channels(connections, seal)
    resources.push_async_callback(channels.aclose)
    kernel = JupyterKernel(spec, sandbox, process, channels, resources)
    await kernel.wait_ready()
    return kernel


def _command(spec: KernelSpec, meeting: Meeting, bridge: Environment | None) -> list[str]:
    # ipykernel and what is built on it take sockets in the file system; Deno's kernel, for one, does not.
    if bridge is None or spec.is_python:
        return spec.command(meeting.connection_file)
    inner = meeting.inner_connection_file
    return runner_command(bridge, "bridge", meeting.connection_file, inner, *spec.command(inner))


async def _connect(
    meeting: Meeting, seal: Seal, process: SandboxProcess, resources: AsyncExitStack
) -> dict[str, Connection]:
    exited = asyncio.get_running_loop().create_task(process.wait())
    connections: dict[str, Connection] = {}
    try:
        for channel, socket_type in _CHANNELS.items():
            connections[channel] = await _connect_one(meeting.socket_path(channel), socket_type, seal, exited)
            resources.push_async_callback(connections[channel].aclose)
    finally:
        exited.cancel()
    return connections


async def _connect_one(path: Path, socket_type: SocketType, seal: Seal, exited: "asyncio.Task[int]") -> Connection:
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
