"""Measures how much space folders take on disk while hostile code may be changing them, and enforces quotas on it.

It counts blocks, not sizes, so that a sparse file counts for what it fills; a hard link counts once. It descends by
descriptor and follows no symlink. Blocking; call `usage` in a thread.

Installers are stopped that need more than is left. A wheel of a few megabytes may unpack to any size and number of
files, and no installer asks first, so the folders that it writes are measured while it runs, in a sandbox or on the
host. The caller says which folders count.
"""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread

from belljar.errors import TooLarge
from belljar.settings import MEBIBYTE

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
_FILE_TOO_LARGE = "(os error 27)"
_SHORTEST_S = 0.05
_REST_PER_LOOK = 5
MAKE_ROOM = "Delete files in the session folder first, with code such as os.remove(name)"


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


# The quota of a session. The host measures the space while the session lives, because no file system can be relied on
# to enforce a quota; what is written between two measurements can exceed the limit. Which cell is stopped, and what its
# caller reads, is decided by the session and the execution.

_NO_LIMIT = 2**62
# The fastest that a cell can write to the page cache: the less space is left, the sooner the next measurement.
FASTEST_BYTES_S = 2_000_000_000
FASTEST_FILES_S = 200_000
MIN_PAUSE_S = 0.05
MAX_BUSY_PAUSE_S = 1.0
MAX_IDLE_PAUSE_S = 5.0
# The pause is at least this many times as long as the measurement, which is slow in a large folder.
PAUSE_PER_MEASUREMENT = 10


class DiskQuota:
    """The disk quota of one session. A limit of 0 means no limit."""

    def __init__(self, folders: Sequence[Path], limit_mb: int) -> None:
        self._folders = folders
        self._limit = limit_mb * MEBIBYTE
        self._files_limit = files_within(limit_mb)
        self._usage = FolderUsage()
        self._is_measured = False

    @property
    def used(self) -> int:
        """Return the bytes used when last measured."""
        return self._usage.size_bytes

    @property
    def is_over(self) -> bool:
        """Return whether the last measurement was over the limit."""
        return self._exceeds(1)

    @property
    def is_far_over(self) -> bool:
        """Return whether the usage is over twice the limit, so that there is no time to wait for an interrupt."""
        return self._exceeds(2)

    def _exceeds(self, times: int) -> bool:
        limits = (self._limit * times, self._files_limit * times)
        return bool(self._limit) and (self.used > limits[0] or self._usage.files > limits[1])

    @property
    def detail(self) -> str:
        """Return the usage and the limit in words."""
        if self._usage.files > self._files_limit and self.used <= self._limit:
            return f"holds {self._usage.files:,} files and folders, the limit is {self._files_limit:,}"
        return f"holds {round(self.used / MEBIBYTE):,} MB, the limit is {self._limit // MEBIBYTE:,} MB"

    @property
    def room_bytes(self) -> int:
        """Return how many bytes were left when last measured."""
        if not self._limit:
            return _NO_LIMIT
        return 0 if self.is_over else self._limit - self.used

    async def measure(self) -> None:
        """Measure the folders now: small ones here, because a thread would cost more than they do."""
        if self._limit:
            self._usage = small_usage(self._folders) or await asyncio.to_thread(usage, self._folders)
            self._is_measured = True

    async def measure_if_over_half(self, seen: FolderUsage, *, is_all: bool = True) -> None:
        """Measure if the usage that a scan has seen is over half of a limit, or if the scan was not complete."""
        is_much = 2 * seen.size_bytes > self._limit or 2 * seen.files > self._files_limit
        if self._limit and (self.is_over or is_much or not is_all):
            await self.measure()

    @asynccontextmanager
    async def room_for(self, size: int) -> AsyncGenerator[None]:
        """Let the block write a file of `size` bytes, or refuse it if it would not fit; one block at a time."""
        async with turn_to_add(self._folders[0]):
            await self.check_room(size)
            yield

    async def check_room(self, size: int) -> None:
        """Refuse a file of `size` bytes that would not fit."""
        await self.measure()
        if self._limit and (self.used + size > self._limit or self._usage.files + 1 > self._files_limit):
            raise TooLarge(
                f"disk_full: the session folder {self.detail}, and {size:,} bytes more do not fit",
                hint=MAKE_ROOM,
            )

    async def watch(self, *, is_busy: Callable[[], bool], on_growth: Callable[[], None]) -> None:
        """Measure until cancelled; call `on_growth` whenever the folder is over its limit and still growing."""
        if not self._limit:
            return
        loop = asyncio.get_running_loop()
        seen: FolderUsage | None = None
        while True:
            began = loop.time()
            # A measurement after a cell counts too: the next cell is not stopped for what that one wrote, unless that
            # is far too much. What was written before the first measurement does not count as growth.
            latest = self._usage if self._is_measured else None
            await self.measure()
            cost_s = loop.time() - began
            is_still = self._usage == seen
            if (self.is_over and self._has_grown(latest)) or (self.is_far_over and self._has_grown(seen)):
                on_growth()
            seen = self._usage
            longest_s = MAX_IDLE_PAUSE_S if is_still and not is_busy() else MAX_BUSY_PAUSE_S
            pause_s = min(longest_s, longest_s if self.is_over and is_still else self._full_in_s())
            await asyncio.sleep(max(MIN_PAUSE_S, pause_s, PAUSE_PER_MEASUREMENT * cost_s))

    def _has_grown(self, before: FolderUsage | None) -> bool:
        return before is not None and (self.used > before.size_bytes or self._usage.files > before.files)

    def _full_in_s(self) -> float:
        """Return the shortest time in which the limit can be reached."""
        files_left = max(0, self._files_limit - self._usage.files)
        return min(max(0, self._limit - self.used) / FASTEST_BYTES_S, files_left / FASTEST_FILES_S)


