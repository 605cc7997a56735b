"""Forks of this process: a kernel, or a checkpoint, which runs nothing until a kernel is forked from it.

A fork is not the host's child. Where Linux does not tell the host how such a process ended, the fork has a keeper: the
process that forked it stays, waits for it, and writes its exit status into a pipe.
"""

import _signal  # pyright: ignore[reportMissingImports] - C's part of `signal`
import _socket
import asyncio
import contextlib
import errno
import gc
import json
import os
import random
import selectors
import signal
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, cast

from . import setns, vfork
from .channel import Channel

SOCKET, STDOUT, STDERR, STATUS = range(4)
"""The order of the descriptors that come with a request; a request for a checkpoint brings only the first."""
DESCRIPTOR_COUNT = STATUS + 1

# C's function and values, because Python's look for the handler's name, which touches 20 pages.
set_handler: Any = _signal.signal  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
DEFAULT, IGNORE = _signal.SIG_DFL, _signal.SIG_IGN  # pyright: ignore

_KEEPER = """
import os, sys
kernel, status = map(int, sys.argv[1:])
_, code = os.waitpid(kernel, 0)
os.write(status, b'{"status": %d}' % os.waitstatus_to_exitcode(code))
"""


def fork_kernel(
    descriptors: list[int],
    *,
    enter: "Callable[[], None] | None",
    is_hidden: bool,
    has_keeper: bool,
    is_session: bool = True,
) -> bool:
    """Fork a kernel; return True in the fork and False in this process.

    `enter`: moves the fork into another sandbox. `is_hidden`: the fork is no child of this process, so that a cell's
    `os.wait()` does not see it. `has_keeper`: a process stays that reports how the fork ended. `is_session`: this
    process is a live session, so its keeper must not hold on to the session's memory, and the fork draws the random
    numbers that the session would.
    """
    numbers = random.getstate() if is_session else None
    first = fork_process()
    if first:
        if is_hidden:
            raise_fork_error(wait_for(first))
        return False
    if is_hidden:
        reparent()
    try:
        os.setsid()
        set_handler(signal.SIGINT, IGNORE)
        if enter is not None:
            enter()
        kernel = fork_process()
    except BaseException as error:
        refuse(descriptors, error)
        os._exit(1)
    if kernel == 0:
        start_fork(has_keeper=has_keeper)
        if numbers is not None:
            random.setstate(numbers)
        return True
    if not has_keeper:
        os._exit(0)
    _run_keeper(kernel, descriptors[STATUS], is_light=not is_session)
    raise AssertionError("a keeper never returns")


def fork_kernel_at_once(enter: "Callable[[], None]", become: "Callable[[], None]", *, is_session: bool = True) -> None:
    """Fork a kernel that has no keeper; `become` is called in the fork and never returns.

    A process in between enters the sandbox. It shares our memory, see `vfork`. Not for a process with threads, which
    must not run on while another process is in its memory.
    """
    numbers = random.getstate() if is_session else None

    def start() -> None:
        enter()
        if fork_process() == 0:
            start_fork(has_keeper=False)
            if numbers is not None:
                random.setstate(numbers)
            become()

    vfork.run_in_child(start)


def await_sandbox(descriptor: int) -> None:
    """Wait until the host has made the sandbox, and enter it. The order comes over the kernel's future socket."""
    sock = socket.socket(fileno=descriptor)
    channel = Channel(sock)
    try:
        sandbox = channel.receive()
    except EOFError:
        os._exit(0)  # the host has given up making one
    sock.detach()
    holder, *groups = channel.take_descriptors()
    enter_sandbox(sandbox, holder, groups)


def enter_sandbox(sandbox: "dict[str, Any]", holder: int, groups: "list[int]") -> None:
    """Enter the namespaces of a process, and before that the control groups, and close the descriptors of both."""
    for group in groups:
        try:  # noqa: SIM105 - `suppress` touches more pages
            os.write(group, b"0")
        except OSError:  # then the host moves this process into the group, which takes longer
            pass
        os.close(group)
    setns.enter(holder, sandbox["flags"], sandbox["uid"], sandbox["gid"])
    os.close(holder)


def reparent() -> None:
    """Fork once more and continue in the child, which is orphaned and so is not a child of the origin.

    The calling process exits in any case, because it is not a fork yet and still has the origin's socket.
    """
    try:
        child = fork_process()
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    except BaseException:
        os._exit(errno.EAGAIN)
    if child:
        os._exit(0)


def raise_fork_error(status: int) -> None:
    """Raise the error that `reparent` exited with, if any."""
    if status:
        raise OSError(status, os.strerror(status))


def reason_of(error: OSError) -> str:
    """Return why a fork failed, as text for a person."""
    if error.errno == errno.EAGAIN:
        return "its limit of processes and threads leaves no room for a copy"
    return str(error)


