"""IPython's InteractiveShell, with its outputs passed to an `emit` function. Knows IPython, not the protocol."""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import bdb
import builtins
import contextlib
import itertools
import linecache
import os
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from IPython.core.autocall import ExitAutocall
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError
from IPython.core.history import HistoryManager
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magics import packaging
from IPython.utils.tokenutil import token_at_cursor
from traitlets import Type, default
from traitlets.config import Config

from . import comms, rich_output
from .rich_output import is_text_alone

Emit = Callable[[dict[str, Any]], None]


def _drop(_message: dict[str, Any]) -> None:
    """Drop outputs, before a host is attached."""


def _do_nothing() -> None:
    """Do nothing when a cell begins, before a host is attached."""


def _never() -> bool:
    """Return False, because no cell that could have forked has run before a host is attached."""
    return False


class Publisher(DisplayPublisher):
    """What `display()`, `update_display()` and `clear_output()` call."""

    emit: Emit = staticmethod(_drop)

    def publish(self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any):
        """Send one rich output."""
        display_id = (transient or {}).get("display_id")
        data = rich_output.prepared(data)
        message = {
            "type": "display",
            "data": data,
            "display_id": display_id or comms.display_id_of(data),
            "update": bool(update),
        }
        self.emit(message)

    def clear_output(self, wait: bool = False) -> None:
        """Tell the host to forget the output so far."""
        self.emit({"type": "clear", "wait": bool(wait), "in_widget": comms.is_claimed()})


