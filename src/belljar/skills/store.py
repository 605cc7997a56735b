"""The skills that owners' agents saved: every version by its digest, with its state, in the data directory.

A folder for each owner, whose name is a hash, so that no owner can choose one. Whoever changes it holds its lock, so
that servers and commands which share a data directory can share it. A version is a folder that is complete before it
gets its name, and never changed. Blocking; call it in a thread.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from belljar.errors import EngineError, InvalidArgument, TooLarge
from belljar.file_lock import hold_lock
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, make_missing, shown_mode, write_file
from belljar.settings import MEBIBYTE
from belljar.skills.format import SkillContent, SkillFile, check_name, read_folder

MAX_SKILLS: Final = 500
MAX_VERSIONS: Final = 20
_RECORDS: Final = "skills.json"
_DIGEST_CHARS: Final = 12

State = Literal["proposed", "approved"]


class SkillMissing(InvalidArgument):
    """An owner has no such skill, or it has no such version."""

    code = "skill-missing"


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a saved skill."""

    digest: str
    state: State
    saved_at: float
    session_id: str
    """The session that saved it, which alone sees it while it is proposed."""
    description: str
    servers: tuple[str, ...]
    size_bytes: int
    manifest: tuple[SkillFile, ...]

    @property
    def short(self) -> str:
        """Return as much of the digest as people need to name it."""
        return self.digest[:_DIGEST_CHARS]


@dataclass(frozen=True, slots=True)
class SavedSkill:
    """A saved skill with its versions, the oldest first."""

    name: str
    versions: tuple[Version, ...] = ()

    @property
    def current(self) -> Version | None:
        """Return the version that all sessions of the owner see: the latest approved one."""
        return next((version for version in reversed(self.versions) if version.state == "approved"), None)

    def seen_by(self, session_id: str) -> Version | None:
        """Return the version that a session sees: its own latest proposal, else the current one."""
        own = [each for each in self.versions if each.state == "proposed" and each.session_id == session_id]
        return own[-1] if own and session_id else self.current

    def find(self, digest: str) -> Version:
        """Return the version whose digest begins so; the latest one for an empty text."""
        found = [version for version in self.versions if version.digest.startswith(digest.removeprefix("sha256:"))]
        if not found or (len(found) > 1 and digest):
            known = ", ".join(version.short for version in reversed(self.versions))
            raise SkillMissing(f"skill {self.name} has no single version {digest[:80]!r}", hint=f"It has {known}")
        return found[-1]


_RECORD = TypeAdapter(dict[str, SavedSkill])


