"""A view of root's files that somebody without rights can walk through: what a sandbox needs, at the same paths.

Data folders and interpreters of a server run by root may lie below folders that are root's alone, such as its home. In
a mount namespace of its own each such folder is covered by an empty one that lets everybody through, with nothing below
it but the trees that are needed. Modes and owners of the host's files stay as they are. Knows nothing of sandboxes.
"""

import ctypes
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from belljar.errors import SandboxUnavailable

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000


def open_stage(trees: Iterable[Path]) -> int:
    """A descriptor of the mount namespace in which these trees can be reached. It lasts as long as the descriptor."""
    outcome: list[int | BaseException] = []

    def build() -> None:
        try:
            outcome.append(_build(sorted(set(trees), key=lambda path: len(path.parts))))
        except BaseException as error:  # noqa: BLE001 - raised again below, by whoever asked
            outcome.append(error)

    # A thread has its mounts, its working directory and its umask to itself once it asks, and takes them with it.
    thread = threading.Thread(target=build, name="stage")
    thread.start()
    thread.join()
    (answer,) = outcome
    if isinstance(answer, OSError):
        raise SandboxUnavailable(f"The mounts that sandboxes are made from cannot be made: {answer}") from answer
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _build(trees: list[Path]) -> int:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    os.umask(0o022)
    _mount(libc, "none", "/", _MS_REC | _MS_SLAVE)
    sources: dict[Path, int] = {}
    try:
        # All are opened first: what is covered later can then still be mounted.
        for tree in trees:
            sources[tree] = os.open(tree, os.O_PATH | os.O_CLOEXEC)
        for tree, source in sources.items():
            _place(libc, tree.resolve(), source)
        # The way by links, for those who were told it; most lead there by now.
        for tree, source in sources.items():
            _place(libc, tree, source)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for source in sources.values():
            os.close(source)


def _place(libc: Any, target: Path, source: int) -> None:
    closed = next((parent for parent in reversed(target.parents) if not _is_passable(parent)), None)
    if closed is not None:
        _mount(libc, "tmpfs", str(closed), _MS_NOSUID | _MS_NODEV, kind="tmpfs", options="mode=0711")
    if _is_there(target, source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(source).st_mode):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(libc, f"/proc/thread-self/fd/{source}", str(target), _MS_BIND | _MS_REC)


def _is_passable(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IXOTH)
    except FileNotFoundError:
        return True


def _is_there(target: Path, source: int) -> bool:
    try:
        return os.path.samestat(target.stat(), os.fstat(source))
    except OSError:
        return False


def _mount(libc: Any, source: str, target: str, flags: int, *, kind: str = "", options: str = "") -> None:
    words = [os.fsencode(word) if word else None for word in (source, target, kind, options)]
    _check(libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), target)


def _check(answer: int, name: str) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
