"""Which files an execution created or changed, told from two snapshots of the session folder.

Runs before and after every execution, so a snapshot is names and status only. Content is not read: an overwrite that
keeps size and restores the modification time still shows in the change time, and so does a change of mode. Deleted
files are not reported.
"""

import time
from dataclasses import dataclass
from typing import Literal

from belljar.files.file_types import mime_type_of
from belljar.files.names import display_name
from belljar.files.scan import DEFAULT_LIMIT
from belljar.files.workspace import Workspace

Fingerprint = tuple[int, int, int, int]
"""mtime_ns, size, inode, ctime_ns."""

# The kernel stamps files with the time of its last tick, up to 10 ms behind the clock.
_TICK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The regular files at one moment; not complete when a limit cut it short."""

    files: dict[str, Fingerprint]
    is_complete: bool
    taken_ns: int


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that is new or not as it was; `name` is its path in the session folder."""

    name: str
    size: int
    mime_type: str
    change: Literal["created", "modified"]


def snapshot(workspace: Workspace, limit: int = DEFAULT_LIMIT) -> Snapshot:
    """What is there now; blocks for about 50 µs for ten files, and for no more than `limit` entries."""
    taken_ns = time.time_ns()
    scan = workspace.scan(limit=limit)
    files = {
        name: (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns) for name, status in scan.found
    }
    return Snapshot(files, scan.is_complete, taken_ns)


def changes(before: Snapshot, after: Snapshot) -> list[FileChange]:
    """What differs, sorted by name. Past the limit of `before`, files count as new only if touched since."""
    changed: list[FileChange] = []
    for raw, fingerprint in after.files.items():
        known = before.files.get(raw)
        if known == fingerprint:
            continue
        if known is None and not before.is_complete and fingerprint[3] < before.taken_ns - _TICK_NS:
            continue
        name = display_name(raw)
        changed.append(FileChange(name, fingerprint[1], mime_type_of(name), "modified" if known else "created"))
    changed.sort(key=lambda change: change.name)
    return changed
