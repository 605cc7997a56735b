"""The folder `skills/` of a session: links to the operator's skills, copies of its owner's.

It lies beside the session's own folders and is shown in the sandbox read-only. The server brings it up to date before
each cell, because a session may be older than its owner (in the pool) and than a skill. Sessions import from it by the
package `inside/skills`.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, shown_mode
from belljar.inside import FOLDER
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import make_layer
from belljar.skills.format import SkillContent
from belljar.skills.library import SkillLibrary

NAME: Final = "skills"
VARIABLE: Final = "BELLJAR_SKILLS"
"""Names the folder to the package `skills` in sessions."""
PACKAGE: Final = FOLDER / "skills"
"""The folder of the package `skills` that sessions import; it is on their path."""
_COPIES: Final = ".copies"
_MAX_ENTRIES: Final = 5_000


@dataclass(frozen=True, slots=True)
class ShownSkills:
    """What sandboxes show so that sessions can read and import skills."""

    readable: tuple[Path, ...]
    """The folders of the host that all sandboxes show, beside each session's own folder of skills."""
    importable: tuple[Path, ...] = (PACKAGE,)
    """What goes on PYTHONPATH."""

    def show_in(self, workspace: Path, identity: Identity | None, folder: Path) -> None:
        """Make a session's folder of skills and, unless the session put something there, the workspace's link to it."""
        make_layer(folder, identity)
        place = workspace / NAME
        with contextlib.suppress(OSError):
            if place.is_symlink() and _is_ours(place):
                place.unlink()
            place.symlink_to(folder)
            if identity is not None:
                os.chown(place, identity.uid, identity.gid, follow_symlinks=False)


def shown_skills(library: SkillLibrary | None) -> ShownSkills | None:
    """Return what sandboxes show of the skills; None where there are none."""
    if library is None:
        return None
    return ShownSkills((PACKAGE, *([library.directory] if library.directory else ())))


class SessionSkills:
    """Keeps one session's folder of skills up to date."""

    def __init__(
        self, library: SkillLibrary, folder: Path, identity: Identity | None, owner: str, session_id: str
    ) -> None:
        self._library = library
        self._folder = folder
        self._identity = identity
        self._owner = owner
        self._session_id = session_id
        self._shown: object = None
        self._hidden: tuple[str, ...] = ()
        self.candidate: SkillContent | None = None
        """A skill that is being checked in this session and stored nowhere yet."""

    async def refresh(self) -> list[str]:
        """Bring the folder up to date before a cell; return notices for its output."""
        if self._stamp() == self._shown:
            return []
        try:
            return await asyncio.to_thread(self._refresh)
        except OSError as error:
            return [f"skills/ could not be brought up to date: {error.strerror or type(error).__name__}"]

    def _stamp(self) -> object:
        """Return what changes whenever the folder must."""
        directory, store = self._library.directory, self._library.store
        with contextlib.suppress(OSError):
            changed = directory.stat().st_mtime_ns if directory is not None else 0
            saved = store.of(self._owner).version() if store is not None else 0
            return (changed, saved, self.candidate.digest if self.candidate else "")
        return None

    def _refresh(self) -> list[str]:
        stamp, wanted, hidden = self._stamp(), dict[str, Path | str](), list[str]()
        make_layer(self._folder, self._identity)
        saved = self._library.saved(self._owner, self._session_id)
        contents: dict[str, Mapping[str, bytes] | Path] = {}
        for name, skill in saved.items():
            if skill.version is not None:
                wanted[name] = f"{_COPIES}/{skill.version.digest}"
                contents[skill.version.digest] = skill.folder
        if self.candidate is not None:
            wanted[self.candidate.name] = f"{_COPIES}/{self.candidate.digest}"
            contents[self.candidate.digest] = self.candidate.files
        for entry in self._operators():
            hidden += [entry.name] if entry.name in wanted else []
            wanted[entry.name] = entry
        for digest, content in contents.items():
            self._copy(digest, content)
        self._link(wanted)
        self._sweep({*contents})
        self._shown = stamp
        before, self._hidden = self._hidden, tuple(hidden)
        return [
            f"skills/{name} is the operator's; your saved skill of that name is hidden by it"
            for name in hidden
            if name not in before
        ]

    def _operators(self) -> list[Path]:
        if self._library.directory is None:
            return []
        entries = sorted(entry for entry in self._library.directory.iterdir() if not entry.name.startswith("."))
        return entries[:_MAX_ENTRIES]

    def _link(self, wanted: Mapping[str, Path | str]) -> None:
        for entry in self._folder.iterdir():
            if entry.name != _COPIES and entry.name not in wanted:
                entry.unlink()
        for name, target in wanted.items():
            place = self._folder / name
            if place.is_symlink() and str(place.readlink()) == str(target):
                continue
            fresh = self._folder / f".{secrets.token_hex(8)}"
            fresh.symlink_to(target)
            fresh.replace(place)

    def _copy(self, digest: str, content: Mapping[str, bytes] | Path) -> None:
        """Put a skill's files there, which only the server can change and only this session sees.

        Those of a stored version are further names of the stored files, so that many sessions take no more disk.
        """
        place = self._folder / _COPIES / digest
        if place.is_dir():
            return
        files: Mapping[str, bytes | Path] = content if not isinstance(content, Path) else _files_of(content)
        make_folder(place.parent, shown_mode(is_folder=True))
        fresh = place.parent / f".{secrets.token_hex(8)}"
        make_folder(fresh, shown_mode(is_folder=True))
        for path, data in files.items():
            for parent in reversed((fresh / path).relative_to(fresh).parents[:-1]):
                make_folder(fresh / parent, shown_mode(is_folder=True))
            _put(fresh / path, data)
        fresh.rename(place)

    def _sweep(self, kept: set[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            for place in (self._folder / _COPIES).iterdir():
                if place.name not in kept:
                    remove_tree(place)


def _files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _put(place: Path, data: bytes | Path) -> None:
    if isinstance(data, Path):
        try:
            place.hardlink_to(data)
        except OSError:  # another file system, or one without links
            data = data.read_bytes()
        else:
            return
    place.write_bytes(data)
    place.chmod(shown_mode(is_folder=False))


def _is_ours(link: Path) -> bool:
    """Return whether the link was made for an earlier kernel, perhaps of the session that this one was forked from."""
    parts = link.readlink().parts
    return len(parts) > 3 and parts[-1] == NAME and parts[-3] in (NAME, "sessions")
