"""A session folder, read and written by the host while hostile code changes it.

No path is resolved twice: each folder is opened relative to the descriptor of the one before, symlinks are never
followed, and a file's type is read from its descriptor. Hard links are read like any file, because `link` cannot cross
mounts inside a sandbox, so they can only reach the session's own files (`process` isolates nothing anyway). `names.py`
checks paths, `openat.py` opens them, `scan.py` lists files. All calls block. Knows no sessions, uploads or surfaces.
"""

import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from belljar.errors import FileMissing
from belljar.files.file_types import mime_type_of
from belljar.files.names import UNFINISHED, bad_name, display_name, shown, split
from belljar.files.openat import (
    Owner,
    create,
    discard,
    make_directory,
    open_directory,
    open_regular,
    too_large,
    unreachable,
    unwritable,
)
from belljar.files.private import FILE_MODE, FOLDER_MODE
from belljar.files.scan import DEFAULT_LIMIT, Scan, scan, scan_page
from belljar.files.tree_copy import OverLimit, copy_content

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file; `name` is its path in the session folder."""

    name: str
    size: int
    mtime_ns: int
    mime_type: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Files sorted by name; not complete if a limit was reached or a directory could not be read."""

    entries: tuple[FileEntry, ...]
    is_complete: bool
    rest: int = 0
    """How many more were seen that the page does not hold."""


