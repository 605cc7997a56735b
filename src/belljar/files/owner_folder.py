"""Files of one owner that outlive sessions, in a folder of the host's own that no sandbox ever sees.

Sessions have copies of them. Whoever changes the shelf has its lock, so that servers which share a data directory can
share shelves. Knows nothing of sessions or owners. Blocking; call it in a thread.
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

MOST_FILES = 5_000

Stamp = tuple[int, int, int]
"""mtime_ns, size, inode: another one is another content."""


def stamp_of(status: os.stat_result) -> Stamp:
    """A file's stamp. Without its change time, which a new owner changes too."""
    return (status.st_mtime_ns, status.st_size, status.st_ino)


class OwnerFolder:
    """One owner's."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = folder / "lock"
        self._content = folder / "files"
        self._files = Workspace(self._content, is_private=True)

    def version(self) -> int:
        """Another number whenever something has changed; 0 for a shelf that never held anything."""
        try:
            return self._lock.stat().st_mtime_ns
        except OSError:
            return 0

    @contextmanager
    def locked(self) -> Generator[None]:
        """While nobody else changes anything."""
        make_missing(self._content)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def files(self) -> dict[str, Stamp]:
        """What is on it."""
        return {name: stamp_of(status) for name, status in self._files.scan(limit=4 * MOST_FILES).found}

    def put(self, name: str, source: int, held: dict[str, Stamp]) -> Stamp:
        """Take in a copy of an open file; `TooLarge` when there is no room for it. Needs the lock.

        `held` is what `files` said since the lock was had, and is kept up to date.
        """
        others = [stamp for other, stamp in held.items() if other != name]
        room = self.limit_bytes - sum(size for _, size, _ in others)
        size = os.fstat(source).st_size
        if size > room:
            raise TooLarge(f"{size:,} bytes, and {max(room, 0):,} of {self.limit_bytes:,} are free")
        if len(others) >= MOST_FILES:
            raise TooLarge(f"there are {MOST_FILES:,} files already")
        self._files.write_from(name, source, room)
        self._note()
        held[name] = self.stamp(name)
        return held[name]

    def copy_to(self, name: str, target: Workspace, as_name: str, limit_bytes: int) -> Stamp:
        """Copy a file into another folder; returns the stamp of what was copied."""
        file, status = self._files.open_read(name)
        with file:
            target.write_from(as_name, file.fileno(), limit_bytes)
        return stamp_of(status)

    def remove(self, name: str) -> None:
        """Take a file off. Needs the lock."""
        self._files.delete(name)
        self._note()

    def stamp(self, name: str) -> Stamp:
        """That of one file."""
        file, status = self._files.open_read(name)
        file.close()
        return stamp_of(status)

    def _note(self) -> None:
        # Never the same twice, though the clock may stand still between two changes.
        now = max(time.time_ns(), self.version() + 1)
        os.utime(self._lock, ns=(now, now))
