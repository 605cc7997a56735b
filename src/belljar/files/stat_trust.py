"""Whether a file's status can vouch for its content: same status later, same bytes.

It can when nobody could write without moving the times. Two ways to do so, both seen: a second write within the tick
of the kernel's clock that stamped the first, and a store through a mapping whose page is dirty already, as
`numpy.memmap` does all day. Knows nothing of snapshots. Blocking for a clock tick at most.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

Inode = tuple[int, int]
"""Device and number."""

Stamp = tuple[int, int, int]
"""Size, mtime_ns, ctime_ns."""

# Linux stamps files by this clock, which Python has no name for.
_CLOCK_REALTIME_COARSE = 5
_PATIENCE_S = 0.02
_NAP_S = 0.0005
# Dirty pages are written back within 35 s as kernels come, and from then on a store moves the times again.
_WRITTEN_BACK_NS = 60 * 10**9

Result = TypeVar("Result")


def inode_of(status: os.stat_result) -> Inode:
    """Which file it is, as long as it exists."""
    return status.st_dev, status.st_ino


def stamp_of(status: os.stat_result) -> Stamp:
    """What any write changes, with the exceptions that `Vouching` looks for."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def steadily(descriptor: int, read: Callable[[], Result]) -> tuple[Result, os.stat_result, bool]:
    """Read a file, and once more if it changed meanwhile; with its status at the start, and whether it then held."""
    before = os.fstat(descriptor)
    result = read()
    after = os.fstat(descriptor)
    if stamp_of(before) == stamp_of(after):
        return result, before, True
    result = read()
    return result, after, stamp_of(os.fstat(descriptor)) == stamp_of(after)


class StatTrust:
    """Decides for many files in a row; waits for the clock once at most, however many were just written."""

    def __init__(self) -> None:
        self._patience_s = _PATIENCE_S

    def is_sound(self, descriptor: int) -> bool:
        """Whether reading that starts now gets what the present status stands for. Only for a read-only descriptor."""
        status = os.fstat(descriptor)
        has_writers = _has_writers(descriptor)
        if has_writers is None:
            return time.time_ns() - status.st_ctime_ns > _WRITTEN_BACK_NS
        return not has_writers and self._outwait(status.st_ctime_ns)

    def _outwait(self, ctime_ns: int) -> bool:
        while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= ctime_ns:
            if self._patience_s <= 0:
                return False
            time.sleep(_NAP_S)
            self._patience_s -= _NAP_S
        return True


def _has_writers(descriptor: int) -> bool | None:
    """Whether anyone has the file open for writing, mappings included; None where this cannot be asked.

    A read lease is refused for exactly that reason. It is given back at once; should somebody open the file in
    between, they wait that long, and the signal we get is one that is ignored by default, where SIGIO would kill us.
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
