"""Snapshots of a session folder, kept by the host: taking one, and restoring the folder from one.

A snapshot costs as much as has changed since the one before. Contents are in a store that only the host can enter.
Names, modes, times and owners are kept in memory, and also in the store if another server is to continue with them.
This module knows nothing of sessions or executions. Blocking; call it in a thread.
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
from belljar.files.snapshot_read import ENTRY_BYTES, SnapshotFailure, TreeReader
from belljar.files.snapshot_tree import Content, ContentStore, FolderNode, KnownFile, read_index, write_index
from belljar.files.snapshot_write import TreeWriter
from belljar.files.stat_trust import Inode


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The result of taking a snapshot. If it is not complete, there is no such snapshot, for the reason given.

    `copied_bytes` is what it added to the store; `changed` names files that were written meanwhile, whose copies may
    mix old and new content.
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
    """The result of restoring a folder. If it is not complete, the entries in `skipped` could not be restored."""

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
    """The snapshots of one folder. Calls run one at a time; what the folder `store` held before is removed."""

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
        """Return the snapshots that can be restored, in the order in which they were taken."""
        return tuple(self._kept)

    @property
    def size_bytes(self) -> int:
        """Return what all snapshots take: contents in the store and names in memory, without holes."""
        return self._store.size_bytes + sum(kept.entries for kept in list(self._kept.values())) * ENTRY_BYTES

    def take(self, label: str) -> SnapshotReport:
        """Take a snapshot, replacing an earlier one with that label. Reads content only of files that changed."""
        with self._lock:
            reader = TreeReader(self._store, self._known, self.size_bytes, self._limit_bytes)
            reason = ""
            try:
                tree = reader.read(self._folder, self._latest)
            except SnapshotFailure as error:
                reader.undo()
                self._forget(label)
                self._reasons[label] = reason = error.reason
            except BaseException:
                reader.undo()
                raise
            else:
                self._forget(label)
                self._kept[label] = _Snapshot(tree, reader.entries)
                self._known, self._latest = reader.known, tree
                self._write_index(label, tree)
            return _snapshot_report(label, reader, reason)

    def restore(self, label: str) -> RestoreReport:
        """Restore the folder's content without touching what is unchanged; the folder itself keeps its inode.

        Files that still exist are written in place, so that processes that have them open see the content too.
        """
        with self._lock:
            snapshot = self._kept.get(label)
            if snapshot is None:
                raise self._missing(label)
            writer = TreeWriter(self._store, self._known)
            try:
                writer.restore(self._folder, snapshot.tree)
            except OSError as error:
                raise EngineError(f"the folder cannot be restored: {error.strerror}") from error
            finally:
                self._known, self._latest = writer.known, snapshot.tree
            return _restore_report(label, writer)

    def export(self, label: str, target: Path) -> RestoreReport:
        """Restore a snapshot into another folder."""
        with self._lock:
            snapshot = self._kept.get(label)
            if snapshot is None:
                raise self._missing(label)
            writer = TreeWriter(self._store, {})
            try:
                writer.restore(os.fspath(target), snapshot.tree)
            except OSError as error:
                raise EngineError(f"the snapshot cannot be copied: {error.strerror}") from error
            return _restore_report(label, writer)

    def drop(self, label: str) -> None:
        """Remove a snapshot, and contents that no other one uses. Does nothing if there is no such snapshot."""
        with self._lock:
            self._forget(label)

    def inherit(self, store: Path, labels: Sequence[str]) -> list[str]:
        """Take over snapshots from an earlier server's store, then remove it; return the labels that were read."""
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
                    self._store.remove(content)
            if store.exists():
                remove_tree(store)
            return [label for label in labels if label in self._kept]

    def _write_index(self, label: str, tree: FolderNode) -> None:
        if self._has_indexes:
            # Without an index the snapshot still works for this server, so an error is ignored.
            with contextlib.suppress(OSError, RecursionError):
                self._store.make()
                write_index(_index(self._store.folder, label), tree)

    def close(self) -> None:
        """Remove all snapshots and the store. May be called twice."""
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


def _snapshot_report(label: str, reader: TreeReader, reason: str) -> SnapshotReport:
    return SnapshotReport(
        label,
        is_complete=not reason,
        reason=reason,
        entries=reader.entries,
        copied_files=reader.copied_files,
        copied_bytes=reader.copied_bytes,
        skipped=tuple(reader.skipped.named),
        changed=tuple(reader.changed.named),
    )


def _restore_report(label: str, writer: TreeWriter) -> RestoreReport:
    skipped = writer.skipped
    return RestoreReport(label, not skipped.count, writer.written_files, writer.removed, tuple(skipped.named))
