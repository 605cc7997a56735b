"""The two ends of a terminal: a cell's output as it comes, and lines typed or piped in for its `input()`."""

import asyncio
import os
import sys
from typing import TextIO

from belljar.cli.endings import exit_argument, last_line
from belljar.cli.keeping import display_in, kept_forms
from belljar.cli.streams import write_output
from belljar.handles import SessionHandle
from belljar.models import Display, ExecutionResult, OutputEvent
from belljar.outputs.bundles import is_readable

_STDIN = 0


class Screen:
    """Writes to our stdout and stderr; `is_quiet` leaves stdout alone. Rich outputs that are saved are not written."""

    def __init__(self, session: SessionHandle, *, is_quiet: bool = False) -> None:
        self._session = session
        self._is_quiet = is_quiet
        self._is_line_open = False

    async def show(self, event: OutputEvent) -> None:
        """Write one event."""
        match event.kind:
            case "stdout":
                await self._say(event.text)
            case "stderr" | "notice":
                await write(sys.stderr, event.text)
            case "input":
                await (write(sys.stderr, event.text) if self._is_quiet else self._say(event.text))
                if os.isatty(_STDIN):
                    self._is_line_open = False  # the person's Enter ends the line
            case "display" | "result":
                if text := await self._text_of(event):
                    await self._say(f"\n{text}\n" if self._is_line_open else f"{text}\n")
            case "error":
                if exit_argument(event.text) is None:
                    await write(sys.stderr, _traceback(event))
            case "clear":
                pass

    async def end(self, result: ExecutionResult) -> None:
        """Say how it ended, where the output has not."""
        if line := last_line(result):
            await write(sys.stderr, f"{line}\n")

    async def _text_of(self, event: OutputEvent) -> str:
        """A rich output in words; empty when it is saved as a file instead."""
        display = display_in(event)
        if display is not None and kept_forms(display):
            return ""
        if isinstance(uri := event.data.get("uri"), str):
            return (await self._session.display(uri)).decode(errors="replace")
        if display is None or is_readable(display.plain):
            return display.plain or "" if display else event.text
        return _first_text(display) or display.plain or ""

    async def _say(self, text: str) -> None:
        if self._is_quiet or not text:
            return
        self._is_line_open = not text.endswith("\n")
        await write(sys.stdout, text)


class StandardInput:
    """Lines of our stdin. A read that is given up leaves no thread behind that would keep the process alive."""

    def __init__(self) -> None:
        self._buffer = b""

    async def answer(self, _prompt: str) -> str | None:
        """The next line; None at the end of the input. The prompt is on the screen already."""
        while b"\n" not in self._buffer:
            await _until_readable(_STDIN)
            chunk = os.read(_STDIN, 65_536)
            if not chunk:
                break
            self._buffer += chunk
        line, end, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").removesuffix("\r") if line or end else None


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
    except PermissionError:
        return  # a regular file, which is always readable
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)


def _first_text(display: Display) -> str:
    return next((form.text for form in (display, *display.also) if form.text), "")


def _traceback(event: OutputEvent) -> str:
    lines = event.data.get("traceback")
    return "\n".join([str(line) for line in lines] if isinstance(lines, list) and lines else [event.text]) + "\n"


async def write(stream: TextIO, text: str) -> None:
    """Write what comes out of a session."""
    # In a thread: a reader that is slow or paused must not stop the clock, nor the ear for Ctrl-C.
    await asyncio.to_thread(write_output, stream, text)
