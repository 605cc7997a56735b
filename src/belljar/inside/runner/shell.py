"""IPython's InteractiveShell with its outputs turned towards the host. Knows IPython; does not know the protocol."""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import bdb
import builtins
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from . import comms, rich_output
from .rich_output import is_text_alone

Emit = Callable[[dict[str, Any]], None]


def _nobody(_message: dict[str, Any]) -> None:
    """Before a host is attached, outputs go nowhere."""


def _nothing() -> None:
    """Before a host is attached, nobody wants to know."""


def _never() -> bool:
    """Before a host is attached, no cell has run that could have forked."""
    return False


class Publisher(DisplayPublisher):
    """`display()`, `update_display()`, `clear_output()`."""

    emit: Emit = staticmethod(_nobody)

    def publish(self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any):
        """Send one rich output."""
        display_id = (transient or {}).get("display_id")
        message = {
            "type": "display",
            "data": rich_output.prepared(data),
            "display_id": display_id,
            "update": bool(update),
        }
        self.emit(message)

    def clear_output(self, wait: bool = False) -> None:
        """Tell the host to forget the output so far."""
        self.emit({"type": "clear", "wait": bool(wait), "in_widget": comms.is_claimed()})


class ResultHook(DisplayHook):
    """The value of the last expression."""

    emit: Emit = staticmethod(_nobody)

    def start_displayhook(self) -> None:
        """Nothing is printed here, so there is nothing to prepare."""

    def write_output_prompt(self) -> None:
        """The count is the host's to show."""

    @staticmethod
    def semicolon_at_end_of_expression(expression: str) -> Any:
        """Whether the cell does not want its value shown; most have no semicolon that would have to be looked at."""
        return ";" in expression and DisplayHook.semicolon_at_end_of_expression(expression)

    def compute_format_data(self, result: Any) -> Any:
        """The value in all the forms it has."""
        shell: Any = self.shell
        formatter = shell.display_formatter
        if not is_text_alone(result, formatter):
            return super().compute_format_data(result)
        text = formatter.formatters["text/plain"](result)
        return ({} if text is None else {"text/plain": text}), {}

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        """Send the value in all the forms it has."""
        self.emit({"type": "result", "data": rich_output.prepared(format_dict)})

    def finish_displayhook(self) -> None:
        """Sent already."""


class _Forgetful(defaultdict[int, list[Any]]):
    """IPython 9 keeps every display of a session in `history_manager.outputs`: here it keeps none."""

    def __missing__(self, key: int) -> list[Any]:
        return []


