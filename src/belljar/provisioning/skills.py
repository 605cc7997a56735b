"""The operator's folder of Python that every session can read and import as `skills`.

Sandboxes show the folder itself, read-only, so that the next import finds what the operator changes. Knows nothing of
what is in it.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import SettingsError
from belljar.files.private import make_folder, shown_mode
from belljar.sandboxes.base import Identity
from belljar.settings import Settings

PACKAGE = "skills"


@dataclass(frozen=True, slots=True)
class Skills:
    """The folder of skills and how sessions import it; made by `open_skills`."""

    folder: Path
    """The operator's folder."""
    importable: Path
    """What goes on PYTHONPATH: a folder of the server with a link `skills` to the operator's, whatever its name is."""

    @property
    def readable(self) -> tuple[Path, ...]:
        """Return the folders of the host that sandboxes show."""
        return (self.importable, self.folder)

    def show_in(self, workspace: Path, identity: Identity | None) -> None:
        """Put a link into a session folder, so that `ls skills` works there; what the session put there stays."""
        place = workspace / PACKAGE
        with contextlib.suppress(OSError):
            if place.is_symlink() and _is_ours(place):
                place.unlink()
            place.symlink_to(self.importable / PACKAGE)
            if identity is not None:
                os.chown(place, identity.uid, identity.gid, follow_symlinks=False)


def open_skills(settings: Settings) -> Skills | None:
    """Return the skills of the settings, None where there are none; SettingsError for a folder that cannot be shown."""
    if not settings.skills_directory:
        return None
    folder = Path(settings.skills_directory).resolve()
    if not folder.is_dir():
        raise SettingsError(f"skills_directory {folder} is no folder", hint="Make it, or name another one")
    if settings.data_directory.resolve().is_relative_to(folder):
        raise SettingsError(
            f"skills_directory {folder} holds the data directory, with the files of every session",
            hint="Name a folder that has skills in it and nothing else",
        )
    # The same path for every server of a data directory, because sessions may outlive their server.
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    importable = settings.data_directory / PACKAGE / name
    make_folder(importable.parent)
    make_folder(importable, shown_mode(is_folder=True))
    with contextlib.suppress(FileExistsError):
        (importable / PACKAGE).symlink_to(folder)
    return Skills(folder, importable)


def _is_ours(link: Path) -> bool:
    """Return whether the link was made for an earlier kernel, perhaps to another folder of skills."""
    parts = link.readlink().parts
    return len(parts) > 2 and parts[-1] == parts[-3] == PACKAGE
