"""All skills that an owner has: the operator's folder as it is now, and what the owner's agents saved.

The operator's wins where both have a name. Blocking; call it in a thread.
"""

import ast
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from belljar.errors import SettingsError
from belljar.servers import shared_folder
from belljar.settings import Settings
from belljar.skills.format import MAIN, BadSkill, SkillFile, described, findings, module_name, read_front_matter, walk
from belljar.skills.front_matter import BadFrontMatter
from belljar.skills.store import SkillStore, Version
from belljar.toolbox.base import Catalogue, ServerCatalogue, ToolDefinition
from belljar.toolbox.search import ToolIndex

SCHEME: Final = "skill://"
MAX_SKILLS: Final = 2_000
_MAX_DEPTH: Final = 3
_MODULE_BYTES: Final = 65_536
_DESCRIPTION_CHARS: Final = 1024
_LINE_CHARS: Final = 200

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill as an owner finds it."""

    path: str
    """Its folder below `skills/`, like `sales-report` or `documents/pdf`; the last part is its name."""
    description: str
    folder: Path
    """Where its files are on the host; a file for a plain module."""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its front matter; empty for a plain module."""
    files: tuple[SkillFile, ...] = ()
    version: Version | None = None
    """The saved version; None for the operator's."""

    @property
    def name(self) -> str:
        """Return its name."""
        return self.path.rpartition("/")[2]

    @property
    def is_plain(self) -> bool:
        """Return whether it is a plain Python file, which is imported and searched but not served."""
        return not self.files

    @property
    def uri(self) -> str:
        """Return the URI of its SKILL.md."""
        return self.resource(MAIN)

    @property
    def module(self) -> str:
        """Return what sessions import it as."""
        return ".".join(["skills", *map(module_name, self.path.removesuffix(".py").split("/"))])

    def resource(self, file: str) -> str:
        """Return the URI of one of its files."""
        return f"{SCHEME}{quote(f'{self.path}/{file}')}"


