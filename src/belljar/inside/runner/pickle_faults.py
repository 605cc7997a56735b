"""Finding the part of a value that cannot be pickled, and why, as text.

Does not know how values are pickled: the caller passes a function that tries it.
"""

# Values may have any type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 16
MAX_CHILDREN = 2_000
MAX_REASON = 300

Fails = Callable[[Any], "BaseException | None"]
_SIMPLE = (str, int, float, bool, bytes, type(None))
_KNOWN = {
    "generator": "a generator is in the middle of its work",
    "async_generator": "a generator is in the middle of its work",
    "coroutine": "a coroutine is in the middle of its work",
    "_asyncio.Task": "a task is in the middle of its work",
    "_asyncio.Future": "a future belongs to the event loop",
    "_io.TextIOWrapper": "an open file cannot be kept",
    "_io.BufferedReader": "an open file cannot be kept",
    "_io.BufferedWriter": "an open file cannot be kept",
    "_io.BufferedRandom": "an open file cannot be kept",
    "_io.FileIO": "an open file cannot be kept",
    "socket.socket": "a connection cannot be kept",
    "sqlite3.Connection": "a connection cannot be kept",
    "threading.Thread": "a thread cannot be kept",
    "subprocess.Popen": "a sub-process cannot be kept",
    "_thread.lock": "a lock belongs to the process",
    "_thread.RLock": "a lock belongs to the process",
    "frame": "a running frame cannot be kept",
    "traceback": "a traceback holds running frames",
}


def reason_for(name: str, value: Any, error: BaseException, fails: Fails) -> str:
    """Return why a variable cannot be pickled. If a part of it is the reason, that part is named by its path."""
    path, culprit, error = _deepest_fault(name, value, error, fails)
    reason = _known_reason(culprit) or error_line(error)
    if path != name:
        reason = f"{path} is a {type_name(culprit)}: {reason}"
    return reason[: 2 * MAX_REASON]


def type_name(value: Any) -> str:
    """Return the name of a value's type: `module.Class`, or `class` for builtins."""
    return _class_name(type(value))


def _known_reason(value: Any) -> str:
    return next((_KNOWN[name] for name in map(_class_name, type(value).__mro__) if name in _KNOWN), "")


def _class_name(kind: Any) -> str:
    try:
        module = str(type.__getattribute__(kind, "__module__"))
        name = str(type.__getattribute__(kind, "__qualname__"))
    except Exception:
        return "object"
    return (name if module == "builtins" else f"{module}.{name}")[:MAX_REASON]


def error_line(error: BaseException) -> str:
    """Return an error as one line of text."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    name = type(error).__name__
    if name in ("PicklingError", "TypeError", "StateDamaged", "CannotWrite", "StateTooLarge") and text:
        return text[:MAX_REASON]
    return (f"{name}: {text}" if text else name)[:MAX_REASON]


def _deepest_fault(path: str, value: Any, error: BaseException, fails: Fails) -> tuple[str, Any, BaseException]:
    seen = {id(value)}
    for _ in range(MAX_DEPTH):
        if _known_reason(value):
            break
        for step, child in itertools.islice(_children(value), MAX_CHILDREN):
            if isinstance(child, _SIMPLE) or id(child) in seen:
                continue
            fault = fails(child)
            if fault is not None:
                seen.add(id(child))
                path, value, error = path + step, child, fault
                break
        else:
            break
    return path, value, error


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{_key(key)}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("{…}", child) for child in value)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    yield from _attributes(value)


def _function_parts(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for index, cell in enumerate(value.__closure__ or ()):
        try:
            yield f"'s {value.__code__.co_freevars[index]}", cell.cell_contents
        except ValueError:
            continue
    for number, child in enumerate(value.__defaults__ or ()):
        yield f".__defaults__[{number}]", child


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        attributes = {}
    for slots in (vars(kind).get("__slots__", ()) for kind in type(value).__mro__):
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            try:
                attributes[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue
    is_class = isinstance(value, type)
    for name, child in attributes.items():
        if not (is_class and name in ("__dict__", "__weakref__")):
            yield f".{name}", child


def _key(key: Any) -> str:
    return repr(key)[:60] if type(key) in _SIMPLE else f"<{type_name(key)}>"
