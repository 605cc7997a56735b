"""Runs a function in a child process that shares this process's memory, as vfork(2) does, while this one waits.

A fork copies the page table, and every page that the child then writes to. A child that only changes its own rights and
namespaces, and then forks, needs neither: a fork of a zygote takes two thirds of the processor time, 6 ms instead of 9.
Whatever it changes in Python's objects is changed in this process, too.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_ANY_CHILD = 0x40000000  # __WALL: the child sends no signal when it ends, so that no handler waits for it


def is_possible() -> bool:
    """Return whether a child can be started here."""
    _, _, stack = _prepare()
    return bool(stack.value)


def begin_anew() -> None:
    """Begin as a process of its own, in what a child has forked: it goes on below the child's stack.

    It is also in the midst of the child's function, which the process that started the child has run.
    """
    _prepare.cache_clear()
    _functions.clear()


def run_in_child(function: "Callable[[], None]") -> None:
    """Run a function in a child, and raise here what it raises; OSError where there can be no such child.

    Only for a process with one thread. The function must return in the child; it may fork, and a process that it forked
    need not return. If the child is killed before that, this process exits, because its own state is then half changed.
    """
    clone, run, stack = _prepare()
    _functions.append(function)
    child = clone(run, stack, _CLONE_VM | _CLONE_VFORK, None)
    if child < 0:
        number = ctypes.get_errno()
        _functions.clear()
        raise OSError(number, f"clone: {os.strerror(number)}")
    if _functions:
        os._exit(1)
    os.waitpid(child, _ANY_CHILD)
    if _errors:
        raise _errors.pop()


_functions: "list[Callable[[], None]]" = []  # what the child is to run; empty once it has returned
_errors: "list[BaseException]" = []  # what it has raised


def _run(_argument: Any) -> int:
    try:
        _functions[0]()
    except BaseException as error:
        _errors.append(error)
    _functions.clear()
    return 0


@cache
def _prepare() -> "tuple[Any, Any, ctypes.c_void_p]":
    """Return C's `clone` and its first two arguments; no stack where there can be none. Made once a process."""
    # Not CDLL, which would release the lock of the interpreter that the child needs.
    clone = getattr(ctypes.PyDLL(None, use_errno=True), "clone", None)
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run)
    return clone, run, ctypes.c_void_p(_find_stack() if clone else 0)


def _find_stack() -> int:
    """Return where the child's stack begins; 0 where that is unknown.

    Below all that this process has used of its own stack, which grows by itself. Not memory apart from it, because
    Python 3.14 takes that for an overflow, and a process that the child forks stays on this stack.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            if line.endswith("[stack]"):
                return int(line.partition("-")[0], 16)
    return 0
