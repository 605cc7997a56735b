"""Makes folders and files of the data directory that only the server's user can access, from the moment they exist.

The mode is passed to the call that makes a file, so that it is never wider, whatever the umask is. If an earlier
version left a data directory open to others, it is closed when a server starts. Only a server that runs as root gives
sessions host users of their own; such a user can enter the folders that lead to its files, and read what it is shown.
"""

import contextlib
import grp
import logging
import os
import pwd
import secrets
import stat
from pathlib import Path

from belljar.errors import SettingsError

FOLDER_MODE, FILE_MODE = 0o700, 0o600
WAY_MODE = 0o711
"""The mode of a folder that users of sessions can enter and cannot list."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
# Folders of a session, which may have put anything there. They are not entered here; the folder above them is closed.
_OF_SESSIONS = frozenset({"workspace", "scratch", "home", "code"})
# Trees of packages, which users of sessions may have to read; the folder above them is closed as well.
_OF_PACKAGES = frozenset({"environments", "support", "skills", "layer"})
# The other files and folders of belljar in the data directory, by prefix; the operator may have others beside them.
_OURS = ("journal.sqlite", "rates.sqlite", "search", "decisions", "runs", "keep", "workspaces")
# Trees of packages of the `executor` surface, with the code that runs now.
_OF_PROGRAMS = ("packages-", "settled-")
_TOOLBOX_TREES = "trees"

log = logging.getLogger(__name__)


def has_session_users() -> bool:
    """Tell whether sessions may have host users of their own, which only a server that runs as root gives them."""
    return os.geteuid() == 0


def way_mode() -> int:
    """Return the mode of a folder that leads to a session's own folders."""
    return WAY_MODE if has_session_users() else FOLDER_MODE


def shown_mode(*, is_folder: bool) -> int:
    """Return the mode of what users of sessions read, below folders that are closed to everybody else."""
    if has_session_users():
        return 0o755 if is_folder else 0o644
    return FOLDER_MODE if is_folder else FILE_MODE


def make_folder(path: Path, mode: int = FOLDER_MODE) -> None:
    """Make a folder with this mode, whatever the umask is, and missing folders above it with mode 0700."""
    name = os.fspath(path)
    # By `os`, because each new session has five of them.
    try:
        os.mkdir(name, mode & FOLDER_MODE)  # noqa: PTH102
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path, mode)
        return
    except FileExistsError:
        if not path.is_dir():
            raise
    if stat.S_IMODE(os.stat(name).st_mode) != mode:  # noqa: PTH116
        os.chmod(name, mode)  # noqa: PTH101


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that only we can access, in a folder of ours; an existing one gets that mode before the content."""
    descriptor = os.open(path, _NEW, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != FILE_MODE:
            os.fchmod(descriptor, FILE_MODE)
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file as `write_file` does, completely or not at all, because half a file could not be read again."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_file(draft, content)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def open_data_directory(folder: Path) -> None:
    """Make the data directory, or check that only we can write it, and close what an earlier version left open."""
    try:
        make_missing(folder)
        status = folder.stat()
    except OSError as error:
        raise SettingsError(
            f"data_directory {folder} cannot be used: {error.strerror}",
            hint="Make room there, or set data_directory to a folder that can be written",
        ) from error
    if status.st_uid != os.geteuid():
        raise SettingsError(
            f"data_directory {folder} belongs to user {status.st_uid}, and this is user {os.geteuid()}",
            hint="Set data_directory to a folder of your own, or have root give it to you with chown",
        )
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
        others = "everybody" if status.st_mode & stat.S_IWOTH else f"group {_group_name(status.st_gid)}"
        raise SettingsError(
            f"data_directory {folder} can be written by {others} (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"See that nothing in it is somebody else's, then: chmod 700 {folder}",
        )
    # Without symbolic links, because the mode of a link is nobody's.
    if closed := _close(folder.resolve()):
        log.warning("%s was open to other users of this machine: %d folders and files are closed now", folder, closed)


def make_missing(folder: Path) -> None:
    """Make a folder unless it exists; an existing one is not changed."""
    if not folder.is_dir():
        make_folder(folder)


def _is_own_group(gid: int) -> bool:
    """Tell whether a group is the private one that many systems give each user, with nobody else in it."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _close(folder: Path) -> int:
    """Close what an earlier version left open to others; return how many folders and files that were.

    Paths can be trusted, because nobody else can write here, except in folders of sessions, which are not entered.
    Nothing below a folder that was closed already is looked at.
    """
    closers = {"sessions": _session_parts, "executor": _session_parts, "toolbox": _toolbox_parts}
    closed = _set_mode(folder, FOLDER_MODE)
    for entry in _entries(folder):
        if entry.name in closers and entry.is_dir(follow_symlinks=False):
            closed += closers[entry.name](Path(entry.path))
        elif entry.name in _OF_PACKAGES | _OF_SESSIONS:
            closed += _set_mode(Path(entry.path), FOLDER_MODE)
        elif entry.name.startswith(_OURS):
            closed += _close_all(Path(entry.path))
    return closed


def _session_parts(folder: Path) -> int:
    # The folders of programs are mounted by the host itself, so no session's user has to enter the folder above them.
    closed = _set_mode(folder, way_mode() if folder.name == "sessions" else FOLDER_MODE)
    for session in _entries(folder):
        if not session.is_dir(follow_symlinks=False):
            closed += _close_all(Path(session.path))
            continue
        closed += _set_mode(Path(session.path), way_mode())
        for part in _entries(Path(session.path)):
            is_tree = part.name in _OF_PACKAGES or part.name.startswith(_OF_PROGRAMS)
            if part.name not in _OF_SESSIONS and not is_tree:
                closed += _close_all(Path(part.path))
    return closed


def _toolbox_parts(folder: Path) -> int:
    closed = _set_mode(folder, FOLDER_MODE)
    for part in _entries(folder):
        closed += _close_all(Path(part.path)) if part.name != _TOOLBOX_TREES else 0
    return closed


def _close_all(path: Path) -> int:
    """Close a file, or a folder with all below it, unless the folder is closed already; return how many were closed."""
    if not path.is_dir() or path.is_symlink():
        return _set_mode(path, FILE_MODE)
    if not _set_mode(path, FOLDER_MODE):
        return 0
    closed, waiting = 1, [path]
    while waiting:
        for entry in _entries(waiting.pop()):
            is_folder = entry.is_dir(follow_symlinks=False)
            closed += _set_mode(Path(entry.path), FOLDER_MODE if is_folder else FILE_MODE)
            if is_folder:
                waiting.append(Path(entry.path))
    return closed


def _entries(folder: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except OSError:
        return []


def _set_mode(path: Path, mode: int) -> int:
    """Limit a file or folder of ours to this mode; return 1 if its mode allowed more before, else 0."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        now = stat.S_IMODE(status.st_mode)
        wanted = mode if stat.S_ISDIR(status.st_mode) else now & mode
        if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode) and now != wanted:
            path.chmod(wanted)
            return int(bool(now & ~wanted))
    return 0
