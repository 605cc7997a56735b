"""`belljar top`: the sessions of every server that uses this data directory, live in the terminal."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from belljar.cli.session_table import ServersSnapshot, SessionTable
from belljar.cli.streams import raw_stream
from belljar.control import ask_servers
from belljar.settings import load_command_settings

_REFRESH_S = 1.0
# The time between the two snapshots of a single frame, which CPU shares are computed from.
_ONCE_S = 0.3
_STDIN = 0


def command(
    once: Annotated[bool, typer.Option("--once", help="Print one frame as plain text and end.")] = False,
) -> None:
    """Watch the sessions of all running servers of this data directory; q or Ctrl-C ends.

    CPU is the share of one processor that a session's kernel used since the last look.
    """
    folder = load_command_settings().data_directory
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(folder) if sys.stdout.isatty() and not once else _print_once(folder))


async def _print_once(folder: Path) -> None:
    """Print one frame: the table to stdout, the notes to stderr."""
    async with aclosing(_tables(folder)) as tables:
        await anext(tables)
        await asyncio.sleep(_ONCE_S)
        table = await anext(tables)
    if text := table.text():
        print(text)
    for note in table.notes():
        print(note, file=sys.stderr)


async def _watch(folder: Path) -> None:
    """Draw a frame a second, until `q` is pressed."""
    with _key_event(b"q") as quitting, _live() as live:
        async with aclosing(_tables(folder)) as tables:
            async for table in tables:
                live.update(table, refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REFRESH_S):
                        await quitting.wait()
                if quitting.is_set():
                    return


def _live() -> Live:
    # rich needs the unfiltered stream to draw; the table has removed control characters from every text.
    console = Console(file=raw_stream(sys.stdout))
    return Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


async def _tables(folder: Path) -> AsyncGenerator[SessionTable]:
    before: ServersSnapshot | None = None
    while True:
        snapshot = ServersSnapshot(await ask_servers(folder))
        yield SessionTable(str(folder), snapshot, before)
        before = snapshot


@contextmanager
def _key_event(key: bytes) -> Generator[asyncio.Event]:
    """Yield an event that is set once the key is pressed, without Enter; it stays unset if stdin is no terminal."""
    pressed = asyncio.Event()
    if not os.isatty(_STDIN):
        yield pressed
        return

    def read() -> None:
        typed = os.read(_STDIN, 1024)
        # An empty read means that the terminal is gone.
        if key in typed.lower() or not typed:
            pressed.set()

    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(_STDIN)
    tty.setcbreak(_STDIN)
    loop.add_reader(_STDIN, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(_STDIN)
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)
