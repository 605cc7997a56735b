"""Opens and removes the entries of a tree by descriptor while hostile code may be rearranging it.

Symlinks are never followed, and nothing is opened by a path of more than one name. If we own a file or folder but its
mode keeps us out, the mode is widened for as long as it is open, and then put back. `remove_tree` removes a whole tree
with `rm`, and with `chmod` where that is not enough. Trees that hostile code built and no longer runs in are given
another owner, and lose set-ID bits and devices, by `chown`, `chmod` and `find`, which have no limit on depth; Python's
own walk gives up at about a thousand levels. This module knows nothing of copies or snapshots. Blocking; call
it in a thread.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from belljar.files.names import MAX_DEPTH, UNFINISHED, display_name

__all__ = [
    "MAX_DEPTH",
    "MAX_ENTRIES",
    "SWAPPED",
    "UNFINISHED",
    "Omission",
    "Omissions",
    "open_file",
    "open_folder",
    "remove",
]

MAX_ENTRIES = 200_000
"""The most entries that are walked: about 10 s of work."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer that never comes.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# The errors of opening an entry, or of reading a link, whose type has changed since it was looked at.
SWAPPED = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EINVAL, errno.EISDIR})

_MAX_NAMED = 100
_BATCH = 5_000
_PASSES = 1_000
_FLAT_DEPTH = 16
_MESSAGE_LIMIT = 300
_SET_ID = ("(", "-perm", "-4000", "-o", "-perm", "-2000", ")")
_DEVICES = ("(", "-type", "b", "-o", "-type", "c", ")")
_PIPES_AND_SOCKETS = ("(", "-type", "p", "-o", "-type", "s", ")")


