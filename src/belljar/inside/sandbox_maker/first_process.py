"""Starts the first process of a sandbox, which shares the maker's memory until it executes the program that stays.

A fork copies the page table, and then every page that one of the two processes writes to: 600 for each sandbox, which
took half of the time. Here the child runs a function in the maker's memory while the maker waits, as after vfork(2).
The function has to return before the program is executed, because the maker's interpreter lives in that memory. So a
chain of C's contexts executes it, not Python (makecontext(3)): the function, then execve, and _exit if that fails.
`inside/runner/vfork.py` does the same where the child may go on as Python.
"""

import ctypes
import mmap
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from .mounts import check, libc

_PROGRAM = b"/usr/bin/sleep" if os.path.exists("/usr/bin/sleep") else b"/bin/sleep"  # noqa: PTH110
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Those of mounts, host name, IPC, users, pids and network. The process makes that of control groups itself, once it
has joined its groups."""
_CLONE_VM, _CLONE_PIDFD, _CLONE_VFORK = 0x100, 0x1000, 0x4000
_FLAGS = ctypes.c_int(_NEW_NAMESPACES | _CLONE_VM | _CLONE_PIDFD | _CLONE_VFORK | signal.SIGCHLD)
_CONTEXT_BYTES = 16_384
_FUNCTION_STACK_BYTES, _CALL_STACK_BYTES = 1_048_576, 65_536


class _Context(ctypes.Structure):
    """How C's `ucontext_t` begins; the rest has no more than `_CONTEXT_BYTES` on any machine."""

    _fields_ = (
        ("flags", ctypes.c_ulong),
        ("link", ctypes.c_void_p),
        ("stack", ctypes.c_void_p),
        ("stack_flags", ctypes.c_int),
        ("stack_bytes", ctypes.c_size_t),
    )


class FirstProcesses:
    """Starts first processes, one at a time. Made once, because everything that it needs stays where it is."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], bool]] = []
        """The function that the child is to run; empty once it has returned."""
        self._callback = ctypes.CFUNCTYPE(None)(self._run)
        self._path = ctypes.create_string_buffer(_PROGRAM, len(_PROGRAM) + 1)
        self._arguments = (ctypes.c_char_p * 3)(b"sleep", b"infinity", None)
        self._variables = (ctypes.c_char_p * 1)(None)
        self._room = mmap.mmap(-1, 3 * _CONTEXT_BYTES)
        self._contexts = [_Context.from_buffer(self._room, number * _CONTEXT_BYTES) for number in range(3)]
        self._stack = _end_of_stack()

    def start(self, function: "Callable[[], bool]", pidfd: ctypes.c_int) -> int:
        """Start a process and return its pid, once it is the program that holds the sandbox open, or has ended.

        It runs the function first, and ends if that returns False. If it is killed before that, this process ends too,
        because the state of its interpreter is half changed.
        """
        self._functions.append(function)
        first = self._chain()
        pid = libc.clone(libc.setcontext, ctypes.c_void_p(self._stack), _FLAGS, first, ctypes.byref(pidfd), None, None)
        if pid < 0:
            self._functions.clear()
        elif self._functions:
            os._exit(1)
        return check(pid, "clone")

    def _chain(self) -> ctypes.c_void_p:
        """Return the first of the contexts that the child goes through."""
        function, execute, leave = self._contexts
        end = self._stack - _CALL_STACK_BYTES  # above it is where `clone` begins
        for context, size in (
            (leave, _CALL_STACK_BYTES),
            (execute, _CALL_STACK_BYTES),
            (function, _FUNCTION_STACK_BYTES),
        ):
            check(libc.getcontext(ctypes.byref(context)), "getcontext")
            end -= size
            context.stack, context.stack_bytes = end, size
        function.link, execute.link, leave.link = ctypes.addressof(execute), ctypes.addressof(leave), None
        libc.makecontext(ctypes.byref(function), self._callback, 0)
        libc.makecontext(ctypes.byref(execute), libc.execve, 3, self._path, self._arguments, self._variables)
        libc.makecontext(ctypes.byref(leave), libc._exit, 1, 1)
        return ctypes.c_void_p(ctypes.addressof(function))

    def _run(self) -> None:
        """Run the function, in the child. There is no program at an empty path."""
        try:
            self._path.value = _PROGRAM if self._functions[0]() else b""
        except BaseException:
            self._path.value = b""
        self._functions.clear()


def _end_of_stack() -> int:
    """Return an address below all that this process has used of its own stack, which grows by itself.

    Not memory apart from it, because Python 3.14 takes that for an overflow.
    """
    found = re.search(rb"^([0-9a-f]+)-.*\[stack\]$", Path("/proc/self/maps").read_bytes(), re.MULTILINE)
    if found is None:
        raise OSError(0, "this process does not see its own stack")
    return int(found[1], 16)
