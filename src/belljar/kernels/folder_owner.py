"""A folder of code files becomes the user's that runs them, on a server that root runs.

Root changes owners here, in a folder that hostile code has written to and that an operator may have named by mistake.
So nothing is reached through a link, and only what belonged to the code of an earlier server changes hands: a file of
anybody else's stays theirs, and so does one that has a second name, which may be anywhere.
"""

import contextlib
import os
import stat
from pathlib import Path

from belljar.errors import SettingsError
from belljar.files.names import MAX_DEPTH
from belljar.sandboxes.base import Identity
from belljar.sandboxes.identities import is_given_out

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_HINT = "Choose a folder that nobody else uses, or give it to the user that belljar runs as"


def hand_over_folder(folder: Path, identity: Identity) -> None:
    """Let this user write there; a folder that is another account's is refused."""
    try:
        top = os.open(folder, _DIRECTORY)
    except OSError as error:
        raise SettingsError(f"the folder of code files {folder}: {error.strerror}", hint=_HINT) from error
    try:
        status = os.fstat(top)
        if status.st_uid != os.geteuid() and not is_given_out(status.st_uid):
            raise SettingsError(f"the folder of code files {folder} belongs to user {status.st_uid}", hint=_HINT)
        if status.st_mode & stat.S_IWOTH:
            raise SettingsError(f"everybody may write to the folder of code files {folder}", hint=_HINT)
        os.fchown(top, identity.uid, identity.gid)
        _hand_over_below(top, status.st_dev, identity, MAX_DEPTH)
    finally:
        os.close(top)


def _hand_over_below(directory: int, device: int, identity: Identity, depth: int) -> None:
    """Not below the depth that a caller's path may have: each step holds a descriptor."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            _hand_over(name, directory, device, identity)
        if depth > 1:
            with contextlib.suppress(OSError):  # no directory, or none any more
                below = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    _hand_over_below(below, device, identity, depth - 1)
                finally:
                    os.close(below)


def _hand_over(name: str, directory: int, device: int, identity: Identity) -> None:
    entry = os.open(name, _LOOK, dir_fd=directory)
    try:
        status = os.fstat(entry)
        is_alone = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
        is_left = status.st_uid != identity.uid and is_given_out(status.st_uid)
        if is_left and is_alone and status.st_dev == device:
            # By its descriptor, so it is the one that was looked at; it was opened without rights of its own.
            os.chown(f"/proc/self/fd/{entry}", identity.uid, identity.gid)
    finally:
        os.close(entry)
