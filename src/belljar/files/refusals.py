"""Why a file of a session cannot be read or written, as errors that say what to do next."""

import errno
import os
import stat

from belljar.errors import BelljarError, FileMissing, InvalidPath, TooLarge
from belljar.files.kinds import kind_of
from belljar.files.names import shown

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def demand_regular(status: os.stat_result, name: str) -> None:
    """Refuse what is no regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise FileMissing(
            f"{shown(name)} is a {kind_of(status.st_mode)}, not a regular file",
            hint="Name a regular file; symlinks are not followed, so name their target",
        )


def in_the_way(directory: int, part: str, reached: str, name: str, error: OSError) -> str:
    """Why a folder on the way to a file could not be entered."""
    if isinstance(error, FileNotFoundError):
        return f"{shown(name)} does not exist: there is no {shown(reached)}"
    try:
        found = os.stat(part, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return f"{shown(name)} cannot be reached: {error.strerror}"
    if stat.S_ISDIR(found.st_mode):
        return f"{shown(name)} cannot be reached: {shown(reached)}: {error.strerror}"
    return f"{shown(name)} cannot be reached: {shown(reached)} is a {kind_of(found.st_mode)}, not a directory"


def unreachable(name: str, action: str, error: OSError) -> FileMissing:
    """Why nothing could be done with what has that name."""
    if isinstance(error, FileNotFoundError):
        return FileMissing(f"{shown(name)} does not exist", hint="List the session's files to see their names")
    if error.errno == errno.ELOOP:
        return FileMissing(f"{shown(name)} is a symlink, not a regular file", hint="Name its target")
    return FileMissing(f"{shown(name)} cannot be {action}: {error.strerror}", hint="Let code in the session mend it")


def unwritable(name: str, size: int, error: OSError) -> BelljarError:
    """Why so many bytes could not be put there."""
    if error.errno in _NO_ROOM:
        return TooLarge(f"no room for the {size} bytes of {shown(name)}", hint="Delete files of the session first")
    if isinstance(error, IsADirectoryError):
        return InvalidPath(f"{shown(name)} is a directory", hint="Choose another name")
    return InvalidPath(f"{shown(name)} cannot be written: {error.strerror}", hint="Choose another name")


def too_large(name: str, size: str, limit_bytes: int) -> TooLarge:
    """More than a caller may have at once."""
    return TooLarge(
        f"{shown(name)} is {size} bytes, and the limit is {limit_bytes}",
        hint="Let code in the session read the part that is needed, or write a smaller file",
    )
