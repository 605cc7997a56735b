"""Copies of this process by fork: a kernel in a sandbox of its own, or one that sleeps beside us until it is needed.

Where Linux does not tell the host how a copy ended, which is no child of its own, the copy has a keeper: a process of
ours that forked it, waits for it, and writes that into a pipe.
"""

import contextlib
import errno
import gc
import json
import os
import random
import signal
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from .channel import Channel

SOCKET, STDOUT, STDERR, STATUS = range(4)
"""The descriptors that come with a request, in this order; a sleeping copy gets the first alone."""
MOST = STATUS + 1

# Their threads hold locks that nobody would ever release in a copy.
_HANGING_LIBRARIES = {"libgomp": "OpenMP", "polars": "polars", "libtorch_cpu": "torch", "libcuda": "CUDA"}
_KEEPER = """
import os, sys
kernel, status = map(int, sys.argv[1:])
_, code = os.waitpid(kernel, 0)
os.write(status, b'{"status": %d}' % os.waitstatus_to_exitcode(code))
"""
_SOFTLY = 1  # of omp_pause_resource_all: settings stay, threads end
_PATIENCE_S = 0.5


def divide(
    descriptors: list[int], *, is_elsewhere: bool, is_hidden: bool, has_keeper: bool, is_session: bool = True
) -> bool:
    """Fork a kernel: True in the copy, False here. Hidden: no child that `os.wait()` of this process could see."""
    first = _fork()
    if first:
        if is_hidden:
            _check(_wait_for(first))
        return False
    if is_hidden:
        _step_aside()
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_elsewhere:
            _move(descriptors[SOCKET])
        kernel = _fork()
    except BaseException as error:
        refuse(descriptors, error)
        os._exit(1)
    if kernel == 0:
        _begin()
        return True
    if not has_keeper:
        os._exit(0)
    _keep(kernel, descriptors[STATUS], is_light=not is_session)
    raise AssertionError("a keeper never returns")


def _move(descriptor: int) -> None:
    """Go where the host says, once that place is made. It comes by the socket that is the kernel's later."""
    sock = socket.socket(fileno=descriptor)
    channel = Channel(sock)
    try:
        place = channel.receive()
    except EOFError:
        os._exit(0)  # there will be none
    sock.detach()
    holder, *groups = channel.take_descriptors()
    for group in groups:
        with contextlib.suppress(OSError):  # the host will do it, and need longer
            os.write(group, b"0")
        os.close(group)
    from .namespaces import enter

    enter(holder, place["flags"], place["uid"], place["gid"])
    os.close(holder)


def divide_asleep() -> bool:
    """Fork a copy that runs nothing: True in it, False here. It has no keeper and is nobody's child."""
    first = _fork()
    if first:
        _check(_wait_for(first))
        return False
    _step_aside()
    _begin()
    return True


def _step_aside() -> None:
    """Fork once more and go on as the child alone: nobody's, once this process has ended.

    Whatever happens, this process ends here. It is no copy yet and no longer the origin, whose socket it has.
    """
    try:
        child = _fork()
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    except BaseException:
        os._exit(errno.EAGAIN)
    if child:
        os._exit(0)


def _check(status: int) -> None:
    """Say why the process that should have stepped aside did not."""
    if status:
        raise OSError(status, os.strerror(status))


def reason_of(error: OSError) -> str:
    """Why a fork failed, in words for a person."""
    if error.errno == errno.EAGAIN:
        return "its limit of processes and threads leaves no room for a copy"
    return str(error)


def _begin() -> None:
    """A copy is a process of its own, also to the main thread, which up to Python 3.12 keeps the origin's number."""
    os.setsid()
    thread = threading.main_thread()
    if hasattr(thread, "_set_native_id"):
        thread._set_native_id()  # pyright: ignore


def _fork() -> int:
    with warnings.catch_warnings(), _copying():
        # Python 3.12 warns of threads that do not come along: the host is told which they are.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


_copied_by: set[int] = set()
"""The thread that forks a copy right now."""


@contextlib.contextmanager
def _copying() -> Generator[None, None, None]:
    thread = threading.get_ident()
    _copied_by.add(thread)
    try:
        yield
    finally:
        _copied_by.discard(thread)


def is_copying() -> bool:
    """Whether the fork that is under way is a copy of ours, not a child of the session's. For hooks of forks."""
    return threading.get_ident() in _copied_by


def _wait_for(child: int) -> int:
    """How it ended; 0 when somebody else was told."""
    with contextlib.suppress(ChildProcessError):  # a session that ignores SIGCHLD, or waits in a thread for anyone's
        _, status = os.waitpid(child, 0)
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EINTR
    return 0


def _keep(kernel: int, status: int, *, is_light: bool) -> None:
    gc.disable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _close_all_but({status})
    if not is_light:
        _shed_memory(kernel, status)
    _, code = os.waitpid(kernel, 0)
    _tell(status, {"status": os.waitstatus_to_exitcode(code)})
    os._exit(0)


def _shed_memory(kernel: int, status: int) -> None:
    """Go on keeping as a program without the session's data, which would be held after everyone else had let go."""
    os.set_inheritable(status, True)
    with contextlib.suppress(OSError):
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", _KEEPER, str(kernel), str(status)], {})


