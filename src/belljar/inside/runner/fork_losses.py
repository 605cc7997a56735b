"""What a fork of this process would lack, and whether it would hang.

A fork has only the thread that forked, and none of the children. The locks of other threads stay locked in it for
ever, so the threads of known libraries are ended first.
"""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from . import fork, gpu, interpreter_state

# Libraries whose threads hold locks; a fork has no such threads, so nothing would ever release those locks in it.
_HANGING_LIBRARIES = {"libgomp": "OpenMP", "polars": "polars", "libtorch_cpu": "torch"}
_SOFTLY = 1  # omp_pause_soft, for omp_pause_resource_all: settings stay, threads end
_TIMEOUT_S = 0.5
_MAX_BYTES = 65_536
# Folders that programs make in HOME by themselves, and whose loss nobody would notice.
_MADE_AGAIN = frozenset({".cache", ".config", ".ipython", ".jupyter", ".local", ".matplotlib"})
_STDERR = 2


def lost_in_fork(own: "Iterable[int]", threads: "list[str]") -> "list[str]":
    """Return what a fork lacks, as text for a person: threads, child processes, sockets not in `own`."""
    lost: list[str] = []
    if len(threads) > 1:
        lost += [f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()]
    for pid in _children(threads):  # no comprehension, see `fork.names_in`
        lost.append(f"process {_name_of(pid)} ({pid})")
    sockets = 0
    for descriptor in fork.open_descriptors():
        if descriptor not in own and descriptor > _STDERR:
            sockets += _is_socket(descriptor)
    if sockets:
        lost.append(f"{sockets} open socket{'s' if sockets > 1 else ''}")
    return lost[:100]


def left_behind() -> "list[str]":
    """Return what a fork in another sandbox does not find there: files in TMPDIR and HOME, which the sandbox owns."""
    # Not those that the session may have chosen, which may lie in its own folder, whose files come along.
    folders = {interpreter_state.variable_at_start(name) for name in ("TMPDIR", "HOME")} - {""}
    with contextlib.suppress(OSError):
        shown = [f"{line.split()[4]}/" for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [f"files in {folder}" for folder in sorted(folders) if _has_files(Path(folder), shown)]
    return []


def _has_files(folder: Path, shown: "list[str]") -> bool:
    """Return whether the session has put files there, which caches are not, nor folders on the way to a mount."""
    try:
        return any(
            one.name not in _MADE_AGAIN and not any(tree.startswith(f"{one}/") for tree in shown)
            for one in folder.iterdir()
        )
    except OSError:
        return False


def obstacle(threads: int) -> str:
    """End the threads of known libraries, and return why a fork would hang; empty when it would not."""
    if gpu.is_in_use():
        return gpu.HELD
    if threads == 1 or not _native_threads():
        return ""
    maps = _memory_maps()
    found = next((name for library, name in _HANGING_LIBRARIES.items() if library in maps), "")
    if not found:
        return ""
    end_pools()
    deadline = time.monotonic() + _TIMEOUT_S
    while _native_threads():
        if time.monotonic() > deadline:
            return f"threads of {found} are running, and a copy of the process would hang in it"
        time.sleep(0.002)
    return ""


def _memory_maps() -> str:
    return Path("/proc/self/maps").read_text(errors="replace")


def _native_threads() -> int:
    return thread_count() - threading.active_count()


def end_pools() -> None:
    """End the threads of OpenMP and OpenBLAS, which start new ones when they have work for them."""
    import ctypes

    maps = _memory_maps()
    for path in {"/" + line.partition("/")[2] for line in maps.splitlines() if "libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_SOFTLY)
    # OpenBLAS ends its threads when the process forks. Call C's fork, so that the session's fork hooks do not run.
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        os._exit(0)
    if child > 0:
        fork.wait_for(child)


# By `os`, not by `pathlib`: these run whenever a checkpoint is forked, and each page that they touch is then copied.


def thread_ids() -> "list[str]":
    """Return the ids of the threads of this process, Python's and those of libraries."""
    return fork.names_in("/proc/self/task")


def thread_count() -> int:
    """Return the number of threads of this process."""
    return len(thread_ids())


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _children(threads: "list[str]") -> "list[int]":
    found: list[int] = []
    for thread in threads:
        try:
            descriptor = os.open(f"/proc/self/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found += map(int, os.read(descriptor, _MAX_BYTES).split())
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return found


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "unknown"
