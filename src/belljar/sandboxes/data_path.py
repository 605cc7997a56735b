"""Shows a session of the `process` sandbox its folder at /mnt/data, the path that clients and models write.

By a mount that only the session's commands see, else, for a server with one session at a time, by a symbolic link that
the session's sandbox holds. Two sessions never share one. Knows folders and commands, nothing of sandboxes.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from belljar.inside import FOLDER
from belljar.sandboxes.base import WORKSPACE

_TRIAL_S = 20
_MARKS = ("/.dockerenv", "/run/.containerenv")
_VARIABLE = "container"
"""A variable that containers have by convention; podman sets it, and our image does."""
_IMAGE = "oci"
"""Its value in our image."""


def is_in_container() -> bool:
    """Tell whether a container of any engine is around us."""
    return _VARIABLE in os.environ or any(os.path.exists(mark) for mark in _MARKS)  # noqa: PTH110 - as short


def is_in_image() -> bool:
    """Tell whether this is a container of our own image, which people look at from outside."""
    return os.environ.get(_VARIABLE) == _IMAGE


def container_note(path: Path) -> str:
    """Return what is to be said with a path that people are told: in our image it is not theirs; elsewhere nothing."""
    if not is_in_image():
        return ""
    is_mounted = any(place.is_mount() for place in (path, *path.parents) if place != place.parent)
    if is_mounted:
        return " (in the container, from what is mounted there)"
    return " (in the container, and gone with it unless a folder is mounted there)"


class DataPath:
    """What this host allows: a mount, a link for one session at a time, or neither."""

    def __init__(self, *, is_for_one: bool = False) -> None:
        self._is_for_one = is_for_one

    @property
    def is_shown(self) -> bool:
        """Return whether sessions see their folder at /mnt/data. Takes 50 ms when first asked."""
        return self._can_mount or self._can_link

    @cached_property
    def _can_mount(self) -> bool:
        # An ordinary user's mount needs a user namespace, in which sudo and ssh do not work: right for a container, and
        # not for somebody's own machine.
        if sys.platform != "linux" or not (os.geteuid() == 0 or is_in_container()):
            return False
        with tempfile.TemporaryDirectory() as folder:
            try:
                tried = subprocess.run(_mounting(folder), capture_output=True, timeout=_TRIAL_S, check=False)
            except (OSError, subprocess.SubprocessError):
                return False
        return tried.returncode == 0

    @cached_property
    def _can_link(self) -> bool:
        if not self._is_for_one or not os.access(Path(WORKSPACE).parent, os.W_OK | os.X_OK):
            return False
        is_free = not os.path.lexists(WORKSPACE) or Path(WORKSPACE).is_symlink()
        return is_free or not any(Path(WORKSPACE).iterdir())

    def command(self, workspace: str, command: Sequence[str]) -> list[str]:
        """Return a command that sees the folder there, as far as mounts can do it."""
        return [*(_mounting(workspace) if self._can_mount else ()), *command]

    def link(self, workspace: Path) -> int | None:
        """Link /mnt/data to this folder and return a descriptor that holds the link, or None where there is none."""
        if self._can_mount or not self._can_link:
            return None
        held = _locked(workspace)
        if held is None:
            return None
        path = Path(WORKSPACE)
        with contextlib.suppress(OSError):
            if path.is_symlink() and (other := _locked(path)) is not None:
                # Left by a server that is gone: nobody holds the folder that it leads to.
                os.close(other)
                path.unlink()
            elif path.is_symlink() and not path.exists():
                path.unlink()
            elif path.is_dir() and not path.is_symlink():
                path.rmdir()
            path.symlink_to(workspace)
            return held
        os.close(held)
        return None


def unlink(held: int, workspace: Path) -> None:
    """Remove the link to this folder, and let go of it."""
    with contextlib.suppress(OSError):
        if Path(WORKSPACE).readlink() == workspace:
            Path(WORKSPACE).unlink()
    os.close(held)


def _mounting(workspace: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(FOLDER / "data_mount.py"), workspace, WORKSPACE]


def _locked(folder: Path) -> int | None:
    """Return a descriptor of a folder that no other session's link leads to, locked; None where one does."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
