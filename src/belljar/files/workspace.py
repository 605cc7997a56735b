"""A session folder, read and written by the host while hostile code changes it.

No path is resolved twice: each folder is opened relative to the descriptor of the one before, symlinks are never
followed, and a file's type is read from its descriptor. Hard links are read like any file, because `link` cannot cross
mounts inside a sandbox, so they can only reach the session's own files (`process` isolates nothing anyway). `names.py`
checks paths, `openat.py` opens them. All calls block. Knows no sessions, uploads or surfaces.
"""

import heapq
import itertools
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from belljar.errors import FileMissing, InvalidPath
from belljar.files.file_types import mime_type_of
from belljar.files.names import MAX_DEPTH, UNFINISHED, bad_name, display_name, shown, split
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
from belljar.files.tree_copy import OverLimit, copy_content

# Finding the regular files of the folder, with a limit on the work that holds for any tree

DEFAULT_LIMIT = 10_000
PAGED_LIMIT = 300_000
"""The most entries that are looked at for one page of a listing; more than a session may have by default."""


@dataclass(frozen=True, slots=True)
class Scan:
    """Regular files in the order found: path, with undecodable bytes as surrogates, and status."""

    found: list[tuple[str, os.stat_result]]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Page:
    """One page of files sorted by the name that callers see; `rest` more were seen, and there may be others."""

    found: list[tuple[str, os.stat_result]]
    rest: int
    is_complete: bool


def scan_page(root: str, start: tuple[str, ...], after: str, count: int) -> Page:
    """Return the first `count` regular files below `start`, as `scan` finds them, whose names follow `after`."""
    first = _FirstByName(after, count)
    is_complete = _scan(root, start, PAGED_LIMIT, first)
    return Page(first.files(), first.seen - min(first.seen, count), is_complete)


def scan(root: str, start: tuple[str, ...] = (), limit: int = DEFAULT_LIMIT) -> Scan:
    """Return regular files below `start`, shallow directories first, looking at no more than `limit` entries.

    Left out: symlinks, FIFOs, sockets and devices; `__pycache__` and directories whose name starts with a dot
    (`.cache`, `.config`, `.ipynb_checkpoints`, `.git`, …) unless they are `start`; our own unfinished writes.
    """
    found: list[tuple[str, os.stat_result]] = []
    return Scan(found, is_complete=_scan(root, start, limit, found))


def _scan(root: str, start: tuple[str, ...], limit: int, found: "_Finds") -> bool:
    """Append what is found to `found`; return whether everything was looked at."""
    scanning = _Scanning(limit, deque([start]), found)
    while scanning.pending and scanning.budget > 0:
        parts = scanning.pending.popleft()
        # Each directory is opened anew from the root, so that no tree can make us hold many descriptors. Deep ones
        # cost more of the budget, because a chain of them would otherwise cause far more work than `limit` allows.
        scanning.budget -= len(parts) // 8
        try:
            directory = open_directory(root, parts, "/".join(parts))
        except FileMissing as error:
            if parts == start and parts:
                raise
            scanning.is_cut |= not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
            continue
        try:
            scanning.look_into(directory, parts)
        except OSError:
            scanning.is_cut = True
        finally:
            os.close(directory)
    return not scanning.is_cut and not scanning.pending


class _Finds(Protocol):
    """A collection that the scan appends files to."""

    def append(self, found: tuple[str, os.stat_result], /) -> None: ...


class _FirstByName:
    """Keeps only the first files by name, so that a folder with very many files costs time and no memory."""

    def __init__(self, after: str, count: int) -> None:
        self._after = after
        self._count = count
        self._kept: list[tuple[str, os.stat_result]] = []
        self.seen = 0

    def append(self, found: tuple[str, os.stat_result], /) -> None:
        if display_name(found[0]) > self._after:
            self.seen += 1
            self._kept.append(found)
            if len(self._kept) > 4 * self._count:
                self._kept = self.files()

    def files(self) -> list[tuple[str, os.stat_result]]:
        return heapq.nsmallest(self._count, self._kept, key=lambda found: display_name(found[0]))