@dataclass(frozen=True, slots=True)
class Omission:
    """An entry that was left out: its path in the folder, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class Omissions:
    """The entries that were left out: the first hundred by name, and the count of all."""

    named: list[Omission] = field(default_factory=list[Omission])
    count: int = 0

    def add(self, parts: list[str], reason: str) -> None:
        """Record the entry at that path."""
        self.count += 1
        if len(self.named) < _MAX_NAMED:
            self.named.append(Omission(display_name("/".join(parts)), reason))


@contextlib.contextmanager
def open_folder(
    name: str, parent: int | None = None, *, is_written: bool = False
) -> Generator[tuple[int, os.stat_result]]:
    """Open a folder and yield its descriptor and status. If it is written, the caller sets its mode later."""
    with _open(name, _FOLDER, parent, 0o700 if is_written else 0o500, is_kept=is_written) as (descriptor, status):
        if parent is not None and status.st_dev != os.fstat(parent).st_dev:
            raise OSError(errno.EXDEV, "is another file system")
        yield descriptor, status


@contextlib.contextmanager
def open_file(name: str, parent: int, *, is_written: bool = False) -> Generator[tuple[int, os.stat_result]]:
    """Open a regular file and yield its descriptor and status. If it is written, the caller sets its mode later."""
    access, rights = (os.O_RDWR, 0o600) if is_written else (os.O_RDONLY, 0o400)
    with _open(name, _FILE | access, parent, rights, is_kept=is_written) as (descriptor, status):
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ELOOP, "is not a regular file")
        yield descriptor, status


@contextlib.contextmanager
def _open(
    name: str, flags: int, parent: int | None, rights: int, *, is_kept: bool
) -> Generator[tuple[int, os.stat_result]]:
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        descriptor, status = _open_widened(name, flags, parent, rights)
    else:
        status = os.fstat(descriptor)
        # Opening a folder needs fewer rights than using the names in it.
        if stat.S_ISDIR(status.st_mode) and ~status.st_mode & rights and status.st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | rights)
    mode = stat.S_IMODE(status.st_mode)
    try:
        yield descriptor, status
    finally:
        # Put the mode back, unless somebody else has changed it meanwhile.
        if not is_kept and mode != mode | rights == stat.S_IMODE(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, mode)
        os.close(descriptor)


def _open_widened(name: str, flags: int, parent: int | None, rights: int) -> tuple[int, os.stat_result]:
    """Open what its mode forbids, by an O_PATH handle, so that the mode of no other inode can be changed."""
    handle = os.open(name, _HANDLE, dir_fd=parent)
    try:
        status = os.fstat(handle)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise OSError(errno.ELOOP, "is neither file nor folder")
        path, mode = f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode)
        try:
            os.chmod(path, mode | rights)  # noqa: PTH101 - a descriptor's path
            try:
                return os.open(path, flags & ~os.O_NOFOLLOW), status
            except OSError:
                os.chmod(path, mode)  # noqa: PTH101
                raise
        except FileNotFoundError as error:
            raise PermissionError(errno.EACCES, "may not be read") from error
    finally:
        os.close(handle)


def remove(parent: int, name: str) -> None:
    """Remove whatever has that name, however deep; a symlink itself, not its target. `OSError` if something stays."""
    remaining = [name]
    while remaining:
        _remove(parent, remaining.pop(), parent, 0, remaining)


def _remove(parent: int, name: str, top: int, depth: int, remaining: list[str]) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        with open_folder(name, parent, is_written=True) as (descriptor, _):
            if depth < _FLAT_DEPTH:
                _empty(descriptor, top, depth + 1, remaining)
            else:
                # Move deep folders to the top and remove them later, so that we need not hold a descriptor per level.
                moved = UNFINISHED + secrets.token_hex(8)
                os.rename(name, moved, src_dir_fd=parent, dst_dir_fd=top)
                remaining.append(moved)
                return
        os.rmdir(name, dir_fd=parent)


def _empty(descriptor: int, top: int, depth: int, remaining: list[str]) -> None:
    for _ in range(_PASSES):
        with os.scandir(descriptor) as entries:
            names = [entry.name for entry in islice(entries, _BATCH)]
        if not names:
            return
        for name in names:
            _remove(descriptor, name, top, depth, remaining)


# Removing a tree that hostile code built, possibly thousands of levels deep, or with folders that nobody may enter.
# Python's own `rmtree` is recursive and gives up at about a thousand levels; `chmod` and `rm` walk by descriptor.

_TIMEOUT_S = 600

log = logging.getLogger(__name__)


def remove_tree(path: Path) -> None:
    """Remove a folder and everything below it, as far as possible; blocks. Symlinks are removed, not followed."""
    if _is_done("rm", "-rf", path):
        return
    # A folder that nobody may enter, which is rare.
    _is_done("chmod", "-R", "u+rwx", path)
    if not _is_done("rm", "-rf", path):
        log.warning("%s was not removed whole", path)


def _is_done(*command: str | Path) -> bool:
    """Run a command on a tree, its last argument; return whether it succeeded.

    What it says names files of the session, one a line, and there may be millions: nobody reads it.
    """
    *words, path = command
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [*words, "--", path], check=False, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s of %s failed: %s", words[0], path, type(error).__name__)
        return False
    return not done.returncode


def change_owner(folders: Sequence[Path], uid: int, gid: int) -> None:
    """Make a user the owner of everything in these trees; of a symlink itself, not of its target."""
    if complaint := _run(["chown", "-R", "-h", f"{uid}:{gid}", "--"], folders):
        raise OSError(complaint)


def close_to_others(folder: Path) -> None:
    """Let nobody but the owner write to anything in a tree, and let the owner enter every folder."""
    # `chmod -R` leaves links inside a tree alone, but follows a link that it is called with.
    if not folder.is_symlink():
        _run(["chmod", "-R", "u+rwX,go-w", "--"], [folder])


def disarm(folders: Sequence[Path], *, keeps_pipes: bool = True) -> None:
    """Clear set-user-ID and set-group-ID bits, and remove devices; pipes and sockets too, unless `keeps_pipes`.

    Folders that we own and may not enter are left as they are, because nobody else may enter them either.
    """
    removed = _DEVICES if keeps_pipes else ("(", *_DEVICES, "-o", *_PIPES_AND_SOCKETS, ")")
    change = ("!", "-type", "l", *_SET_ID, "-exec", "chmod", "u-s,g-s", "{}", "+")
    _run(["find", "-P"], folders, ["-xdev", "(", *removed, "-delete", ")", "-o", "(", *change, ")"])


def _run(command: Sequence[str], folders: Sequence[Path], rest: Sequence[str] = ()) -> str:
    """Run a command on those folders that exist; return its error message, or empty if it succeeded."""
    there = [str(folder) for folder in folders if os.path.lexists(folder)]
    if not there:
        return ""
    done = subprocess.run([*command, *there, *rest], check=False, capture_output=True, stdin=subprocess.DEVNULL)
    message = done.stderr.decode(errors="replace").strip()[-_MESSAGE_LIMIT:]
    return message or f"{command[0]} ended with {done.returncode}" if done.returncode else ""
