"""The filter of system calls for code in a sandbox, as a program for the host's kernel.

It lists what is refused, not what is allowed: sessions run every kind of software, and what they need is open-ended,
while the ways into other processes, namespaces, mounts and rarely used parts of the kernel are known. Refusals are
errors that programs expect of such calls, so that runtimes take their other path. Built once with libseccomp for the
architecture of this machine; knows nothing of sandboxes.
"""

import errno
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

_REFUSED = {
    "other processes": (
        *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    ),
    "namespaces and mounts": (
        *("unshare", "mount", "umount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree"),
        *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "open_tree_attr"),
    ),
    "files past their path": ("open_by_handle_at", "name_to_handle_at", "fanotify_init"),
    "keys": ("keyctl", "add_key", "request_key"),
    "corners of the kernel that bugs are found in": (
        *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "vmsplice"),
        *("modify_ldt", "vm86", "vm86old", "lookup_dcookie", "uselib", "nfsservctl", "_sysctl"),
    ),
    "the machine": (
        *("kexec_load", "kexec_file_load", "create_module", "init_module", "finit_module", "delete_module"),
        *("reboot", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog", "iopl", "ioperm", "vhangup"),
    ),
    "names": ("sethostname", "setdomainname"),
    "the clock": ("settimeofday", "stime", "clock_settime", "clock_settime64", "clock_adjtime", "adjtimex"),
    "placement of memory": ("mbind", "migrate_pages", "move_pages", "set_mempolicy", "set_mempolicy_home_node"),
}
# A distribution's libseccomp may be older than these calls; from 424 on, numbers are the same on every architecture.
_NUMBERS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "openat2": 437,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
    "fchmodat2": 452,
    "open_tree_attr": 467,
}

_NEW_NAMESPACES = (
    0x00020000,  # mount
    0x02000000,  # cgroup
    0x04000000,  # uts
    0x08000000,  # ipc
    0x10000000,  # user
    0x20000000,  # pid
    0x40000000,  # network
)
ALL_NAMESPACES = sum(_NEW_NAMESPACES)
"""The only flags that `setns` lets through: a whole sandbox or nothing. The kernel lets a process without capabilities
into a user namespace only if its user owns that namespace, from the one above; so code finds none to enter but where a
nested sandbox was opened for it."""
# TIOCSTI and TIOCLINUX type into a terminal for another process to read; TIOCSETD loads a line discipline.
_TERMINAL_REQUESTS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423}

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_FAMILIES = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)

# Allowed: Linux, its 32-bit personality, its old version number, or both; all ones, which asks and changes nothing.
# Refused: the bits that switch address randomisation off or make all memory executable.
_PERSONALITY_BITS = 0x0008 | 0x20000
_UNKNOWN = -1
_INT_BITS = 32
_INT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Filter:
    """A program to load, or the reason why there is none."""

    program: bytes = b""
    complaint: str = ""


class _Condition(NamedTuple):
    argument: int
    comparison: str
    value: int
    masked_value: int = 0


class _Rule(NamedTuple):
    error: int
    call: str
    conditions: tuple[_Condition, ...] = ()


# What bubblewrap needs, and what a server needs to look after its sandboxes.
_MAKES_SANDBOXES = ("namespaces and mounts", "names", "other processes")
_CONTAINER_ARCHITECTURES = {
    "SCMP_ARCH_X86_64": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "SCMP_ARCH_AARCH64": ["SCMP_ARCH_ARM"],
}


def container_profile() -> dict[str, Any]:
    """Return the rules, as docker and podman read them, for a container in which belljar makes namespaces of its own.

    They refuse what the filter of sessions refuses, but for what makes and watches sandboxes: inside a user namespace
    that needs no privilege, and it is what seals a session off. Sessions themselves get the whole filter.
    """
    names = [name for group, calls in _REFUSED.items() if group not in _MAKES_SANDBOXES for name in calls]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "archMap": [
            {"architecture": name, "subArchitectures": below} for name, below in _CONTAINER_ARCHITECTURES.items()
        ],
        # A name that an engine's library does not know is skipped by it.
        "syscalls": [{"names": sorted(names), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}],
    }


@cache
def load_filter(*, keeps_set_ids: bool = False) -> Filter:
    """Return the filter for this machine, built at the first call. See `SandboxSpec` for `keeps_set_ids`."""
    try:
        # The import looks for libseccomp, takes 20 to 60 ms, and raises RuntimeError where there is none.
        import pyseccomp  # pyright: ignore[reportMissingTypeStubs]
    except (ImportError, RuntimeError, OSError) as error:
        return Filter(complaint=f"libseccomp cannot be loaded ({error})")
    try:
        return Filter(_build(pyseccomp, keeps_set_ids=keeps_set_ids))
    except (OSError, ValueError) as error:
        return Filter(complaint=f"libseccomp builds no filter on {platform.machine()} ({error})")


