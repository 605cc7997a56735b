"""A session's layer: its own folder of packages, which its code may be able to write.

New packages are moved in from a folder that the session cannot reach. Every step goes through descriptors of folders
and never through a link, so that nothing a session put into the layer can lead a write or a removal out of it.
"""

import contextlib
import csv
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath

from belljar.environments.installed_packages import Distribution, PackageFolder
from belljar.files.fd_walk import change_owner, close_to_others, disarm
from belljar.files.private import make_missing

_FILES_LIMIT = 100_000
_INSTALLER_LOCK = ".lock"


def move_into(layer: Path, tree: Path) -> None:
    """Move the packages of a tree on the same file system into the layer, replacing those of the same name."""
    make_missing(layer)
    present = PackageFolder(layer, is_trusted=False)
    with open_folder(layer) as target, open_folder(tree) as source:
        for name in PackageFolder(tree, is_trusted=False).distributions:
            if distribution := present.find(name):
                withdraw(distribution, present.read_record(distribution), target)
        for name in names_in(source):
            if name != _INSTALLER_LOCK:
                move(name, source, target)


def take_over(tree: Path) -> None:
    """Make the server the owner of a tree that another user may have written, and remove special files; blocks."""
    # Clear set-user-ID bits before the change of owner, because such a file of root's would be the worst outcome.
    disarm([tree], keeps_pipes=False)
    if os.geteuid() == 0:
        change_owner([tree], os.geteuid(), os.getegid())
    close_to_others(tree)


def withdraw(distribution: Distribution, record: str, layer: int) -> None:
    """Remove the files that a distribution lists, as far as they are in the layer."""
    for path in islice(_recorded(record), _FILES_LIMIT):
        if path.parts and not path.is_absolute() and ".." not in path.parts:
            with contextlib.suppress(OSError, ValueError):
                unlink(path, layer)
    _clear(distribution.metadata.name, layer)


def _recorded(record: str) -> Generator[PurePosixPath]:
    # A malformed RECORD ends the list here. The remaining files stay, hidden by the new ones or harmless.
    with contextlib.suppress(csv.Error):
        for row in csv.reader(record.splitlines()):
            yield PurePosixPath(row[0] if row else "")


def unlink(path: PurePosixPath, layer: int) -> None:
    """Remove one file, at a path without `..`, and the folders that are empty afterwards."""
    with contextlib.ExitStack() as stack:
        folders = [layer]
        for part in path.parts[:-1]:
            folders.append(stack.enter_context(open_folder(part, folders[-1])))
        os.unlink(path.name, dir_fd=folders.pop())
        with contextlib.suppress(OSError):
            for part in reversed(path.parts[:-1]):
                os.rmdir(part, dir_fd=folders.pop())


def move(name: str, source: int, target: int) -> None:
    """Move one entry of a folder to another; if both have a folder of that name, merge them."""
    if is_folder(name, source) and is_folder(name, target):
        # Several distributions may share one package folder.
        with open_folder(name, source) as inner_source, open_folder(name, target) as inner_target:
            for child in names_in(inner_source):
                move(child, inner_source, inner_target)
        return
    if is_folder(name, source) or is_folder(name, target):
        _clear(name, target)
    os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)


def _clear(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if is_folder(name, folder):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def names_in(folder: int) -> list[str]:
    """Return the names of the entries of a folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def is_folder(name: str, folder: int) -> bool:
    """Tell whether an entry is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


@contextmanager
def open_folder(path: Path | str, inside: int | None = None) -> Generator[int]:
    """Open a folder that is not a link, by its path or by its name inside another; yield its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
