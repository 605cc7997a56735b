"""Keeps a session's folder on this machine and its files in the pool alike, so that everything else works unchanged.

What callers wrote goes up before a cell, what the cell changed comes down after it. A file is known by its name, size
and time; no content is compared. Names and sizes that the pool tells may be hostile: `Workspace` checks every name, and
nothing is fetched that the session's limit on disk has no room for.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from belljar.azure.pool.routes import MAX_FILES, PoolSession, RemoteFile
from belljar.errors import FileMissing, InvalidPath, PoolUnavailable, TooLarge
from belljar.files.disk_usage import FolderUsage, files_within, usage
from belljar.files.names import shown
from belljar.files.workspace import Workspace
from belljar.settings import MEBIBYTE

AT_ONCE = 8
Item = TypeVar("Item")
_NO_LIMIT = 2**62
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Pair:
    """A file on both sides, as each side showed it when they were last alike."""

    local: tuple[int, int] | None
    """Its size and time here; None while it could not be fetched."""
    remote: tuple[int, str] | None
    """Its size and time in the pool; None while the pool has not listed it."""
    is_coarse: bool = False
    """Whether the pool's time has whole seconds and is new, so that another change may not show in it."""


class FolderMirror:
    """The two sides of one session's files. `limit_mb` of 0 is no limit."""

    def __init__(self, session: PoolSession, workspace: Workspace, scratch: Path, limit_mb: int) -> None:
        self._session = session
        self._workspace = workspace
        self._scratch = scratch
        self._limit_mb = limit_mb
        self._pairs: dict[str, _Pair] = {}

    # Before a cell

    async def push(self) -> list[str]:
        """Bring to the pool what callers wrote or removed here; return notices about what could not be brought."""
        scan = await asyncio.to_thread(self._workspace.scan, (), MAX_FILES)
        present = {name: (status.st_size, status.st_mtime_ns) for name, status in scan.found}
        changed = [name for name, seen in present.items() if self._differs(name, seen)]
        removed = [name for name, pair in self._pairs.items() if pair.local is not None and name not in present]
        notices = await _each(self._push_one, changed)
        if scan.is_complete:
            for name in removed:
                await self._session.delete_file(name)
                del self._pairs[name]
        return _joined("not brought to the pool", [*filter(None, notices)])

    def _differs(self, name: str, seen: tuple[int, int]) -> bool:
        pair = self._pairs.get(name)
        return pair is None or pair.local != seen

    async def _push_one(self, name: str) -> str:
        try:
            name.encode()
            file, status = await asyncio.to_thread(self._workspace.open_read, name)
        except UnicodeEncodeError:
            return f"{shown(os.fsencode(name).decode(errors='replace'))} (its name is not Unicode)"
        except (FileMissing, InvalidPath):
            return ""  # it has gone since, or is no plain file any more
        with file:
            try:
                sent = await self._session.upload(name, file)
            except PoolUnavailable as refusal:
                if "HTTP 413" not in refusal.message:
                    raise
                return f"{shown(name)} ({status.st_size:,} bytes, more than the pool takes)"
        here = (status.st_size, status.st_mtime_ns)
        self._pairs[name] = _Pair(here, (sent.size, sent.modified) if sent else None, _is_coarse(sent))
        return ""

    # After a cell

    async def pull(self) -> list[str]:
        """Bring here what changed in the pool; return notices about what stays there."""
        listed = {file.name: file for file in await self._session.files()}
        wanted = [file for file in listed.values() if self._has_changed(file)]
        gone = [name for name in self._pairs if name not in listed]
        for name in gone:
            await self._remove(name)
        fitting, too_large = await self._fitting(wanted)
        notices = await _each(self._pull_one, fitting)
        return [
            *_joined("left in the pool, because the session's folder has no room for it", too_large),
            *_joined("left in the pool", [*filter(None, notices)]),
        ]

    def _has_changed(self, file: RemoteFile) -> bool:
        pair = self._pairs.get(file.name)
        return pair is None or pair.remote != (file.size, file.modified) or pair.is_coarse

    async def _fitting(self, files: Sequence[RemoteFile]) -> tuple[list[RemoteFile], list[str]]:
        """Return the files that fit into the folder, smallest first, and in words those that do not."""
        if not self._limit_mb:
            return [*files], []
        held: FolderUsage = await asyncio.to_thread(usage, [self._workspace.root])
        room, count = self._limit_mb * MEBIBYTE - held.size_bytes, files_within(self._limit_mb) - held.files
        fitting: list[RemoteFile] = []
        too_large: list[str] = []
        for file in sorted(files, key=lambda each: each.size):
            # Blocks are counted, so that a file may take up to 4 KiB more than its size.
            size = max(0, file.size) + 4096
            if size > room or count <= 0:
                # Known as it is in the pool, so that it is told once and not after every cell.
                self._pairs[file.name] = _Pair(None, (file.size, file.modified))
                too_large.append(f"{shown(file.name)} ({file.size:,} bytes)")
                continue
            room, count = room - size, count - 1
            fitting.append(file)
        return fitting, too_large

    async def _pull_one(self, file: RemoteFile) -> str:
        limit = max(0, file.size) + MEBIBYTE if self._limit_mb else _NO_LIMIT
        try:
            self._workspace.check_name(file.name)
            with tempfile.TemporaryFile(dir=self._scratch) as received:
                if not await self._session.download(file.name, received, limit):  # pyright: ignore[reportArgumentType]
                    return ""  # gone since the list was made
                received.flush()
                _set_time(received.fileno(), file.modified)
                await asyncio.to_thread(self._workspace.write_from, file.name, received.fileno(), limit)
            status = await asyncio.to_thread(self._status, file.name)
        except (InvalidPath, TooLarge, FileMissing) as refusal:
            self._pairs[file.name] = _Pair(None, (file.size, file.modified))
            return f"{shown(file.name)} ({refusal.message})"
        was_coarse = file.name in self._pairs and self._pairs[file.name].remote == (file.size, file.modified)
        self._pairs[file.name] = _Pair(status, (file.size, file.modified), _is_coarse(file) and not was_coarse)
        return ""

    def _status(self, name: str) -> tuple[int, int]:
        file, status = self._workspace.open_read(name)
        file.close()
        return status.st_size, status.st_mtime_ns

    async def _remove(self, name: str) -> None:
        pair = self._pairs.pop(name)
        if pair.local is not None:
            with contextlib.suppress(FileMissing, InvalidPath):
                await asyncio.to_thread(self._workspace.delete, name)


async def _each(work: Callable[[Item], Awaitable[str]], items: Sequence[Item]) -> list[str]:
    """Do the work for each item, a few at once, and return what came of it; the first failure ends all."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def limited(item: Item) -> str:
        async with limit:
            return await work(item)

    tasks = [asyncio.get_running_loop().create_task(limited(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_coarse(file: RemoteFile | None) -> bool:
    return file is not None and "." not in file.modified


def _set_time(descriptor: int, modified: str) -> None:
    """Give a file the time that the pool tells, where that can be read."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        stamp = datetime.fromisoformat(modified).timestamp()
        os.utime(descriptor, (stamp, stamp))


def _joined(fact: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - _MAX_NAMED:,} more" if len(items) > _MAX_NAMED else ""
    return [f"{fact}: {', '.join(items[:_MAX_NAMED])}{more}"]
