"""What the sandboxes and providers of belljar have in common, for them to inherit. A provider need not use it."""

import asyncio

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import WORKSPACE, Identity, SandboxSpec

SCRATCH = "/run/belljar"
HOME = "/home/belljar"


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
