"""The disk space that a session has left for packages, and the check that stops an installer which needs more.

A wheel of a few megabytes may unpack to any size and number of files, and no installer asks first. So the folders that
the installer writes are measured while it runs, whether it runs in a sandbox of any provider or on the host. This
module knows nothing of sessions: the caller says which folders count.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from belljar.errors import TooLarge
from belljar.files.disk_usage import FolderUsage, files_within, turn_to_add, usage
from belljar.settings import MEBIBYTE

# What an installer writes besides the packages while it runs: its cache, pages of the index, its own records.
_BESIDE = FolderUsage(64 * MEBIBYTE, 10_000)
# conda's solver also stores the index of every channel and the packed archives.
_BESIDE_CHANNELS = FolderUsage(768 * MEBIBYTE, 50_000)
_FILE_TOO_LARGE = "(os error 27)"
_SHORTEST_S = 0.05
_REST_PER_LOOK = 5


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
                hint="Delete files in the session folder first, with code such as os.remove(name)",
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
                    hint="Delete files in the session folder first, with code such as os.remove(name)",
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
