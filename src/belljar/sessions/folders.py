"""A session's folders on the host: for its files, packages, sockets, displays and saved state."""

import os
from dataclasses import dataclass
from pathlib import Path

from belljar.files.private import make_folder, way_mode
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import make_layer


@dataclass(frozen=True, slots=True)
class SessionFolders:
    """The paths of one session's folders and files on the host."""

    session_id: str
    root: Path
    identity: Identity | None = None
    """The user that owns them, where the session has a user of its own."""
    principal: str = ""
    """Whose session it is; empty while it is nobody's yet."""

    @property
    def workspace(self) -> Path:
        """Return the working directory of the cells, `/mnt/data` in the sandbox."""
        return self.root / "workspace"

    @property
    def scratch(self) -> Path:
        """Return the folder for sockets and connection files."""
        return self.root / "scratch"

    @property
    def home(self) -> Path:
        """Return HOME under providers without a private one."""
        return self.root / "home"

    @property
    def layer(self) -> Path:
        """Return the folder of packages installed for this session alone."""
        return self.root / "layer"

    @property
    def skills(self) -> Path:
        """Return the folder of the skills that the cells see and cannot change."""
        return self.root / "skills"

    @property
    def own(self) -> tuple[Path, ...]:
        """Return the folders that its code can write."""
        return (self.workspace, self.scratch, self.home)

    @property
    def displays(self) -> Path:
        """Return the folder of displays, out of the cells' reach."""
        return self.root / "displays"

    @property
    def state(self) -> Path:
        """Return the file of its variables while it sleeps."""
        return self.root / "state"

    @property
    def vault(self) -> Path:
        """Return the file of the values behind its redaction tokens while it sleeps, out of the cells' reach."""
        return self.root / "vault"

    @property
    def tokens(self) -> Path:
        """Return the file of the numbers that its redaction tokens have had, no values, out of the cells' reach."""
        return self.root / "tokens.json"

    @property
    def shared(self) -> Path:
        """Return the file that says which files of `workspace/` equal those of the owner's folder, and since when."""
        return self.root / "shared.json"

    @property
    def snapshots(self) -> Path:
        """Return the folder of file snapshots for checkpoints, out of the cells' reach."""
        return self.root / "snapshots"

    def make(self) -> None:
        """Create what is missing of the folders that every session needs, below a root that is closed to others.

        `skills`, `displays` and `snapshots` are made when they are first used.
        """
        make_folder(self.root, way_mode())
        for folder in self.own:
            make_folder(folder)
            if self.identity is not None:
                os.chown(folder, self.identity.uid, self.identity.gid)
        make_layer(self.layer, self.identity)
