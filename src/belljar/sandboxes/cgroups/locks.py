"""A server's own group, held by a lock on its folder: whose lock nobody holds was killed, and its groups go."""

import contextlib
import fcntl
import os
from pathlib import Path

from belljar.sandboxes.cgroups.folders import clear, folders_below, try_removal
from belljar.sandboxes.hierarchy import LEAF

PREFIX = "belljar-"


def make_locked(folder: Path) -> int:
    """Make a server's group and hold its lock; one that is not locked yet may be taken for abandoned meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def remove_abandoned(place: Path) -> None:
    """Groups of servers that were killed: nobody holds their lock."""
    for run in folders_below(place):
        if not run.name.startswith(PREFIX) or run.name == LEAF:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in folders_below(run):
                    clear(folder)
                try_removal(run)
            finally:
                os.close(descriptor)
