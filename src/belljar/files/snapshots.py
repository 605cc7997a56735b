"""Snapshots of a session folder, kept by the host, and putting the folder back to one of them.

A snapshot costs what changed since the one before. Contents lie in a store that only the host can enter; names,
modes, times and owners are kept in memory, and beside the contents where another server is to go on with them.
Knows nothing of sessions or executions. Blocking; call it in a thread.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import EngineError, InvalidArgument
from belljar.files.fd_walk import Omission, remove_tree
from belljar.files.names import shown
from belljar.files.snapshot_read import ENTRY_BYTES, NotKept, TreeReader
from belljar.files.snapshot_tree import Content, ContentStore, FolderNode, KnownFile, read_index, write_index
from belljar.files.snapshot_write import TreeWriter
from belljar.files.stat_trust import Inode


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What taking a snapshot came to. Not complete: there is no such snapshot, for the reason given.

    `copied_bytes` is what it added to the store, `changed` what was written meanwhile and may be torn.
    """

    label: str
    is_complete: bool
    reason: str
    entries: int
    copied_files: int
    copied_bytes: int
    skipped: tuple[Omission, ...]
    changed: tuple[Omission, ...]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What putting the folder back came to. Not complete: what is named could not be made as it was."""

    label: str
    is_complete: bool
    written_files: int
    removed: int
    skipped: tuple[Omission, ...]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    tree: FolderNode
    entries: int


class Snapshots:
    """See the module's docstring. One call at a time, others wait; what is in `store` from before is removed."""

    def __init__(self, folder: Path, store: Path, *, limit_bytes: int, outlives_server: bool = False) -> None:
        self._folder = os.fspath(folder)
        self._has_indexes = outlives_server
        self._limit_bytes = limit_bytes
        self._store = ContentStore(store)
        self._kept: dict[str, _Snapshot] = {}
        self._reasons: dict[str, str] = {}
        self._known: dict[Inode, KnownFile] = {}
        self._latest: FolderNode | None = None
        self._lock = threading.Lock()

    @property
    def labels(self) -> tuple[str, ...]:
        """The snapshots that can be restored, in the order they were taken."""
        return tuple(self._kept)

    @property
    def size_bytes(self) -> int:
        """What all of them take: contents in the store, names in memory. Holes do not count."""
        return self._store.size_bytes + sum(kept.entries for kept in list(self._kept.values())) * ENTRY_BYTES

    def take(self, label: str) -> SnapshotReport:
        """Keep the folder as it is now, in place of a snapshot with that label. Reads content only where it changed."""
        with self._lock:
            taking = TreeReader(self._store, self._known, self.size_bytes, self._limit_bytes)
            reason = ""
            try:
                tree = taking.read(self._folder, self._latest)
            except NotKept as error:
                taking.undo()
                self._forget(label)
                self._reasons[label] = reason = error.reason
            except BaseException:
                taking.undo()
                raise
            else:
                self._forget(label)
                self._kept[label] = _Snapshot(tree, taking.entries)
                self._known, self._latest = taking.known, tree
                self._write_index(label, tree)
            return _taken(label, taking, reason)

    def restore(self, label: str) -> RestoreReport:
        """Make the folder's content as it was, without touching what still is; the folder itself stays the same one.

        Files that are still there are written in place, so that those who have them open see the content too.
        """
        with self._lock:
            snapshot = self._kept.get(label)
            if snapshot is None:
                raise self._missing(label)
            restoring = TreeWriter(self._store, self._known)
            try:
                restoring.restore(self._folder, snapshot.tree)
            except OSError as error:
                raise EngineError(f"the folder cannot be restored: {error.strerror}") from error
            finally:
                self._known, self._latest = restoring.known, snapshot.tree
            return _restored(label, restoring)

    def export(self, label: str, target: Path) -> RestoreReport:
        """Make another folder's content what this one's was."""
        with self._lock:
            snapshot = self._kept.get(label)
            if snapshot is None:
                raise self._missing(label)
            restoring = TreeWriter(self._store, {})
            try:
                restoring.restore(os.fspath(target), snapshot.tree)
            except OSError as error:
                raise EngineError(f"the snapshot cannot be copied: {error.strerror}") from error
            return _restored(label, restoring)

    def drop(self, label: str) -> None:
        """Forget a snapshot, and contents that no other one has. Dropping what is not there does nothing."""
        with self._lock:
            self._forget(label)

    def inherit(self, store: Path, labels: Sequence[str]) -> list[str]:
        """Go on with snapshots of an earlier server, whose store is given up; returns those that were there whole."""
        contents: dict[str, Content] = {}

        def take(name: str, size_bytes: int) -> Content:
            if name not in contents:
                contents[name] = self._store.inherit(store / str(int(name)), size_bytes)
            return contents[name]

        with self._lock:
            for label in labels:
                with contextlib.suppress(OSError, ValueError):
                    tree = read_index(_index(store, label), take)
                    self._store.reference(tree)
                    self._kept[label] = _Snapshot(tree, _count(tree))
                    self._write_index(label, tree)
            for content in contents.values():
                if content.uses == 0:
                    self._store.forgo(content)
            remove_tree(store)
            return [label for label in labels if label in self._kept]

    def _write_index(self, label: str, tree: FolderNode) -> None:
        if self._has_indexes:
            # Without it the snapshot is good all the same, for this server.
            with contextlib.suppress(OSError, RecursionError):
                write_index(_index(self._store.folder, label), tree)

    def close(self) -> None:
        """Forget all of them and remove the store. May be called twice."""
        with self._lock:
            self._kept.clear()
            self._reasons.clear()
            self._known.clear()
            self._latest = None
            self._store.close()

    def _forget(self, label: str) -> None:
        self._reasons.pop(label, None)
        snapshot = self._kept.pop(label, None)
        if snapshot is not None:
            self._store.release(snapshot.tree)
            if self._has_indexes:
                _index(self._store.folder, label).unlink(missing_ok=True)

    def _missing(self, label: str) -> InvalidArgument:
        if label in self._reasons:
            return InvalidArgument(f"the snapshot {shown(label)} was not kept: {self._reasons[label]}")
        hint = f"Kept are {', '.join(map(shown, self._kept))}" if self._kept else "None are kept"
        return InvalidArgument(f"there is no snapshot {shown(label)}", hint=hint)


def _index(store: Path, label: str) -> Path:
    return store / f"tree-{label}"


def _count(tree: FolderNode) -> int:
    return sum(1 + (_count(node) if isinstance(node, FolderNode) else 0) for node in tree.children.values())


def _taken(label: str, taking: TreeReader, reason: str) -> SnapshotReport:
    return SnapshotReport(
        label,
        is_complete=not reason,
        reason=reason,
        entries=taking.entries,
        copied_files=taking.copied_files,
        copied_bytes=taking.copied_bytes,
        skipped=tuple(taking.skipped.named),
        changed=tuple(taking.changed.named),
    )


def _restored(label: str, restoring: TreeWriter) -> RestoreReport:
    skipped = restoring.skipped
    return RestoreReport(label, not skipped.count, restoring.written_files, restoring.removed, tuple(skipped.named))
