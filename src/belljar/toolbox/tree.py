"""The generated tree on disk: a folder for each version, a link to the newest, and the directory that holds them.

Sessions mount the folder read-only: when the link moves, they find the new version under the old paths. All calls
block. This module does not know what is in the files.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, make_missing, shown_mode, write_file
from belljar.sandboxes.base import Identity

LINK = "current"
SERVERS = "servers"
_ROOT = f"{SERVERS}/__init__.py"


class Tree:
    """The tree of one belljar server, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._versions: list[str] = _earlier_versions(folder)

    @property
    def importable(self) -> Path:
        """Return the folder that goes on Python's path."""
        return self.folder / LINK

    @property
    def servers(self) -> Path:
        """Return the folder that session folders link to."""
        return self.folder / LINK / SERVERS

    def write(self, files: Mapping[str, str]) -> bool:
        """Make these files the newest version; return False if they are already."""
        version = _version(files)
        if self._versions and self._versions[-1] == version:
            return False
        self._write(version, files)
        link = self.folder / f"{LINK}-{secrets.token_hex(4)}"
        link.symlink_to(version)
        link.replace(self.folder / LINK)
        # Keep the version before, because a session may be reading it.
        outdated = [each for each in self._versions[:-1] if each != version]
        self._versions = [*self._versions[-1:], version]
        for name in outdated:
            remove_tree(self.folder / name)
        return True

    def remove_older(self) -> None:
        """Remove all versions but the newest, because this server's owners may not be those of the earlier server."""
        for name in self._versions[:-1]:
            remove_tree(self.folder / name)
        self._versions = self._versions[-1:]

    def _write(self, version: str, files: Mapping[str, str]) -> None:
        target = self.folder / version
        if target.exists():
            return
        unfinished = self.folder / f".{version}-{secrets.token_hex(4)}"
        for name, text in files.items():
            path = unfinished / name
            make_missing(path.parent)
            # The session's `toolbox` package compares this with the link: modules of another version are outdated.
            mark = f'\nCATALOGUE = "{version}"\n' if name == _ROOT else ""
            write_file(path, text + mark)
        _open_up(unfinished)
        unfinished.rename(target)

    def show_in(self, workspace: Path, identity: Identity | None) -> None:
        """Link the tree into a session folder, so that `ls servers` works there; keep a file that the session made."""
        place = workspace / SERVERS
        with contextlib.suppress(OSError):
            if place.is_symlink() and _is_ours(place):
                place.unlink()
            place.symlink_to(self.servers)
            if identity is not None:
                os.chown(place, identity.uid, identity.gid, follow_symlinks=False)


def _version(files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name, files[name]):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:16]


def _open_up(folder: Path) -> None:
    """Make the folder readable for the sessions' users, if they are not the server's own user."""
    for place, _, names in os.walk(folder):
        Path(place).chmod(shown_mode(is_folder=True))
        for name in names:
            (Path(place) / name).chmod(shown_mode(is_folder=False))


def _earlier_versions(folder: Path) -> list[str]:
    """Return the versions that an earlier server left, the newest last; none without a valid link.

    Unfinished versions and links are removed.
    """
    try:
        newest = (folder / LINK).readlink().name
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    for name in names:
        if name.startswith((".", f"{LINK}-")):
            remove_tree(folder / name) if name.startswith(".") else (folder / name).unlink(missing_ok=True)
    versions = [name for name in names if name not in (LINK, newest) and not name.startswith((".", f"{LINK}-"))]
    return [*versions, newest] if newest in names else []


def _is_ours(link: Path) -> bool:
    """Return whether a link was made at an earlier kernel's start, maybe by another server."""
    return link.readlink().parts[-2:] == (LINK, SERVERS)


# The directory of a server's tree: a folder of this run, or one that outlives the server. A folder that outlives its
# server is locked by the process that holds its descriptor, which may be a supervisor, because sessions that wait for
# the next server have it mounted.

TREES = "trees"
"""The folder with a tree for each running server. It is belljar's own: anything else in it is removed as a leftover."""
KEPT = "kept"
"""The tree that one server takes over from the one before."""


@dataclass(frozen=True, slots=True)
class TreeDirectory:
    """The place of one server's tree. `run` names the server's run, and `living` has the names of all current runs."""

    run: str
    living: Collection[str]
    hand_over: Callable[[int], None] | None = None
    """Gives a descriptor to a process that outlives this server; None if nothing outlives it."""
    is_left: Callable[[], bool] = lambda: False
    """Returns, when the server stops, whether somebody still needs the tree."""

    @contextmanager
    def open(self, folder: Path) -> Generator[Path]:
        """Yield the folder for the tree, readable by the sessions' users, and remove leftovers."""
        trees = folder / TREES
        # A folder that the operator made keeps its mode.
        made = [folder] if not folder.exists() else []
        make_missing(folder)
        make_missing(trees)
        self._clear(trees)
        own, lock = (trees / self.run, -1) if self.hand_over is None else _make_and_lock(trees / KEPT)
        for each in (*made, own):
            make_folder(each, shown_mode(is_folder=True))
        try:
            if self.hand_over is not None:
                self.hand_over(lock)
            yield own
        finally:
            if lock >= 0:
                os.close(lock)
            if not self.is_left():
                remove_tree(own)

    def _clear(self, trees: Path) -> None:
        for leftover in trees.iterdir():
            if leftover.name == KEPT:
                _remove_unheld(leftover)
            elif leftover.name not in self.living:
                remove_tree(leftover)


def _make_and_lock(place: Path) -> tuple[Path, int]:
    """Make the folder and lock it; try again if another server removed it as a leftover before it was locked."""
    while True:
        make_missing(place)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), place.stat()):
                    return place, lock
            os.close(lock)


def _remove_unheld(place: Path) -> None:
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Rename it before removing, so that a server that makes it again meanwhile never finds it half removed.
        leaving = place.with_name(f".{KEPT}-{os.getpid()}")
        place.rename(leaving)
        remove_tree(leaving)
    except OSError:  # another process holds the lock, or removes the folder as well
        return
    finally:
        os.close(lock)
