"""Decides whether an unchanged status of a file will prove that its content is unchanged.

That holds unless somebody can write without moving the file's times. Two ways to do that have been seen: a second write
within the same tick of the kernel's clock as the first, and a store through a mapping whose page is already dirty, as
`numpy.memmap` does all the time. This module knows nothing of snapshots. It blocks for a clock tick at most.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

Inode = tuple[int, int]
"""Device and inode number."""

Stamp = tuple[int, int, int]
"""Size, mtime_ns, ctime_ns."""

# The clock by which Linux stamps files; Python has no name for it.
_CLOCK_REALTIME_COARSE = 5
_TIMEOUT_S = 0.02
_NAP_S = 0.0005
# With a kernel's default settings dirty pages are written back within 35 s; after that, a store moves the times again.
_WRITTEN_BACK_NS = 60 * 10**9

Result = TypeVar("Result")


def inode_of(status: os.stat_result) -> Inode:
    """Return what identifies a file as long as it exists."""
    return status.st_dev, status.st_ino


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what any write changes, with the exceptions that `StatTrust` looks for."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def steadily(descriptor: int, read: Callable[[], Result]) -> tuple[Result, os.stat_result, bool]:
    """Read a file, and once more if it changed meanwhile.

    Return the result, the status before the last read, and whether the status was still the same after it.
    """
    before = os.fstat(descriptor)
    result = read()
    after = os.fstat(descriptor)
    if stamp_of(before) == stamp_of(after):
        return result, before, True
    result = read()
    return result, after, stamp_of(os.fstat(descriptor)) == stamp_of(after)


class StatTrust:
    """Decides for many files in a row; waits for one clock tick at most, however many were just written."""

    def __init__(self) -> None:
        self._patience_s = _TIMEOUT_S

    def is_sound(self, descriptor: int) -> bool:
        """Tell whether a read that starts now gets the content that the present status stands for.

        The descriptor must be read-only.
        """
        status = os.fstat(descriptor)
        has_writers = _has_writers(descriptor)
        if has_writers is None:
            return time.time_ns() - status.st_ctime_ns > _WRITTEN_BACK_NS
        return not has_writers and self._wait_past(status.st_ctime_ns)

    def _wait_past(self, ctime_ns: int) -> bool:
        while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= ctime_ns:
            if self._patience_s <= 0:
                return False
            time.sleep(_NAP_S)
            self._patience_s -= _NAP_S
        return True


def _has_writers(descriptor: int) -> bool | None:
    """Tell whether any process has the file open for writing, mappings included; None if that cannot be found out.

    The kernel refuses a read lease for exactly that reason. The lease is released at once. A process that opens the
    file in between waits until then, and we get SIGURG, which is ignored by default, where SIGIO would kill us.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None  # not our file and no right to lease it, or a file system without leases
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
