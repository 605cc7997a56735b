"""Moving this process, with its memory, into another sandbox: into its namespaces, as its user, without capabilities.

A process without any capability may enter, because the sandbox's user namespace is a child of ours and owned by our
user. The capabilities that entering grants are given up before anything else runs.
"""

import ctypes
import os
import struct
from typing import Any

_CAPABILITY_VERSION = 0x20080522
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 4, 24, 47, 4
_MAX_CAPABILITIES = 64

_libc: Any = ctypes.CDLL(None, use_errno=True)
_prctl, _setns, _capset = _libc.prctl, _libc.setns, _libc.capset
_HEADER, _NO_CAPABILITIES = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)


def enter(holder: int, flags: int, uid: int, gid: int) -> None:
    """Join the namespaces of the process behind the pidfd `holder`, and change to a user there.

    Only children of this process are in the new pid namespace.
    """
    _check(_setns(holder, flags), "setns")
    os.setresgid(gid, gid, gid)
    # Drop the bounding set before the user changes, because that needs a capability.
    for capability in range(_MAX_CAPABILITIES):
        if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    os.setresuid(uid, uid, uid)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(_capset(_HEADER, _NO_CAPABILITIES), "capset")


def own_proc_entry() -> None:
    """Make this process dumpable again, because /proc/self belongs to root after a change of user.

    Debuggers and profilers of the session would fail otherwise.
    """
    _prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _check(answer: int, call: str) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
