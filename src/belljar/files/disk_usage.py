"""Measures how much space folders take on disk while hostile code may be changing them.

It counts blocks, not sizes, so that a sparse file counts for what it fills; a hard link counts once. It descends by
descriptor and follows no symlink. Blocking; call `usage` in a thread.
"""

import asyncio
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ENTRIES = 20_000
_FEW_ENTRIES = 50
_MAX_DEPTH = 32
_BLOCK_BYTES = 512
# Added for each entry, because even one without blocks costs a name and an inode.
_ENTRY_BYTES = 512
_TIMEOUT_S = 60


# ext4 makes one inode for each 16 KB of a disk, so 64 files for each MB; a small limit on bytes still allows 20,000.
_FILES_PER_MB = 64
_FEWEST_FILES = 20_000


@dataclass(frozen=True, slots=True)
class FolderUsage:
    """What folders hold: bytes on disk, and the number of files and folders of any kind."""

    size_bytes: int = 0
    files: int = 0

    def __add__(self, other: "FolderUsage") -> "FolderUsage":
        return FolderUsage(self.size_bytes + other.size_bytes, self.files + other.files)


def files_within(limit_mb: int) -> int:
    """Return how many files and folders go with a limit on bytes, because a disk runs out of inodes too."""
    return max(_FEWEST_FILES, _FILES_PER_MB * limit_mb)


_turns: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()


def turn_to_add(folder: Path) -> asyncio.Lock:
    """Return the lock of a folder with a limit, and of those that count with it.

    Whoever adds to them holds it from the check for room until everything is written: otherwise several callers at once
    would each be given the same room.
    """
    return _turns.setdefault(folder, asyncio.Lock())


class _TooMuch(Exception):
    """The tree is too large or too deep to be walked in Python."""


def usage(folders: Sequence[Path]) -> FolderUsage:
    """Measure all of these folders; 10 µs a folder and 2 µs a file. Large or deep trees are left to `du`."""
    return sum(map(_measure, folders), FolderUsage())


def small_usage(folders: Sequence[Path]) -> FolderUsage | None:
    """Measure folders with hardly a file, which takes 0.1 ms; None if they hold more."""
    walk = _Walk(_FEW_ENTRIES)
    try:
        return FolderUsage(sum(map(walk.measure, folders)), walk.files)
    except _TooMuch:
        return None


def _measure(folder: Path) -> FolderUsage:
    walk = _Walk(_MAX_ENTRIES)
    try:
        return FolderUsage(walk.measure(folder), walk.files)
    except _TooMuch:
        return FolderUsage(_ask_du(folder, "-k") * 1024, _ask_du(folder, "--inodes"))


class _Walk:
    def __init__(self, most_entries: int) -> None:
        self._left = most_entries
        self._links: set[tuple[int, int]] = set()
        self.files = 0

    def measure(self, folder: Path) -> int:
        """Return the bytes of a folder, and count its files."""
        try:
            descriptor = os.open(folder, _DIRECTORY)
        except OSError:
            return 0
        return self._directory(descriptor, 0)

    def _directory(self, descriptor: int, depth: int) -> int:
        """Measure an open folder and close it. One descriptor stays open for each level, hence the limit on depth."""
        try:
            if depth > _MAX_DEPTH:
                raise _TooMuch
            total = 0
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        raise _TooMuch
                    total += self._entry(entry, descriptor, depth)
        except PermissionError:
            return 0
        else:
            return total
        finally:
            os.close(descriptor)

    def _entry(self, entry: "os.DirEntry[str]", parent: int, depth: int) -> int:
        try:
            status = entry.stat(follow_symlinks=False)
            below = os.open(entry.name, _DIRECTORY, dir_fd=parent) if entry.is_dir(follow_symlinks=False) else -1
        except OSError:
            return 0  # gone or changed since it was listed
        own = status.st_blocks * _BLOCK_BYTES + _ENTRY_BYTES
        if below < 0 and status.st_nlink > 1:
            link = (status.st_dev, status.st_ino)
            if link in self._links:
                return 0
            self._links.add(link)
        self.files += 1
        return own if below < 0 else own + self._directory(below, depth + 1)


def _ask_du(folder: Path, unit: str) -> int:
    try:
        output = subprocess.run(
            ["du", "-s", "-x", unit, "--", str(folder)],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        ).stdout
        return int(output.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0
