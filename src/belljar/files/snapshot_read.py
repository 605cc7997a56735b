"""Turning a folder into a tree of nodes, while hostile code may be writing to it.

Content is read only where status cannot vouch for it, and copied only where it is not in the store already. Knows
nothing of the snapshots there are. Blocking; call it in a thread.
"""

import os
import stat

from belljar.files.fd_walk import MAX_DEPTH, MAX_ENTRIES, SWAPPED, UNFINISHED, Omissions, opened_file, opened_folder
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
"""What an entry of a snapshot costs in memory."""


class NotKept(Exception):
    """There can be no snapshot, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TreeReader:
    """A snapshot under way, with what is known of the files from the time before."""

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
        self._vouching = StatTrust()

    def read(self, folder: str, before: FolderNode | None) -> FolderNode:
        """The whole folder, sharing nodes with the tree before; `NotKept` when it cannot be had whole."""
        try:
            with opened_folder(folder) as (descriptor, status):
                tree = self._list(descriptor, status, before)
        except OSError as error:
            raise NotKept(f"the folder cannot be read: {error.strerror}") from error
        self._keep(tree)
        return tree

    def undo(self) -> None:
        """Discard what was copied."""
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
                # Read twice because it was being written, or of a file that was gone in the end.
                self._store.discard(content)

    def _list(self, descriptor: int, status: os.stat_result, before: Node | None) -> FolderNode:
        if len(self._parts) > MAX_DEPTH:
            raise NotKept(f"the folder is more than {MAX_DEPTH} levels deep")
        known = before.children if isinstance(before, FolderNode) else {}
        children: dict[str, Node] = {}
        later: list[str] = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(UNFINISHED):
                    continue
                self._count()
                node = self._recognise(entry)
                if node is None:
                    later.append(name)
                else:
                    children[name] = _shared(known.get(name), node)
        # Only now, so that the listing holds no descriptor while we go further down.
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
            raise NotKept(f"the folder has more than {MAX_ENTRIES} entries")
        self._spend(ENTRY_BYTES)

    def _spend(self, size_bytes: int) -> None:
        self._room_bytes -= size_bytes
        if self._room_bytes < 0:
            raise self._over_limit()

    def _over_limit(self) -> NotKept:
        return NotKept(f"all snapshots together would take more than {self._limit_bytes} bytes")

    def _recognise(self, entry: os.DirEntry[str]) -> FileNode | None:
        """A file whose content is known by its status alone: most of them, most of the time."""
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
                    raise NotKept(f"{name} cannot be kept: {error.strerror}") from error
        self.changed.add(self._parts, "was something else each time it was opened, and is left out")
        return None

    def _node(self, parent: int, name: str, before: Node | None) -> Node:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with opened_folder(name, parent) as (descriptor, status):
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
        with opened_file(name, parent) as (descriptor, original):
            is_sound = self._vouching.is_sound(descriptor)
            content, status, is_steady = steadily(descriptor, lambda: self._content(descriptor))
        if not is_steady:
            self.changed.add(self._parts, "was written while it was copied")
        # A mode that had to be lent has moved the time of change, and once more when it was put back.
        is_lent = stat.S_IMODE(original.st_mode) != stat.S_IMODE(status.st_mode)
        stamp = stamp_of(status) if is_sound and is_steady and not is_lent else None
        self.known[inode_of(status)] = KnownFile(stamp, content)
        return _file_node(status, content)._replace(mode=stat.S_IMODE(original.st_mode))

    def _content(self, descriptor: int) -> Content:
        status = os.fstat(descriptor)
        inode = inode_of(status)
        # Under another name in this very snapshot, or with another time of change in the one before.
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


def _no_store(error: OSError) -> NotKept:
    return NotKept(f"a file cannot be copied to the store of snapshots: {error.strerror}")


def _file_node(status: os.stat_result, content: Content) -> FileNode:
    return FileNode(stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_uid, status.st_gid, content)


def _shared(before: Node | None, node: Node) -> Node:
    return before if before is not None and before == node else node


def _is_same(one: FolderNode, other: FolderNode) -> bool:
    """Whether they are equal, at the cost of one level: below it, equal nodes are the same ones already."""
    return (
        one[:4] == other[:4]
        and len(one.children) == len(other.children)
        and all(other.children.get(name) is child for name, child in one.children.items())
    )
