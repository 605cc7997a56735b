"""Forks a checkpoint: a fork of this process that keeps its state and sleeps until the host has a request for it.

Each page that either process writes to after the fork is in memory twice, and most checkpoints are dropped without ever
being used. So a checkpoint does as little as possible before it sleeps: what it needs was made before the fork, and
Python's own work after a fork, the fork hooks of libraries among it, waits until a request comes.
"""

import _socket
import contextlib
import ctypes
import errno
import functools
import gc
import os
import platform
import random
import signal
import stat
from typing import Any

from . import fork, fork_losses

# Not CDLL, which would release the interpreter's lock: the functions of Python need it.
_python: Any = ctypes.PyDLL(None, use_errno=True)
_SIGNAL_SET_BYTES = 128  # `sigset_t`
_ALL_SIGNALS = b"\xff" * _SIGNAL_SET_BYTES

_system_call: Any = _python.syscall
_system_call.restype = ctypes.c_long
_CLONE = {"x86_64": (56, True), "aarch64": (220, False)}
"""By machine the number of `clone`, and whether its last argument is the thread-local storage."""
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_NO_SIBLING = (errno.ENOSYS, errno.EINVAL, errno.EPERM)
_FIRST = (1, 0)
"""What `os.getppid()` returns for the first process of our sandbox, and for that of the sandbox ours is nested in."""

_session_hooks: "list[str]" = []
"""The kinds of fork hooks that the session has registered."""


def watch_fork_hooks() -> None:
    """Learn of the fork hooks that are registered from now on, which nothing else tells."""
    register = os.register_at_fork

    @functools.wraps(register)
    def register_at_fork(**hooks: Any) -> None:
        register(**hooks)
        _session_hooks.extend(hooks)

    os.register_at_fork = register_at_fork


def fork_checkpoint(descriptor: int, ready: bytes) -> bool:
    """Fork a checkpoint; return False in this process and, when the host wakes it, True in the checkpoint.

    The checkpoint sends `ready` by the socket `descriptor`, then sleeps. It is not our child and has no keeper.
    """
    # C's class, because libraries such as gevent replace Python's by one that runs other code while it waits.
    sock = _socket.socket(fileno=descriptor)
    sock.settimeout(None)  # else it has the default timeout that a cell may have set
    try:
        may_defer = fork_losses.thread_count() == 1 and not _session_hooks
        return _fork_deferring_hooks(sock, ready) if may_defer else _fork_running_hooks(sock, ready)
    finally:
        sock.detach()


def _fork_deferring_hooks(sock: _socket.socket, ready: bytes) -> bool:
    # Asked before the fork, because the session may have replaced what answers.
    parent_reaps = not fork.has_keeper() and os.getppid() in _FIRST
    number, is_tls_last = _CLONE.get(platform.machine(), (0, False)) if parent_reaps else (0, False)
    with _Detachment(sock) as detachment, fork.forking(), _Undisturbed():
        _python.PyOS_BeforeFork()
        is_checkpoint, error = _fork_sibling(number, is_tls_last=is_tls_last) if number else (False, errno.ENOSYS)
        if error in _NO_SIBLING:
            is_checkpoint, error = _fork_orphan()
        if not is_checkpoint:
            _python.PyOS_AfterFork_Parent()
            fork.raise_fork_error(error)
            return False
        try:
            os.setsid()
            detachment.apply()
            _await_request(sock, ready)
        except BaseException:  # of a trace function of the session's; nothing else must go on with the session's code
            os._exit(errno.EIO)
        _drop_pending_signals()
        numbers = random.getstate()
        _python.PyOS_AfterFork_Child()
        # A fork hook of Python's has seeded the generator anew.
        random.setstate(numbers)
        fork.own_thread_id()
        return True


def _fork_sibling(number: int, *, is_tls_last: bool) -> "tuple[bool, int]":
    """Fork once, to a child of our parent's, which a cell's `os.wait()` does not see; return whether this is the fork.

    The second value is the number of an error. Only where our parent is the first process of a sandbox, ours or the one
    ours is nested in, because that waits for whatever ends. Linux is called directly, because no function of C does
    this: what C's fork does beside, it does when a kernel is forked from the checkpoint.
    """
    thread_id = ctypes.c_void_p()
    _python.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0)
    # Where C remembers the id of its thread, Linux writes that of the fork.
    flags = _CLONE_PARENT | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if thread_id.value else 0) | signal.SIGCHLD
    rest = (thread_id, None) if is_tls_last else (None, thread_id)
    child = _system_call(number, ctypes.c_ulong(flags), None, None, *rest)
    return child == 0, ctypes.get_errno() if child < 0 else 0


