"""The parts of a folder's snapshots: a tree of nodes in memory, contents in a store on disk, and the tree as a file.

A content is one numbered file of the store, shared by all files that have it, so that the store never has to reproduce
names or trees that hostile code made. This module does not know the folder, or how snapshots are taken.
"""

import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from belljar.errors import EngineError
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, replace_file
from belljar.files.stat_trust import Stamp

INODE_BYTES = 512
"""The disk space that a content takes besides its data."""


class Content:
    """The bytes of one or more files, in the store."""

    __slots__ = ("is_gone", "path", "size_bytes", "uses")

    def __init__(self, path: str) -> None:
        self.path = path
        self.size_bytes = INODE_BYTES
        self.uses = 0
        self.is_gone = False


class FileNode(NamedTuple):
    """A regular file."""

    mode: int
    mtime_ns: int
    uid: int
    gid: int
    content: Content


class LinkNode(NamedTuple):
    """A symlink."""

    target: str
    mtime_ns: int
    uid: int
    gid: int


class SpecialNode(NamedTuple):
    """A pipe, socket or device, which a restore leaves in place and never makes."""

    kind: str


class FolderNode(NamedTuple):
    """A folder; snapshots share the node as long as nothing below it changes."""

    mode: int
    mtime_ns: int
    uid: int
    gid: int
    children: "dict[str, Node]"


Node = FileNode | LinkNode | SpecialNode | FolderNode


class KnownFile(NamedTuple):
    """The content that a file had when it was read; without a stamp, it has to be compared again."""

    stamp: Stamp | None
    content: Content


class ContentStore:
    """Contents in a folder that only the host can enter; what the folder held before is removed.

    The folder is made when something is stored, because most sessions never have a file, and removing takes a process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_made = False
        self._numbers = count()
        self._size_bytes = 0
        if folder.exists():
            remove_tree(folder)

    @property
    def size_bytes(self) -> int:
        """Return the space that the contents take, without holes."""
        return self._size_bytes

    def new(self) -> tuple[Content, int]:
        """Return an empty content and a descriptor to write it; the caller closes that, then adds or discards it."""
        content = self._next_content()
        return content, _open(content, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def inherit(self, path: Path, size_bytes: int) -> Content:
        """Move a content of another store into this one."""
        content = self._next_content()
        path.rename(content.path)
        content.size_bytes = size_bytes
        self._size_bytes += size_bytes
        return content

    def _next_content(self) -> Content:
        self.make()
        return Content(os.fspath(self._folder / str(next(self._numbers))))

    def make(self) -> None:
        """Make the folder, once: where it is gone later, somebody has tampered with it."""
        if not self._is_made:
            make_folder(self._folder)
            self._is_made = True

    @property
    def folder(self) -> Path:
        """Return the folder that holds the contents, once there are any."""
        return self._folder

    def open(self, content: Content) -> int:
        """Return a descriptor to read a content; the caller closes it."""
        return _open(content, os.O_RDONLY)

    def add(self, content: Content, data_bytes: int) -> None:
        """Count the size of a new content."""
        content.size_bytes += data_bytes
        self._size_bytes += content.size_bytes

    def reference(self, tree: FolderNode) -> None:
        """Count a use of the tree's contents by a snapshot, so that they stay."""
        for content in _contents(tree):
            content.uses += 1

    def release(self, tree: FolderNode) -> None:
        """Drop a snapshot's use of the tree's contents, and remove those that no other snapshot uses."""
        for content in _contents(tree):
            content.uses -= 1
            if content.uses == 0:
                self.remove(content)

    def remove(self, content: Content) -> None:
        """Remove a content whose size was counted."""
        self.discard(content)
        self._size_bytes -= content.size_bytes

    def discard(self, content: Content) -> None:
        """Remove a content that no snapshot uses, without subtracting its size."""
        content.is_gone = True
        os.unlink(content.path)  # noqa: PTH108 - a thousand times in a row

    def close(self) -> None:
        """Remove everything. May be called twice."""
        self._size_bytes = 0
        # What is stored after this finds no folder, and fails.
        was_made, self._is_made = self._is_made, True
        if was_made:
            remove_tree(self._folder)


def _open(content: Content, flags: int) -> int:
    try:
        return os.open(content.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, FileExistsError) as error:
        # Another type, because callers take `FileNotFoundError` for a missing file of the session.
        raise EngineError(f"the store of snapshots was tampered with: {error.strerror}") from error


def _contents(tree: FolderNode) -> Iterator[Content]:
    for node in tree.children.values():
        if isinstance(node, FileNode):
            yield node.content
        elif isinstance(node, FolderNode):
            yield from _contents(node)


# A snapshot's tree as a file, for the next server. Contents are named by their file in the store. What is read back can
# be trusted, because the host wrote it into a folder that nobody else can enter.

TakeContent = Callable[[str, int], Content]
"""Returns the content with that name and size in bytes."""


def write_index(path: Path, tree: FolderNode) -> None:
    """Write a tree to a file, completely or not at all."""
    replace_file(path, json.dumps(_node_fields(tree)))


def read_index(path: Path, take_content: TakeContent) -> FolderNode:
    """Read a tree from a file; OSError or ValueError if there is none that can be read."""
    try:
        node = _node(json.loads(path.read_text("utf-8")), take_content)
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError("no tree") from error
    if isinstance(node, FolderNode):
        return node
    raise ValueError("no folder")


def _node_fields(node: Node) -> list[Any]:
    match node:
        case FileNode(mode, mtime_ns, uid, gid, content):
            return ["file", mode, mtime_ns, uid, gid, Path(content.path).name, content.size_bytes]
        case FolderNode(mode, mtime_ns, uid, gid, children):
            return ["folder", mode, mtime_ns, uid, gid, {name: _node_fields(child) for name, child in children.items()}]
        case LinkNode():
            return ["link", *node]
        case SpecialNode():
            return ["special", *node]


def _node(encoded: Any, take_content: TakeContent) -> Node:
    kind, *fields = encoded
    match kind:
        case "file":
            mode, mtime_ns, uid, gid, name, size_bytes = fields
            return FileNode(mode, mtime_ns, uid, gid, take_content(name, size_bytes))
        case "folder":
            mode, mtime_ns, uid, gid, children = fields
            below = {name: _node(child, take_content) for name, child in children.items()}
            return FolderNode(mode, mtime_ns, uid, gid, below)
        case "link":
            return LinkNode(*fields)
        case _:
            return SpecialNode(*fields)
