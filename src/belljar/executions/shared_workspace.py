"""The folder `workspace/` of a session, which all sessions of its owner share: copied in before a cell, out after it.

It is a copy and not a mount, because sessions have users of their own and five kinds of sandboxes, and are forked,
rewound and hibernated, and none of that may touch the files another session works with. Of two sessions that change
one file the later one wins. Whoever changes the folder holds its lock, so that servers which share a data directory can
share it.
"""

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, FileMissing, InvalidPath, TooLarge
from belljar.file_lock import hold_lock
from belljar.files.names import shown
from belljar.files.private import make_missing, write_file
from belljar.files.workspace import FolderScan, Workspace
from belljar.servers import shared_folder
from belljar.settings import MEBIBYTE, Settings

MAX_FILES = 5_000

Stamp = tuple[int, int, int]
"""mtime_ns, size, inode: a different stamp means different content."""
FOLDER = "workspace"
_PREFIX = f"{FOLDER}/"
_MAX_NAMED = 5

log = logging.getLogger(__name__)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return a file's stamp, without its change time, because that changes with the file's owner too."""
    return (status.st_mtime_ns, status.st_size, status.st_ino)


class WorkspaceFolder:
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
        with hold_lock(self._lock):
            yield

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


class WorkspaceFolders:
    """The folders of all owners. Their names are hashes, so that no owner can choose one."""

    def __init__(self, folder: Path, *, limit_mb: int) -> None:
        self._folder = folder
        self._limit_mb = limit_mb

    def of(self, principal: str) -> WorkspaceFolder:
        """Return the folder of an owner."""
        name = hashlib.sha256(principal.encode(errors="surrogatepass")).hexdigest()[:32]
        return WorkspaceFolder(self._folder / name, limit_bytes=self._limit_mb * MEBIBYTE)


def open_shared_workspaces(settings: Settings) -> WorkspaceFolders | None:
    """Return the owners' folders of a server; None where the setting `workspace` is off."""
    if settings.workspace == "off":
        return None
    folder = Path(settings.workspace_directory or shared_folder(settings.data_directory) / "workspaces")
    return WorkspaceFolders(folder, limit_mb=settings.workspace_mb)


