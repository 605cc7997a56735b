"""Finds which files an execution created or changed, by comparing two snapshots of the session folder.

A snapshot is taken before and after every execution, so it has names and status only, and no content is read. An
overwrite that keeps the size and restores the modification time still shows in the change time, and so does a change of
mode. Deleted files are not reported.
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

# Linux stamps files with the time of its last clock tick, up to 10 ms behind the clock.
_TICK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The regular files at one moment; not complete if the limit was reached."""

    files: dict[str, Fingerprint]
    is_complete: bool
    taken_ns: int


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that is new or changed; `name` is its path in the session folder."""

    name: str
    size: int
    mime_type: str
    change: Literal["created", "modified"]


def snapshot(workspace: Workspace, limit: int = DEFAULT_LIMIT) -> Snapshot:
    """Record the present files; blocks for about 50 µs for ten files, and looks at no more than `limit` entries."""
    taken_ns = time.time_ns()
    scan = workspace.scan(limit=limit)
    files = {
        name: (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns) for name, status in scan.found
    }
    return Snapshot(files, scan.is_complete, taken_ns)


def changes(before: Snapshot, after: Snapshot) -> list[FileChange]:
    """Return what differs, sorted by name. If `before` is incomplete, unknown files count only if changed since."""
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
