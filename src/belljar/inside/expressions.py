"""Evaluates expressions apart from the server: others write them, and choose the values that they go through.

The server starts this file with the folder of the CEL library. Each line of standard input is a JSON list of an
expression and its values; each line of standard output is a list of the value and why there is none. An evaluation
that takes too much time or memory ends the process, because the library counts nothing and cannot be interrupted. The
server calls `value_of` itself for what is small in every respect.
"""

import json
import math
import signal
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any, cast

TIME_S = 2
"""The processor time of one evaluation."""
MEMORY_MB = 512
MAX_VALUE_BYTES = 256 * 1024
"""The largest value of an expression, as JSON."""
_MAX_DEPTH = 64
_FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def load_library(folder: str) -> Any:
    """Return the CEL library that lies in a folder, without its command line, which takes half a second to import."""
    if "cel.cel" not in sys.modules:
        spec = PathFinder.find_spec("cel.cel", [folder])
        if spec is None or spec.loader is None:
            raise ImportError(f"there is no CEL library in {folder}")
        library = module_from_spec(spec)
        spec.loader.exec_module(library)
        sys.modules["cel.cel"] = library  # it cannot be loaded twice
    return sys.modules["cel.cel"]


def value_of(program: Any, values: dict[str, Any]) -> Any:
    """Return the value of a compiled expression as JSON has it; raise ValueError with why there is none."""
    try:
        found = program.execute(values)
    except _FAULTS as error:
        raise ValueError(_reason(error)) from None
    return plain_value(found)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    text = f"no value under {lines[0]}" if isinstance(error, KeyError) else lines[0]
    return text.partition(": ERROR: ")[2] or text


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; raises ValueError for one that JSON has not, or that is too large."""
    plain = _plain(value, 0)
    size = len(json.dumps(plain))
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"the value has {size:,} bytes, the limit is {MAX_VALUE_BYTES:,}")
    return plain


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"the value is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the value is no finite number")
        return float(value)
    if isinstance(value, dict):
        return {str(key): _plain(each, depth + 1) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, depth + 1) for each in cast("list[Any]", value)]
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if hasattr(value, "total_seconds"):
        return float(value.total_seconds())
    raise ValueError(f"the value is a {type(value).__name__}, which JSON has not")


def main(folder: str) -> None:
    """Answer requests until the server hangs up."""
    import resource  # Windows has no such module, and imports this one for `plain_value`

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = lru_cache(maxsize=64)(load_library(folder).compile)
    for line in sys.stdin.buffer:
        # The signal ends the process at once: a handler in Python would wait for the library.
        signal.setitimer(signal.ITIMER_PROF, TIME_S)
        text, values = json.loads(line)
        try:
            answer = [value_of(compiled(text), values), ""]
        except ValueError as error:
            answer = [None, str(error)]
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1])
