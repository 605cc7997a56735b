"""Looking at the running servers again and again, until the person has seen enough."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from belljar.cli.board import Board, Look
from belljar.cli.streams import raw_stream
from belljar.control import ask_servers

REFRESH_S = 1.0
# Between the two looks of a single frame: CPU is what was used between them.
ONCE_S = 0.3
_STDIN = 0


async def print_once(folder: Path) -> None:
    """One frame: the table to stdout, the rest to stderr."""
    async with aclosing(_frames(folder)) as frames:
        await anext(frames)
        await asyncio.sleep(ONCE_S)
        board = await anext(frames)
    if text := board.text():
        print(text)
    for note in board.notes():
        print(note, file=sys.stderr)


async def watch(folder: Path) -> None:
    """A frame a second, until `q` is pressed."""
    with _pressed(b"q") as quitting, _live() as live:
        async with aclosing(_frames(folder)) as frames:
            async for board in frames:
                live.update(board, refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFRESH_S):
                        await quitting.wait()
                if quitting.is_set():
                    return


def _live() -> Live:
    # It draws; what it is given to draw has been made harmless by the board.
    console = Console(file=raw_stream(sys.stdout))
    return Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


async def _frames(folder: Path) -> AsyncGenerator[Board]:
    before: Look | None = None
    while True:
        look = Look(await ask_servers(folder))
        yield Board(str(folder), look, before)
        before = look


@contextmanager
def _pressed(key: bytes) -> Generator[asyncio.Event]:
    """Set once the key is pressed, without Enter; never where stdin is no terminal."""
    pressed = asyncio.Event()
    if not os.isatty(_STDIN):
        yield pressed
        return

    def read() -> None:
        typed = os.read(_STDIN, 1024)
        # Nothing at all: the terminal is gone.
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
