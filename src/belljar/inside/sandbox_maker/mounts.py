"""Mounts, by Linux's own calls: those that work on descriptors have no functions in C's library yet.

Linux 5.12 is the first that has all of them.
"""

import ctypes
import os
import struct
from typing import Any

# Numbers of Linux's; those from 424 on are the same on every architecture.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, 0)
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
NOSUID, NODEV, NOEXEC, RECURSIVE, SLAVE = 0x2, 0x4, 0x8, 0x4000, 0x80000
_DETACH = 2
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_TREE_CLONE, _TREE_CLOEXEC = 0x1, os.O_CLOEXEC
_AT_CWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_MOVE_FROM_EMPTY_PATH, _MOVE_TO_LINKS = 0x4, 0x10
_COVERED = ("sys", "sysrq-trigger", "irq", "bus")
"""What bubblewrap makes read-only of /proc, where it can be written."""

# Not CDLL, which would release the interpreter's lock for each call: the child that shares this process's memory needs
# the lock, and neither process has another thread that could use it meanwhile.
libc: Any = ctypes.PyDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of C's library; OSError where it says so."""
    return check(getattr(libc, name)(*arguments), name)


def check(answer: int, name: str) -> int:
    """Return what a function of C's library has answered; OSError where that is an error."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return answer


def mount(source: str, path: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or change what is mounted."""
    words = [word.encode() or None for word in (source, path, kind, options)]
    check(libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {path}")


def open_tree(path: str) -> int:
    """Return a copy of a mount with all below it, attached nowhere."""
    flags = ctypes.c_uint(_TREE_CLONE | _TREE_CLOEXEC | _AT_RECURSIVE)
    tree: int = check(libc.syscall(_OPEN_TREE, _AT_CWD, os.fsencode(path), flags), f"open_tree {path}")
    return tree


def restrict(tree: int, *, is_read_only: bool = False, allows_devices: bool = False, recursive: bool = False) -> None:
    """Take from a mount what bubblewrap takes from every one, and more if wanted."""
    wanted = _ATTR_NOSUID | (0 if allows_devices else _ATTR_NODEV) | (_ATTR_READ_ONLY if is_read_only else 0)
    attributes = struct.pack("=4Q", wanted, 0, 0, 0)
    flags = ctypes.c_uint(_AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0))
    call("syscall", _MOUNT_SETATTR, tree, b"", flags, attributes, ctypes.c_size_t(len(attributes)))


def move(tree: int, path: str) -> None:
    """Attach a copy of mounts at a path."""
    flags = ctypes.c_uint(_MOVE_FROM_EMPTY_PATH | _MOVE_TO_LINKS)
    check(libc.syscall(_MOVE_MOUNT, tree, b"", _AT_CWD, os.fsencode(path), flags), f"move_mount {path}")


def make_read_only(path: str) -> None:
    """Make what is mounted at a path read-only."""
    mounted = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        restrict(mounted, is_read_only=True)
    finally:
        os.close(mounted)


def mount_proc(path: str) -> None:
    """Mount the processes of our pid namespace, with the same parts read-only as bubblewrap."""
    mount("proc", path, "proc", NOSUID | NODEV | NOEXEC)
    for name in _COVERED:
        if os.access(f"{path}/{name}", os.W_OK):
            tree = open_tree(f"{path}/{name}")
            restrict(tree, is_read_only=True, recursive=True)
            move(tree, f"{path}/{name}")


def unmount(path: str) -> None:
    """Detach what is mounted at a path, with all below it."""
    check(libc.umount2(os.fsencode(path), _DETACH), f"umount {path}")


def leave_root(folder: str) -> None:
    """Make a folder that is a mount our root, and detach the old root."""
    os.chdir(folder)
    # The old root is on top of the new one then, until it goes.
    call("syscall", _PIVOT_ROOT, b".", b".")
    unmount(".")
    os.chdir("/")
