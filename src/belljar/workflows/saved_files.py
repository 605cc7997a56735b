"""What a run at the terminal left in `workspace/`: saved in a folder `workspace` of the working directory.

The code of a workflow chooses the names of its files, so they never get among the person's own: the folder is one that
belljar made, marked by a file in it. Beside a folder that somebody else filled they go to `download_directory`.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from belljar.cli.streams import one_line
from belljar.errors import BelljarError
from belljar.executions.shared_workspace import FOLDER, Stamp, WorkspaceFolder, open_shared_workspaces
from belljar.files.transfer import download_folder, safe_path
from belljar.files.workspace import Workspace
from belljar.journal.run_records import RunRecord
from belljar.settings import MEBIBYTE, Settings

MARK = ".belljar"
_MARK_TEXT = "Files that runs of workflows left in workspace/. A later run replaces those of the same name.\n"
_KEEPERS = frozenset({".gitkeep", ".gitignore", ".keep"})
"""Files that only keep an empty folder in a repository."""
_MAX_LISTED = 20


class RunFiles:
    """The files of a run's owner, from when a command begins or goes on with the run."""

    def __init__(self, settings: Settings, run: RunRecord) -> None:
        self._settings = settings
        self._run = run
        folders = open_shared_workspaces(settings)
        self._folder = folders.of(run.principal) if folders is not None else None
        self._before: dict[str, Stamp] = {}
        if self._folder is not None:
            with contextlib.suppress(OSError, BelljarError):  # then nothing is kept, which the steps' notices tell
                self._before = _files(self._folder)

    async def save(self) -> None:
        """Save what the run wrote since it began, and say where on stderr."""
        if self._folder is not None:
            await asyncio.to_thread(self._save, self._folder)

    def _save(self, folder: WorkspaceFolder) -> None:
        try:
            # Hidden files are obeyed by shells and tools.
            names = [name for name in self._changed(folder) if not name.startswith(".") and "/." not in name]
            if names:
                self._copy(folder, names, *self._target())
        except (OSError, BelljarError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            print(f"the files in {FOLDER}/ are not saved here: {one_line(reason)}", file=sys.stderr)

    def _changed(self, folder: WorkspaceFolder) -> list[str]:
        # An earlier command may have ended without saving, and code may give a file an older time.
        began = int(self._run.started_at * 1e9)
        found = sorted(_files(folder).items())
        return [name for name, stamp in found if self._before.get(name) != stamp or stamp[0] >= began]

    def _target(self) -> tuple[Path, str]:
        """Return the folder to save in, and why it is not the one in the working directory, if it is not."""
        here = Path.cwd() / FOLDER
        if not os.path.lexists(here):
            here.mkdir()
        elif here.is_symlink() or not here.is_dir():
            return self._other(), f"{FOLDER} here is no folder"
        elif not _is_ours(here):
            return self._other(), f"{FOLDER} here has files that no run left there"
        (here / MARK).write_text(_MARK_TEXT)
        return here, ""

    def _other(self) -> Path:
        folder = download_folder(self._settings.download_directory, self._run.id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _copy(self, folder: WorkspaceFolder, names: list[str], target: Path, why: str) -> None:
        saved = Workspace(target)
        with folder.locked():
            for name in names:
                folder.copy_to(name, saved, str(safe_path(name)), self._settings.workspace_mb * MEBIBYTE)
        more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
        shown = ", ".join([*map(one_line, names[:_MAX_LISTED]), *more])
        place = f"{target}, because {why}" if why else f"{FOLDER}/"
        print(f"saved in {place}: {shown}", file=sys.stderr, flush=True)


def _files(folder: WorkspaceFolder) -> dict[str, Stamp]:
    with folder.locked():
        return folder.files()


def _is_ours(folder: Path) -> bool:
    names = {entry.name for entry in os.scandir(folder)}
    mark = folder / MARK
    return not names - _KEEPERS or (mark.is_file() and not mark.is_symlink())
