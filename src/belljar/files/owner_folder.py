"""Files of one owner that outlive sessions, in a folder of the host that no sandbox ever sees.

Sessions have copies of them. Whoever changes the folder holds its lock, so that servers which share a data directory
can share it. This module knows nothing of sessions or owners. Blocking; call it in a thread.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from belljar.errors import TooLarge
from belljar.files.private import make_missing
from belljar.files.workspace import Workspace

MAX_FILES = 5_000

Stamp = tuple[int, int, int]
"""mtime_ns, size, inode: a different stamp means different content."""


def stamp_of(status: os.stat_result) -> Stamp:
    """Return a file's stamp, without its change time, because that changes with the file's owner too."""
    return (status.st_mtime_ns, status.st_size, status.st_ino)


class OwnerFolder:
    """The kept files of one owner."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = folder / "lock"
        self._content = folder / "files"
        self._files = Workspace(self._content, is_private=True)

    def version(self) -> int:
        """Return a number that changes whenever a file changes; 0 for a folder that was never used."""
        try:
            return self._lock.stat().st_mtime_ns
        except OSError:
            return 0

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock, so that nobody else changes anything; blocks until it is free."""
        make_missing(self._content)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def files(self) -> dict[str, Stamp]:
        """Return the stamps of all files by name."""
        return {name: stamp_of(status) for name, status in self._files.scan(limit=4 * MAX_FILES).found}

    def put(self, name: str, source: int, held: dict[str, Stamp]) -> Stamp:
        """Store a copy of an open file; `TooLarge` if there is no space for it. The caller holds the lock.

        `held` is the result of `files` since the lock was taken, and is updated here.
        """
        others = [stamp for other, stamp in held.items() if other != name]
        room = self.limit_bytes - sum(size for _, size, _ in others)
        size = os.fstat(source).st_size
        if size > room:
            raise TooLarge(f"{size:,} bytes, and {max(room, 0):,} of {self.limit_bytes:,} are free")
        if len(others) >= MAX_FILES:
            raise TooLarge(f"there are {MAX_FILES:,} files already")
        self._files.write_from(name, source, room)
        self._bump_version()
        held[name] = self.stamp(name)
        return held[name]

    def copy_to(self, name: str, target: Workspace, as_name: str, limit_bytes: int) -> Stamp:
        """Copy a file into another folder; return the stamp of what was copied."""
        file, status = self._files.open_read(name)
        with file:
            target.write_from(as_name, file.fileno(), limit_bytes)
        return stamp_of(status)

    def remove(self, name: str) -> None:
        """Remove a file. The caller holds the lock."""
        self._files.delete(name)
        self._bump_version()

    def stamp(self, name: str) -> Stamp:
        """Return the stamp of one file."""
        file, status = self._files.open_read(name)
        file.close()
        return stamp_of(status)

    def _bump_version(self) -> None:
        # Always a new version, even if the clock does not advance between two changes.
        now = max(time.time_ns(), self.version() + 1)
        os.utime(self._lock, ns=(now, now))
