"""A session's folder, as executions see it: the files that a cell changed, and the disk space that a session may use.

Changes are found by scans before and after the cell. The host measures the space while the session lives, because no
file system can be relied on to enforce a quota; what is written between two measurements can exceed the limit. The
session and the execution decide which cell is stopped and what its caller reads. Knows nothing of kernels.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from belljar.errors import TooLarge
from belljar.executions.shared_workspace import SharedWorkspace
from belljar.files.disk_usage import FolderUsage, files_within, small_usage, turn_to_add, usage
from belljar.files.file_types import mime_type_of
from belljar.files.workspace import FolderScan, Workspace, changes, scan_folder
from belljar.models import FileReference
from belljar.settings import MEBIBYTE

SMALL_FOLDER = 100
LISTED_CHARS = 100_000
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
                hint="Delete files in the session folder first, with code such as os.remove(name)",
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


# Changed files


def file_uri(session_id: str, name: str) -> str:
    """Return the resource URI of a file in a session's folder."""
    return f"kernel://{session_id}/{quote(name)}"


def file_reference(session_id: str, name: str, size: int) -> FileReference:
    """Return a session's file as answers name it."""
    return FileReference(uri=file_uri(session_id, name), name=name, mime_type=mime_type_of(name), size=size)


class FileChanges:
    """The file changes of one cell."""

    def __init__(
        self, session_id: str, workspace: Workspace, quota: DiskQuota, sharing: SharedWorkspace | None
    ) -> None:
        self._session_id = session_id
        self._workspace = workspace
        self._quota = quota
        self._sharing = sharing
        self._before = self._after = FolderScan({}, is_complete=True, taken_ns=0)

    async def bring_in(self) -> list[str]:
        """Copy in what the owner's other sessions stored in `workspace/`; return notices for the output."""
        return [] if self._sharing is None else await self._sharing.bring_in(self._quota.room_bytes)

    async def scan_before(self) -> None:
        """Scan the folder before the cell."""
        self._before = await self._scan()

    async def scan_after(self) -> list[str]:
        """Scan the folder after the cell, and copy out what outlives the session; return notices for the output."""
        self._after = await self._scan()
        return [] if self._sharing is None else await self._sharing.take_out(self._after)

    async def scan_again(self) -> None:
        """Scan the folder once more, because belljar itself wrote files after the cell."""
        self._after = await self._scan()

    def pictures(self) -> int:
        """Return how many pictures the cell itself has created or changed."""
        return sum(change.mime_type.startswith("image/") for change in changes(self._before, self._after))

    def names_of_size(self, size: int) -> list[str]:
        """Return the paths of the files with this many bytes."""
        return [name for name, fingerprint in self._after.files.items() if fingerprint[1] == size]

    @property
    def seen(self) -> tuple[FolderUsage, bool]:
        """Return the usage that the scan after the cell found, and whether the scan was complete."""
        files = self._after.files.values()
        return FolderUsage(sum(fingerprint[1] for fingerprint in files), len(files)), self._after.is_complete

    def files(self) -> tuple[list[FileReference], int]:
        """Return the files that the cell created or changed, as many as fit into a message, and how many do not."""
        found = changes(self._before, self._after)
        listed: list[FileReference] = []
        left = LISTED_CHARS
        for change in found:
            file = FileReference(
                uri=file_uri(self._session_id, change.name),
                name=change.name,
                mime_type=change.mime_type,
                size=change.size,
                change=change.change,
            )
            left -= len(file.uri) + len(file.name) + 100
            if left < 0:
                break
            listed.append(file)
        return listed, len(found) - len(listed)

    async def _scan(self) -> FolderScan:
        """Scan the session folder: a small one here, which takes 50 µs, because a thread would cost four times that."""
        small = scan_folder(self._workspace, limit=SMALL_FOLDER)
        return small if small.is_complete else await asyncio.to_thread(scan_folder, self._workspace)
