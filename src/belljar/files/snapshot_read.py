"""Reads a folder into a tree of nodes while hostile code may be writing to it.

A file's content is read only if its status does not prove that it is unchanged, and copied only if the store does not
have it already. This module does not know which snapshots exist. Blocking; call it in a thread.
"""

import os
import stat

from belljar.files.fd_walk import MAX_DEPTH, MAX_ENTRIES, SWAPPED, UNFINISHED, Omissions, open_file, open_folder
from belljar.files.file_types import kind_of
from belljar.files.names import display_name, shown
from belljar.files.snapshot_tree import (
    INODE_BYTES,
    Content,
    ContentStore,
    FileNode,
    FolderNode,
    KnownFile,
    LinkNode,
    Node,
    SpecialNode,
)
from belljar.files.stat_trust import Inode, StatTrust, inode_of, stamp_of, steadily
from belljar.files.tree_copy import OverLimit, copy_content, is_same_content

ENTRY_BYTES = 128
"""The memory that an entry of a snapshot takes."""


class SnapshotFailure(Exception):
    """The snapshot could not be taken; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TreeReader:
    """Reads one snapshot, using what is known of the files from the snapshot before."""

    def __init__(self, store: ContentStore, known: dict[Inode, KnownFile], used_bytes: int, limit_bytes: int) -> None:
        self.known: dict[Inode, KnownFile] = {}
        self.entries = 0
        self.copied_files = 0
        self.copied_bytes = 0
        self.skipped = Omissions()
        self.changed = Omissions()
        self._store = store
        self._before = known
        self._limit_bytes = limit_bytes
        self._room_bytes = limit_bytes - used_bytes
        self._parts: list[str] = []
        self._made: list[tuple[Content, int]] = []
        self._stat_trust = StatTrust()

    def read(self, folder: str, before: FolderNode | None) -> FolderNode:
        """Return the whole folder, sharing nodes with the tree before; `SnapshotFailure` if not all can be read."""
        try:
            with open_folder(folder) as (descriptor, status):
                tree = self._list(descriptor, status, before)
        except OSError as error:
            raise SnapshotFailure(f"the folder cannot be read: {error.strerror}") from error
        self._keep(tree)
        return tree

    def undo(self) -> None:
        """Discard the contents that were copied."""
        for content, _ in self._made:
            self._store.discard(content)
        self._made.clear()

    def _keep(self, tree: FolderNode) -> None:
        self._store.reference(tree)
        for content, data_bytes in self._made:
            if content.uses:
                self._store.add(content, data_bytes)
                self.copied_files += 1
                self.copied_bytes += data_bytes
            else:
                # The file was copied twice because it was being written, or it was gone in the end.
                self._store.discard(content)

    def _list(self, descriptor: int, status: os.stat_result, before: Node | None) -> FolderNode:
        if len(self._parts) > MAX_DEPTH:
            raise SnapshotFailure(f"the folder is more than {MAX_DEPTH} levels deep")
        known = before.children if isinstance(before, FolderNode) else {}
        children: dict[str, Node] = {}
        later: list[str] = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(UNFINISHED):
                    continue
                self._count()
                node = self._known_file(entry)
                if node is None:
                    later.append(name)
                else:
                    children[name] = _shared(known.get(name), node)
        # After the listing, so that it holds no descriptor while we descend.
        for name in later:
            self._parts.append(name)
            node = self._look(descriptor, name, known.get(name))
            self._parts.pop()
            if node is not None:
                children[name] = node
        found = FolderNode(status.st_mode & 0o7777, status.st_mtime_ns, status.st_uid, status.st_gid, children)
        return before if isinstance(before, FolderNode) and _is_same(found, before) else found

    def _count(self) -> None:
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise SnapshotFailure(f"the folder has more than {MAX_ENTRIES} entries")
        self._spend(ENTRY_BYTES)

    def _spend(self, size_bytes: int) -> None:
        self._room_bytes -= size_bytes
        if self._room_bytes < 0:
            raise self._over_limit()

    def _over_limit(self) -> SnapshotFailure:
        return SnapshotFailure(f"all snapshots together would take more than {self._limit_bytes} bytes")

    def _known_file(self, entry: os.DirEntry[str]) -> FileNode | None:
        """Return the node of a file whose content is known by its status alone, as for most files; else None."""
        try:
            if not entry.is_file(follow_symlinks=False):
                return None
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        inode = inode_of(status)
        known = self._before.get(inode)
        if known is None or known.stamp != stamp_of(status) or known.content.is_gone:
            return None
        self.known[inode] = known
        return _file_node(status, known.content)

    def _look(self, parent: int, name: str, before: Node | None) -> Node | None:
        for _ in range(2):
            try:
                return self._node(parent, name, before)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in SWAPPED:
                    name = shown(display_name("/".join(self._parts)))
                    raise SnapshotFailure(f"{name} cannot be kept: {error.strerror}") from error
        self.changed.add(self._parts, "was something else each time it was opened, and is left out")
        return None

    def _node(self, parent: int, name: str, before: Node | None) -> Node:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with open_folder(name, parent) as (descriptor, status):
                return self._list(descriptor, status, before)
        if stat.S_ISREG(status.st_mode):
            node = self._file(parent, name)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=parent)
            node = LinkNode(target, status.st_mtime_ns, status.st_uid, status.st_gid)
        else:
            node = SpecialNode(kind_of(status.st_mode))
            self.skipped.add(self._parts, f"is a {node.kind}")
        return _shared(before, node)

    def _file(self, parent: int, name: str) -> FileNode:
        with open_file(name, parent) as (descriptor, original):
            is_sound = self._stat_trust.is_sound(descriptor)
            content, status, is_steady = steadily(descriptor, lambda: self._content(descriptor))
        if not is_steady:
            self.changed.add(self._parts, "was written while it was copied")
        # Widening the mode has moved the change time, and putting it back moves it again, so the stamp is not valid.
        is_widened = stat.S_IMODE(original.st_mode) != stat.S_IMODE(status.st_mode)
        stamp = stamp_of(status) if is_sound and is_steady and not is_widened else None
        self.known[inode_of(status)] = KnownFile(stamp, content)
        return _file_node(status, content)._replace(mode=stat.S_IMODE(original.st_mode))

    def _content(self, descriptor: int) -> Content:
        status = os.fstat(descriptor)
        inode = inode_of(status)
        # The file may be known under another name in this snapshot, or with another change time in the one before.
        for known in (self.known.get(inode), self._before.get(inode)):
            if known is not None and not known.content.is_gone and self._has(descriptor, known.content):
                return known.content
        return self._copy(descriptor)

    def _has(self, descriptor: int, content: Content) -> bool:
        stored = self._store.open(content)
        try:
            return is_same_content(descriptor, stored)
        finally:
            os.close(stored)

    def _copy(self, descriptor: int) -> Content:
        self._spend(INODE_BYTES)
        try:
            content, target = self._store.new()
        except OSError as error:
            raise _no_store(error) from error
        try:
            data_bytes = copy_content(descriptor, target, self._room_bytes)
        except BaseException as error:
            self._store.discard(content)
            if isinstance(error, OverLimit):
                raise self._over_limit() from error
            if isinstance(error, OSError):
                raise _no_store(error) from error
            raise
        finally:
            os.close(target)
        self._made.append((content, data_bytes))
        self._spend(data_bytes)
        return content


def _no_store(error: OSError) -> SnapshotFailure:
    return SnapshotFailure(f"a file cannot be copied to the store of snapshots: {error.strerror}")


def _file_node(status: os.stat_result, content: Content) -> FileNode:
    return FileNode(stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_uid, status.st_gid, content)


def _shared(before: Node | None, node: Node) -> Node:
    return before if before is not None and before == node else node


def _is_same(one: FolderNode, other: FolderNode) -> bool:
    """Tell whether two folders are equal by comparing one level, because equal nodes below are already shared."""
    return (
        one[:4] == other[:4]
        and len(one.children) == len(other.children)
        and all(other.children.get(name) is child for name, child in one.children.items())
    )
