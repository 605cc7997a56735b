"""An independent copy of a session folder, made by the host while hostile code may be changing the original.

Symlinks are copied as they are; hard links become files of their own; pipes, sockets and devices are left out and
named. Nothing half-made stays when it fails. Knows nothing of sessions. Blocking; call it in a thread.
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
    opened_file,
    opened_folder,
    remove,
)
from belljar.files.file_types import kind_of
from belljar.files.openat import Owner
from belljar.files.stat_trust import steadily

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Permissions and the sticky bit: what runs with its owner's rights is not ours to hand on.
_KEPT_MODE = 0o1777
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_HINT = "Delete files of the session first"


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy holds, what it lacks, and which files did not hold still; holes do not count as data."""

    files: int
    data_bytes: int
    skipped: tuple[Omission, ...]
    skipped_count: int
    changed: tuple[Omission, ...]


def copy_tree(source: Path, target: Path, *, owner: Owner | None, limit_bytes: int) -> CopyReport:
    """Copy a folder to one that is missing or empty; everything in it belongs to `owner`, or to us.

    `TooLarge` when there is more data than the limit, too deep a tree or no room; then nothing stays of the copy.
    """
    is_made = _make(target)
    copying = _TreeCopy(owner, limit_bytes)
    try:
        with contextlib.ExitStack() as stack:
            try:
                below, status = stack.enter_context(opened_folder(os.fspath(source)))
            except OSError as error:
                raise FileMissing(f"the folder to copy cannot be opened: {error.strerror}") from error
            into, _ = stack.enter_context(opened_folder(os.fspath(target), is_written=True))
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
    """A copy under way."""

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
            self._skipped.count,
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
        """Give a file or folder its owner, mode and time, in the order in which each leaves the others alone."""
        if self._owner is not None:
            os.fchown(descriptor, *self._owner)
        os.fchmod(descriptor, mode & _KEPT_MODE)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))

    def _names(self, source: int) -> list[str]:
        """All at once, so that the listing holds no descriptor while we go further down."""
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
                original, found = stack.enter_context(opened_file(name, source))
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
                below, status = stack.enter_context(opened_folder(name, source))
            os.mkdir(name, 0o700, dir_fd=target)
            into, _ = stack.enter_context(opened_folder(name, target, is_written=True))
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
    """The original cannot be opened; anything that goes wrong later is no reason to leave it out."""

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
        with opened_folder(os.fspath(target), is_written=True) as (descriptor, _):
            for path in target.iterdir():
                remove(descriptor, path.name)
        if is_made:
            target.rmdir()


def _uncopied(error: OSError) -> BelljarError:
    if error.errno in _NO_ROOM:
        return TooLarge(f"the folder cannot be copied: {error.strerror}", hint=_HINT)
    return EngineError(f"the folder cannot be copied: {error.strerror}")


# The content of one file: shared where the file system can, else copied with its holes, or compared.
# Works on open descriptors and at offsets it says itself. Knows nothing of names, modes or folders. Blocking; call it
# in a thread.

_FICLONE = 0x40049409
_CHUNK_BYTES = 1 << 20
# One call of copy_file_range may take this much: it cannot be interrupted by a limit in between.
_STRIDE_BYTES = 64 << 20
_BLOCK_BYTES = 512

# What file systems answer that cannot share or copy by themselves; reading and writing then says what is wrong.
_UNABLE = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY, errno.EBADF}
)


class OverLimit(Exception):
    """The content is larger than was allowed; what was written of it is the caller's to discard."""


def copy_content(source: int, target: int, limit_bytes: int) -> int:
    """Make the empty `target` like `source`, up to its size at the start; returns how many bytes are not holes."""
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
    """Give `target` the content of `source`, in place; False when it had it, and nothing was written.

    Only what differs is written, so that whoever has the file open or mapped sees the content, and never none.
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
    """Whether they hold the same bytes; holes are not read, and reading ends at the first difference."""
    size = os.fstat(one).st_size
    return os.fstat(other).st_size == size and next(_differences(one, other, size), None) is None


def clone(source: int, target: int) -> bool:
    """Let `target` share all blocks of `source` until either is written; False where that cannot be done."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _UNABLE:
            return False
        raise
    return True


def data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data rather than holes, start and end, within its first `size` bytes."""
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
    """Chunks of `source` that `target` does not have, each with its offset; what both have as holes is passed over."""
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
