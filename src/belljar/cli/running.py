"""One cell, from the command line to an exit status: its output as it comes, its figures and files beside it.

Stdout is the code's own; what belljar has to say goes to stderr. Knows sessions by their handle only.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from belljar.api import open_session
from belljar.cli.endings import INTERRUPTED, exit_status
from belljar.cli.keeping import Keeper, check_folder
from belljar.cli.streams import log_to_stderr
from belljar.cli.terminal import Screen, StandardInput
from belljar.environments import prepare
from belljar.errors import InvalidArgument
from belljar.files.transfer import download_folder
from belljar.handles import SessionHandle
from belljar.settings import Settings

_BROKEN_PIPE = 128 + signal.SIGPIPE
# Made ready for sessions to come and for going back: here there is one session, and one way through it.
_SPARED = {"fork_start": False, "pool_size": 0, "checkpoints": 0, "hibernate": False}


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and what to do with what it gives."""

    code: str
    out: Path | None
    """Where files go; None for a folder of the session's own below `download_directory`."""
    as_json: bool
    is_stdin_free: bool


def read_code(file: str | None, code: str | None) -> str:
    """The code, from exactly one of its three places."""
    if (file is None) == (code is None):
        raise InvalidArgument("belljar run takes either a file or -c CODE", hint="Use - to read the code from stdin")
    if code is not None:
        return code
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file or "").read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error


def spared(settings: Settings) -> Settings:
    """The settings without what a single session does not need, unless that was asked for."""
    return settings.model_copy(
        update={name: value for name, value in _SPARED.items() if name not in settings.model_fields_set}
    )


def run(settings: Settings, job: Job) -> int:
    """Run a job to its end and tell the exit status."""
    # What belljar does is no part of what the code prints; warnings are, such as that nothing is isolated.
    level = logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING
    log_to_stderr(level)
    try:
        return asyncio.run(_run(settings, job))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain about it once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


async def _run(settings: Settings, job: Job) -> int:
    # Told before the work rather than after it.
    out = check_folder(job.out) if job.out is not None else None
    await prepare_environment(settings)
    async with open_session(settings=settings) as session:
        screen = Screen(session, is_quiet=job.as_json)
        keeper = Keeper(session, out or download_folder(settings.download_directory, session.id))
        stream = session.stream(job.code, on_input=StandardInput().answer if job.is_stdin_free else None)
        with interrupting(session):
            async for event in stream:
                keeper.notice(event)
                await screen.show(event)
        await screen.end(stream.result)
        if job.as_json:
            print(json.dumps(stream.result.model_dump(mode="json"), indent=2), flush=True)
        await keeper.save(stream.result.files)
        return exit_status(stream.result)


async def prepare_environment(settings: Settings) -> None:
    """Make the default environment if it is needed and missing, with a sign of life."""
    if settings.environment != "default" and not settings.environment.startswith("kernel:"):
        return
    is_terminal = sys.stderr.isatty()
    said: list[str] = []

    def say(line: str) -> None:
        # On a terminal uv draws its own progress; elsewhere its words would be a page of package names.
        if is_terminal or not said:
            print(line, file=sys.stderr, flush=True)
        said.append(line)

    await prepare(settings, show=is_terminal, on_progress=say)


@contextlib.contextmanager
def interrupting(session: SessionHandle) -> Generator[None]:
    """The first Ctrl-C interrupts the code, as it would without us; the second ends it with its process."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    interrupts: list[asyncio.Task[list[str]]] = []

    def on_signal() -> None:
        if not interrupts:
            interrupts.append(loop.create_task(session.interrupt()))
        elif main is not None:
            main.cancel()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
