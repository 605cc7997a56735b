"""What a script of `belljar run` finds as `sys.argv` and `sys.stdin`. Run as a cell of its own before the script.

A session's process has no input: `input()` asks the host. Here `sys.stdin` becomes a stream that asks the host for the
next bytes of what is piped into the command, only when code reads, and `input()` reads a line of that stream as it does
in any script. The command (`cli/terminal.py`) answers with base64, and not at all when its input has ended.
"""

import base64
import builtins
import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

_QUESTION = "belljar:stdin:"
_CHUNK_BYTES = 256 * 1024


class _PipedInput(io.RawIOBase):
    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask

    def readable(self) -> bool:
        return True

    def _next(self, most: int) -> bytes:
        try:
            return base64.b64decode(self._ask(_QUESTION + str(most)))
        except EOFError:
            return b""

    def readinto(self, buffer: Any) -> int:
        content = self._next(min(len(buffer), _CHUNK_BYTES))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self._next(_CHUNK_BYTES), b""))


def _input(prompt: object = "", /) -> str:
    """Read a line as Python's own `input` does where stdin is not a terminal."""
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.removesuffix("\n")


def install(arguments: "list[str]", *, is_piped: bool) -> None:
    """Set the script's arguments and, where something is piped in, its standard input."""
    sys.argv = [*arguments]
    if is_piped:
        raw = io.BufferedReader(_PipedInput(builtins.input), _CHUNK_BYTES)
        sys.stdin = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape")
        builtins.input = _input
    with contextlib.suppress(ImportError, AttributeError):  # a Python kernel that is not IPython
        _forget_this_cell()


def _forget_this_cell() -> None:
    """Have IPython forget the cell that runs, once it has ended, so that the script's own cell is `In[1]`."""
    from IPython import get_ipython

    shell: Any = get_ipython()
    inputs = shell.history_manager
    if inputs.enabled:  # a kernel of Jupyter's, which has written the cell's number to its database
        return
    # Versions of IPython differ in when they count a cell, but each has stored its input by now.
    count = len(inputs.input_hist_parsed) - 1

    def forget(_: object) -> None:
        shell.events.unregister("post_run_cell", forget)
        shell.execution_count = count
        del inputs.input_hist_parsed[count:], inputs.input_hist_raw[count:]
        inputs._i00 = ""

    shell.events.register("post_run_cell", forget)
