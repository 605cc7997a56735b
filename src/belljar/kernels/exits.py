"""How a process ended that is no child of ours, as Linux tells it from 6.15 on to whoever has a descriptor of it."""

import fcntl
import os
import struct
import subprocess
import sys
from functools import cache

_PIDFD_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3
_WORDS = struct.Struct("=Q52xi")


def exit_status(pidfd: int) -> int | None:
    """The status, negative for a signal; None while the process lives or nobody has waited for it yet."""
    answer = bytearray(_WORDS.size)
    _WORDS.pack_into(answer, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    known, code = _WORDS.unpack(answer)
    return os.waitstatus_to_exitcode(code) if known & _INFO_EXIT else None


@cache
def tells_exits() -> bool:
    """Whether this kernel of the operating system does; tried once, with a process of our own."""
    if sys.platform != "linux":
        return False
    try:
        with subprocess.Popen(["/bin/false"], stdin=subprocess.DEVNULL) as child:
            pidfd = os.pidfd_open(child.pid)
    except OSError:
        return False
    try:
        return exit_status(pidfd) == 1
    finally:
        os.close(pidfd)