# The room for packages

# What an installer writes besides the packages while it runs: its cache, pages of the index, its own records.
_BESIDE = FolderUsage(64 * MEBIBYTE, 10_000)
# conda's solver also stores the index of every channel and the packed archives.
_BESIDE_CHANNELS = FolderUsage(768 * MEBIBYTE, 50_000)


class NoRoom(Exception):
    """The packages need more space than is left; the message is for whoever asked for them."""


class InstallRoom:
    """The space that the folders of one session may take. A limit of 0 means no limit."""

    def __init__(self, folders: Sequence[Path], limit_mb: int) -> None:
        self._folders = folders
        self._limit_mb = limit_mb
        self._limit = FolderUsage(limit_mb * MEBIBYTE, files_within(limit_mb))

    @property
    def is_limited(self) -> bool:
        """Tell whether there is a limit at all."""
        return bool(self._limit_mb)

    async def measure_left(self) -> FolderUsage:
        """Measure and return what may be added; zero of both once either limit is reached."""
        used = await to_thread.run_sync(usage, self._folders)
        left = FolderUsage(self._limit.size_bytes - used.size_bytes, self._limit.files - used.files)
        return left if left.size_bytes > 0 and left.files > 0 else FolderUsage()

    async def check_begun(self) -> FolderUsage:
        """Return what is left, or raise `TooLarge` if nothing is."""
        left = await self.measure_left()
        if left == FolderUsage():
            raise TooLarge(
                f"disk_full: nothing is left of disk_mb = {self._limit_mb} for packages",
                hint=MAKE_ROOM,
            )
        return left

    @asynccontextmanager
    async def room_for(self, tree: Path) -> AsyncGenerator[None]:
        """Let the block add a tree of packages, or raise `NoRoom` if it does not fit; one block at a time."""
        if not self.is_limited:
            yield
            return
        async with turn_to_add(self._folders[0]):
            left = await self.measure_left()
            if exceeds(await to_thread.run_sync(usage, [tree]), left):
                raise self.refusal(left)
            yield

    @asynccontextmanager
    async def room_for_file(self, size: int) -> AsyncGenerator[None]:
        """Let the block add a file of `size` bytes, or raise `TooLarge` if it does not fit; one block at a time."""
        if not self.is_limited:
            yield
            return
        async with turn_to_add(self._folders[0]):
            if size > (await self.measure_left()).size_bytes:
                raise TooLarge(
                    f"disk_full: {size:,} bytes more do not fit into disk_mb = {self._limit_mb}",
                    hint=MAKE_ROOM,
                )
            yield

    def refusal(self, left: FolderUsage) -> NoRoom:
        """Return the error for packages that need more than is left."""
        return NoRoom(
            f"the packages need more than what is left of disk_mb = {self._limit_mb}: "
            f"{left.size_bytes // MEBIBYTE:,} MB and {left.files:,} files. "
            "Nothing was installed; delete files in the session folder, or install less"
        )

    async def check_complaint(self, complaint: str) -> None:
        """Raise `NoRoom` if an installer's error message says that it hit the limit on the size of one file."""
        if self.is_limited and _FILE_TOO_LARGE in complaint:
            raise self.refusal(await self.measure_left())

    @asynccontextmanager
    async def holding(self, folders: Callable[[], Sequence[Path]], *, has_channels: bool) -> AsyncGenerator[None]:
        """Cancel the block and raise `NoRoom` when the folders that an installer fills hold more than is left."""
        if not self.is_limited:
            yield
            return
        left = await self.check_begun()
        allowed = left + (_BESIDE_CHANNELS if has_channels else _BESIDE)
        with anyio.CancelScope() as scope:
            watching = asyncio.get_running_loop().create_task(_watch(folders, allowed, scope))
            try:
                yield
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
        if scope.cancelled_caught:
            raise self.refusal(left)


async def _watch(folders: Callable[[], Sequence[Path]], allowed: FolderUsage, scope: anyio.CancelScope) -> None:
    """Measure the folders again and again, and cancel the scope once they hold too much."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        if exceeds(await asyncio.to_thread(lambda: usage(folders())), allowed):
            scope.cancel()
            return
        await asyncio.sleep(max(_SHORTEST_S, _REST_PER_LOOK * (loop.time() - began)))


def largest_file_mb(limit_mb: int) -> int:
    """Return the largest size of one file of an installer, so that one cannot grow far between two measurements."""
    return limit_mb and limit_mb + _BESIDE_CHANNELS.size_bytes // MEBIBYTE


def exceeds(used: FolderUsage, allowed: FolderUsage) -> bool:
    """Tell whether more bytes or more files are used than allowed."""
    return used.size_bytes > allowed.size_bytes or used.files > allowed.files