def _fork_orphan() -> "tuple[bool, int]":
    """Fork twice, so that the second fork is an orphan; return as `_fork_sibling` does."""
    first, error = _fork_without_hooks()
    if first != 0:
        return False, error or fork.wait_for(first)
    second, error = _fork_without_hooks()
    if second != 0:
        os._exit(error)
    return True, 0


def _fork_running_hooks(sock: _socket.socket, ready: bytes) -> bool:
    """Fork a checkpoint of a process with threads, or with fork hooks of the session's own.

    Without Python's own work after the fork it could wait for ever for the interpreter's lock, because a thread that
    holds or wants the lock is not there. And a hook that fails must do so now, not when the checkpoint is needed.
    """
    numbers = random.getstate()
    first = fork.fork_process()
    if first:
        fork.raise_fork_error(fork.wait_for(first))
        return False
    fork.reparent()
    fork.start_fork(has_keeper=False)
    random.setstate(numbers)
    with _Detachment(sock) as detachment:
        detachment.apply()
    _await_request(sock, ready)
    return True


def _fork_without_hooks() -> "tuple[int, int]":
    """Call C's fork; return what it returns, and the number of its error."""
    child = _python.fork()
    return child, (ctypes.get_errno() or errno.EAGAIN) if child < 0 else 0


def _await_request(sock: _socket.socket, ready: bytes) -> None:
    """Wait for a request, and leave it in the socket; exit when the host is gone."""
    with contextlib.suppress(OSError):
        sock.sendall(ready)
    while True:
        try:
            # Exit without flushing or exit functions, because these belong to the process that it is a checkpoint of.
            return None if sock.recv(1, _socket.MSG_PEEK) else os._exit(0)
        except OSError:
            os._exit(0)
        except BaseException:
            continue


class _Undisturbed:
    """Lets no signal handler and no garbage collection run.

    Between Python's work before and after a fork, locks of the interpreter are held: since 3.13 one that starting a
    thread needs, and since 3.14 a collection too. A handler that raises would leave them held.
    """

    def __init__(self) -> None:
        self._mask = ctypes.create_string_buffer(_SIGNAL_SET_BYTES)
        self._collects = gc.isenabled()

    def __enter__(self) -> None:
        gc.disable()
        _python.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS, self._mask)

    def __exit__(self, *_: object) -> None:
        _python.pthread_sigmask(signal.SIG_SETMASK, self._mask, None)
        if self._collects:
            gc.enable()


def _drop_pending_signals() -> None:
    """Drop the signals that a checkpoint was sent while it slept: cells send them to all processes that they see."""
    while signal.sigtimedwait(signal.valid_signals(), 0) is not None:
        pass


class _Detachment:
    """What separates a checkpoint from the descriptors that it inherits. Made before the fork, to be applied after it.

    It has no output. Files are reopened, so that it has offsets of its own. Sockets and pipes are replaced, because the
    session's pipes would never end and its ports never be free while the checkpoint has them.
    """

    def __init__(self, sock: _socket.socket) -> None:
        self._silent = self._dead = -1
        self._sock = sock
        self._files: list[int] = []
        self._replaced: list[int] = []

    def __enter__(self) -> "_Detachment":
        for descriptor in fork.open_descriptors():
            if descriptor in (0, 1, 2, self._sock.fileno()):
                continue
            with contextlib.suppress(OSError):
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISREG(mode):
                    self._files.append(descriptor)
                elif stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                    self._replaced.append(descriptor)
        self._silent = fork.open_silent_pipe()
        try:
            self._dead = fork.open_dead_socket()
        except BaseException:
            self.__exit__()
            raise
        return self

    def apply(self) -> None:
        for number in (1, 2):
            os.dup2(self._silent, number)
        for descriptor in self._files:
            fork.reopen(descriptor)
        for descriptor in self._replaced:
            os.dup2(self._dead, descriptor, inheritable=False)
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._silent, self._dead):
            if descriptor >= 0:
                os.close(descriptor)
        self._silent = self._dead = -1