def _build(library: Any, *, keeps_set_ids: bool = False) -> bytes:
    program = library.SyscallFilter(library.ALLOW)
    # 32-bit and x32 calls have other numbers, which would get past the rules, so all of them get ENOSYS.
    program.set_attr(library.Attr.ACT_BADARCH, library.ERRNO(errno.ENOSYS))
    for rule in _rules(keeps_set_ids=keeps_set_ids):
        conditions = [library.Arg(a, getattr(library, how), v, m) for a, how, v, m in rule.conditions]
        program.add_rule(library.ERRNO(rule.error), _number(library, rule.call), *conditions)
    with os.fdopen(os.memfd_create("belljar-filter"), "w+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()


def _number(library: Any, call: str) -> int:
    """Return a call's number; a negative one is a call this architecture lacks, which libseccomp skips."""
    number: int = library.resolve_syscall(library.system_arch(), call)
    if number != _UNKNOWN:
        return number
    if call not in _NUMBERS:
        raise ValueError(f"it does not know {call}")
    return _NUMBERS[call]


def _rules(*, keeps_set_ids: bool = False) -> Iterator[_Rule]:
    for calls in _REFUSED.values():
        for call in calls:
            yield _Rule(errno.EPERM, call)
    yield _Rule(errno.EPERM, "setns", (_Condition(1, "NE", ALL_NAMESPACES),))
    yield from _clone_rules()
    yield from _personality_rules()
    yield from _socket_rules()
    if not keeps_set_ids:
        yield from _set_id_rules()
    for request in _TERMINAL_REQUESTS.values():
        # Masked, because the kernel looks at the lower half only, so bits in the upper half would get past the rule.
        yield _Rule(errno.EPERM, "ioctl", (_Condition(1, "MASKED_EQ", _INT, request),))


def _clone_rules() -> Iterator[_Rule]:
    # A filter cannot see the flags of clone3, which are behind a pointer; without clone3 the C library uses clone.
    yield _Rule(errno.ENOSYS, "clone3")
    flags = 1 if platform.machine().startswith("s390") else 0
    for flag in _NEW_NAMESPACES:
        yield _Rule(errno.EPERM, "clone", (_Condition(flags, "MASKED_EQ", flag, flag),))


def _personality_rules() -> Iterator[_Rule]:
    top = 1 << (_INT_BITS - 1)
    for bit in (1 << number for number in range(_INT_BITS - 1)):
        if not bit & _PERSONALITY_BITS:
            yield _Rule(errno.EPERM, "personality", (_Condition(0, "MASKED_EQ", top | bit, bit),))
        # With the top bit set, only the query (all ones) has all other bits set as well.
        yield _Rule(errno.EPERM, "personality", (_Condition(0, "MASKED_EQ", top | bit, top),))


def _socket_rules() -> Iterator[_Rule]:
    for call in ("socket", "socketpair"):
        for family in range(max(_FAMILIES)):
            if family not in _FAMILIES:
                yield _Rule(errno.EAFNOSUPPORT, call, (_Condition(0, "EQ", family),))
        yield _Rule(errno.EAFNOSUPPORT, call, (_Condition(0, "GT", max(_FAMILIES)),))
    # libzmq aborts without a netlink socket for routes; other netlink families lead to kernel code nobody needs here.
    other_than_routes = (_Condition(0, "EQ", _AF_NETLINK), _Condition(2, "NE", 0))
    yield _Rule(errno.EPROTONOSUPPORT, "socket", other_than_routes)


_SET_IDS = (0o4000, 0o2000)
# Calls that give a file its mode, and which argument that is.
_MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "mknod": 1, "mknodat": 2, "creat": 1}
_CREATING = (os.O_CREAT, getattr(os, "O_TMPFILE", 0) & ~getattr(os, "O_DIRECTORY", 0))


def _set_id_rules() -> Iterator[_Rule]:
    """Refuse set-user-ID and set-group-ID files.

    In a folder of the host that others can reach, whoever ran one would be the server.
    """
    for bit in _SET_IDS:
        for call, mode in _MODES.items():
            yield _Rule(errno.EPERM, call, (_Condition(mode, "MASKED_EQ", bit, bit),))
        for call, flags in (("open", 1), ("openat", 2)):
            for flag in _CREATING:
                creates, sets = _Condition(flags, "MASKED_EQ", flag, flag), _Condition(flags + 1, "MASKED_EQ", bit, bit)
                yield _Rule(errno.EPERM, call, (creates, sets))
    # Its flags and mode are behind a pointer; programs then use openat.
    yield _Rule(errno.ENOSYS, "openat2")
