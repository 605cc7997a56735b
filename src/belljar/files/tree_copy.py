"""Copies a session folder, or the content of one file, while hostile code may be changing the original.

Symlinks are copied as they are; hard links become separate files; pipes, sockets and devices are left out and named. If
a copy of a folder fails, nothing of it stays. This module knows nothing of sessions. Blocking; call it in a thread.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

from belljar.errors import BelljarError, EngineError, FileMissing, InvalidPath, TooLarge
from belljar.files.fd_walk import (
    MAX_DEPTH,
    MAX_ENTRIES,
    SWAPPED,
    UNFINISHED,
    Omission,
    Omissions,
    open_file,
    open_folder,
    remove,
)
from belljar.files.file_types import kind_of
from belljar.files.openat import Owner, no_room
from belljar.files.stat_trust import steadily

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Permissions and the sticky bit. Set-user-ID and set-group-ID bits are not copied, because such a file runs with its
# owner's rights.
_KEPT_MODE = 0o1777
_HINT = "Delete files of the session first"


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy holds, what it lacks, and which files changed meanwhile; holes do not count as data."""

    files: int
    data_bytes: int
    skipped: tuple[Omission, ...]
    changed: tuple[Omission, ...]


def copy_tree(source: Path, target: Path, *, owner: Owner | None, limit_bytes: int) -> CopyReport:
    """Copy a folder to one that is missing or empty; everything in the copy belongs to `owner`, or to us.

    Raise `TooLarge` if there is too much data, the tree is too deep or the disk is full; then no copy stays.
    """
    is_made = _make(target)
    copying = _TreeCopy(owner, limit_bytes)
    try:
        with contextlib.ExitStack() as stack:
            try:
                below, status = stack.enter_context(open_folder(os.fspath(source)))
            except OSError as error:
                raise FileMissing(f"the folder to copy cannot be opened: {error.strerror}") from error
            into, _ = stack.enter_context(open_folder(os.fspath(target), is_written=True))
            copying.fill(below, into)
            if is_made:
                copying.finish(into, status.st_mode, status.st_mtime_ns)
    except BaseException as error:
        _unmake(target, is_made=is_made)
        if isinstance(error, OSError):
            raise _uncopied(error) from error
        raise
    return copying.report()


class _TreeCopy:
    """Makes one copy, and counts what it copied and left out."""

    def __init__(self, owner: Owner | None, limit_bytes: int) -> None:
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._parts: list[str] = []
        self._entries = 0
        self._files = 0
        self._data_bytes = 0
        self._skipped = Omissions()
        self._changed = Omissions()

    def report(self) -> CopyReport:
        return CopyReport(
            self._files,
            self._data_bytes,
            tuple(self._skipped.named),
            tuple(self._changed.named),
        )

    def fill(self, source: int, target: int) -> None:
        """Copy what is in one open folder into another."""
        if len(self._parts) > MAX_DEPTH:
            raise TooLarge(f"the folder is more than {MAX_DEPTH} levels deep", hint=_HINT)
        for name in self._names(source):
            self._parts.append(name)
            self._copy(name, source, target)
            self._parts.pop()

    def finish(self, descriptor: int, mode: int, mtime_ns: int) -> None:
        """Set the owner, mode and time of a copy, in an order in which no step changes what an earlier one set."""
        if self._owner is not None:
            os.fchown(descriptor, *self._owner)
        os.fchmod(descriptor, mode & _KEPT_MODE)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))

    def _names(self, source: int) -> list[str]:
        """Return all names at once, so that the listing holds no descriptor while we descend."""
        names: list[str] = []
        with os.scandir(source) as entries:
            for entry in entries:
                self._entries += 1
                if self._entries > MAX_ENTRIES:
                    raise TooLarge(f"the folder has more than {MAX_ENTRIES} entries", hint=_HINT)
                if not entry.name.startswith(UNFINISHED):
                    names.append(entry.name)
        return names

    def _copy(self, name: str, source: int, target: int) -> None:
        for _ in range(2):
            try:
                with _reading():
                    status = os.stat(name, dir_fd=source, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    return self._copy_file(name, source, target)
                if stat.S_ISDIR(status.st_mode):
                    return self._copy_folder(name, source, target)
                if stat.S_ISLNK(status.st_mode):
                    return self._copy_link(name, source, target, status)
                return self._skipped.add(self._parts, f"is a {kind_of(status.st_mode)}")
            except _Unreadable as error:
                if error.number == errno.ENOENT:
                    return None
                if error.number not in SWAPPED:
                    return self._skipped.add(self._parts, error.reason)
        return self._changed.add(self._parts, "was something else each time it was opened, and is left out")

    def _copy_file(self, name: str, source: int, target: int) -> None:
        with contextlib.ExitStack() as stack:
            with _reading():
                original, found = stack.enter_context(open_file(name, source))
            copy = os.open(name, _CREATE, 0o600, dir_fd=target)
            stack.callback(os.close, copy)

            def read() -> int:
                os.ftruncate(copy, 0)
                return copy_content(original, copy, self._limit_bytes - self._data_bytes)

            try:
                data_bytes, status, is_steady = steadily(original, read)
            except OverLimit as error:
                message = f"the folder holds more than {self._limit_bytes} bytes"
                raise TooLarge(message, hint=_HINT) from error
            self.finish(copy, found.st_mode, status.st_mtime_ns)
        self._files += 1
        self._data_bytes += data_bytes
        if not is_steady:
            self._changed.add(self._parts, "was written while it was copied")

    def _copy_folder(self, name: str, source: int, target: int) -> None:
        with contextlib.ExitStack() as stack:
            with _reading():
                below, status = stack.enter_context(open_folder(name, source))
            os.mkdir(name, 0o700, dir_fd=target)
            into, _ = stack.enter_context(open_folder(name, target, is_written=True))
            self.fill(below, into)
            self.finish(into, status.st_mode, status.st_mtime_ns)

    def _copy_link(self, name: str, source: int, target: int, status: os.stat_result) -> None:
        with _reading():
            content = os.readlink(name, dir_fd=source)
        os.symlink(content, name, dir_fd=target)
        if self._owner is not None:
            os.chown(name, *self._owner, dir_fd=target, follow_symlinks=False)
        times = (status.st_mtime_ns, status.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


class _Unreadable(Exception):
    """The original cannot be opened, so it is left out; any later error fails the whole copy."""

    def __init__(self, error: OSError) -> None:
        self.number = error.errno
        self.reason = error.strerror or str(error)


@contextlib.contextmanager
def _reading() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _Unreadable(error) from error


def _make(target: Path) -> bool:
    try:
        target.mkdir(mode=0o700)
    except FileExistsError:
        if not target.is_dir() or any(target.iterdir()):
            raise InvalidPath(f"{target} is there already and is not an empty folder") from None
        return False
    except OSError as error:
        raise _uncopied(error) from error
    return True


def _unmake(target: Path, *, is_made: bool) -> None:
    with contextlib.suppress(OSError):
        with open_folder(os.fspath(target), is_written=True) as (descriptor, _):
            for path in target.iterdir():
                remove(descriptor, path.name)
        if is_made:
            target.rmdir()


def _uncopied(error: OSError) -> BelljarError:
    message = f"the folder cannot be copied: {error.strerror}"
    return no_room(message, error) or EngineError(message)


# The content of one file: blocks are shared if the file system can, else copied with their holes, or compared. This
# part works on open descriptors with explicit offsets, and knows nothing of names, modes or folders.

_FICLONE = 0x40049409
_CHUNK_BYTES = 1 << 20
# The most for one call of copy_file_range, because no limit can interrupt a call.
_STRIDE_BYTES = 64 << 20
_BLOCK_BYTES = 512

# The errors of file systems that cannot share or copy themselves. We then read and write instead, and if something
# else is wrong, that fails with its own error.
_UNABLE = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY, errno.EBADF}
)