class ResultHook(DisplayHook):
    """What IPython calls with the value of a cell's last expression."""

    emit: Emit = staticmethod(_drop)
    wants_value = False
    """Whether the host wants the value as JSON beside what is shown of it."""

    def start_displayhook(self) -> None:
        """Do nothing, because nothing is printed here."""

    def write_output_prompt(self) -> None:
        """Do nothing, because the host shows the count."""

    @staticmethod
    def semicolon_at_end_of_expression(expression: str) -> Any:
        """Return whether the cell suppresses its value; do not ask IPython where there is no semicolon at all."""
        return ";" in expression and DisplayHook.semicolon_at_end_of_expression(expression)

    def compute_format_data(self, result: Any) -> Any:
        """Return the value's representations by media type, with a short cut for values that have text only."""
        shell: Any = self.shell
        formatter = shell.display_formatter
        if not is_text_alone(result, formatter):
            forms, metadata = super().compute_format_data(result)
        else:
            text = rich_output.text_of(result, formatter.formatters["text/plain"])
            forms, metadata = ({} if text is None else {"text/plain": text}), {}
        if self.wants_value and (value := rich_output.json_value(result)) is not None:
            forms = {**forms, rich_output.VALUE: value}
        return forms, metadata

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        """Send the value in all its representations."""
        data = rich_output.prepared(format_dict)
        comms.display_id_of(data)  # it is updated as if it were a display
        self.emit({"type": "result", "data": data})

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Keep the value's text in the history, as IPython does, without the record for `outputs`, which are discarded.

        In a fork this saves 10 pages of its own.
        """
        text = format_dict.get("text/plain")
        if text is None:
            return
        shell: Any = self.shell
        if shell.logger.log_output:
            shell.logger.log_write(text, "output")
        shell.history_manager.output_hist_reprs[self.prompt_count] = text

    def finish_displayhook(self) -> None:
        """Do nothing, because the value is sent already."""


_ipythons = TransformerManager()
"""Knows the transformers that IPython has by itself."""


class CellTransformer(TransformerManager):
    """IPython's transformation of magics and shell commands; cells that can have none do not go through it.

    Lists of transformers are compared as lists, because that does not touch what is in both.
    """

    def transform_cell(self, cell: str) -> Any:
        """Return the cell as Python. IPython's first transformers remove prompts, indents and blanks of empty lines.

        Where there are none of these the answer is known, which saves, in a fork, 26 pages of its own.
        """
        lines = (cell if cell.endswith("\n") else f"{cell}\n").splitlines(keepends=True)
        has_own = self.cleanup_transforms == _ipythons.cleanup_transforms
        if not has_own or self.line_transforms != _ipythons.line_transforms or _may_be_pasted(cell, lines):
            return super().transform_cell(cell)
        return "".join(self.do_token_transforms(lines))

    def do_token_transforms(self, lines: list[str]) -> Any:
        """Return the lines transformed. IPython's transformers look for `%`, `!`, `?`, and lines that start with `,;/`.

        Without any of these the answer is known, which saves 0.3 ms and, in a fork, 100 pages of its own.
        """
        if self.token_transformers == _ipythons.token_transformers and not any(map(_may_be_special, lines)):
            return lines
        return super().do_token_transforms(lines)


def _may_be_pasted(cell: str, lines: list[str]) -> bool:
    """Return whether a cell may begin with a magic, an indent or an empty line, or have prompts or blank lines."""
    if cell.startswith("%%") or cell[:1].isspace() or any(map(_is_blank, lines)):
        return True
    return ">>>" in cell or "..." in cell or "In [" in cell


def _is_blank(line: str) -> bool:
    return line.isspace() and line != "\n"


def _may_be_special(line: str) -> bool:
    return "%" in line or "!" in line or "?" in line or line.lstrip()[:1] in _AT_START


_AT_START = frozenset(",;/")


class _DiscardedOutputs(defaultdict[int, list[Any]]):
    """A dict that stores nothing, because IPython 9 would keep every display in `history_manager.outputs`."""

    def __missing__(self, key: int) -> list[Any]:
        return []


class CellExit(ExitAutocall):
    """`exit` and `quit`, which end the cell like sys.exit(); the session and its variables stay."""

    def __call__(self, status: Any = None) -> None:
        """End the cell; a status other than 0 is an error."""
        sys.exit(status)


class ZMQShell(InteractiveShell):
    """The shell; one for each process.

    pandas looks for `zmq` in the name, and takes any other shell for a terminal of 80 columns. It is not the whole name
    of ipykernel's shell, because those who look for that one draw widgets, which no model can read.
    """

    displayhook_class = Type(ResultHook)
    display_pub_class = Type(Publisher)
    emit: Emit = staticmethod(_drop)
    on_begin: Callable[[], None] = staticmethod(_do_nothing)
    is_forked: Callable[[], bool] = staticmethod(_never)
    """Tells whether this process is a child that a cell forked, which prints its errors as a script does."""
    ask_form: Callable[[str, "dict[str, Any]"], Any]
    """Puts a form to the person; set when there is a host. The module `forms` looks for it here."""
    kernel = comms.CommKernelStub()

    @default("exiter")
    def _make_exiter(self) -> CellExit:
        return CellExit(self)

    def _tee(self, channel: Any) -> Any:
        # Do not tee, because IPython 9 copies every printed string into its history, and memory would grow with output.
        return contextlib.nullcontext()

    def init_hooks(self) -> None:
        """Install a pager that prints its text instead of waiting for a key."""
        super().init_hooks()
        self.set_hook("show_in_pager", _print_page, 99)

    def init_io(self) -> None:
        """Do nothing, because `streams` has replaced the streams already."""

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing, because there is no display; `%matplotlib inline` calls this all the same."""

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
        """Report a magic that does not exist or was called wrongly: as in ipykernel, one line and no traceback."""
        print(f"UsageError: {_text(exc)}", file=sys.stderr)
        if not self.is_forked():
            self.emit({"type": "error", "name": "UsageError", "message": _text(exc), "traceback": []})

    def showtraceback(self, exc_tuple: Any = None, *rest: Any, exception_only: bool = False, **options: Any) -> None:
        """Report an exception. IPython prints exception groups as text; here they are errors like any other."""
        try:
            kind, value, trace = self._get_exc_info(exc_tuple)
        except ValueError:
            kind, value, trace = None, None, None
        if exception_only or not _has_group(value):
            super().showtraceback(exc_tuple, *rest, exception_only=exception_only, **options)
            return
        self._showtraceback(kind, value, traceback.format_exception(kind, value, _from_the_cell(trace)))

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
        """Run a part of the cell; IPython has finished its own preparations by then."""
        self.on_begin()
        has_failed = await super().run_code(code_obj, result, async_=async_)
        error = getattr(result, "error_in_exec", None)
        # Report it, because IPython takes BdbQuit for the end of the cell and shows nothing.
        if has_failed and isinstance(error, bdb.BdbQuit):
            self.showtraceback((type(error), error, error.__traceback__))
        return has_failed

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        kind, value, trace = super()._get_exc_info(exc_tuple)
        _trim(value, trace)
        # Contexts too, because a cancelled call raises in the cell, and the interrupt may come while that is handled.
        for before in _contexts(value):
            _trim(before, before.__traceback__)
        return kind, value, trace

    def system(self, cmd: str) -> None:
        """Run `!command` and `%pip`; the child writes straight to descriptors 1 and 2."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.user_ns["_exit_code"] = _run(self.var_expand(cmd, depth=1))

    system_piped = system_raw = system

    def run_command(self, command: str) -> int:
        """Run a shell command as it stands, without Python's variables in it, and return its exit status."""
        sys.stdout.flush()
        sys.stderr.flush()
        status = self.user_ns["_exit_code"] = _run(command)
        return 128 - status if status < 0 else status


