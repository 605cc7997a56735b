"""A session folder, read and written by the host while hostile code changes it.

Nothing here trusts a path twice: each step is opened relative to the descriptor of the one before, symlinks are never
followed, and what a descriptor is gets asked of the descriptor. Hard links are read like any file: inside a sandbox
`link` cannot cross mounts, so they can only reach the session's own files (`process` isolates nothing anyway).
Blocking calls throughout; knows nothing of sessions, uploads or surfaces.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from belljar.errors import BelljarError, FileMissing, InvalidPath, TooLarge, UsageError
from belljar.files.mime import is_text, mime_type_of
from belljar.files.reflink import OverLimit, copy_content

__all__ = ["FileEntry", "Listing", "Workspace", "display_name", "is_text", "mime_type_of"]

SANDBOX_ROOT = "/mnt/data"
"""Where code inside a sandbox sees the folder; callers may say it."""

MAX_DEPTH = 64
MAX_COMPONENT_BYTES = 255
DEFAULT_LIMIT = 10_000

_RELATIVE_HINT = "Use a path relative to the session folder, such as 'data/table.csv'"
_UNFINISHED = ".belljar-unfinished-"
_CHUNK_BYTES = 1 << 20
_SHOWN_CHARACTERS = 120

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer that never comes.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Owner = tuple[int, int]
"""uid and gid."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file; `name` is its path in the session folder."""

    name: str
    size: int
    mtime_ns: int
    mime_type: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Files sorted by name; not complete when a limit or an unreadable directory cut it short."""

    entries: tuple[FileEntry, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Scan:
    """Regular files as found: path with undecodable bytes as surrogates, and status."""

    found: list[tuple[str, os.stat_result]]
    is_complete: bool


class Workspace:
    """See the module's docstring. What is written through it belongs to `owner`, or to us."""

    def __init__(self, root: Path, owner: Owner | None = None) -> None:
        self.root = root
        self._owner = owner
        self._root = os.fspath(root)

    def check_name(self, name: str) -> tuple[str, ...]:
        """The components of a caller's path to a file, or `InvalidPath`."""
        parts = self._split(name)
        if not parts:
            raise _bad_name(name, "names no file")
        return parts

    def open_read(self, name: str) -> tuple[BinaryIO, os.stat_result]:
        """Open a regular file; the caller closes it. Its status is the descriptor's, so it is this file's."""
        parts = self.check_name(name)
        directory = self._open_directory(parts[:-1], name, FileMissing)
        try:
            return _open_regular(directory, parts[-1], name)
        finally:
            os.close(directory)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """The whole content, or `TooLarge`; a file that grows meanwhile is read to the limit at most."""
        file, status = self.open_read(name)
        with file:
            if status.st_size > limit_bytes:
                raise _too_large(name, f"{status.st_size}", limit_bytes)
            content = bytearray()
            while chunk := file.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(content))):
                content += chunk
        if len(content) > limit_bytes:
            raise _too_large(name, f"more than {limit_bytes}", limit_bytes)
        return bytes(content)

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file in one step, missing directories included; a symlink is replaced, not followed."""
        self._replace(name, lambda file: _write(file, data), len(data))

    def write_from(self, name: str, source: int, limit_bytes: int) -> None:
        """Like `write`, with the content and the time of an open file; `TooLarge` when it has more data than that."""
        status = os.fstat(source)

        def fill(file: int) -> None:
            copy_content(source, file, limit_bytes)
            os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))

        try:
            self._replace(name, fill, status.st_size)
        except OverLimit:
            raise _too_large(name, f"{status.st_size}", limit_bytes) from None

    def make_folder(self, name: str) -> None:
        """Make a folder where there is none; what else has its name is in the way."""
        os.close(self._open_directory(self.check_name(name), name, InvalidPath, make=True))

    def _replace(self, name: str, fill: Callable[[int], None], size: int) -> None:
        parts = self.check_name(name)
        directory = self._open_directory(parts[:-1], name, InvalidPath, make=True)
        unfinished = _UNFINISHED + secrets.token_hex(8)
        try:
            _create(directory, unfinished, fill, self._owner)
            try:
                os.rename(unfinished, parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                _discard(directory, unfinished)
                raise
        except OSError as error:
            raise _unwritable(name, size, error) from error
        finally:
            os.close(directory)

    def create(self, name: str, data: bytes) -> None:
        """Create a file, missing directories included; `FileExistsError` when anything has that name."""
        parts = self.check_name(name)
        directory = self._open_directory(parts[:-1], name, InvalidPath, make=True)
        try:
            _create(directory, parts[-1], lambda file: _write(file, data), self._owner)
        except FileExistsError:
            raise
        except OSError as error:
            raise _unwritable(name, len(data), error) from error
        finally:
            os.close(directory)

    def delete(self, name: str) -> None:
        """Remove whatever has that name except a directory; of a symlink, the link."""
        parts = self.check_name(name)
        directory = self._open_directory(parts[:-1], name, FileMissing)
        try:
            found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise FileMissing(f"{shown(name)} is a directory, not a file", hint="Name one file")
            os.unlink(parts[-1], dir_fd=directory)
        except OSError as error:
            raise _unreachable(name, "removed", error) from error
        finally:
            os.close(directory)

    def list(self, path: str = "", limit: int = DEFAULT_LIMIT) -> Listing:
        """Every regular file under `path`; see `scan` for what is left out. A missing session folder is empty."""
        scan = self.scan(self._split(path), limit)
        entries = [
            FileEntry(name := display_name(raw), status.st_size, status.st_mtime_ns, mime_type_of(name))
            for raw, status in scan.found
        ]
        entries.sort(key=lambda entry: entry.name)
        return Listing(tuple(entries), scan.is_complete)

    def scan(self, start: tuple[str, ...] = (), limit: int = DEFAULT_LIMIT) -> Scan:
        """Regular files below `start`, shallow directories first, after looking at no more than `limit` entries.

        Left out: symlinks, FIFOs, sockets and devices; `__pycache__` and directories whose name starts with a dot
        (`.cache`, `.config`, `.ipynb_checkpoints`, `.git`, …) unless they are `start`; our own unfinished writes.
        """
        scanning = _Scanning(limit, deque([start]))
        while scanning.pending and scanning.budget > 0:
            parts = scanning.pending.popleft()
            # Each directory is opened anew from the root, so that no tree can make us hold many descriptors: deep
            # ones cost more of the budget, or a chain of them would buy far more work than `limit` says.
            scanning.budget -= len(parts) // 8
            try:
                directory = self._open_directory(parts, "/".join(parts), FileMissing)
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
        return Scan(scanning.found, is_complete=not scanning.is_cut and not scanning.pending)

    def _split(self, path: str) -> tuple[str, ...]:
        try:
            encoded = path.encode()
        except UnicodeEncodeError as error:
            raise _bad_name(path, "is not valid Unicode") from error
        if b"\0" in encoded:
            raise _bad_name(path, "contains a NUL character")
        parts = tuple(part for part in self._relative(path).split("/") if part not in ("", "."))
        if ".." in parts:
            raise _bad_name(path, "contains '..'")
        if len(parts) > MAX_DEPTH:
            raise _bad_name(path, f"is {len(parts)} levels deep, and the limit is {MAX_DEPTH}")
        if any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts):
            raise _bad_name(path, f"has a component longer than {MAX_COMPONENT_BYTES} bytes")
        return parts

    def _relative(self, path: str) -> str:
        if not path.startswith("/"):
            return path
        # Where nothing is mounted over it, code sees the folder under its host path and reports that.
        for prefix in (SANDBOX_ROOT, self._root):
            if path == prefix or path.startswith(prefix + "/"):
                return path[len(prefix) :]
        raise _bad_name(path, "is an absolute path outside the session folder")

    def _open_directory(
        self,
        parts: tuple[str, ...],
        name: str,
        refusal: type[UsageError],
        *,
        make: bool = False,
    ) -> int:
        """A descriptor of the directory; `refusal` is raised when something else is in the way."""
        try:
            directory = os.open(self._root, _DIRECTORY)
        except OSError as error:
            raise refusal(f"the session folder cannot be opened: {error.strerror}") from error
        for index, part in enumerate(parts):
            try:
                below = _enter(directory, part, self._owner) if make else os.open(part, _DIRECTORY, dir_fd=directory)
            except OSError as error:
                reached = "/".join(parts[: index + 1])
                raise refusal(_in_the_way(directory, part, reached, name, error)) from error
            finally:
                os.close(directory)
            directory = below
        return directory


@dataclass(slots=True)
class _Scanning:
    """A scan under way."""

    budget: int
    pending: deque[tuple[str, ...]]
    found: list[tuple[str, os.stat_result]] = field(default_factory=list[tuple[str, os.stat_result]])
    is_cut: bool = False

    def look_into(self, directory: int, parts: tuple[str, ...]) -> None:
        prefix = "/".join((*parts, ""))
        # Locals, because this loop runs before and after every execution: 3 µs a file instead of 3.6.
        budget, found = self.budget, self.found
        with os.scandir(directory) as entries:
            try:
                for entry in entries:
                    if budget <= 0:
                        self.is_cut = True
                        break
                    budget -= 1
                    if entry.is_file(follow_symlinks=False):
                        # The type in the directory entry may be older than the status: only the status counts.
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
    if entry.name.startswith(_UNFINISHED):
        return None
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def display_name(raw: str) -> str:
    """A path as callers may see it: valid Unicode, bytes that are none replaced."""
    return raw if raw.isascii() else os.fsencode(raw).decode(errors="replace")


def shown(name: str) -> str:
    """A caller's value in an error message, at a length that can be read."""
    return repr(name) if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]!r}…"