_has_keeper = False
"""Whether this process is a fork that has a keeper."""


def has_keeper() -> bool:
    """Return whether this process has a keeper for a parent, which waits for it and for nothing else."""
    return _has_keeper


def start_fork(*, has_keeper: bool) -> None:
    """Record whether the fork has a keeper, and give it a session id, and its main thread a thread id, of its own."""
    global _has_keeper  # of this process
    _has_keeper = has_keeper
    vfork.begin_anew()
    os.setsid()
    own_thread_id()


def own_thread_id() -> None:
    """Give the main thread of a fork its own id, which stays the origin's up to Python 3.12."""
    thread = threading.main_thread()
    if hasattr(thread, "_set_native_id"):
        thread._set_native_id()  # pyright: ignore


def fork_process() -> int:
    """Fork as `os.fork` does, for a kernel or a checkpoint."""
    with warnings.catch_warnings(), forking():
        # Python 3.12 warns about threads that a fork does not copy; the host gets their names from `fork_losses.py`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


_forking_threads: set[int] = set()
"""The ids of threads that are forking a kernel or a checkpoint right now."""


@contextlib.contextmanager
def forking() -> Generator[None, None, None]:
    """Mark what is forked in the block as a kernel or a checkpoint, for fork hooks: see `is_forking`."""
    thread = threading.get_ident()
    _forking_threads.add(thread)
    try:
        yield
    finally:
        _forking_threads.discard(thread)


def is_forking() -> bool:
    """Return whether the fork under way makes a kernel or a checkpoint, no child of the session. For fork hooks."""
    return threading.get_ident() in _forking_threads


def wait_for(child: int) -> int:
    """Return the exit status of a child; 0 when somebody else has reaped it."""
    with contextlib.suppress(ChildProcessError):  # the session ignores SIGCHLD, or a thread of it waits for any child
        _, status = os.waitpid(child, 0)
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EINTR
    return 0


def _run_keeper(kernel: int, status: int, *, is_light: bool) -> None:
    gc.disable()
    set_handler(signal.SIGCHLD, DEFAULT)
    _close_all_but({status})
    if not is_light:
        _shed_memory(kernel, status)
    _, code = os.waitpid(kernel, 0)
    _tell(status, {"status": os.waitstatus_to_exitcode(code)})
    os._exit(0)


def _shed_memory(kernel: int, status: int) -> None:
    """Continue as keeper in a new program, because this copy of the session's memory would stay allocated otherwise."""
    os.set_inheritable(status, True)
    with contextlib.suppress(OSError):
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", _KEEPER, str(kernel), str(status)], {})


def refuse(descriptors: "list[int]", error: BaseException) -> None:
    """Tell the host why it gets no fork."""
    _tell(descriptors[STATUS], {"error": f"{type(error).__name__}: {error}"})


def _tell(status: int, message: "dict[str, Any]") -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(message).encode())


def _close_all_but(excepted: "set[int]") -> None:
    edge = 0
    for descriptor in sorted(excepted):
        if edge < descriptor:  # because closerange(0, 0) closes everything
            os.closerange(edge, descriptor)
        edge = descriptor + 1
    os.closerange(edge, os.sysconf("SC_OPEN_MAX"))


def reap() -> None:
    """Reap keepers that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# In the fork


def take_streams(descriptors: list[int]) -> socket.socket:
    """Put the fork's own pipes at 1 and 2 and an empty input at 0, and return its socket to the host."""
    for descriptor, number in ((descriptors[STDOUT], 1), (descriptors[STDERR], 2)):
        os.dup2(descriptor, number)
    # Not the origin's input, because it is the same pipe in all forks, and they could communicate through it.
    reading, writing = os.pipe()
    os.close(writing)
    if reading != 0:  # it is 0 when a cell has closed the old input
        os.dup2(reading, 0)
        os.close(reading)
    return socket.socket(fileno=descriptors[SOCKET])


