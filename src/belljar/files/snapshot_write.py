"""Restores a folder from a tree of nodes while hostile code may be writing to it.

What is unchanged is not touched. Owners, modes and times are set through descriptors only, so that no file outside the
folder can be put under a name and changed. This module does not know which snapshots exist. Blocking; call it in a
thread.
"""

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Generator
from itertools import islice

from belljar.files.fd_walk import SWAPPED, UNFINISHED, Omissions, open_file, open_folder, remove
from belljar.files.snapshot_tree import (
    Content,
    ContentStore,
    FileNode,
    FolderNode,
    KnownFile,
    LinkNode,
    Node,
    SpecialNode,
)
from belljar.files.stat_trust import Inode, inode_of, stamp_of
from belljar.files.tree_copy import copy_content, overwrite

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# Permissions and the sticky bit. Set-user-ID and set-group-ID bits are not restored, because such a file runs with its
# owner's rights.
_SET_MODE = 0o1777
_ATTEMPTS = 3
_BATCH = 5_000
_PASSES = 1_000


class TreeWriter:
    """Restores one snapshot, using what is known of the files from before."""

    def __init__(self, store: ContentStore, known: dict[Inode, KnownFile]) -> None:
        self.known: dict[Inode, KnownFile] = {}
        self.written_files = 0
        self.removed = 0
        self.skipped = Omissions()
        self._store = store
        self._before = known
        self._parts: list[str] = []

    def restore(self, folder: str, tree: FolderNode) -> None:
        """Restore the whole tree; entries that cannot be restored are named in `skipped`."""
        with open_folder(folder, is_written=True) as (descriptor, _):
            self._fill(descriptor, tree)
            self._set(descriptor, tree)

    def _fill(self, descriptor: int, node: FolderNode) -> None:
        self._clear(descriptor, node)
        for name, child in node.children.items():
            self._parts.append(name)
            self._restore_entry(descriptor, name, child)
            self._parts.pop()

    def _clear(self, descriptor: int, node: FolderNode) -> None:
        """Remove the entries that the snapshot does not have."""
        stuck: set[str] = set()
        for _ in range(_PASSES):
            with os.scandir(descriptor) as entries:
                added = (entry.name for entry in entries if entry.name not in node.children)
                names = list(islice((name for name in added if name not in stuck), _BATCH))
            if not names:
                return
            for name in names:
                try:
                    remove(descriptor, name)
                    self.removed += 1
                except OSError as error:
                    stuck.add(name)
                    self.skipped.add([*self._parts, name], f"cannot be removed: {error.strerror}")

    def _restore_entry(self, parent: int, name: str, node: Node) -> None:
        for _ in range(_ATTEMPTS):
            try:
                self._restore(parent, name, node)
            except (FileExistsError, FileNotFoundError):
                continue
            except OSError as error:
                if error.errno in SWAPPED:
                    continue
                return self.skipped.add(self._parts, f"cannot be restored: {error.strerror}")
            else:
                return None
        return self.skipped.add(self._parts, "is replaced by something else again and again")

    def _restore(self, parent: int, name: str, node: Node) -> None:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            status = None
        match node:
            case FolderNode():
                self._restore_folder(parent, name, node, status)
            case FileNode():
                self._restore_file(parent, name, node, status)
            case LinkNode():
                self._restore_link(parent, name, node, status)
            case SpecialNode():
                self._leave_special(parent, name, node, status)

    def _restore_folder(self, parent: int, name: str, node: FolderNode, status: os.stat_result | None) -> None:
        if status is None or not stat.S_ISDIR(status.st_mode):
            remove(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
        with open_folder(name, parent, is_written=True) as (descriptor, _):
            self._fill(descriptor, node)
            self._set(descriptor, node)

    def _restore_file(self, parent: int, name: str, node: FileNode, status: os.stat_result | None) -> None:
        if status is None or not stat.S_ISREG(status.st_mode):
            return self._replace(parent, name, node)
        known = self._before.get(inode_of(status))
        has_content = known is not None and known.stamp == stamp_of(status) and known.content is node.content
        if known is not None and has_content and _is_set(status, node):
            self.known[inode_of(status)] = known
            return None
        # A file with other names, or of another owner, may be one from outside that was hard-linked here.
        if status.st_nlink != 1 or status.st_uid != node.uid:
            return self._replace(parent, name, node)
        try:
            return self._rewrite(parent, name, node, has_content=has_content)
        except OSError as error:
            if error.errno in SWAPPED:
                raise
            # The file is being executed, or cannot be written for another reason; a new file may work.
            return self._replace(parent, name, node)

    def _rewrite(self, parent: int, name: str, node: FileNode, *, has_content: bool) -> None:
        with open_file(name, parent, is_written=True) as (descriptor, status):
            if status.st_nlink != 1 or status.st_uid != node.uid:
                raise OSError(errno.ELOOP, "is another file than a moment ago")
            if not has_content:
                with self._reading(node.content) as stored:
                    self.written_files += overwrite(descriptor, stored)
            self._set(descriptor, node)
            self.known[inode_of(status)] = KnownFile(None, node.content)

    def _replace(self, parent: int, name: str, node: FileNode) -> None:
        unfinished = UNFINISHED + secrets.token_hex(8)
        descriptor = os.open(unfinished, _CREATE, 0o600, dir_fd=parent)
        try:
            with self._reading(node.content) as stored:
                copy_content(stored, descriptor, sys.maxsize)
            self._set(descriptor, node)
            self.known[inode_of(os.fstat(descriptor))] = KnownFile(None, node.content)
            try:
                os.rename(unfinished, name, src_dir_fd=parent, dst_dir_fd=parent)
            except IsADirectoryError:
                remove(parent, name)
                os.rename(unfinished, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=parent)
            raise
        finally:
            os.close(descriptor)
        self.written_files += 1

    def _restore_link(self, parent: int, name: str, node: LinkNode, status: os.stat_result | None) -> None:
        if status is None or not stat.S_ISLNK(status.st_mode) or os.readlink(name, dir_fd=parent) != node.target:
            remove(parent, name)
            os.symlink(node.target, name, dir_fd=parent)
        handle = os.open(name, _HANDLE, dir_fd=parent)
        try:
            status = os.fstat(handle)
            if not stat.S_ISLNK(status.st_mode):
                raise OSError(errno.ELOOP, "is no symlink")
            # There is no other way to set these for a symlink by its descriptor. The path leads to the link, not to
            # its target.
            path = f"/proc/self/fd/{handle}"
            if (status.st_uid, status.st_gid) != (node.uid, node.gid):
                os.chown(path, node.uid, node.gid)
            if status.st_mtime_ns != node.mtime_ns:
                os.utime(path, ns=(status.st_atime_ns, node.mtime_ns))
        finally:
            os.close(handle)

    def _leave_special(self, parent: int, name: str, node: SpecialNode, status: os.stat_result | None) -> None:
        kinds = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        if status is not None and stat.S_IFMT(status.st_mode) not in kinds:
            return
        remove(parent, name)
        self.skipped.add(self._parts, f"was a {node.kind}, which cannot be made again")

    def _set(self, descriptor: int, node: FileNode | FolderNode) -> None:
        """Set owner, mode and time, in an order in which no step changes what an earlier one set."""
        status = os.fstat(descriptor)
        if (status.st_uid, status.st_gid) != (node.uid, node.gid):
            try:
                os.fchown(descriptor, node.uid, node.gid)
            except PermissionError:
                self.skipped.add(self._parts, f"belongs to {status.st_uid}:{status.st_gid} now")
        if stat.S_IMODE(status.st_mode) != node.mode:
            os.fchmod(descriptor, node.mode & _SET_MODE)
        if os.fstat(descriptor).st_mtime_ns != node.mtime_ns:
            os.utime(descriptor, ns=(status.st_atime_ns, node.mtime_ns))

    @contextlib.contextmanager
    def _reading(self, content: Content) -> Generator[int]:
        stored = self._store.open(content)
        try:
            yield stored
        finally:
            os.close(stored)


def _is_set(status: os.stat_result, node: FileNode) -> bool:
    return (stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_uid, status.st_gid) == node[:4]