def _bad_name(name: str, reason: str) -> InvalidPath:
    return InvalidPath(f"the path {shown(name)} {reason}", hint=_RELATIVE_HINT)


def _open_regular(directory: int, leaf: str, name: str) -> tuple[BinaryIO, os.stat_result]:
    try:
        # Opening a device can have effects of its own, hence a look before as well as after.
        _demand_regular(os.stat(leaf, dir_fd=directory, follow_symlinks=False), name)
        descriptor = os.open(leaf, _READ, dir_fd=directory)
    except OSError as error:
        raise _unreachable(name, "read", error) from error
    try:
        status = os.fstat(descriptor)
        _demand_regular(status, name)
        return os.fdopen(descriptor, "rb"), status
    except BaseException:
        os.close(descriptor)
        raise


def _demand_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileMissing(
            f"{shown(name)} is a {_kind(status.st_mode)}, not a regular file",
            hint="Name a regular file; symlinks are not followed, so name their target",
        )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "named pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "character device",
        stat.S_IFBLK: "block device",
        stat.S_IFREG: "regular file",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


def _enter(directory: int, part: str, owner: Owner | None) -> int:
    """Open a directory below, making it if nothing has its name."""
    try:
        return os.open(part, _DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        # Another upload may make it first; whatever it then is, opening it decides.
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o755, dir_fd=directory)
    below = os.open(part, _DIRECTORY, dir_fd=directory)
    try:
        if owner is not None:
            os.fchown(below, *owner)
    except OSError:
        os.close(below)
        raise
    return below


