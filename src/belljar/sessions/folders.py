"""A session's places on the host: where its files, packages, sockets and displays are."""

import os
from dataclasses import dataclass
from pathlib import Path

from belljar.files.private import make_folder, way_mode
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import make_layer


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
    def own(self) -> tuple[Path, ...]:
        """Those that its code writes."""
        return (self.workspace, self.scratch, self.home)

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
        make_folder(self.root, way_mode())
        for folder in self.own:
            make_folder(folder)
            if self.identity is not None:
                os.chown(folder, self.identity.uid, self.identity.gid)
        make_layer(self.layer, self.identity)