class Shell(InteractiveShell):
    """One per process."""

    displayhook_class = Type(ResultHook)
    display_pub_class = Type(Publisher)
    emit: Emit = staticmethod(_nobody)
    on_begin: Callable[[], None] = staticmethod(_nothing)
    is_forked: Callable[[], bool] = staticmethod(_never)
    """Whether this process is a child that a cell forked, which prints its errors as a script does."""
    kernel = comms.CommKernelStub()

    def _tee(self, channel: Any) -> Any:
        # IPython 9 copies every printed string into its history; memory would grow with output.
        return contextlib.nullcontext()

    def init_hooks(self) -> None:
        """Pagers print their text instead of waiting for a key."""
        super().init_hooks()
        self.set_hook("show_in_pager", _print_page, 99)

    def init_io(self) -> None:
        """Streams are ours already."""

    def enable_gui(self, gui: Any = None) -> None:
        """There is no screen; `%matplotlib inline` asks all the same."""

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        if isinstance(evalue, SystemExit) and evalue.code in (None, 0):
            return
        lines = [line for block in stb for line in str(block).splitlines()]
        if self.is_forked():
            if not isinstance(evalue, SystemExit):
                print("\n".join(lines), file=sys.stderr)
            return
        self.emit({"type": "error", "name": _name(etype), "message": _text(evalue), "traceback": lines})

    def show_usage_error(self, exc: Any) -> None:
        """Tell of a magic that does not exist or was called wrongly: as in ipykernel, a line and no traceback."""
        print(f"UsageError: {_text(exc)}", file=sys.stderr)
        if not self.is_forked():
            self.emit({"type": "error", "name": "UsageError", "message": _text(exc), "traceback": []})

    def showtraceback(self, exc_tuple: Any = None, *words: Any, exception_only: bool = False, **options: Any) -> None:
        """Show an exception. IPython prints groups of exceptions as text; here they are errors like any other."""
        try:
            kind, value, trace = self._get_exc_info(exc_tuple)
        except ValueError:
            kind, value, trace = None, None, None
        if exception_only or not _has_group(value):
            super().showtraceback(exc_tuple, *words, exception_only=exception_only, **options)
            return
        self._showtraceback(kind, value, traceback.format_exception(kind, value, _from_the_cell(trace)))

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
        """Run a part of the cell; all of IPython's own preparations are over."""
        self.on_begin()
        has_failed = await super().run_code(code_obj, result, async_=async_)
        left = getattr(result, "error_in_exec", None)
        if has_failed and isinstance(
            left, bdb.BdbQuit
        ):  # which IPython takes for the end of the cell, and says nothing
            self.showtraceback((type(left), left, left.__traceback__))
        return has_failed

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        kind, value, trace = super()._get_exc_info(exc_tuple)
        _trim(value, trace)
        # A call that is cancelled raises in the cell too, and the interrupt may come while that is being handled.
        for before in _contexts(value):
            _trim(before, before.__traceback__)
        return kind, value, trace

    def system(self, cmd: str) -> None:
        """`!command` and `%pip`: the child writes straight to descriptors 1 and 2."""
        sys.stdout.flush()
        sys.stderr.flush()
        command = self.var_expand(cmd, depth=1)
        # The user's shell, as in ipykernel; what is none any more must not take every command with it.
        executable = shutil.which(os.environ.get("SHELL", "sh")) or "/bin/sh"
        with subprocess.Popen(
            command, shell=True, executable=executable, stdin=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        self.user_ns["_exit_code"] = status

    system_piped = system_raw = system


def _has_group(value: Any) -> bool:
    """Whether an exception, or one that it was raised after, is a group; Python knows those from 3.11 on."""
    group = getattr(builtins, "BaseExceptionGroup", ())
    return isinstance(value, group) or any(isinstance(before, group) for before in _contexts(value))


def _contexts(value: Any) -> "list[BaseException]":
    """The exceptions that one was raised after."""
    found: list[BaseException] = []
    seen = {id(value)}  # a session can make a circle of them
    before = getattr(value, "__context__", None)
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        found.append(before)
        before = before.__context__
    return found


def _trim(value: Any, trace: Any) -> None:
    """End the traceback of an exception at the cell where our own code raised it."""
    if isinstance(value, (KeyboardInterrupt, StdinNotImplementedError)):
        _end_at_the_cell(trace, f"{__package__}.")
    # What went wrong is in the call, or took too long there, and not in the code that passes it on.
    if type(value).__module__ == "toolbox.errors" or isinstance(value, KeyboardInterrupt):
        _end_at_the_cell(trace, "toolbox.")
    _end_at_the_cell(trace, "workspace_state")


def _from_the_cell(trace: Any) -> Any:
    """A traceback without IPython's frames above the cell."""
    first = trace
    while first is not None and "IPython" in str(first.tb_frame.f_globals.get("__name__")):
        first = first.tb_next
    return first or trace


def _end_at_the_cell(trace: Any, ours: str) -> None:
    """A traceback ends where the cell was, not in our own code that raised it there."""
    while trace is not None and trace.tb_next is not None:
        if str(trace.tb_next.tb_frame.f_globals.get("__name__")).startswith(ours):
            trace.tb_next = None
        trace = trace.tb_next


def _print_page(_shell: Any, content: Any, start: int = 0, screen_lines: int = 0) -> None:
    print(content["text/plain"] if isinstance(content, dict) else content)


def _name(etype: Any) -> str:
    return str(getattr(etype, "__name__", etype))


def _text(evalue: Any) -> str:
    try:
        return str(evalue)
    except Exception as broken:
        return f"<the exception's own message cannot be shown: {type(broken).__name__}>"


def build_shell() -> Shell:
    """The shell, with nothing in it that a fork could not share."""
    config = Config()
    config.HistoryManager.enabled = False
    config.Completer.use_jedi = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.banner1 = ""
    shell: Any = Shell.instance(config=config)
    if hasattr(shell.history_manager, "outputs"):
        shell.history_manager.outputs = _Forgetful()
    # IPython's advice after sys.exit(): nobody here can press Ctrl-D.
    warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)
    # `exit()` ends the cell like sys.exit(); the session and its variables stay.
    shell.user_ns["exit"] = shell.user_ns["quit"] = sys.exit
    return shell


def direct_outputs(shell: Shell, emit: Emit) -> None:
    """From now on, displays, results and errors go to `emit`."""
    speakers: list[Any] = [shell, shell.display_pub, shell.displayhook]
    for speaker in speakers:
        speaker.emit = emit
