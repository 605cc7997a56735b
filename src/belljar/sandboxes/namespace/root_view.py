"""A view of root's files through which a user without rights can pass, with what a sandbox needs at the same paths.

Data folders and interpreters of a server that root runs may lie below folders that only root may enter, such as its
home. In a separate mount namespace each such folder is covered by an empty one that everybody may pass through, and
below it only the needed trees are mounted. Modes and owners of the host's files do not change. The host's other mounts
are not in it: bubblewrap reads the whole table of mounts again for each mount that it makes.
"""

import ctypes
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.defaults import SYSTEM, is_within

_CLONE_NEWNS = 0x00020000
_MNT_DETACH = 2
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000


_ALWAYS_KEPT = ("/etc", "/dev", "/proc")
_UNUSED = ("/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/hugepages")  # noqa: S108 - sandboxes have their own or none


def open_root_view(trees: Iterable[Path]) -> int:
    """Return a descriptor of a new mount namespace in which these trees are reachable; it lasts as long as that."""
    outcome: list[int | BaseException] = []

    def build() -> None:
        try:
            outcome.append(_build(sorted(set(trees), key=lambda path: len(path.parts))))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the calling thread
            outcome.append(error)

    # In a thread, because after unshare its mounts, working directory and umask are its own, and go with it.
    thread = threading.Thread(target=build, name="root-view")
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
        # Open all trees first, because those that get covered can then still be mounted.
        for tree in trees:
            sources[tree] = os.open(tree, os.O_PATH | os.O_CLOEXEC)
        _detach_all_but(libc, {*map(str, trees), *(str(tree.resolve()) for tree in trees), *SYSTEM, *_ALWAYS_KEPT})
        for tree, source in sources.items():
            _place(libc, tree.resolve(), source)
        # Then the paths as given, through links, for those who use them; most lead to the same place by now.
        for tree, source in sources.items():
            _place(libc, tree, source)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for source in sources.values():
            os.close(source)


def _detach_all_but(libc: Any, needed: set[str]) -> None:
    """Detach every mount that neither is on the way to one of these paths nor lies below one."""
    detached: list[str] = []
    for line in Path("/proc/thread-self/mountinfo").read_bytes().splitlines():
        # A space is written as \040, which is not decoded here: umount2 then fails, and that mount stays.
        point = os.fsdecode(line.split()[4])
        # What lies below a detached mount is gone with it; its path may lead somewhere else by now.
        if any(is_within(point, gone) for gone in detached):
            continue
        paths = needed - {"/dev"} if point in _UNUSED else needed
        if not any(is_within(path, point) or is_within(point, path) for path in paths):
            libc.umount2(os.fsencode(point), _MNT_DETACH)
            detached.append(point)


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