def _run(command: str) -> int:
    """Run a shell command to its end and return its status, which is negative if a signal ended it."""
    # The user's shell, as in ipykernel. If SHELL is not a program any more, commands still run with /bin/sh.
    executable = shutil.which(os.environ.get("SHELL", "sh")) or "/bin/sh"
    with subprocess.Popen(
        command, shell=True, executable=executable, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _has_group(value: Any) -> bool:
    """Return whether an exception, or one in its context, is a group; Python has groups from 3.11 on."""
    group = getattr(builtins, "BaseExceptionGroup", ())
    return isinstance(value, group) or any(isinstance(before, group) for before in _contexts(value))


def _contexts(value: Any) -> "list[BaseException]":
    """Return the exceptions in the `__context__` chain of one."""
    found: list[BaseException] = []
    seen = {id(value)}  # a session can make the chain a cycle
    before = getattr(value, "__context__", None)
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        found.append(before)
        before = before.__context__
    return found


def _trim(value: Any, trace: Any) -> None:
    """Cut our own frames off the end of an exception's traceback, so that it ends in the cell."""
    if isinstance(value, (KeyboardInterrupt, EOFError, StdinNotImplementedError)):
        _end_at_the_cell(trace, f"{__package__}.")
    # The fault is in the tool call, or the call took too long; it is not in the toolbox code that passes it on.
    if type(value).__module__ == "toolbox.errors" or isinstance(value, KeyboardInterrupt):
        _end_at_the_cell(trace, "toolbox.")
    if type(value).__module__ == "forms.errors":
        _end_at_the_cell(trace, "forms.")
    _end_at_the_cell(trace, "workspace_state")


def _from_the_cell(trace: Any) -> Any:
    """Return the traceback without IPython's frames before the cell."""
    first = trace
    while first is not None and "IPython" in str(first.tb_frame.f_globals.get("__name__")):
        first = first.tb_next
    return first or trace


def _end_at_the_cell(trace: Any, ours: str) -> None:
    """Cut the traceback before the first frame of a module whose name starts with `ours`."""
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


def _print_without_restart(*arguments: Any, **options: Any) -> None:
    """Print what `%pip` says, except its advice to restart a kernel, which nobody here can do."""
    if "restart the kernel" not in str(arguments[0] if arguments else ""):
        print(*arguments, **options)


def build_shell() -> ZMQShell:
    """Build the shell, with nothing in it that a fork could not share."""
    packaging.print = _print_without_restart  # pyright: ignore[reportAttributeAccessIssue]
    config = Config()
    config.HistoryManager.enabled = False
    config.Completer.use_jedi = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.banner1 = ""
    shell: Any = ZMQShell.instance(config=config)
    shell.input_transformer_manager = CellTransformer()
    # For good and not for each cell, because pandas looks for `get_ipython` when it is imported, to know whether it is
    # in a notebook: that may be in a zygote, when a session wakes, or in a task between two cells.
    shell.builtin_trap.__enter__()
    if hasattr(shell.history_manager, "outputs"):
        shell.history_manager.outputs = _DiscardedOutputs()
    # IPython's fork hook ends the threads of these, and ours has none. Not a WeakSet, because going through one writes
    # to 11 pages with each checkpoint.
    if hasattr(HistoryManager, "_instances"):
        HistoryManager._instances = set()  # pyright: ignore
    # IPython's advice after sys.exit() does not help, because nobody here can press Ctrl-D.
    warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)
    # Programs that list packages with it, as clients of Azure's sessions do, take stderr for a part of the list.
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated as an API", category=UserWarning)
    return shell


def direct_outputs(shell: ZMQShell, emit: Emit) -> None:
    """Send displays, results and errors to `emit` from now on."""
    publishers: list[Any] = [shell, shell.display_pub, shell.displayhook]
    for publisher in publishers:
        publisher.emit = emit


