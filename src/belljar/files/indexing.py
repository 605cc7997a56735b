"""A snapshot's tree as a file, for a server that comes after this one. Contents are named by their place in the store.

What is read back was written by the host, into a folder that nobody else can enter.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from belljar.files.private import write_file
from belljar.files.trees import Content, FileNode, FolderNode, LinkNode, Node, SpecialNode

TakeContent = Callable[[str, int], Content]
"""The content of that name, which takes so many bytes."""


def write_index(path: Path, tree: FolderNode) -> None:
    """Keep a tree; whole or not at all."""
    draft = path.with_suffix(".new")
    write_file(draft, json.dumps(_told(tree)))
    draft.replace(path)


def read_index(path: Path, take_content: TakeContent) -> FolderNode:
    """A tree that was kept; OSError or ValueError where there is none that can be read."""
    try:
        node = _node(json.loads(path.read_text("utf-8")), take_content)
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError("no tree") from error
    if isinstance(node, FolderNode):
        return node
    raise ValueError("no folder")


def _told(node: Node) -> list[Any]:
    match node:
        case FileNode(mode, mtime_ns, uid, gid, content):
            return ["file", mode, mtime_ns, uid, gid, Path(content.path).name, content.size_bytes]
        case FolderNode(mode, mtime_ns, uid, gid, children):
            return ["folder", mode, mtime_ns, uid, gid, {name: _told(child) for name, child in children.items()}]
        case LinkNode():
            return ["link", *node]
        case SpecialNode():
            return ["special", *node]


def _node(told: Any, take_content: TakeContent) -> Node:
    kind, *fields = told
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
