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
import random
import signal
import stat
import traceback
from collections.abc import Callable
from typing import Any

from . import fork

# Not CDLL, which would release the interpreter's lock: the functions of Python need it.
_python: Any = ctypes.PyDLL(None, use_errno=True)
# We look these up here, because a lookup after the fork writes to the pages of what it finds.
_before_fork: Any = _python.PyOS_BeforeFork
_after_fork_in_parent: Any = _python.PyOS_AfterFork_Parent
_after_fork_in_child: Any = _python.PyOS_AfterFork_Child
_set_signal_mask: Any = _python.pthread_sigmask
_system_call: Any = _python.syscall
_system_call.restype = ctypes.c_long
_disable_collection, _enable_collection, _is_collecting = gc.disable, gc.enable, gc.isenabled
_PEEK = int(_socket.MSG_PEEK)
_SIGNAL_SET_BYTES = 128  # `sigset_t`
_ALL_SIGNALS = b"\xff" * _SIGNAL_SET_BYTES
_signal_mask = ctypes.create_string_buffer(_SIGNAL_SET_BYTES)
"""The signals that were blocked before a fork; only the main thread forks checkpoints."""
_SIG_BLOCK, _SIG_SETMASK, _SIGCHLD = int(signal.SIG_BLOCK), int(signal.SIG_SETMASK), int(signal.SIGCHLD)

_CLONE = {"x86_64": (56, True), "aarch64": (220, False)}.get(os.uname().machine, (0, False))
"""The number of `clone` on this machine, and whether its last argument is the thread-local storage."""
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_NO_SIBLING = (errno.ENOSYS, errno.EINVAL, errno.EPERM)
_FIRST = (1, 0)
"""What `os.getppid()` returns if the parent is the first process of our sandbox, or of the sandbox around it."""


def _clone_arguments() -> "tuple[Any, ...]":
    """Return the arguments with which `syscall` forks a sibling, which a cell's `os.wait()` does not see.

    The sibling is a child of our parent. That has to be the first process of our sandbox or of the sandbox around it,
    because a first process reaps whatever ends. Linux is called directly, because no function of C's library forks a
    sibling; what C's fork does in addition is done when a kernel is forked from the checkpoint. The result is empty on
    a machine whose numbers we do not know.
    """
    number, is_tls_last = _CLONE
    if not number:
        return ()
    thread_id = ctypes.c_void_p()
    _python.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0)
    # Have Linux write the thread id of the fork to the place where C's library remembers the id of its thread.
    flags = _CLONE_PARENT | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if thread_id.value else 0) | _SIGCHLD
    return (number, ctypes.c_ulong(flags), None, None, *((thread_id, None) if is_tls_last else (None, thread_id)))


_has_session_hooks = False
"""Whether the session has registered fork hooks, which nothing but `watch_hooks` tells."""


def watch_hooks() -> None:
    """Count what is registered with `os.register_at_fork` from now on as the session's."""
    register: Any = os.register_at_fork

    @functools.wraps(register)
    def register_at_fork(**hooks: Any) -> None:
        global _has_session_hooks  # of this process
        register(**hooks)
        _has_session_hooks = True

    os.register_at_fork = register_at_fork


Send = Callable[["list[bytes]"], None]

_clone_of_main_thread = _clone_arguments()
"""The same in all forks, because they have the same addresses."""


def fork_checkpoint(descriptor: int, ready: bytes, send: "Send", answer: "list[bytes]", *, has_threads: bool) -> bool:
    """Fork a checkpoint; return False in this process and, when the host wakes it, True in the checkpoint.

    The checkpoint sends `ready` by the socket `descriptor`, then sleeps. It is not our child and has no keeper. When
    there is a checkpoint, this process closes `descriptor` and calls `send` with `answer`. That should wait for the
    next request: each page that is written to before the wait is in memory twice for as long as the session is idle.
    """
    # C's class, because libraries such as gevent replace Python's by one that runs other code while it waits.
    sock = _socket.socket(fileno=descriptor)
    sock.settimeout(None)  # a cell may have called `socket.setdefaulttimeout`, which new sockets take over
    try:
        may_defer = not has_threads and not _has_session_hooks
        return (_fork_deferring_hooks if may_defer else _fork_running_hooks)(sock, ready, send, answer)
    finally:
        sock.detach()