@dataclass(slots=True)
class SkillScan:
    """The operator's folder at one moment."""

    skills: dict[str, Skill] = field(default_factory=dict[str, Skill])
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Folders with a SKILL.md that are not served, and why."""


class SkillLibrary:
    """The skills of one server."""

    def __init__(self, directory: Path | None, store: SkillStore | None) -> None:
        self.directory = directory
        """The operator's folder; None where there is none."""
        self.store = store
        """What agents saved; None where the setting `skills` does not let them."""
        self._seen: dict[Path, tuple[object, Skill]] = {}
        self._logged_problems: dict[str, str] = {}
        self._index: tuple[tuple[Skill, ...], ToolIndex] | None = None

    # Finding

    def skills(self, owner: str, session_id: str = "") -> list[Skill]:
        """Return the owner's skills in order of their paths, with those that only this session sees yet."""
        found = self.scan().skills
        return [skill for _, skill in sorted({**self.saved(owner, session_id), **found}.items())]

    def saved(self, owner: str, session_id: str = "") -> dict[str, Skill]:
        """Return the owner's saved skills by name, also those that the operator's hide."""
        if self.store is None:
            return {}
        store = self.store.of(owner)
        found: dict[str, Skill] = {}
        for name, saved in store.skills().items():
            if (version := saved.seen_by(session_id)) is not None:
                folder = store.path(version)
                skill = self._described(name, folder, version.digest, version.manifest, version)
                found[name] = skill
        return found

    def find(self, owner: str, path: str) -> Skill | None:
        """Return the skill that has a path, or a path below it; None if the owner has none there."""
        parts = path.split("/")
        for end in range(1, min(len(parts), _MAX_DEPTH + 1) + 1):
            place = self.directory.joinpath(*parts[:end]) if self.directory is not None else None
            if place is None or parts[end - 1][:1] in ("", ".", "_"):
                break
            if (place / MAIN).is_file():
                with contextlib.suppress(BadSkill, BadFrontMatter, OSError):
                    return self._skill("/".join(parts[:end]), place)
                return None
        return self.saved(owner).get(parts[0])

    def read(self, owner: str, path: str) -> tuple[Skill, bytes] | None:
        """Return the content of a file, given as PATH-OF-THE-SKILL/FILE, and whose it is; None if there is none."""
        skill = self.find(owner, path)
        if skill is None:
            return None
        file = path.removeprefix(f"{skill.path}/")
        # Only what the manifest lists, so no path leads anywhere else.
        if all(each.path != file for each in skill.files):
            return None
        try:
            return skill, (skill.folder / file).read_bytes()
        except OSError:
            return None

    def search(self, owner: str, query: str, *, limit: int, session_id: str = "") -> list[Skill]:
        """Return the skills that match by name and description, the best first."""
        skills = tuple(self.skills(owner, session_id))
        if self._index is None or self._index[0] != skills:
            tools = tuple(ToolDefinition("skills", each.path, each.description) for each in skills)
            self._index = (skills, ToolIndex(Catalogue({"skills": ServerCatalogue("skills", tools)})))
        by_path = {skill.path: skill for skill in skills}
        return [by_path[tool.name] for tool in self._index[1].search(query, limit=limit)]

    def found_in_session(self, owner: str, session_id: str, query: str, limit: int) -> str:
        """Return the skills that match as text, for `toolbox.search` in sessions."""
        found = self.search(owner, query, limit=limit, session_id=session_id)
        lines = [f"skills/{each.path}: {' '.join(each.description.split())[:_LINE_CHARS]}" for each in found]
        return "\n".join(["# skills, read SKILL.md there first:", *lines]) if lines else ""

    # The operator's folder

    def scan(self) -> SkillScan:
        """Look through the operator's folder; what did not change since the last time is not read again."""
        scan = SkillScan()
        if self.directory is None:
            return scan
        for place, is_skill in _candidates(self.directory, 0):
            path = place.relative_to(self.directory).as_posix()
            if len(scan.skills) >= MAX_SKILLS:
                scan.problems[path] = f"there are more than {MAX_SKILLS:,} skills"
                break
            try:
                scan.skills[path] = self._skill(path, place) if is_skill else self._module(path, place)
            except (BadSkill, BadFrontMatter, OSError) as error:
                reason = str(error) if isinstance(error, BadSkill | BadFrontMatter) else error.strerror or "unreadable"
                scan.problems[path] = reason
        for path, reason in scan.problems.items():
            if self._logged_problems.get(path) != reason:
                log.warning("skill %s of skills_directory is not served: %s", path, reason)
        self._logged_problems = scan.problems
        return scan

    def _skill(self, path: str, folder: Path) -> Skill:
        listed = walk(folder)
        stamp = tuple((name, status.st_mtime_ns, status.st_size, status.st_ino) for name, status in listed)
        if (seen := self._seen.get(folder)) is not None and seen[0] == stamp:
            return seen[1]
        files = tuple(described(name, (folder / name).read_bytes()) for name, _ in listed)
        return self._described(path, folder, stamp, files)

    def _described(
        self, path: str, folder: Path, stamp: object, files: tuple[SkillFile, ...], version: Version | None = None
    ) -> Skill:
        """Return a skill, whose front matter is read again only if its stamp has changed."""
        seen = self._seen.get(folder)
        if seen is not None and seen[0] == stamp and seen[1].version == version:
            return seen[1]
        matter = read_front_matter((folder / MAIN).read_bytes())
        if errors := findings(matter, path.rpartition("/")[2]).errors:
            raise BadSkill("; ".join(errors))
        skill = Skill(path, matter.fields["description"], folder, matter.fields, files, version)
        self._seen[folder] = (stamp, skill)
        return skill

    def _module(self, path: str, file: Path) -> Skill:
        """Return a plain module, described by the beginning of its docstring."""
        status = file.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if (seen := self._seen.get(file)) is not None and seen[0] == stamp:
            return seen[1]
        skill = Skill(path, _docstring(file) if status.st_size <= _MODULE_BYTES else "", file)
        self._seen[file] = (stamp, skill)
        return skill


def _candidates(folder: Path, depth: int) -> Iterator[tuple[Path, bool]]:
    """Yield the skills below a folder, and whether each is a folder of the format; skills in skills are theirs too."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name[0] in "._" or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            if (entry / MAIN).is_file():
                yield entry, True
            elif depth < _MAX_DEPTH:
                yield from _candidates(entry, depth + 1)
        elif entry.suffix == ".py" and depth == 0:
            yield entry, False


def _docstring(file: Path) -> str:
    # The operator's own file: it is parsed here and never run.
    try:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    return " ".join(text.partition("\n\n")[0].split())[:_DESCRIPTION_CHARS]


def open_library(settings: Settings, *, has_tools: bool) -> SkillLibrary | None:
    """Return the skills of the settings, None where there are none; SettingsError for a folder that cannot be shown."""
    can_save = settings.skills == "on" or (settings.skills == "auto" and (has_tools or bool(settings.skills_directory)))
    if not settings.skills_directory and not can_save:
        return None
    store = SkillStore(shared_folder(settings.data_directory), limit_mb=settings.skills_mb) if can_save else None
    if not settings.skills_directory:
        return SkillLibrary(None, store)
    folder = Path(settings.skills_directory).resolve()
    if not folder.is_dir():
        raise SettingsError(f"skills_directory {folder} is no folder", hint="Make it, or name another one")
    if settings.data_directory.resolve().is_relative_to(folder):
        raise SettingsError(
            f"skills_directory {folder} holds the data directory, with the files of every session",
            hint="Name a folder that has skills in it and nothing else",
        )
    return SkillLibrary(folder, store)