def open_silent_pipe() -> int:
    """Return the write end of a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def open_dead_socket() -> int:
    """Return a socket whose peer has closed it."""
    peer, end = _socket.socketpair()
    peer.close()
    return end.detach()


def close_inherited(excepted: "Iterable[int]") -> None:
    """Close every descriptor except these and the standard ones. For forks of a zygote, which own nothing else."""
    _close_all_but({0, 1, 2, *excepted})


def detach_inherited(excepted: "Iterable[int]") -> None:
    """Detach a fork of a live session from the origin's descriptors.

    Open files are reopened, so that the fork has its own offsets. Sockets and pipes cannot be shared; in the fork they
    behave as if the peer had closed them.
    """
    own = {0, 1, 2, *excepted}
    dead = -1
    for descriptor in open_descriptors():
        if descriptor in own:
            continue
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode):
            reopen(descriptor)
        elif stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
            if dead < 0:
                dead = open_dead_socket()
            os.dup2(dead, descriptor, inheritable=False)
    if dead >= 0:
        os.close(dead)


def reopen(descriptor: int) -> None:
    """Reopen a file by its path, which in another sandbox leads to that sandbox's copy of the file."""
    import fcntl

    link = f"/proc/self/fd/{descriptor}"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
    inherited = os.get_inheritable(descriptor)
    with contextlib.suppress(OSError):
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        name = Path(link).readlink()
        fresh = os.open(name if name.is_file() else link, flags)
        os.lseek(fresh, offset, os.SEEK_SET)
        os.dup2(fresh, descriptor, inheritable=inherited)
        os.close(fresh)


def reseed() -> None:
    """Seed all random generators anew, because what libraries seeded before the fork is the same in every fork."""
    random.seed()
    stir_random()
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        # The whole state at once, which takes a third of the time of `seed(None)`.
        numpy.random.set_state(("MT19937", numpy.frombuffer(os.urandom(2_496), "uint32"), 624))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()  # those of GPUs are seeded when their context is made
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None  # pyright: ignore[reportAttributeAccessIssue]
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)  # pyright: ignore[reportAttributeAccessIssue]


def prepare_stir() -> None:
    """Have OpenSSL make its generator here, once: it takes 2.6 MB, of every fork that has to make one of its own."""
    ssl = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_bytes(1)


def stir_random() -> None:
    """Add entropy to OpenSSL, because it tells forks apart by pid only, and in pid namespaces those can be the same."""
    ssl = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


# By `os`, not by `pathlib`, and without comprehensions, which make functions: these run whenever a checkpoint is
# forked, and each page that they touch is then copied.


def open_descriptors() -> "list[int]":
    """Return the numbers of all open descriptors, and of the one that lists them."""
    return [*map(int, names_in("/proc/self/fd"))]


def names_in(folder: str) -> "list[str]":
    """Return the names of a folder's entries."""
    return os.listdir(folder)  # noqa: PTH208


# What a fork of a live session must change: paths of folders that are elsewhere for it, and its event loop. Parts of
# an event loop have no public names; where one is missing, a new loop is made instead.
# pyright: reportPrivateUsage=false


def move_modules(old: str, new: str) -> None:
    """Replace a package folder by another in paths and loaded modules, so that modules find their files there."""
    sys.path[:] = [_moved(path, old, new) for path in sys.path]
    for path in [path for path in sys.path_importer_cache if _moved(path, old, new) != path]:
        del sys.path_importer_cache[path]
    for name in ("PYTHONPATH", "PATH"):
        if name in os.environ:
            parts = os.environ[name].split(os.pathsep)
            os.environ[name] = os.pathsep.join(_moved(part, old, new) for part in parts)
    try:
        is_empty = not names_in(new)
    except OSError:
        is_empty = False
    if is_empty:
        # No module came from there. Looking at all of them writes to 10 MB of a fork's memory.
        return
    for module in list(sys.modules.values()):
        for name in ("__file__", "__cached__"):
            place = getattr(module, name, None)
            if isinstance(place, str):
                _set(module, name, _moved(place, old, new))
        for holder, name in ((module, "__path__"), (getattr(module, "__spec__", None), "submodule_search_locations")):
            places: Any = getattr(holder, name, None)
            if isinstance(places, list):
                places[:] = [_moved(str(place), old, new) for place in cast("list[Any]", places)]


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + os.sep) else path


def _set(module: Any, name: str, value: str) -> None:
    try:
        if getattr(module, name) != value:
            setattr(module, name, value)
    except Exception:
        return  # an object in `sys.modules` may be no module, and may refuse


def own_loop(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Return the loop with its tasks on a new selector, because the old one's registrations are the origin's too."""
    given: Any = loop
    if loop.is_closed():
        return loop
    if not all(hasattr(given, name) for name in ("_selector", "_make_self_pipe", "_ssock", "_csock", "_internal_fds")):
        return asyncio.new_event_loop()
    # Do not unregister from or close the old selector, because that would change the origin's.
    given._selector = selectors.DefaultSelector()
    given._internal_fds = 0
    given._make_self_pipe()
    given._default_executor = None
    return loop


def loop_descriptors(loop: asyncio.AbstractEventLoop) -> "set[int]":
    """Return the event loop's own sockets, which a fork replaces."""
    found: set[int] = set()
    for name in ("_ssock", "_csock"):  # no comprehension, see `names_in`
        if (end := getattr(loop, name, None)) is not None:
            found.add(end.fileno())
    return found
