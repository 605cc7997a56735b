"""A cell at a terminal: its output as it comes, lines typed or piped in for its `input()`, and how it ended."""

import asyncio
import base64
import os
import signal
import stat
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TextIO

from belljar.cli.saved_outputs import display_in, saved_forms
from belljar.cli.streams import write_output
from belljar.models import Display, ExecutionResult, OutputEvent
from belljar.outputs.forms import is_readable
from belljar.outputs.spoofed_notices import StreamDisarmer
from belljar.outputs.terminal_text import LineFolder
from belljar.python.session_handle import SessionHandle
from belljar.questions.schema import JSON_HINT

INTERRUPTED = 130
"""The exit status that a shell gives a process that Ctrl-C ended."""

_EXIT_STATUSES = {"ok": 0, "error": 1, "timeout": 124, "interrupted": INTERRUPTED, "died": 137, "out_of_memory": 137}
STDIN_QUESTION = "belljar:stdin:"
"""How the questions of `inside/script_input.py` begin; then comes how many bytes it takes at most."""
_SYSTEM_EXIT = "SystemExit"
_STDIN = 0


class OutputPrinter:
    """Writes the events of a cell to stdout and stderr, except rich outputs that are saved as files.

    With `is_quiet` it writes nothing to stdout. Where no person reads stdout beside our notices, it stays as it is, but
    for progress bars: what is no terminal gets their last state.
    """

    def __init__(self, session: SessionHandle, *, is_quiet: bool = False) -> None:
        self._session = session
        self._is_quiet = is_quiet
        self._is_line_open = False
        self._disarmer = StreamDisarmer()
        self._is_stdout_shown = sys.stdout.isatty()
        self._is_animated = {"stdout": self._is_stdout_shown, "stderr": sys.stderr.isatty()}
        self._folder = LineFolder()

    async def show(self, event: OutputEvent) -> None:
        """Write one event."""
        if event.kind in self._is_animated:
            is_animated = self._is_animated[event.kind]
            await self._print_streams(
                [(event.kind, event.text)] if is_animated else self._folder.add(event.kind, event.text)
            )
            return
        await self._print_streams(self._folder.settle())
        match event.kind:
            case "notice":
                self._disarmer.notice()
                await write(sys.stderr, event.text)
            case "input" if event.text.startswith(STDIN_QUESTION):
                pass
            case "input":
                await (self._print_error(event.text) if self._is_quiet else self._print(event.text))
                if os.isatty(_STDIN):
                    self._is_line_open = False  # the person's Enter ends the line
            case "display" | "result":
                if text := await self._text_of(event):
                    await self._print(f"\n{text}\n" if self._is_line_open else f"{text}\n")
            case "error":
                if exit_argument(event.text) is None:
                    await self._print_error("\n".join(event.traceback or [event.text]) + "\n")
            case _:
                pass

    async def _print_streams(self, texts: Sequence[tuple[str, str]]) -> None:
        for name, text in texts:
            await (self._print(text) if name == "stdout" else self._print_error(text))

    async def end(self, result: ExecutionResult) -> None:
        """Write how the cell ended, where its output does not say that already."""
        await self._print_streams(self._folder.settle())
        if line := last_line(result):
            await write(sys.stderr, f"{line}\n")

    async def _text_of(self, event: OutputEvent) -> str:
        """Return a rich output as text; empty when it is saved as a file instead."""
        display = display_in(event)
        if display is not None and saved_forms(display):
            return ""
        if isinstance(uri := event.data.get("uri"), str):
            return (await self._session.display(uri)).decode(errors="replace")
        if display is None or is_readable(display.plain):
            return display.plain or "" if display else event.text
        return _first_text(display) or display.plain or ""

    async def _print(self, text: str) -> None:
        if self._is_quiet or not text:
            return
        self._is_line_open = not text.endswith("\n")
        await write(sys.stdout, self._disarmer.feed(text) if self._is_stdout_shown else text)

    async def _print_error(self, text: str) -> None:
        await write(sys.stderr, self._disarmer.feed(text))


class StandardInput:
    """Lines of our stdin, read on the event loop.

    A thread that waits in `read` would keep the process alive after an interrupt; a cancelled task does not.
    """

    def __init__(self) -> None:
        self._buffer = b""

    async def answer(self, prompt: str) -> str | None:
        """Return the next line, or None at the end of the input; of the prompt, the caller has printed the question."""
        if prompt.startswith(STDIN_QUESTION):
            content = await self._read(int(prompt.removeprefix(STDIN_QUESTION)))
            return base64.b64encode(content).decode() if content else None
        _, hint, fields = prompt.partition(JSON_HINT)
        if hint:
            await write(sys.stderr, f"{hint}{fields}")
        while b"\n" not in self._buffer:
            await _until_readable(_STDIN)
            chunk = os.read(_STDIN, 65_536)
            if not chunk:
                break
            self._buffer += chunk
        line, end, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").removesuffix("\r") if line or end else None

    async def _read(self, most: int) -> bytes:
        """Return the next bytes, as many as there are at once; none at the end of the input."""
        if not self._buffer:
            await _until_readable(_STDIN)
            self._buffer = os.read(_STDIN, 65_536)
        content, self._buffer = self._buffer[:most], self._buffer[most:]
        return content


def is_input_piped() -> bool:
    """Tell whether something is piped into this process: a file, a pipe or a socket, no terminal and not /dev/null."""
    try:
        mode = os.fstat(_STDIN).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
    except PermissionError:
        return  # epoll refuses regular files, which are always readable
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)


@contextmanager
def on_sigint(act: Callable[[], object]) -> Generator[None]:
    """Call back at each Ctrl-C during the block, instead of ending the process."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def exit_status(result: ExecutionResult) -> int:
    """Return the status that a shell would see if it had run the code itself."""
    argument = exit_argument(result.error) if result.status == "error" else None
    if argument is not None and argument.removeprefix("-").isdecimal():
        return int(argument) & 0xFF
    return _EXIT_STATUSES.get(result.status, 1)


def exit_argument(error: str | None) -> str | None:
    """Return what the code passed to `sys.exit`, as text; None for any other error."""
    name, _, argument = (error or "").partition(": ")
    return argument if name == _SYSTEM_EXIT else None


def last_line(result: ExecutionResult) -> str:
    """Return a line that says how the cell ended; empty when its output has said so."""
    match result.status:
        case "error":
            argument = exit_argument(result.error) or ""
            return "" if argument.removeprefix("-").isdecimal() else argument
        case "timeout":
            return f"error: stopped after {result.usage.wall_s:.1f} s, its time limit"
        case "interrupted":
            return "interrupted"
        case "died" | "out_of_memory":
            return f"error: {result.cause or result.error}"
        case _:
            return ""


def _first_text(display: Display) -> str:
    return next((form.text for form in (display, *display.also) if form.text), "")


async def write(stream: TextIO, text: str) -> None:
    """Write output of a session to stdout or stderr."""
    # In a thread, because a slow or paused reader must not block the event loop, which runs time limits and Ctrl-C.
    await asyncio.to_thread(write_output, stream, text)