# What a warm-up cell leaves in the shell is undone, so that the session's first cell finds it unused

_LAST_RESULTS = ("_", "__", "___")
_LAST_INPUTS = ("_i00", "_i", "_ii", "_iii")
_INPUTS = ("input_hist_parsed", "input_hist_raw", "db_input_cache")
_LAST_EXECUTION = ("execution_count", "last_execution_result", "last_execution_succeeded")
_LAST_ERRORS = ("last_type", "last_value", "last_traceback", "last_exc")


@contextmanager
def no_traces(shell: ZMQShell) -> Generator[None, None, None]:
    """Restore names, `In`, `Out`, the count, remembered inputs and results, sources and errors after the block."""
    hook: Any = shell.displayhook
    history: Any = shell.history_manager
    sources: dict[str, int] = getattr(shell.compile, "_filename_map", {})
    shown: dict[int, str] = getattr(history, "output_hist_reprs", {})
    errors: dict[int, Any] = getattr(history, "exceptions", {})
    kept: list[Any] = [shell.user_ns, shell.user_ns_hidden, shell.user_ns["_oh"], shown, errors, sources]
    before: list[tuple[Any, dict[Any, Any]]] = [(mapping, dict(mapping)) for mapping in kept]
    inputs: list[tuple[list[Any], list[Any]]] = [(one, list(one)) for one in map(partial(getattr, history), _INPUTS)]
    attributes = [(hook, name, getattr(hook, name, "")) for name in _LAST_RESULTS]
    attributes += [(history, name, getattr(history, name)) for name in _LAST_INPUTS]
    attributes += [(shell, name, getattr(shell, name, None)) for name in _LAST_EXECUTION]
    attributes.append((shell.InteractiveTB, "tb", getattr(shell.InteractiveTB, "tb", None)))
    try:
        yield
    finally:
        for name in sources.keys() - before[-1][1].keys():
            linecache.cache.pop(name, None)
        for mapping, content in before:
            _restore(mapping, content)
        for values, content in inputs:
            values[:] = content
        for owner, name, value in attributes:
            setattr(owner, name, value)
        for name in _LAST_ERRORS:
            with contextlib.suppress(AttributeError):
                delattr(sys, name)


def _restore(mapping: Any, content: "dict[Any, Any]") -> None:
    """Restore a mapping in place, because others hold the same object."""
    for name in [name for name in mapping if name not in content]:
        del mapping[name]
    mapping.update(content)


# Completion, inspection and completeness of code, for a person who types

MAX_MATCHES = 1_000
LONGEST_MATCH = 1_000
LONGEST_FORM = 200_000
NO_INSPECTION: dict[str, Any] = {"type": "inspection", "data": {}}


def no_completion(cursor: int) -> dict[str, Any]:
    """Return the answer for when nothing fits."""
    return {"type": "completion", "matches": [], "start": cursor, "end": cursor}


def completion(shell: Any, code: str, cursor: int) -> dict[str, Any]:
    """Return the names that fit at the cursor; all of them replace the same span."""
    try:
        with provisionalcompleter():
            found = rectify_completions(code, shell.Completer.completions(code, cursor))
            matches = list(itertools.islice(found, MAX_MATCHES))
    except Exception:
        return no_completion(cursor)  # a property or a completer of the session raised
    if not matches:
        return no_completion(cursor)
    texts = [match.text for match in matches if len(match.text) <= LONGEST_MATCH]
    return {"type": "completion", "matches": texts, "start": matches[0].start, "end": matches[0].end}


def inspection(shell: Any, code: str, cursor: int, detail: int) -> dict[str, Any]:
    """Return what the name at the cursor is."""
    try:
        name = token_at_cursor(code, cursor)
        data = rich_output.prepared(shell.object_inspect_mime(name, detail_level=detail)) if name else {}
    except Exception:
        return NO_INSPECTION  # a KeyError for an unknown name, or whatever an object of the session raises
    forms = {mime: form[:LONGEST_FORM] for mime, form in data.items() if isinstance(form, str)}
    return {"type": "inspection", "data": forms}


def completeness(shell: Any, code: str) -> dict[str, Any]:
    """Return whether code is complete, incomplete or invalid, and the indentation of the next line."""
    status, indent = shell.input_transformer_manager.check_complete(code)
    return {"type": "checked", "status": status, "indent": " " * min(indent or 0, LONGEST_MATCH)}
