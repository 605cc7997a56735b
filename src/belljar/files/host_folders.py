"""Opens host folders that the settings show to sessions, and reads files in them.

A folder is opened component by component, relative to the descriptor of the one above, so that nobody can exchange a
part of its path meanwhile. A symlink on the way counts only if root, this server's user or the owner of what it leads
to has made it: with one of somebody else's, that person would decide what sessions see. Below the folder no symlink is
followed. This module knows no settings and no sessions.
"""

import errno
import os
import stat
import sys
from pathlib import PurePosixPath

from belljar.errors import FileMissing, InvalidPath, SandboxUnavailable
from belljar.files.file_types import kind_of
from belljar.files.names import shown
from belljar.files.openat import blocked_message, open_regular, too_large

_MAX_LINKS = 40
"""As many as Linux follows itself."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without the right to read or to enter a folder: a mount needs neither. Elsewhere than on Linux nothing is mounted.
_PLACE = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1024 * 1024


def open_host_folder(path: str) -> int:
    """Return a descriptor of a folder of the host (`O_PATH`), or raise SandboxUnavailable. The caller closes it."""
    if sys.platform != "linux":  # sessions have no view of their own there, and see what the server's user sees
        return _open_on_other_platforms(path)
    try:
        descriptor, links = _follow(path)
    except OSError as error:
        raise SandboxUnavailable(
            f"folder {path} cannot be shown: {error.strerror}", hint="Mend it, or take it out of the setting `folders`"
        ) from error
    found = os.fstat(descriptor)
    strange = [link for link, owner in links if owner not in {0, os.geteuid(), found.st_uid}]
    if stat.S_ISDIR(found.st_mode) and not strange:
        return descriptor
    os.close(descriptor)
    if strange:
        raise SandboxUnavailable(
            f"folder {path} cannot be shown: the symlink {strange[0]} belongs to another user",
            hint="Name the folder itself in the setting `folders`",
        )
    raise SandboxUnavailable(f"folder {path} cannot be shown: it is a {kind_of(found.st_mode)}")


def _follow(path: str) -> tuple[int, list[tuple[str, int]]]:
    """Return a descriptor of what a path leads to, and the symlinks on the way with their owners."""
    links: list[tuple[str, int]] = []
    rest = [*PurePosixPath(path).parts[1:]]
    descriptor = os.open("/", _PLACE)
    try:
        while rest:
            part = rest.pop(0)
            below = os.open(part, _PLACE, dir_fd=descriptor)  # "/" where a link led to an absolute path
            status = os.fstat(below)
            if not stat.S_ISLNK(status.st_mode):
                os.close(descriptor)
                descriptor = below
                continue
            # By its descriptor, because another one may have its name by now.
            target = os.readlink("", dir_fd=below)
            os.close(below)
            links.append((f"{part} -> {target}", status.st_uid))
            rest = [*PurePosixPath(target).parts, *rest]
            _check_links(len(links), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, links


def _check_links(count: int, path: str) -> None:
    if count > _MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _open_on_other_platforms(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxUnavailable(f"folder {path} cannot be shown: {error.strerror}") from error


def read_host_file(folder: int, name: str, limit_bytes: int) -> bytes:
    """Return the content of a regular file below an opened folder; `name` is relative, and no symlink is followed."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise InvalidPath(f"{shown(name)} is no path below the folder", hint="Name a file in it, without ..")
    directory = os.open(".", _DIRECTORY, dir_fd=folder)
    try:
        for index, part in enumerate(parts[:-1]):
            try:
                below = os.open(part, _DIRECTORY, dir_fd=directory)
            except OSError as error:
                reached = "/".join(parts[: index + 1])
                raise FileMissing(blocked_message(directory, part, reached, name, error)) from error
            os.close(directory)
            directory = below
        file, status = open_regular(directory, parts[-1], name)
    finally:
        os.close(directory)
    with file:
        content = bytearray()
        if status.st_size <= limit_bytes:
            while chunk := file.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(content))):
                content += chunk
        if max(status.st_size, len(content)) > limit_bytes:
            raise too_large(name, f"{max(status.st_size, len(content))}", limit_bytes)
    return bytes(content)
