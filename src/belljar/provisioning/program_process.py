"""Runs a program once in a new process of an environment, sandboxed as a session is.

There is no kernel, and no variables last: the result is what the program writes to stdout and stderr, and its exit
status.
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
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes.base import Incident, Sandbox
from belljar.sandboxes.child import open_output_pipe

OUTPUT_CAP_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended and what it wrote; only the status says whether it failed."""

    status: int
    """Negative for a signal."""
    stdout: str
    stderr: str
    is_timeout: bool = False
    dropped_bytes: int = 0
    """The size of the output beyond the cap."""
    incidents: list[Incident] = field(default_factory=list[Incident])
    """The limits that it hit."""
    notices: tuple[str, ...] = ()
    """Words of belljar's own about its code and its output."""


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
    """Run the environment's Python with these arguments in the folders' workspace, with an empty stdin."""
    sandbox = await starter.open_sandbox(environment, folders, readable)
    try:
        async with _open_reader(output_cap_bytes) as stdout, _open_reader(output_cap_bytes) as stderr:
            status, is_timeout = await _run(sandbox, environment, folders.layer, arguments, stdout, stderr, timeout_s)
            incidents = sandbox.incidents()
            # After this no process has a pipe open any more.
            await sandbox.kill()
            stdout_text, stderr_text = await stdout.text(), await stderr.text()
        dropped = stdout.dropped_bytes + stderr.dropped_bytes
        return ProgramEnd(status, stdout_text, stderr_text, is_timeout, dropped, incidents)
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.aclose()


def program_arguments(text: str, name: str, place: Path) -> list[str]:
    """Return arguments with which Python runs this text as if it were the file of that name.

    The text is written into `place`, a folder that the program can read but not write, because the named file may be
    changed by then. The caller has to show `place` to the sandbox.
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
    """Reads one pipe to its end and keeps the beginning."""

    def __init__(self, writing: int, reader: asyncio.StreamReader, cap_bytes: int) -> None:
        self.writing = writing
        self.dropped_bytes = 0
        self._kept = bytearray()
        self._cap = cap_bytes
        self._is_open = True
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    def close_writing(self) -> None:
        """Close our copy of the write end, once the program has it; may be called twice."""
        if self._is_open:
            self._is_open = False
            os.close(self.writing)

    async def text(self) -> str:
        """Wait until every writer is gone, and return what was kept."""
        await self._reading
        return self._kept.decode("utf-8", "replace")

    def stop(self) -> None:
        """Stop reading and close the write end."""
        self.close_writing()
        self._reading.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            room = self._cap - len(self._kept)
            self._kept += chunk[:room]
            self.dropped_bytes += len(chunk[room:])


@asynccontextmanager
async def _open_reader(cap_bytes: int) -> AsyncGenerator[_OutputReader]:
    async with open_output_pipe() as (writing, reader):
        output = _OutputReader(writing, reader, cap_bytes)
        try:
            yield output
        finally:
            output.stop()