class SharedWorkspace:
    """One session's copy of its owner's folder.

    `stamps_file` is on the host, outside the session's reach. It has the stamps of files that were equal in both.
    """

    def __init__(self, workspace_folder: WorkspaceFolder, workspace: Workspace, stamps_file: Path) -> None:
        self._folder = workspace_folder
        self._workspace = workspace
        self._stamps_file = stamps_file
        self._same = _read_stamps(stamps_file)
        """By name: the file's stamps in the session and in the owner's folder when both had the same content."""
        self._version = -1
        self._is_rewound = False

    def forget(self) -> None:
        """Have the session's copy replaced at the next cell, because a rewind leaves the owner's folder as it is."""
        self._is_rewound = True
        self._version = -1

    async def bring_in(self, room_bytes: int) -> list[str]:
        """Copy in, before a cell, what changed in the owner's folder; return notices for the output."""
        version = self._folder.version()
        if version == self._version:
            return []
        try:
            notices = await asyncio.to_thread(self._bring_in, room_bytes)
        except (BelljarError, OSError) as error:
            return [f"{_PREFIX} could not be brought up to date: {_reason(error)}"]
        self._version = version
        return notices

    async def take_out(self, after: FolderScan) -> list[str]:
        """Copy out, after a cell, what it changed; return notices for the output."""
        if self._is_rewound:
            return []
        here = {
            name.removeprefix(_PREFIX): (mtime, size, inode)
            for name, (mtime, size, inode, _) in after.files.items()
            if name.startswith(_PREFIX)
        }
        changed = [name for name, stamp in here.items() if name not in self._same or self._same[name][0] != stamp]
        # A scan that was not complete does not show which files are missing.
        gone = [name for name in self._same if name not in here] if after.is_complete else []
        if not changed and not gone:
            return []
        try:
            return await asyncio.to_thread(self._take_out, changed, gone)
        except OSError as error:
            return [f"what changed in {_PREFIX} is not kept: {_reason(error)}"]

    # Run in threads

    def _bring_in(self, room_bytes: int) -> list[str]:
        self._workspace.make_folder(FOLDER)
        before = dict(self._same)
        missing: list[str] = []
        with self._folder.locked():
            there = self._folder.files()
            here = {
                name.removeprefix(_PREFIX): stamp_of(status) for name, status in self._workspace.scan((FOLDER,)).found
            }
            for name in [name for name in self._same if name not in there]:
                self._drop(name, here)
            for name, stamp in there.items():
                if not self._is_wanted(name, stamp, here.get(name)):
                    continue
                if stamp[1] > room_bytes:
                    missing.append(f"{shown(name)} (no room for its {stamp[1]:,} bytes in the session)")
                    continue
                self._folder.copy_to(name, self._workspace, _PREFIX + name, room_bytes)
                self._same[name] = (self._stamp_here(name), stamp)
                room_bytes -= stamp[1]
        self._is_rewound = False
        if self._same != before:
            self._write_stamps()
        return _notices("not brought in", missing)

    def _is_wanted(self, name: str, there: Stamp, here: Stamp | None) -> bool:
        """Return whether the owner's file replaces this session's; note the stamps of two that are the same."""
        known = self._same.get(name)
        if here is None or self._is_rewound:
            # A known file that a background process deleted here between cells is deleted from the owner's folder after
            # the next cell, so do not bring it back.
            return known is None or known[1] != there or self._is_rewound
        if known is None:
            if here[:2] == there[:2]:
                self._same[name] = (here, there)  # a fork's copy of the same file
            return there[0] > here[0]
        return known[1] != there and known[0] == here

    def _drop(self, name: str, here: Mapping[str, Stamp]) -> None:
        """Delete a file that another session deleted, unless it was changed here meanwhile."""
        known, _ = self._same.pop(name)
        if here.get(name) == known:
            self._workspace.delete(_PREFIX + name)

    def _take_out(self, changed: list[str], gone: list[str]) -> list[str]:
        unkept: list[str] = []
        with self._folder.locked():
            is_current = self._folder.version() == self._version
            owner_files = self._folder.files()
            # Delete only files that are missing from an existing folder. If `workspace/` itself was deleted or renamed,
            # it is copied in again.
            is_there = self._is_folder()
            for name in gone:
                _, stamp = self._same.pop(name)
                if is_there and owner_files.get(name) == stamp:
                    self._folder.remove(name)
                    del owner_files[name]
            for name in changed:
                try:
                    self._same[name] = self._put(name, owner_files)
                except BelljarError as error:
                    unkept.append(f"{shown(name)} ({_reason(error)})")
            self._version = self._folder.version() if is_current and is_there else -1
        self._write_stamps()
        return _notices("not kept for other sessions", unkept)

    def _is_folder(self) -> bool:
        try:
            self._workspace.scan((FOLDER,), limit=1)
        except FileMissing:
            return False
        return True

    def _put(self, name: str, owner_files: dict[str, Stamp]) -> tuple[Stamp, Stamp]:
        file, status = self._workspace.open_read(_PREFIX + name)
        with file:
            return stamp_of(status), self._folder.put(name, file.fileno(), owner_files)

    def _stamp_here(self, name: str) -> Stamp:
        file, status = self._workspace.open_read(_PREFIX + name)
        file.close()
        return stamp_of(status)

    def _write_stamps(self) -> None:
        try:
            write_file(self._stamps_file, json.dumps(self._same))
        except OSError as error:
            log.warning("what is the same in workspace/ could not be noted: %s", error.strerror)


def _read_stamps(file: Path) -> dict[str, tuple[Stamp, Stamp]]:
    try:
        kept: Any = json.loads(file.read_text("utf-8"))
        return {str(name): (_stamp(here), _stamp(there)) for name, (here, there) in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _stamp(values: Any) -> Stamp:
    mtime, size, inode = values
    return (int(mtime), int(size), int(inode))


def _reason(error: BelljarError | OSError) -> str:
    if isinstance(error, FileMissing | InvalidPath):
        return error.message
    return getattr(error, "message", "") or getattr(error, "strerror", "") or type(error).__name__


def _notices(fact: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{_PREFIX}: {fact}: {', '.join(names[:_MAX_NAMED])}{more}"] if names else []
