"""A session's places on the host: where its files, packages, sockets and displays are."""

import os
from dataclasses import dataclass
from pathlib import Path

from belljar.sandboxes.base import Identity


@dataclass(frozen=True, slots=True)
class SessionFolders:
    """The session's places on the host."""

    session_id: str
    root: Path
    identity: Identity | None = None
    """Whose they are, where the session is a user of its own."""

    @property
    def workspace(self) -> Path:
        """Working directory of the cells, `/mnt/data` inside."""
        return self.root / "workspace"

    @property
    def scratch(self) -> Path:
        """Sockets and connection files."""
        return self.root / "scratch"

    @property
    def home(self) -> Path:
        """HOME under providers without a private one."""
        return self.root / "home"

    @property
    def layer(self) -> Path:
        """Packages installed for this session alone."""
        return self.root / "layer"

    @property
    def displays(self) -> Path:
        """What executions showed, out of the cells' reach."""
        return self.root / "displays"

    @property
    def state(self) -> Path:
        """Its variables while it sleeps."""
        return self.root / "state"

    @property
    def vault(self) -> Path:
        """What its tokens stand for while it sleeps, out of the cells' reach."""
        return self.root / "vault"

    @property
    def tokens(self) -> Path:
        """Which numbers its tokens have had, out of the cells' reach; no values."""
        return self.root / "tokens.json"

    @property
    def shared(self) -> Path:
        """What it has in common with its owner's other sessions, and since when."""
        return self.root / "shared.json"

    @property
    def snapshots(self) -> Path:
        """What its files once were, out of the cells' reach."""
        return self.root / "snapshots"

    def make(self) -> None:
        """Make those that are not there, below a folder that is closed to others."""
        for folder in (self.workspace, self.scratch, self.home, self.layer):
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            if self.identity is not None and folder != self.layer:
                os.chown(folder, self.identity.uid, self.identity.gid)
        # Whatever the umask is: the session's user passes through the one, and reads the other, which stays ours.
        self.root.chmod(0o711)
        self.layer.chmod(0o755)