class OverLimit(Exception):
    """The content is larger than was allowed; the caller discards what was written of it."""


def copy_content(source: int, target: int, limit_bytes: int) -> int:
    """Copy `source`, up to its size at the start, to the empty `target`; return how many bytes are not holes."""
    status = os.fstat(source)
    if clone(source, target):
        filled = min(status.st_size, status.st_blocks * _BLOCK_BYTES)
        if filled > limit_bytes:
            raise OverLimit
        return filled
    copied = 0
    for start, end in data_ranges(source, status.st_size):
        if end - start > limit_bytes - copied:
            raise OverLimit
        _copy_range(source, target, start, end)
        copied += end - start
    os.ftruncate(target, status.st_size)
    return copied


def overwrite(target: int, source: int) -> bool:
    """Give `target` the content of `source`, in place; return False if it had it already and nothing was written.

    Only what differs is written, so that processes that have the file open or mapped never see it empty.
    """
    size = os.fstat(source).st_size
    is_written = False
    for offset, chunk in _differences(source, target, size):
        is_written = True
        if clone(source, target):
            break
        _write(target, chunk, offset)
    if os.fstat(target).st_size != size:
        os.ftruncate(target, size)
        is_written = True
    return is_written


def is_same_content(one: int, other: int) -> bool:
    """Tell whether two files hold the same bytes; holes are not read, and reading ends at the first difference."""
    size = os.fstat(one).st_size
    return os.fstat(other).st_size == size and next(_differences(one, other, size), None) is None


def clone(source: int, target: int) -> bool:
    """Let `target` share all blocks of `source` until either is written; return False if that is not possible."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _UNABLE:
            return False
        raise
    return True


def data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range of data, rather than holes, within the first `size` bytes of a file."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left, or the file has become shorter
                return
            raise
        if start < end:
            yield start, end


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    try:
        while start < end:
            copied = os.copy_file_range(source, target, min(_STRIDE_BYTES, end - start), start, start)
            if not copied:
                break
            start += copied
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
    while start < end and (chunk := os.pread(source, min(_CHUNK_BYTES, end - start), start)):
        _write(target, chunk, start)
        start += len(chunk)


def _differences(source: int, target: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of `source` that differ in `target`, each with its offset; holes of both are not read."""
    offset = 0
    for start, end in merge(data_ranges(source, size), data_ranges(target, size)):
        offset = max(offset, start)
        while offset < end:
            length = min(_CHUNK_BYTES, end - offset)
            chunk = os.pread(source, length, offset)
            if chunk != os.pread(target, length, offset):
                yield offset, chunk
            offset += length


def _write(target: int, chunk: bytes, offset: int) -> None:
    view = memoryview(chunk)
    while view:
        written = os.pwrite(target, view, offset)
        view, offset = view[written:], offset + written
