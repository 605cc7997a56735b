"""A program in a fresh process of an environment: sandboxed as a session is, run to its end, and gone.

No kernel and no variables that last: what it writes to stdout and stderr, and how it ended, is all there is.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from belljar.environments.base import Environment
from belljar.files.private import shown_mode, write_file
from belljar.inside import RUNNER
from belljar.kernels.launch import session_environment
from belljar.provisioning.folders import KernelFolders
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes.base import Incident, Sandbox

OUTPUT_CAP_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How it ended and what it said; only the status says whether it failed."""

    status: int
    """Negative for a signal."""
    stdout: str
    stderr: str
    is_timeout: bool = False
    dropped_bytes: int = 0
    """Output beyond the cap."""
    incidents: list[Incident] = field(default_factory=list[Incident])
    """Limits that it hit."""


async def run_program(
    starter: KernelStarter,
    environment: Environment,
    folders: KernelFolders,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    output_cap_bytes: int = OUTPUT_CAP_BYTES,
    readable: Sequence[Path] = (),
) -> ProgramEnd:
    """Run the environment's Python with these arguments in the folders' workspace, with nothing to read from stdin."""
    sandbox = await starter.open_sandbox(environment, folders, readable)
    try:
        async with _hearing(output_cap_bytes) as stdout, _hearing(output_cap_bytes) as stderr:
            status, is_timeout = await _run(sandbox, environment, folders.layer, arguments, stdout, stderr, timeout_s)
            incidents = sandbox.incidents()
            # With the sandbox the last one is gone that could still hold a pipe.
            await sandbox.kill()
            said, complained = await stdout.heard(), await stderr.heard()
        dropped = stdout.dropped_bytes + stderr.dropped_bytes
        return ProgramEnd(status, said, complained, is_timeout, dropped, incidents)
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.aclose()


def program_arguments(text: str, name: str, place: Path) -> list[str]:
    """Arguments for Python to run this text as if it were the file of that name, whatever is in the file by then.

    The place is a folder out of the program's reach, which it has to be shown; it is filled here.
    """
    code = place / "code.py"
    write_file(code, text)
    code.chmod(shown_mode(is_folder=False))
    place.chmod(shown_mode(is_folder=True))
    return ["-u", str(RUNNER / "program.py"), str(code), name]


async def _run(
    sandbox: Sandbox,
    environment: Environment,
    layer: Path,
    arguments: Sequence[str],
    stdout: "_OutputReader",
    stderr: "_OutputReader",
    timeout_s: float,
) -> tuple[int, bool]:
    try:
        process = await sandbox.spawn(
            [str(environment.python), *arguments],
            environment=session_environment(sandbox, environment, layer),
            stdout=stdout.writing,
            stderr=stderr.writing,
        )
    finally:
        stdout.close_writing()
        stderr.close_writing()
    waiting = asyncio.get_running_loop().create_task(process.wait())
    try:
        done, _ = await asyncio.wait([waiting], timeout=timeout_s)
        if not done:
            await sandbox.kill()
        return await waiting, not done
    finally:
        waiting.cancel()


class _OutputReader:
    """Hears one pipe to its end, and keeps the beginning."""

    def __init__(self, writing: int, reader: asyncio.StreamReader, cap_bytes: int) -> None:
        self.writing = writing
        self.dropped_bytes = 0
        self._kept = bytearray()
        self._cap = cap_bytes
        self._is_open = True
        self._listening = asyncio.get_running_loop().create_task(self._listen(reader))

    def close_writing(self) -> None:
        """The program has its own end now."""
        if self._is_open:
            self._is_open = False
            os.close(self.writing)

    async def heard(self) -> str:
        """All that is kept, once every writer is gone."""
        await self._listening
        return self._kept.decode("utf-8", "replace")

    def stop(self) -> None:
        """Nobody listens any more."""
        self.close_writing()
        self._listening.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            room = self._cap - len(self._kept)
            self._kept += chunk[:room]
            self.dropped_bytes += len(chunk[room:])


@asynccontextmanager
async def _hearing(cap_bytes: int) -> AsyncGenerator[_OutputReader]:
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    ear = _OutputReader(writing, reader, cap_bytes)
    try:
        yield ear
    finally:
        ear.stop()
        transport.close()
