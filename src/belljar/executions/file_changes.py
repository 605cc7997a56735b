"""What one cell leaves in its session's folder: the folder before and after it, and its part that outlives the session.

Knows nothing of kernels.
"""

import asyncio
from urllib.parse import quote

from belljar.executions.quota import DiskQuota
from belljar.executions.shared_folder import SharedFolder
from belljar.files.changes import Snapshot, changes, snapshot
from belljar.files.disk_usage import FolderUsage
from belljar.files.workspace import Workspace
from belljar.models import FileReference

SMALL_FOLDER = 100
TOLD_CHARS = 100_000


def file_uri(session_id: str, name: str) -> str:
    """Return the resource URI of a file in a session's folder."""
    return f"kernel://{session_id}/{quote(name)}"


class FileChanges:
    """One cell's."""

    def __init__(self, session_id: str, workspace: Workspace, quota: DiskQuota, sharing: SharedFolder | None) -> None:
        self._session_id = session_id
        self._workspace = workspace
        self._quota = quota
        self._sharing = sharing
        self._before = self._after = Snapshot({}, is_complete=True, taken_ns=0)

    async def bring_in(self) -> list[str]:
        """What other sessions of the owner have kept; returns what is to be said of it."""
        return [] if self._sharing is None else await self._sharing.bring_in(self._quota.room_bytes)

    async def scan_before(self) -> None:
        """Look before the cell."""
        self._before = await self._look()

    async def scan_after(self) -> list[str]:
        """Look after the cell, and keep what outlives the session; returns what is to be said of that."""
        self._after = await self._look()
        return [] if self._sharing is None else await self._sharing.take_out(self._after)

    @property
    def seen(self) -> tuple[FolderUsage, bool]:
        """What was seen to be there after the cell, and whether that was everything."""
        files = self._after.files.values()
        return FolderUsage(sum(fingerprint[1] for fingerprint in files), len(files)), self._after.is_complete

    def files(self) -> tuple[list[FileReference], int]:
        """What the cell created or changed, as far as one message holds it; how many more were seen."""
        found = changes(self._before, self._after)
        told: list[FileReference] = []
        left = TOLD_CHARS
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
            told.append(file)
        return told, len(found) - len(told)

    async def _look(self) -> Snapshot:
        """The session folder now. A small one is read here in 50 µs; a thread for it would cost four times that."""
        small = snapshot(self._workspace, limit=SMALL_FOLDER)
        return small if small.is_complete else await asyncio.to_thread(snapshot, self._workspace)
