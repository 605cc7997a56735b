"""A sandbox's root folder, made of the arguments that bubblewrap would get for it."""

# Path objects would take longer than what is done with them.
# ruff: noqa: PTH101, PTH102, PTH108, PTH110, PTH115, PTH211

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Any

from .mounts import (
    NODEV,
    NOEXEC,
    NOSUID,
    leave_root,
    make_read_only,
    mount,
    mount_proc,
    move,
    open_tree,
    restrict,
    unmount,
)

_NEW_ROOT = "/tmp"
"""Where a root folder is put together, in mounts that nobody else sees. bubblewrap does it there, too."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    *(("/proc/self/fd", "fd"), ("/proc/kcore", "core"), ("pts/ptmx", "ptmx")),
    *((f"/proc/self/fd/{number}", name) for number, name in enumerate(("stdin", "stdout", "stderr"))),
)


class RootFolder:
    """A root folder, made of bubblewrap's arguments.

    The maker makes all of it that needs no namespace of the sandbox's own, so that what is wrong with it is known
    before there is a process.
    """

    def __init__(self, descriptors: "dict[int, int]") -> None:
        self._descriptors = descriptors
        self._trees: list[int] = []
        """Copies of mounts, attached nowhere yet."""
        self._made: set[str] = set()
        """The folders that are there."""
        self._is_mounted = False
        self._finishing: list[Callable[[], None]] = []
        """Steps that the first process does, because they need its namespaces."""

    def build(self, arguments: "list[str]") -> None:
        """Make the root folder at a place of its own."""
        operations = _parse(arguments)
        # Copy before mounting on `_NEW_ROOT`, because the mounts to copy may lie below it.
        trees = [self._copy(option, values[0]) if option in _BINDS else -1 for option, values, _, _ in operations]
        mount("tmpfs", _NEW_ROOT, "tmpfs", NOSUID | NODEV)
        self._is_mounted = True
        os.chmod(_NEW_ROOT, 0o755)
        for (option, values, mode, size), tree in zip(operations, trees):  # noqa: B905 - `strict` is Python 3.10's
            if option not in _BINDS:
                getattr(self, f"_{option[2:].replace('-', '_')}")(*values, mode, size)
            elif tree >= 0:
                self._attach(tree, values[1])

    def enter(self) -> None:
        """Finish the root folder in the sandbox's namespaces, and leave the old one for it."""
        for finish in self._finishing:
            finish()
        # Attach a copy of the mounts on top of them, because pivot_root(2) refuses a mount that this mount namespace
        # got from that of another user namespace.
        move(open_tree(_NEW_ROOT), _NEW_ROOT)
        leave_root(_NEW_ROOT)

    def close(self) -> None:
        """Unmount the root folder in the maker, and close the copies of mounts. The sandbox keeps its own."""
        if self._is_mounted:
            unmount(_NEW_ROOT)
        for tree in self._trees:
            os.close(tree)

    def _copy(self, option: str, source: str) -> int:
        """Return a copy of the mounts at a path, or of a descriptor's folder; -1 where there may be nothing."""
        is_read_only, may_lack, is_descriptor = _BINDS[option]
        wanted = None
        if is_descriptor:
            # Linux mounts no folder of another mount namespace, so this is the folder that is at its path here.
            wanted = os.fstat(self._descriptors[int(source)])
            source = os.readlink(f"/proc/self/fd/{self._descriptors[int(source)]}")
        try:
            tree = self._open_tree(source)
        except FileNotFoundError:
            if may_lack:
                return -1
            raise
        if wanted is not None and not os.path.samestat(os.fstat(tree), wanted):
            raise PermissionError(0, f"{source} is not the folder that the settings name")
        restrict(tree, is_read_only=is_read_only, recursive=True)
        return tree

    def _open_tree(self, path: str) -> int:
        tree = open_tree(path)
        self._trees.append(tree)
        return tree

    def _attach(self, tree: int, path: str, *, and_then: "Callable[[], None]" = lambda: None) -> None:
        """Attach a copy of mounts at a path, where an empty folder or file is made for it."""
        if path.startswith("/proc/"):
            self._finishing += [lambda: move(tree, _NEW_ROOT + path), and_then]
            return
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            self._make_folder(path, 0o755)
        else:
            self._make_file(path, 0o444)
        move(tree, _NEW_ROOT + path)
        and_then()

    def _proc(self, path: str, *_: Any) -> None:
        self._make_folder(path, 0o755)
        self._finishing.append(lambda: mount_proc(_NEW_ROOT + path))

    def _dev(self, path: str, *_: Any) -> None:
        self._tmpfs(path, 0o755, 0)
        for name in _DEVICES:
            tree = self._open_tree(f"/dev/{name}")
            restrict(tree, allows_devices=True)
            self._attach(tree, f"{path}/{name}")
        for target, name in _DEVICE_LINKS:
            os.symlink(target, f"{_NEW_ROOT}{path}/{name}")
        for name in ("pts", "shm"):
            self._make_folder(f"{path}/{name}", 0o755)
        options = "newinstance,ptmxmode=0666,mode=620"
        mount("devpts", f"{_NEW_ROOT}{path}/pts", "devpts", NOSUID | NOEXEC, options)

    def _tmpfs(self, path: str, mode: "int | None", size: int) -> None:
        mode = 0o755 if mode is None else mode
        self._make_folder(path, 0o755, like=mode)
        options = f"mode={mode:o}" + (f",size={size}" if size else "")
        mount("tmpfs", _NEW_ROOT + path, "tmpfs", NOSUID | NODEV, options)

    def _dir(self, path: str, mode: "int | None", _: int) -> None:
        mode = 0o755 if mode is None else mode
        self._make_folder(path, mode, like=mode)

    def _symlink(self, target: str, path: str, *_: Any) -> None:
        self._make_parents(path, 0o755)
        os.symlink(target, _NEW_ROOT + path)

    def _file(self, source: str, path: str, mode: "int | None", _: int) -> None:
        mode = 0o666 if mode is None else mode
        self._make_parents(path, mode)
        self._write(source, path, mode)

    def _ro_bind_data(self, source: str, path: str, mode: "int | None", _: int) -> None:
        # In a folder that can still be written when the file is removed, which Linux wants done last.
        content = f"/tmp/content{len(self._trees)}"
        self._write(source, content, 0o600 if mode is None else mode)
        tree = self._open_tree(_NEW_ROOT + content)
        restrict(tree, is_read_only=True)
        self._attach(tree, path, and_then=lambda: os.unlink(_NEW_ROOT + content))

    def _remount_ro(self, path: str, *_: Any) -> None:
        if path == "/proc":
            self._finishing.append(lambda: make_read_only(_NEW_ROOT + path))
        else:
            make_read_only(_NEW_ROOT + path)

    def _write(self, source: str, path: str, mode: int) -> None:
        reading, position = self._descriptors[int(source)], 0
        writing = os.open(_NEW_ROOT + path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
        try:
            while piece := os.pread(reading, 1 << 20, position):
                position += os.write(writing, piece)
        finally:
            os.close(writing)

    def _make_parents(self, path: str, mode: int) -> None:
        """Make the folders above a path: as bubblewrap does, closed to those who may not even see what is below."""
        parent = path.rpartition("/")[0]
        if parent and parent not in self._made:
            group, others = 0o050 * bool(mode & 0o070), 0o005 * bool(mode & 0o007)
            self._make_parents(parent, mode)
            self._make_one(parent, 0o700 | group | others)

    def _make_folder(self, path: str, mode: int, *, like: int = 0o755) -> None:
        self._make_parents(path, like)
        self._make_one(path, mode)

    def _make_one(self, path: str, mode: int) -> None:
        if path not in self._made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_NEW_ROOT + path, mode)
            self._made.add(path)

    def _make_file(self, path: str, mode: int) -> None:
        self._make_parents(path, 0o755)
        if not os.path.exists(_NEW_ROOT + path):
            os.close(os.open(_NEW_ROOT + path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, mode))


_BINDS = {
    # read-only, may lack its source, by descriptor
    "--bind": (False, False, False),
    "--ro-bind": (True, False, False),
    "--ro-bind-try": (True, True, False),
    "--bind-fd": (False, False, True),
    "--ro-bind-fd": (True, False, True),
}
_VALUES = {
    **dict.fromkeys((*_BINDS, "--symlink", "--file", "--ro-bind-data"), 2),
    **dict.fromkeys(("--proc", "--dev", "--tmpfs", "--dir", "--remount-ro"), 1),
}
"""bubblewrap's options that are known here, with the number of their values."""


def _parse(arguments: "list[str]") -> "list[tuple[str, list[str], int | None, int]]":
    """Return operations with their values, and the mode and the size that stood before each."""
    operations: list[tuple[str, list[str], int | None, int]] = []
    mode: int | None = None
    size = at = 0
    while at < len(arguments):
        option = arguments[at]
        if option == "--perms":
            mode, count = int(arguments[at + 1], 8), 1
        elif option == "--size":
            size, count = int(arguments[at + 1]), 1
        else:
            count = _VALUES[option]
            operations.append((option, arguments[at + 1 : at + 1 + count], mode, size))
            mode, size = None, 0
        at += 1 + count
    return operations