def _in_the_way(directory: int, part: str, reached: str, name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{shown(name)} does not exist: there is no {shown(reached)}"
    try:
        found = os.stat(part, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return f"{shown(name)} cannot be reached: {error.strerror}"
    if stat.S_ISDIR(found.st_mode):
        return f"{shown(name)} cannot be reached: {shown(reached)}: {error.strerror}"
    return f"{shown(name)} cannot be reached: {shown(reached)} is a {_kind(found.st_mode)}, not a directory"


def _create(directory: int, leaf: str, fill: Callable[[int], None], owner: Owner | None) -> None:
    """Make a new file and fill it; nothing of it stays when that fails."""
    descriptor = os.open(leaf, _CREATE, 0o600, dir_fd=directory)
    try:
        try:
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, 0o644)
            fill(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        _discard(directory, leaf)
        raise


def _write(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)


def _discard(directory: int, leaf: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(leaf, dir_fd=directory)


def _unreachable(name: str, action: str, error: OSError) -> FileMissing:
    if isinstance(error, FileNotFoundError):
        return FileMissing(f"{shown(name)} does not exist", hint="List the session's files to see their names")
    if error.errno == errno.ELOOP:
        return FileMissing(f"{shown(name)} is a symlink, not a regular file", hint="Name its target")
    return FileMissing(f"{shown(name)} cannot be {action}: {error.strerror}", hint="Let code in the session mend it")


def _unwritable(name: str, size: int, error: OSError) -> BelljarError:
    if error.errno in _NO_ROOM:
        return TooLarge(f"no room for the {size} bytes of {shown(name)}", hint="Delete files of the session first")
    if isinstance(error, IsADirectoryError):
        return InvalidPath(f"{shown(name)} is a directory", hint="Choose another name")
    return InvalidPath(f"{shown(name)} cannot be written: {error.strerror}", hint="Choose another name")


def _too_large(name: str, size: str, limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"{shown(name)} is {size} bytes, and the limit is {limit_bytes}",
        hint="Let code in the session read the part that is needed, or write a smaller file",
    )
