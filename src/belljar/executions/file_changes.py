"""The files that a cell created or changed, found by scans of the session's folder before and after it.

Knows nothing of kernels.
"""

import asyncio
from urllib.parse import quote

from belljar.executions.shared_workspace import SharedWorkspace
from belljar.files.disk_usage import DiskQuota, FolderUsage
from belljar.files.file_types import mime_type_of
from belljar.files.workspace import FolderScan, Workspace, changes, scan_folder
from belljar.models import FileReference

SMALL_FOLDER = 100
LISTED_CHARS = 100_000


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
