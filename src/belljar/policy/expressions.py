"""The operator's expressions: rules in CEL (Common Expression Language) and regular expressions in RE2's syntax.

CEL reaches nothing outside the values it is given, but an expression can take any time and memory, so all but the
smallest are evaluated in processes of their own (`inside/expressions.py`). This module knows names and values, not
what a rule is for. The CEL library is loaded with the first expression, so that a policy without expressions does not
pay for it.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import IO, Any, Protocol, cast

import re2 as _re2  # pyright: ignore[reportMissingTypeStubs]

from belljar.inside import FOLDER
from belljar.inside.expressions import MEMORY_MB, TIME_S, load_library, value_of

VARIABLES = ("arguments", "server", "tool", "read_only", "destructive", "calls")
MAX_CHARS = 10_000
MAX_VALUES_BYTES = 16 * 1024 * 1024
"""The most that one expression may be given, as JSON."""
# What is evaluated in the server's own process takes 5 µs, and at worst 30 ms: without a macro it takes no more steps
# than the square of its length for each byte.
SMALL_CHARS = 200
SMALL_VALUES_BYTES = 2_000
# The names that macros bind, as in `arguments.rows.all(row, row.amount < 10)`.
_BOUND = re.compile(r"(?:\.(?:all|exists|exists_one|map|filter)|\bcel\.bind)\s*\(\s*([A-Za-z_]\w*)\s*,")
# Macros, and patterns, which are compiled each time.
_COSTLY = re.compile(r"\b(?:all|exists|exists_one|map|filter|bind|matches)\b")


class ExpressionFailed(Exception):
    """An expression has no value for a call, for example because it compares an argument that is missing."""


class Expression:
    """One compiled CEL expression over the variables `names`."""

    def __init__(self, text: str, names: Collection[str] = VARIABLES) -> None:
        if len(text) > MAX_CHARS:
            raise ValueError(f"the expression has {len(text):,} characters, the limit is {MAX_CHARS:,}")
        self.text = text
        try:
            self._program = load_library(_library_folder()).compile(text)
        except (ValueError, RuntimeError) as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise ValueError(f"{text!r} is no CEL expression: {first.partition(': ERROR: ')[2] or first}") from None
        self._is_small = len(text) <= SMALL_CHARS and not _COSTLY.search(text)
        self.names = frozenset(cast("list[str]", self._program.variables())) - {*_BOUND.findall(text)}
        """The names that need a value."""
        unknown = self.names - {*names}
        if unknown:
            raise ValueError(f"{text!r} names {min(unknown)!r}; there are {', '.join(names) or 'none'}")

    async def is_true(self, values: Mapping[str, Any]) -> bool:
        """Return whether the expression is true of these values; raise `ExpressionFailed` if it is no boolean."""
        outcome = await self.value(values)
        if not isinstance(outcome, bool):
            raise ExpressionFailed(f"it is {type(outcome).__name__}, neither true nor false")
        return outcome

    async def value(self, values: Mapping[str, Any]) -> Any:
        """Return the value of the expression as JSON has it. Raises `ExpressionFailed` if there is none."""
        needed = {name: values[name] for name in self.names}
        given = _as_json(needed)
        if self._is_small and len(given) <= SMALL_VALUES_BYTES:
            try:
                return value_of(self._program, needed)
            except ValueError as error:
                raise ExpressionFailed(str(error)) from None
        request = f"[{json.dumps(self.text)},{given}]\n".encode()
        return await asyncio.get_running_loop().run_in_executor(_evaluators, _evaluated, request)


@cache
def _library_folder() -> str:
    spec = find_spec("cel")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("common-expression-language is not installed")
    return spec.submodule_search_locations[0]


def _as_json(values: Mapping[str, Any]) -> str:
    """Return values as a JSON object; raise `ExpressionFailed` for too much, before all of it is written."""
    parts: list[str] = []
    size = 0
    for name, value in values.items():
        try:
            parts.append(f"{json.dumps(name)}:{json.dumps(value)}")
        except (TypeError, ValueError, RecursionError):
            raise ExpressionFailed(f"{name} has a value that JSON has not") from None
        size += len(parts[-1])
        if size > MAX_VALUES_BYTES:
            raise ExpressionFailed(f"its values have more than {MAX_VALUES_BYTES:,} bytes")
    return f"{{{','.join(parts)}}}"


# The processes that evaluate: each belongs to a thread, which waits for it. They stay until the server ends.

_evaluators = ThreadPoolExecutor(2, thread_name_prefix="expressions")
_own = threading.local()


def _evaluated(request: bytes) -> Any:
    """Return the answer of this thread's process. One that dies is an error of this request, not of the next."""
    process: subprocess.Popen[bytes] | None = getattr(_own, "process", None)
    if process is None or process.poll() is not None:
        command = [sys.executable, "-I", "-S", str(FOLDER / "expressions.py"), _library_folder()]
        process = _own.process = subprocess.Popen(
            command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    requests, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        requests.write(request)
        requests.flush()
        answer = answers.readline()
    except OSError:
        answer = b""
    if not answer.endswith(b"\n"):
        process.kill()
        with suppress(OSError), process:
            pass
        is_late = process.wait() == -signal.SIGPROF
        raise ExpressionFailed(
            f"it takes more than {TIME_S} s" if is_late else f"it takes more than {MEMORY_MB} MB of memory"
        )
    value, reason = json.loads(answer)
    if reason:
        raise ExpressionFailed(reason)
    return value


# Regular expressions. RE2 takes linear time: the operator writes the patterns, but the searched text may be hostile.

re2: Any = _re2  # it has no types


class Regex(Protocol):
    """The methods of a compiled regular expression that belljar uses."""

    def search(self, text: str, /) -> object | None:
        """Return the first match, or None."""
        ...

    def sub(self, repl: Any, text: str, /) -> str:
        """Return the text with every match replaced."""
        ...


@lru_cache(maxsize=1_000)
def compiled(pattern: str, *, may_be_empty: bool = False) -> Regex:
    """Compile a pattern; raise ValueError with what is wrong, such as a match of the empty text, found everywhere."""
    quiet = re2.Options()
    quiet.log_errors = False
    try:
        regex = cast("Regex", re2.compile(pattern, quiet))
    except re2.error as error:
        reason = str(error.args[0].decode() if isinstance(error.args[0], bytes) else error)
        raise ValueError(f"{pattern!r} is no regular expression that RE2 takes: {reason}") from None
    if not may_be_empty and regex.search("") is not None:
        raise ValueError(f"{pattern!r} matches the empty text, so it would match everywhere")
    return regex
