"""The prompt of `belljar attach` on a terminal: cells with editing, history, and names completed by the session.

What the session answers is hostile: few and short names are taken from it, and control characters are shown, not sent
to the terminal.
"""

import asyncio
import importlib
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import completion_is_selected
from prompt_toolkit.history import DummyHistory, FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import PygmentsLexer

from belljar.cli.streams import one_line, write_output
from belljar.cli.terminal import write
from belljar.engine.attachment_messages import AttachedSession
from belljar.errors import BelljarError
from belljar.settings.environments import KERNEL_PREFIX

_TIMEOUT_S = 3.0
_MAX_NAMES = 200
_LONGEST_NAME = 200
_LONGEST_LINE = 10_000


class LineEditor:
    """Reads cells and answers from the person at the terminal."""

    def __init__(self, attached: AttachedSession, history: Path | None = None) -> None:
        self._attached = attached
        self._prompt: PromptSession[str] = PromptSession(
            history=_open_history(history or history_file()),
            completer=SessionCompleter(attached),
            complete_while_typing=False,
            lexer=PygmentsLexer(importlib.import_module("pygments.lexers.python").PythonLexer),
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=lambda width, _line, _wrap: "...: ".rjust(width),
            enable_open_in_editor=True,
        )
        self._rest = ""
        """The end of a line that others have not finished yet."""
        self._open_stream: TextIO | None = None
        """The stream whose last line has no end yet."""
        self._writing = asyncio.Lock()
        self._answers: PromptSession[str] = PromptSession(history=InMemoryHistory())
        self._passwords: PromptSession[str] = PromptSession(history=DummyHistory(), is_password=True)
        self._check = _always_whole if attached.environment.startswith(KERNEL_PREFIX) else _checker()

    async def write(self, stream: TextIO, text: str) -> None:
        """Write text of the session; above the prompt if there is one, which takes whole lines only."""
        text, self._rest = self._rest + text, ""
        app = self._running_app()
        if app is None:
            async with self._writing:
                await write(stream, text)
            if text:
                self._open_stream = None if text.endswith("\n") else stream
            return
        lines, newline, self._rest = text.rpartition("\n")
        text = lines + newline
        if len(self._rest) > _LONGEST_LINE:
            text, self._rest = f"{text}{self._rest}\n", ""
        if not text:
            return
        if app._running_in_terminal:  # pyright: ignore[reportPrivateUsage]
            async with in_terminal():  # after the person's editor
                write_output(stream, text)
            return
        # At once, so that nothing is drawn meanwhile, and without handing the terminal's input back, as `in_terminal`
        # does: a Ctrl-D that is typed then is lost.
        app.renderer.erase()
        write_output(stream, text)
        app.renderer.reset()
        app.renderer.request_absolute_cursor_position()
        app.invalidate()

    async def end_line(self) -> None:
        """Write what `write` kept back, and end the line, so that the prompt has one of its own."""
        if self._rest or self._open_stream is not None:
            await self.write(self._open_stream or sys.stderr, "\n")

    def _running_app(self) -> "Application[str] | None":
        prompts = (self._prompt, self._answers, self._passwords)
        return next((prompt.app for prompt in prompts if prompt.app.is_running), None)

    def redraw(self) -> None:
        """Draw the prompt again, with the number of the next cell."""
        self._prompt.app.invalidate()

    async def read_cell(self) -> str | None:
        """Return the next cell; None when the person leaves with Ctrl-D."""
        while True:
            async with self._writing:
                pass  # what is being written now comes before the prompt
            try:
                # Our own handler gets SIGINT while a cell runs; here Ctrl-C is a key, which drops what was typed.
                return await self._prompt.prompt_async(self._message, handle_sigint=False)
            except KeyboardInterrupt:
                continue
            except EOFError:
                await self.end_line()
                return None

    async def answer(self, prompt: str, *, is_password: bool) -> str | None:
        """Return the person's answer to a cell's question, None if there is none; a password is not shown or kept."""
        self._open_stream = None  # the person's Enter ends the line
        asking = self._passwords if is_password else self._answers
        with suppress(KeyboardInterrupt, EOFError):
            return await asking.prompt_async(one_line(prompt), handle_sigint=False)
        return None

    def _message(self) -> str:
        return f"In [{self._attached.count + 1}]: "

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter", filter=~completion_is_selected)
        def run_or_continue(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
            """Run a whole cell; begin a new line in one that goes on."""
            buffer = event.current_buffer
            before, after = buffer.document.text_before_cursor, buffer.document.text_after_cursor
            status, indent = self._check(buffer.text)
            # A blank line ends an indented block.
            is_block_end = "\n" in before and not before.rpartition("\n")[2].strip()
            if after.strip() or (status == "incomplete" and not is_block_end):
                buffer.insert_text("\n" + " " * (indent or 0))
            else:
                buffer.validate_and_handle()

        @keys.add("c-j")
        def new_line(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
            """Begin a new line, whatever there is."""
            event.current_buffer.insert_text("\n")

        @keys.add("escape", "enter")
        def run_now(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
            """Run the cell as it is."""
            event.current_buffer.validate_and_handle()

        @keys.add("tab", filter=~completion_is_selected)
        def complete_or_indent(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
            """Indent at the beginning of a line; elsewhere complete the name."""
            buffer = event.current_buffer
            if buffer.document.current_line_before_cursor.strip():
                buffer.start_completion(insert_common_part=True)
            else:
                buffer.insert_text("    ")

        return keys


class SessionCompleter(Completer):
    """Asks the session which names fit; a session that is busy or slow gives none."""

    def __init__(self, attached: AttachedSession) -> None:
        self._attached = attached

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> list[Completion]:
        """Return none, because only the asynchronous method can ask."""
        return []

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        """Yield the names that the session's kernel knows."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await self._attached.complete(document.text, document.cursor_position)
        except (BelljarError, TimeoutError):
            return
        typed = document.text[max(found.start, 0) : document.cursor_position]
        for name in found.matches[:_MAX_NAMES]:
            if len(name) <= _LONGEST_NAME and name == one_line(name):
                yield Completion(name, start_position=-len(typed))


def _checker() -> Callable[[str], tuple[str, int | None]]:
    """Return what tells whether a text is a whole cell, and how far its next line is indented.

    The session could be asked too, but what the person types before it has answered would be taken for the same cell.
    """
    module: Any = importlib.import_module("IPython.core.inputtransformer2")
    return module.TransformerManager().check_complete


def _always_whole(_: str) -> tuple[str, int | None]:
    """Take every line of another language for a cell; Ctrl-J makes lines."""
    return "complete", None


def history_file() -> Path:
    """Return the file that keeps what the person typed, for the next time."""
    return platformdirs.user_state_path("belljar", appauthor=False) / "attach-history"


def _open_history(path: Path) -> History:
    """Return the history of that file, which only its owner can read; one in memory where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
