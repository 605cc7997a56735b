"""The content of one file: shared where the file system can, else copied with its holes, or compared.

Works on open descriptors and at offsets it says itself. Knows nothing of names,
modes or folders. Blocking; call it in a thread.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from heapq import merge

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