def refuse(descriptors: "list[int]", error: BaseException) -> None:
    """Tell the host why there is no copy."""
    _tell(descriptors[STATUS], {"error": f"{type(error).__name__}: {error}"})


def _tell(status: int, message: "dict[str, Any]") -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(message).encode())


def _close_all_but(kept: "set[int]") -> None:
    edge = 0
    for descriptor in sorted(kept):
        if edge < descriptor:  # an empty range at 0 closes everything there is
            os.closerange(edge, descriptor)
        edge = descriptor + 1
    os.closerange(edge, os.sysconf("SC_OPEN_MAX"))


def reap() -> None:
    """Forget keepers that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# In the copy


def take_streams(descriptors: list[int]) -> socket.socket:
    """Put the copy's own pipes at 1 and 2, an end of input at 0, and return its socket to the host."""
    for descriptor, number in ((descriptors[STDOUT], 1), (descriptors[STDERR], 2)):
        os.dup2(descriptor, number)
    # The origin's pipe is the same for all its copies: they could talk to each other through it.
    reading, writing = os.pipe()
    os.close(writing)
    if reading != 0:  # a cell may have closed it
        os.dup2(reading, 0)
        os.close(reading)
    return socket.socket(fileno=descriptors[SOCKET])


def own_proc_entry() -> None:
    """See `entering`: it is imported only where something is entered."""
    from .namespaces import own_proc_entry

    own_proc_entry()


def silence_streams() -> None:
    """Put nothing at 1 and 2: a copy asleep has no output."""
    reading, writing = os.pipe()
    os.close(reading)
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)


def close_inherited(kept: "Iterable[int]") -> None:
    """Close every descriptor but these and the standard ones. For copies of a zygote, which own nothing else."""
    _close_all_but({0, 1, 2, *kept})


def detach_inherited(kept: "Iterable[int]") -> None:
    """For copies of a live session: own offsets for open files; what cannot be had twice answers as closed."""
    own = {0, 1, 2, *kept}
    dead = -1
    for descriptor in _open_descriptors():
        if descriptor in own:
            continue
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode):
            _reopen(descriptor)
        elif stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
            if dead < 0:
                peer, end = socket.socketpair()
                peer.close()
                dead = end.detach()
            os.dup2(dead, descriptor, inheritable=False)
    if dead >= 0:
        os.close(dead)


def _reopen(descriptor: int) -> None:
    """A description of our own for the same file; by its name, which in another sandbox is that sandbox's copy."""
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
    """Randomness of its own: what libraries seeded before the fork is the same in every copy."""
    random.seed()
    stir_random()
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(None)
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None  # pyright: ignore[reportAttributeAccessIssue]
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)  # pyright: ignore[reportAttributeAccessIssue]


def stir_random() -> None:
    """OpenSSL tells copies apart by their pid alone, and in namespaces of their own those are the same."""
    ssl = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


# What a copy would lack


def uncloneable(own: "Iterable[int]") -> "list[str]":
    """What does not come along, in words for a person."""
    lost = [f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()]
    lost += [f"process {_name_of(pid)} ({pid})" for pid in _children()]
    sockets = 0
    for descriptor in _open_descriptors():
        with contextlib.suppress(OSError):
            if descriptor not in {0, 1, 2, *own} and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                sockets += 1
    if sockets:
        lost.append(f"{sockets} open socket{'s' if sockets > 1 else ''}")
    return lost[:100]


def left_behind() -> "list[str]":
    """What a copy in another sandbox does not find there: folders of the sandbox's own are not the session's."""
    temporary = os.environ.get("TMPDIR", "")
    try:
        shown = [f"{line.split()[4]}/" for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        # What leads to a tree that the sandbox shows there is no file of the session's.
        own = [one for one in Path(temporary or "/").iterdir() if not any(tree.startswith(f"{one}/") for tree in shown)]
    except OSError:
        return []
    return [f"files in {temporary}"] if temporary and own else []


def obstacle() -> str:
    """Why a copy would hang; empty when it would not."""
    if not _native_threads():
        return ""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    found = next((name for library, name in _HANGING_LIBRARIES.items() if library in maps), "")
    if not found:
        return ""
    _end_pools(maps)
    deadline = time.monotonic() + _PATIENCE_S
    while _native_threads():
        if time.monotonic() > deadline:
            return f"threads of {found} are running, and a copy of the process would hang in it"
        time.sleep(0.002)
    return ""


def _native_threads() -> int:
    return thread_count() - threading.active_count()


def _end_pools(maps: str) -> None:
    """End the threads of libraries that start them again when they have work for them: OpenMP's and OpenBLAS's."""
    import ctypes

    for path in {"/" + line.partition("/")[2] for line in maps.splitlines() if "libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_SOFTLY)
    # OpenBLAS ends its own when the process forks. Not Python's fork: the session's hooks are none of this one's.
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        os._exit(0)
    if child > 0:
        _wait_for(child)


def thread_count() -> int:
    """All threads of this process, Python's and those of libraries."""
    return len([*Path("/proc/self/task").iterdir()])


def _open_descriptors() -> "list[int]":
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def _children() -> "list[int]":
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "unknown"
