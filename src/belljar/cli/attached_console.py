"""A console on a live session: it runs the person's cells, typed or piped in, and shows everyone else's as they run.

Output of the person's own cells goes to stdout; prompts and other people's cells go to stderr. On a terminal lines are
edited (`line_editor.py`), and figures are saved as files.
"""

import asyncio
import contextlib
import sys
from collections.abc import Generator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from belljar.cli.saved_outputs import FigureFiles
from belljar.cli.terminal import INTERRUPTED, StandardInput, on_sigint, write
from belljar.engine.attachment_messages import (
    AttachedSession,
    CommHeard,
    ExecutionEnded,
    ExecutionOutput,
    ExecutionStarted,
    QuestionAsked,
    SessionEnded,
    SessionEvent,
)
from belljar.engine.remote_attachments import open_attachment
from belljar.errors import BelljarError
from belljar.files.transfer import download_folder
from belljar.outputs.forms import readable_text
from belljar.outputs.terminal_text import as_plain
from belljar.outputs.tracebacks import short_traceback

if TYPE_CHECKING:
    from belljar.cli.line_editor import LineEditor

_FAILED = 1
_WELCOME = (
    "You share its variables. Tab completes, Up and Ctrl-R find earlier lines, Ctrl-J\n"
    "adds a line, Alt-Enter runs what is there. Ctrl-C interrupts what runs. Ctrl-D\n"
    "leaves, and the session goes on.\n"
)


def run_console(data_directory: Path, prefix: str, download_directory: Path) -> int:
    """Run cells until the input or the session ends; return the exit status of the person's last cell."""
    try:
        return asyncio.run(_run_console(data_directory, prefix, download_directory))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _run_console(data_directory: Path, prefix: str, download_directory: Path) -> int:
    async with open_attachment(data_directory, prefix) as attached:
        figures = FigureFiles(download_folder(download_directory, attached.session_id))
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return await _Console(attached, figures).run()
        await write(sys.stderr, f"session {attached.session_id}\nenvironment {attached.environment}\n{_WELCOME}")
        # prompt_toolkit takes 150 ms to import, which a console in a pipe need not pay.
        from belljar.cli.line_editor import LineEditor

        return await _Console(attached, figures, LineEditor(attached)).run()


class _Console:
    """Runs the person's cells one at a time, and prints the events of the session meanwhile."""

    def __init__(self, attached: AttachedSession, figures: FigureFiles, editor: "LineEditor | None" = None) -> None:
        self._attached = attached
        self._figures = figures
        self._editor = editor
        self._input = StandardInput()
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
                await _cancel(reading)
                await self._write(sys.stderr, "the session has ended\n")
        finally:
            await _cancel(printing, reading)
        return _FAILED if self._is_failed else 0

    # Cells of the person

    async def _run_cells(self) -> None:
        while (code := await self._read_cell()) is not None:
            if code.strip():
                await self._run_cell(code)

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
        if self._editor is not None:
            return await self._editor.read_cell()
        lines: list[str] = []
        while True:
            line = await self._input.answer("")
            if line is None:
                return "\n".join(lines) if lines else None
            lines.append(line)
            code = "\n".join(lines)
            checked = await self._attached.check(code)
            # A blank line ends an indented block. A kernel that cannot check code makes every line a cell.
            if checked.status != "incomplete" or (len(lines) > 1 and not line.strip()):
                return code

    # Events of the session

    async def _print_events(self) -> None:
        async with aclosing(self._attached.events()) as events:
            async for item in events:
                await self._print_event(item)

    async def _print_event(self, item: SessionEvent) -> None:
        match item:
            case ExecutionStarted(is_own=True):
                self._own.add(item.execution_id)
            case ExecutionStarted():
                await self._write(sys.stderr, f"\n# somebody else runs [{item.count}]:\n{item.code}\n")
            case ExecutionOutput():
                await self._print_output(item)
            case QuestionAsked():
                await _cancel(self._answering)
                self._answering = asyncio.get_running_loop().create_task(self._answer(item))
            case ExecutionEnded():
                await self._end(item)
            case CommHeard() | SessionEnded():
                pass

    async def _print_output(self, said: ExecutionOutput) -> None:
        text, stream = _text_and_stream(said)
        if said.output in ("display_data", "execute_result"):
            for path in await asyncio.to_thread(self._figures.save, said.content["data"]):
                text = text if text.strip() and not text.startswith("<") else ""
                text += f"[saved: {path}]\n"
        await self._write(stream if said.execution_id in self._own else sys.stderr, text)

    async def _write(self, stream: TextIO, text: str) -> None:
        """Write text of the session; on a terminal without control sequences, and above the prompt if there is one."""
        text = as_plain(text) if stream.isatty() else text
        await (self._editor.write(stream, text) if self._editor is not None else write(stream, text))

    async def _end(self, ended: ExecutionEnded) -> None:
        if self._editor is not None:
            await self._editor.end_line()
        if ended.execution_id not in self._own:
            if self._editor is not None:
                self._editor.redraw()
            return
        self._own.discard(ended.execution_id)
        # Until the end, because its prompt gives the terminal back, which the next one has taken by then otherwise.
        await _cancel(self._answering)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(ended)

    async def _answer(self, asks: QuestionAsked) -> None:
        with contextlib.suppress(BelljarError):
            if self._editor is not None:
                text = await self._editor.answer(asks.prompt, is_password=asks.is_password)
            else:
                await self._write(sys.stderr, asks.prompt)
                text = await self._input.answer("")
            await self._attached.answer(asks.execution_id, text, asks.question)


async def _cancel(*tasks: "asyncio.Task[None] | None") -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _text_and_stream(said: ExecutionOutput) -> tuple[str, TextIO]:
    content: dict[str, Any] = said.content
    match said.output:
        case "stream":
            return str(content["text"]), sys.stderr if content["name"] == "stderr" else sys.stdout
        case "error":
            return "\n".join(short_traceback([*map(str, content["traceback"])])) + "\n", sys.stderr
        case "clear_output" | "comm_open" | "comm_msg" | "comm_close":
            return "", sys.stdout
        case _:
            return f"{readable_text(content['data'])[0]}\n", sys.stdout


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

    with on_sigint(on_signal):
        yield
