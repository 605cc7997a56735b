"""Folders and files of a session, each opened relative to the descriptor of the folder it is in.

Symlinks are never followed, and what a descriptor is gets asked of the descriptor. Knows no names but one component's.
"""

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from belljar.errors import FileMissing, InvalidPath, UsageError
from belljar.files.refusals import demand_regular, in_the_way, unreachable

Owner = tuple[int, int]
"""uid and gid."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer that never comes.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(root: str, parts: tuple[str, ...], name: str) -> int:
    """A descriptor of the folder `parts` below `root`; `FileMissing` of `name` when something is in the way."""
    return _descend(root, parts, name, FileMissing, lambda above, part: os.open(part, _DIRECTORY, dir_fd=above))


def make_directory(root: str, parts: tuple[str, ...], name: str, owner: Owner | None, mode: int = 0o755) -> int:
    """Like `open_directory`, made where there is none, for `owner` or for us; otherwise `InvalidPath`."""
    return _descend(root, parts, name, InvalidPath, lambda above, part: _enter(above, part, owner, mode))


def _descend(
    root: str, parts: tuple[str, ...], name: str, refusal: type[UsageError], enter: Callable[[int, str], int]
) -> int:
    try:
        directory = os.open(root, _DIRECTORY)
    except OSError as error:
        raise refusal(f"the session folder cannot be opened: {error.strerror}") from error
    for index, part in enumerate(parts):
        try:
            below = enter(directory, part)
        except OSError as error:
            reached = "/".join(parts[: index + 1])
            raise refusal(in_the_way(directory, part, reached, name, error)) from error
        finally:
            os.close(directory)
        directory = below
    return directory


def _enter(directory: int, part: str, owner: Owner | None, mode: int) -> int:
    """Open a directory below, making it if nothing has its name."""
    try:
        return os.open(part, _DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        # Another upload may make it first; whatever it then is, opening it decides.
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
    """Open a regular file; its status is the descriptor's, so it is this file's."""
    try:
        # Opening a device can have effects of its own, hence a look before as well as after.
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
    """Make a new file and fill it; nothing of it stays when that fails."""
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
    """Remove what was not finished, if it is still there."""
    with contextlib.suppress(OSError):
        os.unlink(leaf, dir_fd=directory)