def _fork_deferring_hooks(sock: _socket.socket, ready: bytes, send: "Send", answer: "list[bytes]") -> bool:
    # Make all that the checkpoint needs before the fork, because the checkpoint must touch little, and because
    # the session may have replaced what would make it.
    is_sibling = not fork.has_keeper() and os.getppid() in _FIRST
    clone, arguments = _system_call, _clone_of_main_thread if is_sibling else ()
    after_fork, set_mask, old_mask = _after_fork_in_parent, _set_signal_mask, _signal_mask
    collects, collect_again = _is_collecting(), _enable_collection
    detachment = _Detachment(sock, ready)
    close, silent, dead = os.close, detachment.silent, detachment.dead
    child, error = -1, errno.ENOSYS
    # Between Python's work before and after a fork, locks of the interpreter are held: since 3.13 one that starting a
    # thread needs, and since 3.14 a collection too. A signal handler that raises would leave them held.
    _disable_collection()
    set_mask(_SIG_BLOCK, _ALL_SIGNALS, old_mask)
    try:
        _before_fork()
        if arguments:
            child = clone(*arguments)
            error = ctypes.get_errno() if child < 0 else 0
        if error in _NO_SIBLING:
            child, error = _fork_orphan()
        if child == 0:
            _sleep(detachment, has_session=False)
            _drop_pending_signals()
            _run_deferred_hooks()
        else:
            after_fork()
    finally:
        close(silent)
        close(dead)
        if collects:
            collect_again()
        set_mask(_SIG_SETMASK, old_mask, None)
    if error:
        fork.raise_fork_error(error)
    if child > 0:
        sock.close()
        _answer(send, answer)
    return child == 0


def _fork_orphan() -> "tuple[int, int]":
    """Fork twice, so that the second fork is an orphan; return 0 in it, and here the number of an error, if any."""
    first, error = _fork_without_hooks()
    if first != 0:
        return first, error or fork.wait_for(first)
    second, error = _fork_without_hooks()
    if second != 0:
        os._exit(error)
    return 0, 0


def _run_deferred_hooks() -> None:
    numbers = random.getstate()
    with fork.forking():
        _after_fork_in_child()
    # A fork hook of Python's has seeded the generator anew.
    random.setstate(numbers)
    fork.own_thread_id()


def _fork_running_hooks(sock: _socket.socket, ready: bytes, send: "Send", answer: "list[bytes]") -> bool:
    """Fork a checkpoint of a process with threads, or with fork hooks of the session's own.

    Without Python's own work after the fork it could wait for ever for the interpreter's lock, because a thread that
    holds or wants the lock is not there. And a hook that fails must do so now, not when the checkpoint is needed.
    """
    numbers = random.getstate()
    first = fork.fork_process()
    if first:
        fork.raise_fork_error(fork.wait_for(first))
        sock.close()
        _answer(send, answer)
        return False
    fork.reparent()
    fork.start_fork(has_keeper=False)
    random.setstate(numbers)
    detachment = _Detachment(sock, ready)
    _sleep(detachment, has_session=True)
    os.close(detachment.silent)
    os.close(detachment.dead)
    return True


def _fork_without_hooks() -> "tuple[int, int]":
    """Call C's fork; return what it returns, and the number of its error."""
    child = _python.fork()
    return child, (ctypes.get_errno() or errno.EAGAIN) if child < 0 else 0


def _drop_pending_signals() -> None:
    """Drop the signals that a checkpoint was sent while it slept: cells send them to all processes that they see."""
    while signal.sigtimedwait(signal.valid_signals(), 0) is not None:
        pass


class _Detachment:
    """What separates a checkpoint from the descriptors that it inherits. Made before the fork, to be used after it.

    It has no output. Files are reopened, so that it has offsets of its own. Sockets and pipes are replaced, because the
    session's pipes would never end and its ports never be free while the checkpoint has them.
    """

    def __init__(self, sock: _socket.socket, ready: bytes) -> None:
        self.ready, self.send, self.receive = ready, sock.send, sock.recv
        self.replace, self.start_session, self.exit = os.dup2, os.setsid, os._exit
        self.files: list[int] = []
        sockets: list[int] = []
        for descriptor in fork.open_descriptors():
            if descriptor in (0, 1, 2, sock.fileno()):
                continue
            try:
                mode = os.fstat(descriptor).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode):
                self.files.append(descriptor)
            elif stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                sockets.append(descriptor)
        self.silent = fork.open_silent_pipe()
        try:
            self.dead = fork.open_dead_socket()
        except BaseException:
            os.close(self.silent)
            raise
        self.replacements = [(self.silent, 1, True), (self.silent, 2, True)]
        for descriptor in sockets:
            self.replacements.append((self.dead, descriptor, False))


def _answer(send: "Send", answer: "list[bytes]") -> None:
    """Send the answer. Raise nothing, because the caller would take it for a failure of the fork and answer again."""
    try:
        send(answer)
    except Exception:  # a signal handler of the session's has raised, or the host is gone
        with contextlib.suppress(Exception):  # it may raise again
            traceback.print_exc()


def _sleep(detachment: _Detachment, *, has_session: bool) -> None:
    """Detach this checkpoint, tell the host that it is ready, and wait for a request, which is left in the socket.

    Exit when the host is gone, without flushing or exit functions, because these belong to the origin.
    """
    receive, leave, peek = detachment.receive, detachment.exit, _PEEK
    try:
        if not has_session:
            detachment.start_session()
        for replacement in detachment.replacements:
            detachment.replace(*replacement)
        for descriptor in detachment.files:
            fork.reopen(descriptor)
        detachment.send(detachment.ready)
    except OSError:
        leave(0)
    except BaseException:  # of a trace function of the session's; nothing else must go on with the session's code
        leave(errno.EIO)
    while True:
        try:
            if receive(1, peek):
                return
            leave(0)
        except OSError:
            leave(0)
        except BaseException:
            continue
