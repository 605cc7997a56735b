"""Runs uv, the installer, as a subprocess that is heard, limited in time, and gone when its caller is.

It passes the process's own variables on, so that the user's index settings count. Nothing of it reaches our stdout,
which may be an MCP connection. It does not know what is installed or where.
"""

import codecs
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process
from uv import find_uv_bin

from belljar.errors import EnvironmentBroken

_HEARD_LIMIT = 1_000_000
_COMPLAINT_LIMIT = 4_000
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


def find_uv() -> str:
    """The uv binary that came with our dependency."""
    try:
        return find_uv_bin()
    except FileNotFoundError as error:
        raise EnvironmentBroken(
            "the uv binary is missing", hint="Reinstall it: pip install --force-reinstall uv"
        ) from error


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
    )
    try:
        with anyio.fail_after(timeout_s):
            words = await _listen(process, on_line)
            return UvAnswer(await process.wait(), words)
    except TimeoutError:
        return UvAnswer(-signal.SIGKILL, f"error: uv was stopped after {timeout_s:g} s")
    finally:
        await _end(process)


async def _listen(process: Process, on_line: Callable[[str], None] | None) -> str:
    heard, line = "", ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if process.stderr is None:
        return heard
    async for chunk in process.stderr:
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
