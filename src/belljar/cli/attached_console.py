"""A console on a live session: it runs the person's cells, typed or piped in, and shows everyone else's as they run.

Output of the person's own cells goes to stdout; prompts and other people's cells go to stderr.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO

from belljar.attachments import AttachedSession, open_attachment
from belljar.attachments.messages import (
    CommHeard,
    ExecutionEnded,
    ExecutionOutput,
    ExecutionStarted,
    QuestionAsked,
    SessionEnded,
    SessionEvent,
)
from belljar.cli.terminal import INTERRUPTED, StandardInput, write
from belljar.errors import BelljarError
from belljar.outputs.mime_bundles import words_in
from belljar.outputs.terminal_text import as_plain

_FAILED = 1


def run_console(data_directory: Path, prefix: str) -> int:
    """Run cells until the input or the session ends; return the exit status of the person's last cell."""
    try:
        return asyncio.run(_run_console(data_directory, prefix))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _run_console(data_directory: Path, prefix: str) -> int:
    async with open_attachment(data_directory, prefix) as attached:
        if sys.stdin.isatty():
            await write(
                sys.stderr,
                f"session {attached.session_id}, environment {attached.environment}\n"
                "Its variables are shared. Ctrl-C interrupts what runs, Ctrl-D leaves; the session goes on.\n",
            )
        return await _Console(attached).run()


class _Console:
    """Runs the person's cells one at a time, and prints the events of the session meanwhile."""

    def __init__(self, attached: AttachedSession) -> None:
        self._attached = attached
        self._input = StandardInput()
        self._is_prompting = False
        self._own: set[str] = set()
        self._ended: asyncio.Future[ExecutionEnded | None] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._is_failed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        printing = loop.create_task(self._print_events())
        reading = loop.create_task(self._run_cells())
        try:
            with _interrupt_on_sigint(self._attached):
                await asyncio.wait([printing, reading], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            else:
                await write(sys.stderr, "the session has ended\n")
        finally:
            for task in (printing, reading):
                task.cancel()
            await asyncio.gather(printing, reading, return_exceptions=True)
        return _FAILED if self._is_failed else 0

    # Cells of the person

    async def _run_cells(self) -> None:
        while (code := await self._read_cell()) is not None:
            if code.strip():
                await self._run_cell(code)
        if sys.stdin.isatty():
            await write(sys.stderr, "\n")

    async def _run_cell(self, code: str) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._attached.execute(code, allow_input=True)
            ended = await self._ended
        except BelljarError as error:
            self._is_failed = True
            await write(sys.stderr, f"error: {error}\n")
            return
        self._is_failed = ended is not None and ended.status != "ok"

    async def _read_cell(self) -> str | None:
        """Read lines until they are a whole cell; return None at the end of the input."""
        lines: list[str] = []
        while True:
            prompt = "   ...: " if lines else f"In [{self._attached.count + 1}]: "
            line = await self._read_line(prompt)
            if line is None:
                return "\n".join(lines) if lines else None
            lines.append(line)
            code = "\n".join(lines)
            checked = await self._attached.check(code)
            # A blank line ends an indented block. A kernel that cannot check code makes every line a cell.
            if checked.status != "incomplete" or (len(lines) > 1 and not line.strip()):
                return code

    async def _read_line(self, prompt: str) -> str | None:
        self._is_prompting = sys.stdin.isatty()
        if self._is_prompting:
            await write(sys.stderr, prompt)
        try:
            return await self._input.answer(prompt)
        finally:
            self._is_prompting = False

    # Events of the session

    async def _print_events(self) -> None:
        async with aclosing(self._attached.news()) as news:
            async for item in news:
                await self._print_event(item)

    async def _print_event(self, item: SessionEvent) -> None:
        match item:
            case ExecutionStarted(is_own=True):
                self._own.add(item.execution_id)
            case ExecutionStarted():
                await _write_plain(sys.stderr, f"\n# somebody else runs [{item.count}]:\n{item.code}\n")
            case ExecutionOutput():
                await self._print_output(item)
            case QuestionAsked():
                self._answering = asyncio.get_running_loop().create_task(self._answer(item))
            case ExecutionEnded():
                await self._end(item)
            case CommHeard() | SessionEnded():
                pass

    async def _print_output(self, said: ExecutionOutput) -> None:
        text, stream = _text_and_stream(said)
        if said.execution_id in self._own:
            await _write_plain(stream, text)
        else:
            await _write_plain(sys.stderr, text)

    async def _end(self, ended: ExecutionEnded) -> None:
        if ended.execution_id not in self._own:
            if self._is_prompting:
                await write(sys.stderr, f"In [{ended.count + 1}]: ")
            return
        self._own.discard(ended.execution_id)
        if self._answering is not None:
            self._answering.cancel()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(ended)

    async def _answer(self, asks: QuestionAsked) -> None:
        await _write_plain(sys.stderr, asks.prompt)
        with contextlib.suppress(BelljarError):
            text = await self._input.answer("")
            await self._attached.answer(asks.execution_id, text, asks.question)


async def _write_plain(stream: TextIO, text: str) -> None:
    """Write text of the session; on a terminal without control sequences."""
    await write(stream, as_plain(text) if stream.isatty() else text)


def _text_and_stream(said: ExecutionOutput) -> tuple[str, TextIO]:
    content: dict[str, Any] = said.content
    match said.output:
        case "stream":
            return str(content["text"]), sys.stderr if content["name"] == "stderr" else sys.stdout
        case "error":
            return "\n".join(map(str, content["traceback"])) + "\n", sys.stderr
        case "clear_output" | "comm_open" | "comm_msg" | "comm_close":
            return "", sys.stdout
        case _:
            return f"{words_in(content['data'])[0]}\n", sys.stdout


@contextlib.contextmanager
def _interrupt_on_sigint(attached: AttachedSession) -> Generator[None]:
    """Interrupt what runs in the session on Ctrl-C, which then does not end the console."""
    loop = asyncio.get_running_loop()
    interrupts: set[asyncio.Task[None]] = set()

    async def interrupt() -> None:
        with contextlib.suppress(BelljarError):
            await attached.interrupt()

    def on_signal() -> None:
        task = loop.create_task(interrupt())
        interrupts.add(task)
        task.add_done_callback(interrupts.discard)

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