class Workspace:
    """A session folder. What is written through it belongs to `owner`, or to us; if private, only we can access it."""

    def __init__(self, root: Path, owner: Owner | None = None, *, is_private: bool = False) -> None:
        self.root = root
        self._owner = owner
        self._folder_mode, self._file_mode = (FOLDER_MODE, FILE_MODE) if is_private else (0o755, 0o644)
        self._root = os.fspath(root)

    def check_name(self, name: str) -> tuple[str, ...]:
        """Return the components of a caller's path to a file, or raise `InvalidPath`."""
        parts = split(name, self._root)
        if not parts:
            raise bad_name(name, "names no file")
        return parts

    def open_read(self, name: str) -> tuple[BinaryIO, os.stat_result]:
        """Open a regular file, which the caller closes; return it with the status of its descriptor."""
        parts = self.check_name(name)
        directory = open_directory(self._root, parts[:-1], name)
        try:
            return open_regular(directory, parts[-1], name)
        finally:
            os.close(directory)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return the whole content, or raise `TooLarge`; a file that grows meanwhile is read to the limit at most."""
        file, status = self.open_read(name)
        with file:
            if status.st_size > limit_bytes:
                raise too_large(name, f"{status.st_size}", limit_bytes)
            content = bytearray()
            while chunk := file.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(content))):
                content += chunk
        if len(content) > limit_bytes:
            raise too_large(name, f"more than {limit_bytes}", limit_bytes)
        return bytes(content)

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file in one step, missing directories included; a symlink is replaced, not followed."""
        self._replace(name, lambda file: _write(file, data), len(data))

    def write_from(self, name: str, source: int, limit_bytes: int) -> None:
        """Write a file with the content and the time of an open one; `TooLarge` if it has more data than the limit."""
        status = os.fstat(source)

        def fill(file: int) -> None:
            copy_content(source, file, limit_bytes)
            os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))

        try:
            self._replace(name, fill, status.st_size)
        except OverLimit:
            raise too_large(name, f"{status.st_size}", limit_bytes) from None

    def make_folder(self, name: str) -> None:
        """Make a folder unless it exists; raise `InvalidPath` if something else has its name."""
        os.close(make_directory(self._root, self.check_name(name), name, self._owner, self._folder_mode))

    def _replace(self, name: str, fill: Callable[[int], None], size: int) -> None:
        parts = self.check_name(name)
        directory = make_directory(self._root, parts[:-1], name, self._owner, self._folder_mode)
        unfinished = UNFINISHED + secrets.token_hex(8)
        try:
            create(directory, unfinished, fill, self._owner, self._file_mode)
            try:
                os.rename(unfinished, parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                discard(directory, unfinished)
                raise
        except OSError as error:
            raise unwritable(name, size, error) from error
        finally:
            os.close(directory)

    def create(self, name: str, data: bytes) -> None:
        """Create a file, missing directories included; raise `FileExistsError` if anything has that name."""
        parts = self.check_name(name)
        directory = make_directory(self._root, parts[:-1], name, self._owner, self._folder_mode)
        try:
            create(directory, parts[-1], lambda file: _write(file, data), self._owner, self._file_mode)
        except FileExistsError:
            raise
        except OSError as error:
            raise unwritable(name, len(data), error) from error
        finally:
            os.close(directory)

    def delete(self, name: str) -> None:
        """Remove whatever has that name, except a directory; a symlink itself, not its target."""
        parts = self.check_name(name)
        directory = open_directory(self._root, parts[:-1], name)
        try:
            found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise FileMissing(f"{shown(name)} is a directory, not a file", hint="Name one file")
            os.unlink(parts[-1], dir_fd=directory)
        except OSError as error:
            raise unreachable(name, "removed", error) from error
        finally:
            os.close(directory)

    def list(self, path: str = "", limit: int = DEFAULT_LIMIT) -> Listing:
        """List the regular files under `path`; see `scan` for what is left out. A missing session folder is empty."""
        seen = self.scan(split(path, self._root), limit)
        entries = sorted(map(_entry, seen.found), key=lambda entry: entry.name)
        return Listing(tuple(entries), seen.is_complete)

    def list_page(self, path: str, after: str, count: int) -> Listing:
        """List the first `count` regular files under `path`, sorted by name, whose names follow `after`."""
        page = scan_page(self._root, split(path, self._root), after, count)
        return Listing(tuple(map(_entry, page.found)), page.is_complete, page.rest)

    def scan(self, start: tuple[str, ...] = (), limit: int = DEFAULT_LIMIT) -> Scan:
        """Find the regular files below `start`; see `scan.scan`."""
        return scan(self._root, start, limit)


def _entry(found: tuple[str, os.stat_result]) -> FileEntry:
    raw, status = found
    return FileEntry(name := display_name(raw), status.st_size, status.st_mtime_ns, mime_type_of(name))


def _write(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)


# Which files an execution created or changed: two snapshots of the folder are compared.
#
# A snapshot is taken before and after every execution, so it has names and status only, and no content is read. An
# overwrite that keeps the size and restores the modification time still shows in the change time, and so does a change
# of mode. Deleted files are not reported.

Fingerprint = tuple[int, int, int, int]
"""mtime_ns, size, inode, ctime_ns."""

# Linux stamps files with the time of its last clock tick, up to 10 ms behind the clock.
_TICK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The regular files at one moment; not complete if the limit was reached."""

    files: dict[str, Fingerprint]
    is_complete: bool
    taken_ns: int


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that is new or changed; `name` is its path in the session folder."""

    name: str
    size: int
    mime_type: str
    change: Literal["created", "modified"]


def snapshot(workspace: Workspace, limit: int = DEFAULT_LIMIT) -> Snapshot:
    """Record the present files; blocks for about 50 µs for ten files, and looks at no more than `limit` entries."""
    taken_ns = time.time_ns()
    scan = workspace.scan(limit=limit)
    files = {
        name: (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns) for name, status in scan.found
    }
    return Snapshot(files, scan.is_complete, taken_ns)


def changes(before: Snapshot, after: Snapshot) -> list[FileChange]:
    """Return what differs, sorted by name. If `before` is incomplete, unknown files count only if changed since."""
    changed: list[FileChange] = []
    for raw, fingerprint in after.files.items():
        known = before.files.get(raw)
        if known == fingerprint:
            continue
        if known is None and not before.is_complete and fingerprint[3] < before.taken_ns - _TICK_NS:
            continue
        name = display_name(raw)
        changed.append(FileChange(name, fingerprint[1], mime_type_of(name), "modified" if known else "created"))
    changed.sort(key=lambda change: change.name)
    return changed