@dataclass(slots=True)
class _Scanning:
    """The state of a scan: the budget left, the directories to look into, and what was found."""

    budget: int
    pending: deque[tuple[str, ...]]
    found: _Finds
    is_cut: bool = False

    def look_into(self, directory: int, parts: tuple[str, ...]) -> None:
        prefix = "/".join((*parts, ""))
        # Local variables, because this loop runs before and after every execution: 3 µs a file instead of 3.6.
        budget, found = self.budget, self.found
        with os.scandir(directory) as entries:
            try:
                for entry in entries:
                    if budget <= 0:
                        self.is_cut = True
                        break
                    budget -= 1
                    if entry.is_file(follow_symlinks=False):
                        # The type in the directory entry may be older than the status, so only the status counts.
                        status = _status(entry)
                        if status is not None and stat.S_ISREG(status.st_mode):
                            found.append((prefix + entry.name, status))
                    elif entry.is_dir(follow_symlinks=False):
                        self._look_later(parts, entry.name)
            finally:
                self.budget = budget

    def _look_later(self, parts: tuple[str, ...], name: str) -> None:
        if name.startswith(".") or name == "__pycache__":
            return
        # A file one level further down would have a name that `check_name` refuses.
        if len(parts) + 2 > MAX_DEPTH:
            self.is_cut = True
        else:
            self.pending.append((*parts, name))


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    if entry.name.startswith(UNFINISHED):
        return None
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file; `name` is its path in the session folder."""

    name: str
    size: int
    mtime_ns: int
    mime_type: str


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A folder; `name` is its path in the session folder."""

    name: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FolderListing:
    """What is right in one folder; `next_after` is the name to go on after, None where there is no more."""

    files: tuple[FileEntry, ...]
    folders: tuple[FolderEntry, ...]
    next_after: str | None


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

    def rename(self, name: str, to: str) -> None:
        """Give a regular file another name, in a folder that is there or is made; never over what has that name."""
        parts, wanted = self.check_name(name), self.check_name(to)
        file, _ = self.open_read(name)
        file.close()
        source = open_directory(self._root, parts[:-1], name)
        try:
            target = make_directory(self._root, wanted[:-1], to, self._owner, self._folder_mode)
            try:
                # A second name and then one less: a rename would replace what a cell has put there meanwhile.
                os.link(parts[-1], wanted[-1], src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                os.unlink(parts[-1], dir_fd=source)
            except FileExistsError as error:
                raise InvalidPath(f"{shown(to)} is there already", hint="Choose another name") from error
            except OSError as error:
                raise unreachable(name, "renamed", error) from error
            finally:
                os.close(target)
        finally:
            os.close(source)

    def list(self, path: str = "", limit: int = DEFAULT_LIMIT) -> Listing:
        """List the regular files under `path`; see `scan` for what is left out. A missing session folder is empty."""
        seen = self.scan(split(path, self._root), limit)
        entries = sorted(map(_entry, seen.found), key=lambda entry: entry.name)
        return Listing(tuple(entries), seen.is_complete)

    def list_page(self, path: str, after: str, count: int) -> Listing:
        """List the first `count` regular files under `path`, sorted by name, whose names follow `after`."""
        page = scan_page(self._root, split(path, self._root), after, count)
        return Listing(tuple(map(_entry, page.found)), page.is_complete, page.rest)

    def look_at(self, name: str) -> FileEntry:
        """Return the entry of one regular file."""
        file, status = self.open_read(name)
        file.close()
        return _entry(("/".join(self.check_name(name)), status))

    def list_folder(self, path: str, after: str, count: int) -> FolderListing:
        """List the first `count` files and folders right in `path`, by name, whose names follow `after`.

        Left out is what `scan` leaves out.
        """
        parts = split(path, self._root)
        found: list[tuple[str, os.stat_result]] = []
        directory = open_directory(self._root, parts, path)
        try:
            with os.scandir(directory) as entries:
                for entry in itertools.islice(entries, PAGED_LIMIT):
                    status = _status(entry)
                    if status is not None and _is_listed(entry.name, status) and display_name(entry.name) > after:
                        found.append((entry.name, status))
        finally:
            os.close(directory)
        first = heapq.nsmallest(count, found, key=lambda each: display_name(each[0]))
        prefix = "/".join((*parts, ""))
        files = [_entry((prefix + name, status)) for name, status in first if stat.S_ISREG(status.st_mode)]
        folders = [
            FolderEntry(display_name(prefix + name), status.st_mtime_ns)
            for name, status in first
            if stat.S_ISDIR(status.st_mode)
        ]
        last = display_name(first[-1][0]) if len(found) > len(first) else None
        return FolderListing(tuple(files), tuple(folders), last)

    def scan(self, start: tuple[str, ...] = (), limit: int = DEFAULT_LIMIT) -> Scan:
        """Find the regular files below `start`; see `scan.scan`."""
        return scan(self._root, start, limit)


def _is_listed(name: str, status: os.stat_result) -> bool:
    if stat.S_ISDIR(status.st_mode):
        return not name.startswith(".") and name != "__pycache__"
    return stat.S_ISREG(status.st_mode)


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
class FolderScan:
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


def scan_folder(workspace: Workspace, limit: int = DEFAULT_LIMIT) -> FolderScan:
    """Record the present files; blocks for about 50 µs for ten files, and looks at no more than `limit` entries."""
    taken_ns = time.time_ns()
    scan = workspace.scan(limit=limit)
    files = {
        name: (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns) for name, status in scan.found
    }
    return FolderScan(files, scan.is_complete, taken_ns)


def changes(before: FolderScan, after: FolderScan) -> list[FileChange]:
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
