"""What the sandboxes and providers of belljar have in common, to inherit or to call. A provider need not use it."""

import asyncio
import os

from belljar.errors import InvalidArgument, SandboxUnavailable
from belljar.sandboxes.base import WORKSPACE, Identity, SandboxSpec

SCRATCH = "/run/belljar"
HOME = "/home/belljar"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders of programs and libraries of the host, which sessions see."""
_OWN = ("/proc", "/dev", "/tmp", "/etc", HOME, SCRATCH, WORKSPACE)  # noqa: S108 - a path inside


class SandboxBase:
    """The attributes of a sandbox with its own view of the file system, and whether it has been closed."""

    workspace = WORKSPACE
    scratch = SCRATCH
    home = HOME
    temporary = "/tmp"  # noqa: S108 - a path inside
    can_spare = False
    ends_with_command = True

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._ending = asyncio.Lock()
        self._is_closed = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxUnavailable(f"Sandbox of session {self.spec.session_id} is closed")


class WithoutHostUsers:
    """The part of a provider whose sessions run as the server's own user."""

    def take_identity(self) -> Identity | None:
        """Return None, because sessions run as the server's own user."""
        return None

    def release_identity(self, identity: Identity) -> None:
        """Do nothing, because no user was taken."""


def check_folders(spec: SandboxSpec) -> None:
    """Refuse a sandbox whose folders are missing, or whose trees would cover the sandbox's own folders."""
    for path in spec.readable:
        if not path.is_absolute() or any(is_within(own, str(path)) for own in _OWN):
            raise InvalidArgument(f"Tree cannot be shown in the sandbox: {path}", hint="Name a folder further down")
        if covering := next((folder for folder in spec.folders if is_within(str(path), folder.inside)), None):
            raise InvalidArgument(
                f"Folder {covering.name} would cover {path} in the sandbox", hint="Give it another name in `folders`"
            )
    for path in (spec.workspace, spec.scratch, *spec.readable):
        if not path.exists():
            raise SandboxUnavailable(f"Folder for the sandbox is missing: {path}")


def may_keep_set_ids(spec: SandboxSpec, identity: Identity | None) -> bool:
    """Return whether `keeps_set_ids` is asked for, and such files can be of no use to anybody outside the sandbox.

    A folder above the session's must be closed to all but the server's user, and no other folder of the host may be
    writable. A session that is the host's root has no such files at all, because an operator may copy them.
    """
    if not spec.keeps_set_ids or any(folder.is_writable for folder in spec.folders):
        return False
    own = os.geteuid()
    above = [folder.stat() for folder in spec.workspace.resolve().parents]
    return (own != 0 or identity is not None) and any(
        status.st_uid == own and not status.st_mode & 0o077 for status in above
    )


def is_within(path: str, tree: str) -> bool:
    """Return whether a path is the tree or below it, by name. Of strings, because `Path` takes 3 ms for a sandbox."""
    return path == tree or tree == "/" or path.startswith(f"{tree}/")
