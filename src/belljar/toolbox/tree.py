"""The generated tree on disk: a folder for each version, and a link that leads to the newest.

Sessions see the folder read-only and live: when the link moves, they find the new version under the old names. Blocking
calls; knows nothing of what is in the files.
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
    """One server's, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._versions: list[str] = _left_in(folder)

    @property
    def is_empty(self) -> bool:
        """Whether there is no version yet: not even one that an earlier server has left."""
        return not self._versions

    @property
    def importable(self) -> Path:
        """What goes on the path of Python."""
        return self.folder / LINK

    @property
    def servers(self) -> Path:
        """What a session folder links to."""
        return self.folder / LINK / SERVERS

    def write(self, files: Mapping[str, str]) -> bool:
        """Make this the newest version; False when it is already."""
        version = _version(files)
        if self._versions and self._versions[-1] == version:
            return False
        self._write(version, files)
        link = self.folder / f"{LINK}-{secrets.token_hex(4)}"
        link.symlink_to(version)
        link.replace(self.folder / LINK)
        # The last one stays: a session may be in the middle of reading it.
        outdated = [each for each in self._versions[:-1] if each != version]
        self._versions = [*self._versions[-1:], version]
        for name in outdated:
            remove_tree(self.folder / name)
        return True

    def remove_older(self) -> None:
        """Remove all versions but the newest: what an earlier server wrote may not be for whom this one serves."""
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
            # Told to who imports it: modules of another version than the link's are outdated.
            told = f'\nCATALOGUE = "{version}"\n' if name == _ROOT else ""
            write_file(path, text + told)
        _open_up(unfinished)
        unfinished.rename(target)

    def show_in(self, workspace: Path, identity: Identity | None) -> None:
        """A link in a session folder, so that `ls servers` works there; what the session put there itself stays."""
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
    """Readable for the users of sessions, where they are not ours."""
    for place, _, names in os.walk(folder):
        Path(place).chmod(shown_mode(is_folder=True))
        for name in names:
            (Path(place) / name).chmod(shown_mode(is_folder=False))


def _left_in(folder: Path) -> list[str]:
    """The versions of an earlier server, the newest last; none where no link leads to one. The unfinished go."""
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
    """Whether an earlier kernel's start has left it, maybe one of another server's."""
    return link.readlink().parts[-2:] == (LINK, SERVERS)


# Where the generated tree of a server stands: in a folder of its own run, or in one that outlives the server.
# A folder that outlives its server is locked by whoever holds its descriptor, which may be a supervisor: sessions
# that wait for the next server have it mounted. Knows nothing of what is in a tree.

TREES = "trees"
"""The folder with a tree for each server that runs. Whatever else is in there is a leftover, so it is ours alone."""
KEPT = "kept"
"""The tree that one server after the other goes on with."""


@dataclass(frozen=True, slots=True)
class TreeDirectory:
    """Of one server, by the name of its run; `living` are the names of all that run."""

    run: str
    living: Collection[str]
    hand_over: Callable[[int], None] | None = None
    """Has somebody hold a descriptor beyond the end of this server; None where nothing outlives it."""
    is_left: Callable[[], bool] = lambda: False
    """Asked in the end: whether somebody still needs the tree."""

    @contextmanager
    def open(self, folder: Path) -> Generator[Path]:
        """The place for the tree in a folder; open to be read by the users of sessions. Leftovers are removed."""
        trees = folder / TREES
        # A folder that the operator made keeps the mode that they chose.
        made = [folder] if not folder.exists() else []
        make_missing(folder)
        make_missing(trees)
        self._clear(trees)
        own, lock = (trees / self.run, -1) if self.hand_over is None else _kept(trees / KEPT)
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


def _kept(place: Path) -> tuple[Path, int]:
    """The folder with a lock on it; one that is not locked yet may be taken for a leftover meanwhile."""
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
        # Out of the way first: who makes it anew meanwhile must find it whole or not at all.
        leaving = place.with_name(f".{KEPT}-{os.getpid()}")
        place.rename(leaving)
        remove_tree(leaving)
    except OSError:  # somebody has it, or removes it as well
        return
    finally:
        os.close(lock)