@dataclass(slots=True)
class OwnerStore:
    """The saved skills of one owner."""

    folder: Path
    limit_bytes: int
    _known: tuple[int, dict[str, SavedSkill]] = field(default_factory=lambda: (-1, dict[str, SavedSkill]()))

    def version(self) -> int:
        """Return a number that changes whenever a skill does; 0 for an owner that never saved one."""
        try:
            return (self.folder / _RECORDS).stat().st_mtime_ns
        except OSError:
            return 0

    def skills(self) -> dict[str, SavedSkill]:
        """Return all saved skills by name."""
        if (version := self.version()) != self._known[0]:
            self._known = (version, self._read())
        return self._known[1]

    def get(self, name: str) -> SavedSkill:
        """Return one skill; SkillMissing for a name that the owner does not have."""
        return _found(self.skills(), name)

    def path(self, version: Version) -> Path:
        """Return the folder of a version's files, which is never changed."""
        return self.folder / "versions" / version.digest

    def content(self, name: str, version: Version) -> SkillContent:
        """Return the files of a version; EngineError if they are not what was saved."""
        content = SkillContent(name, read_folder(self.path(version)).files)
        if content.digest != version.digest:
            raise EngineError(
                f"version {version.short} of skill {name} was changed on disk", hint="Remove it and save it again"
            )
        return content

    # Changes

    def add(self, content: SkillContent, *, state: State, session_id: str, servers: list[str]) -> Version:
        """Store a version; the same content again only becomes the latest version."""
        check_name(content.name)
        version = Version(
            digest=content.digest,
            state=state,
            saved_at=time.time(),
            session_id=session_id,
            description=content.description,
            servers=tuple(servers),
            size_bytes=sum(each.size for each in content.manifest),
            manifest=content.manifest,
        )
        with self._locked() as skills:
            skill = skills.get(content.name, SavedSkill(content.name))
            if content.name not in skills and len(skills) >= MAX_SKILLS:
                raise TooLarge(f"there are {MAX_SKILLS} saved skills already", hint="Have one of them removed")
            before = [each for each in skill.versions if each.digest == version.digest]
            if before and before[0].state == "approved":
                version = replace(version, state="approved")
            others = [each for each in skill.versions if each.digest != version.digest]
            skills[content.name] = replace(skill, versions=_newest([*others, version]))
            self._check_room(skills)
            self._write_files(content, version)
        return version

    def approve(self, name: str, digest: str = "") -> Version:
        """Let all sessions of the owner see a version, which becomes the latest approved one."""
        with self._locked() as skills:
            skill = _found(skills, name)
            version = replace(skill.find(digest), state="approved")
            others = [each for each in skill.versions if each.digest != version.digest]
            skills[name] = replace(skill, versions=(*others, version))
        return version

    def remove(self, name: str, digest: str = "") -> None:
        """Remove a skill with all its versions, or one of them."""
        with self._locked() as skills:
            skill = _found(skills, name)
            gone = skill.find(digest).digest if digest else ""
            left = tuple(each for each in skill.versions if gone and each.digest != gone)
            del skills[name]
            if left:
                skills[name] = replace(skill, versions=left)

    def _check_room(self, skills: Mapping[str, SavedSkill]) -> None:
        sizes = {each.digest: each.size_bytes for skill in skills.values() for each in skill.versions}
        if (total := sum(sizes.values())) > self.limit_bytes:
            raise TooLarge(
                f"saved skills would take {total:,} bytes, and skills_mb allows {self.limit_bytes:,}",
                hint="Have old versions removed, or leave out what can be fetched when it is used",
            )

    @contextmanager
    def _locked(self) -> Generator[dict[str, SavedSkill]]:
        """Hold the lock; write the records that the block leaves, and remove versions that none of them has."""
        make_missing(self.folder)
        with hold_lock(self.folder / "lock"):
            skills = self._read()
            yield skills
            self._write(skills)
            self._sweep(skills)

    # Files

    def _read(self) -> dict[str, SavedSkill]:
        try:
            return _RECORD.validate_json((self.folder / _RECORDS).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise EngineError(
                f"the records of saved skills in {self.folder} cannot be read: {str(error).splitlines()[0]}",
                hint="Restore the file skills.json there",
            ) from error

    def _write(self, skills: Mapping[str, SavedSkill]) -> None:
        fresh = self.folder / f".{_RECORDS}-{secrets.token_hex(4)}"
        write_file(fresh, _RECORD.dump_json({**skills}))
        # Always a new version number, even if the clock does not advance between two changes.
        now = max(time.time_ns(), self.version() + 1)
        os.utime(fresh, ns=(now, now))
        fresh.replace(self.folder / _RECORDS)

    def _write_files(self, content: SkillContent, version: Version) -> None:
        place = self.path(version)
        if place.is_dir():
            return
        fresh = place.with_name(f".{secrets.token_hex(8)}")
        make_folder(fresh)
        try:
            for path, data in content.files.items():
                make_missing((fresh / path).parent)
                write_file(fresh / path, data)
                # Sessions see links to these files, and their users read them there; the folders here are closed.
                (fresh / path).chmod(shown_mode(is_folder=False))
            fresh.rename(place)
        except BaseException:
            remove_tree(fresh)
            raise

    def _sweep(self, skills: Mapping[str, SavedSkill]) -> None:
        kept = {version.digest for skill in skills.values() for version in skill.versions}
        with suppress(FileNotFoundError):
            for place in (self.folder / "versions").iterdir():
                if place.name not in kept:
                    remove_tree(place)


class SkillStore:
    """The saved skills of all owners of a data directory."""

    def __init__(self, data_directory: Path, *, limit_mb: int) -> None:
        self._folder = data_directory / "skills" / "owners"
        self._limit_bytes = limit_mb * MEBIBYTE
        self._owners: dict[str, OwnerStore] = {}

    def of(self, owner: str) -> OwnerStore:
        """Return the store of one owner."""
        if owner not in self._owners:
            name = hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()[:32]
            self._owners[owner] = OwnerStore(self._folder / name, self._limit_bytes)
        return self._owners[owner]


def _found(skills: Mapping[str, SavedSkill], name: str) -> SavedSkill:
    if name not in skills:
        raise SkillMissing(f"there is no saved skill {name[:80]!r}", hint="`belljar skills list` names them")
    return skills[name]


def _newest(versions: list[Version]) -> tuple[Version, ...]:
    """Return the versions to keep: the latest ones, and the one that is current."""
    current = SavedSkill("", tuple(versions)).current
    kept = {each.digest for each in versions[-MAX_VERSIONS:]} | {current.digest if current else ""}
    return tuple(each for each in versions if each.digest in kept)
