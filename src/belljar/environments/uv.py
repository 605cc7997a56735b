"""Runs uv, the installer, as a subprocess that is heard, limited in time, and gone when its caller is.

It passes the process's own variables on, so that the user's index settings count. Nothing of it reaches our stdout,
which may be an MCP connection. It does not know what is installed or where. That uv may run elsewhere than on the host
is said here; where, `kernels` knows.
"""

import codecs
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
from anyio.abc import Process
from uv import find_uv_bin

from belljar.environments.base import Environment
from belljar.errors import EnvironmentBroken

_HEARD_LIMIT = 1_000_000
_COMPLAINT_LIMIT = 20_000
_CHATTER = ("Using ", "Resolved ", "Downloading ", " Downloaded ", "Prepared ", "Audited ", "Checked ")


@dataclass(frozen=True, slots=True)
class UvAnswer:
    """How uv ended and what it said."""

    status: int
    words: str

    @property
    def complaint(self) -> str:
        """What uv said went wrong, without what it said before."""
        lines = self.words.strip().splitlines()
        start = next((number for number, line in enumerate(lines) if line.startswith("error:")), None)
        kept = lines[start:] if start is not None else [line for line in lines if not line.startswith(_CHATTER)]
        return "\n".join(kept).strip()[-_COMPLAINT_LIMIT:] or f"uv ended with status {self.status}"


class Uv(Protocol):
    """uv, wherever it runs, in the folder that it was opened for."""

    async def __call__(self, arguments: Sequence[str], *, timeout_s: float) -> UvAnswer:
        """Run it once. Asked by an installation, several times over."""
        ...


OpenUv = Callable[[Environment, Path], AbstractAsyncContextManager[Uv]]
"""Opens uv for an environment and a working folder; nothing of uv runs on when the block has ended."""


@asynccontextmanager
async def open_uv_on_host(environment: Environment, folder: Path) -> AsyncGenerator[Uv]:
    """uv as a process of this server's user, which reaches what that user reaches."""
    # A hard link would let a session write into uv's cache.
    yield partial(run_uv, directory=folder, variables={"UV_LINK_MODE": "copy"})


def find_uv() -> str:
    """The uv binary that came with our dependency, or else one on the PATH."""
    try:
        return find_uv_bin()
    except FileNotFoundError as error:
        if found := shutil.which("uv"):
            return found
        raise EnvironmentBroken(
            "the uv binary is missing", hint="Reinstall it: pip install --force-reinstall uv"
        ) from error


def has_uv() -> bool:
    """Whether there is one."""
    try:
        return bool(find_uv())
    except EnvironmentBroken:
        return False


async def run_uv(
    arguments: Sequence[str],
    *,
    directory: Path,
    timeout_s: float,
    show: bool = False,
    on_line: Callable[[str], None] | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> UvAnswer:
    """Run uv in a directory whose parents hold no project; with `show`, it talks to our stderr and nothing is heard."""
    process = await anyio.open_process(
        [find_uv(), *([] if show else ["--color", "never"]), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if show else subprocess.PIPE,
        cwd=directory,
        start_new_session=True,
        pass_fds=pass_fds,
        env={**os.environ, **variables} if variables else None,
        # Root's sessions have users of their own, and read what is made here.
        umask=0o022 if os.geteuid() == 0 else -1,
    )
    try:
        with anyio.fail_after(timeout_s):
            words = await listen(process.stderr, on_line) if process.stderr else ""
            return UvAnswer(await process.wait(), words)
    except TimeoutError:
        return stopped_after(timeout_s)
    finally:
        await _end(process)


def stopped_after(timeout_s: float) -> UvAnswer:
    """The answer of a uv that had no time left."""
    return UvAnswer(-signal.SIGKILL, f"error: uv was stopped after {timeout_s:g} s")


async def listen(chunks: AsyncIterable[bytes], on_line: Callable[[str], None] | None = None) -> str:
    """What uv says, to its end: the last of it, should it be very long."""
    heard, line = "", ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for chunk in chunks:
        text = decoder.decode(chunk)
        heard = (heard + text)[-_HEARD_LIMIT:]
        *lines, line = (line + text).split("\n")
        if on_line:
            for complete in lines:
                on_line(complete.strip())
    return heard


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with anyio.CancelScope(shield=True):
        await process.aclose()
