"""Where the generated tree of a server stands: in a folder of its own run, or in one that outlives the server.

A folder that outlives its server is locked by whoever holds its descriptor, which may be a supervisor: sessions that
wait for the next server have it mounted. Knows nothing of what is in a tree.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from belljar.files.private import make_folder, make_missing, shown_mode
from belljar.files.removal import remove_tree

TREES = "trees"
"""The folder with a tree for each server that runs. Whatever else is in there is a leftover, so it is ours alone."""
KEPT = "kept"
"""The tree that one server after the other goes on with."""


@dataclass(frozen=True, slots=True)
class Plot:
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
