"""Opens and creates a session's folders and files, each relative to the descriptor of the folder that it is in.

Symlinks are never followed, and the type of a file is read from its descriptor, not from its path. The errors that say
why a file cannot be read or written are here too. Which paths are valid is up to `names.py`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import BinaryIO

from belljar.errors import BelljarError, FileMissing, InvalidPath, TooLarge, UsageError, out_of_descriptors
from belljar.files.file_types import kind_of
from belljar.files.names import shown

Owner = tuple[int, int]
"""User id and group id."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer that never comes.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(root: str, parts: tuple[str, ...], name: str) -> int:
    """Return a descriptor of the folder `parts` below `root`; `FileMissing` for `name` if it cannot be entered."""
    return _descend(root, parts, name, FileMissing, lambda above, part: os.open(part, _DIRECTORY, dir_fd=above))


def make_directory(root: str, parts: tuple[str, ...], name: str, owner: Owner | None, mode: int = 0o755) -> int:
    """Open a folder and make missing ones, owned by `owner` or by us; `InvalidPath` if that is not possible."""
    return _descend(root, parts, name, InvalidPath, lambda above, part: _enter(above, part, owner, mode))


def _descend(
    root: str, parts: tuple[str, ...], name: str, refusal: type[UsageError], enter: Callable[[int, str], int]
) -> int:
    try:
        directory = os.open(root, _DIRECTORY)
    except OSError as error:
        raise out_of_descriptors(error) or refusal(f"the session folder cannot be opened: {error.strerror}") from error
    for index, part in enumerate(parts):
        try:
            below = enter(directory, part)
        except OSError as error:
            reached = "/".join(parts[: index + 1])
            named = out_of_descriptors(error)
            raise named or refusal(blocked_message(directory, part, reached, name, error)) from error
        finally:
            os.close(directory)
        directory = below
    return directory


def _enter(directory: int, part: str, owner: Owner | None, mode: int) -> int:
    """Open a folder inside another, and make it first if nothing has its name."""
    try:
        return os.open(part, _DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        # Another upload may make it first; whatever has the name then, the call to open below checks it.
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, mode, dir_fd=directory)
    below = os.open(part, _DIRECTORY, dir_fd=directory)
    try:
        if owner is not None:
            os.fchown(below, *owner)
    except OSError:
        os.close(below)
        raise
    return below


def open_regular(directory: int, leaf: str, name: str) -> tuple[BinaryIO, os.stat_result]:
    """Open a regular file; its status comes from the descriptor, so it belongs to the file that was opened."""
    try:
        # Checked before opening as well as after, because opening a device can have side effects.
        demand_regular(os.stat(leaf, dir_fd=directory, follow_symlinks=False), name)
        descriptor = os.open(leaf, _READ, dir_fd=directory)
    except OSError as error:
        raise unreachable(name, "read", error) from error
    try:
        status = os.fstat(descriptor)
        demand_regular(status, name)
        return os.fdopen(descriptor, "rb"), status
    except BaseException:
        os.close(descriptor)
        raise


def create(directory: int, leaf: str, fill: Callable[[int], None], owner: Owner | None, mode: int = 0o644) -> None:
    """Make a new file and fill it; if that fails, remove it."""
    descriptor = os.open(leaf, _CREATE, 0o600, dir_fd=directory)
    try:
        try:
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)
            fill(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        discard(directory, leaf)
        raise


def discard(directory: int, leaf: str) -> None:
    """Remove an unfinished file, if it is still there."""
    with contextlib.suppress(OSError):
        os.unlink(leaf, dir_fd=directory)


# The errors for files that cannot be read or written, with a hint what to do next.

_RENAME = "If a list shows it so, its name is not UTF-8: let code rename it, which finds it in os.listdir(b'.')"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def no_room(message: str, error: OSError) -> TooLarge | None:
    """Return the error for a write that found no room; None if it failed for another reason.

    A full disk may be full of what others have written, so deleting files of the session may not be enough.
    """
    if error.errno not in _NO_ROOM:
        return None
    if error.errno == errno.ENOSPC:
        hint = "The server's disk is full: delete files of the session, or have the operator free some space"
        return TooLarge(message, hint=hint)
    return TooLarge(message, hint="Delete files of the session first")


def demand_regular(status: os.stat_result, name: str) -> None:
    """Raise `FileMissing` for anything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise FileMissing(
            f"{shown(name)} is a {kind_of(status.st_mode)}, not a regular file",
            hint="Name a regular file; symlinks are not followed, so name their target",
        )


def blocked_message(directory: int, part: str, reached: str, name: str, error: OSError) -> str:
    """Return the message that says why a folder in the path of a file could not be entered."""
    if isinstance(error, FileNotFoundError):
        return f"{shown(name)} does not exist: there is no {shown(reached)}"
    try:
        found = os.stat(part, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return f"{shown(name)} cannot be reached: {error.strerror}"
    if stat.S_ISDIR(found.st_mode):
        return f"{shown(name)} cannot be reached: {shown(reached)}: {error.strerror}"
    return f"{shown(name)} cannot be reached: {shown(reached)} is a {kind_of(found.st_mode)}, not a directory"


def unreachable(name: str, action: str, error: OSError) -> BelljarError:
    """Return the error for a file that could not be read or removed."""
    if (named := out_of_descriptors(error)) is not None:
        return named
    if isinstance(error, FileNotFoundError):
        # The mark stands for bytes that are no UTF-8, in lists of files, and no caller can pass those bytes.
        hint = _RENAME if "\ufffd" in name else "List the session's files to see their names"
        return FileMissing(f"{shown(name)} does not exist", hint=hint)
    if error.errno == errno.ELOOP:
        return FileMissing(f"{shown(name)} is a symlink, not a regular file", hint="Name its target")
    return FileMissing(f"{shown(name)} cannot be {action}: {error.strerror}", hint="Let code in the session mend it")


def unwritable(name: str, size: int, error: OSError) -> BelljarError:
    """Return the error for a file of that size that could not be written."""
    if refusal := out_of_descriptors(error) or no_room(f"no room for the {size} bytes of {shown(name)}", error):
        return refusal
    if isinstance(error, IsADirectoryError):
        return InvalidPath(f"{shown(name)} is a directory", hint="Choose another name")
    return InvalidPath(f"{shown(name)} cannot be written: {error.strerror}", hint="Choose another name")


def too_large(name: str, size: str, limit_bytes: int) -> TooLarge:
    """Return the error for a file that is larger than a caller may get at once."""
    return TooLarge(
        f"{shown(name)} is {size} bytes, and the limit is {limit_bytes}",
        hint="Let code in the session read the part that is needed, or write a smaller file",
    )
