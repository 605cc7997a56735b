"""The rules of the open Agent Skills format: names, fields, files and sizes of a skill folder.

What is saved here must keep all of them. What others wrote is served if it keeps those that a client relies on; the
rest are warnings. Knows nothing of where skills are stored and who may see them.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

from belljar.errors import InvalidArgument
from belljar.skills.front_matter import BadFrontMatter, FrontMatter, parse

MAIN: Final = "SKILL.md"
SCRIPTS: Final = "scripts"
MAX_FILES: Final = 512
MAX_BYTES: Final = 16 * 1024 * 1024
NAME_CHARS: Final = 64
DESCRIPTION_CHARS: Final = 1024
COMPATIBILITY_CHARS: Final = 500
SERVERS_FIELD: Final = "belljar-servers"
"""The field of `metadata` with the MCP servers that a skill's code imports."""
_NAME: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_FILE_NAME: Final = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")
_MAX_DEPTH: Final = 12
_SERVER_IMPORT: Final = re.compile(r"^[ \t]*(?:from|import)[ \t]+servers\.(\w{1,64})", re.MULTILINE)
_SERVERS_IMPORT: Final = re.compile(r"^[ \t]*from[ \t]+servers[ \t]+import[ \t]+([\w, \t]{1,500})", re.MULTILINE)
_AMBIGUOUS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
KNOWN_FIELDS: Final = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")


class BadSkill(InvalidArgument):
    """A skill that breaks the format: the file, the line where there is one, and the reason."""


@dataclass(frozen=True, slots=True)
class SkillFile:
    """One file of a skill, as clients verify it."""

    path: str
    """Its path below the skill folder, with `/`."""
    digest: str
    size: int


@dataclass(frozen=True)
class SkillContent:
    """A skill as it would be stored: its files by path."""

    name: str
    files: Mapping[str, bytes]

    @cached_property
    def front_matter(self) -> FrontMatter:
        """Return the front matter of its SKILL.md."""
        return read_front_matter(self.files.get(MAIN))

    @cached_property
    def manifest(self) -> tuple[SkillFile, ...]:
        """Return its files with digests and sizes, in order of their paths."""
        return tuple(described(path, content) for path, content in sorted(self.files.items()))

    @property
    def description(self) -> str:
        """Return what it is for."""
        return str(self.front_matter.fields.get("description", ""))

    @property
    def digest(self) -> str:
        """Return the digest of the whole skill."""
        return digest_of(self.manifest)


@dataclass(slots=True)
class Findings:
    """What is wrong with a skill: errors, for which it is refused or not served, and warnings."""

    errors: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])


def described(path: str, content: bytes) -> SkillFile:
    """Return a file's entry of the manifest."""
    return SkillFile(path, f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


def digest_of(manifest: Iterable[SkillFile]) -> str:
    """Return the digest of a whole skill, which changes with any of its files."""
    lines = (f"{each.digest} {each.size} {each.path}\n" for each in sorted(manifest, key=lambda each: each.path))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_front_matter(content: bytes | None) -> FrontMatter:
    """Return the front matter of a SKILL.md; BadFrontMatter where it is missing or cannot be read."""
    if content is None:
        raise BadFrontMatter("there is no SKILL.md")
    try:
        return parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadFrontMatter("it is not in UTF-8", line) from None


def check_name(name: str) -> None:
    """Refuse a name that the format does not have."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS:
        raise BadSkill(
            f"the name {name[:80]!r} is not one of the Agent Skills format",
            hint=f"Use 1 to {NAME_CHARS} lower-case letters, digits and single hyphens, like sales-report",
        )


def check_path(path: str) -> None:
    """Refuse a path of a file that leaves the skill folder or that some system could not store."""
    parts = path.split("/")
    is_plain = all(_FILE_NAME.fullmatch(part) and part not in (".", "..") for part in parts)
    try:
        path.encode()
    except UnicodeEncodeError:
        is_plain = False
    if not is_plain or len(parts) > _MAX_DEPTH or path != str(PurePosixPath(path)):
        raise BadSkill(
            f"{path[:80]!r} is no path of a file in a skill",
            hint="Use paths below the skill folder, like scripts/report.py",
        )


def check_sizes(manifest: Iterable[tuple[str, int]]) -> str:
    """Return which limit of the format a skill's files break; empty if none."""
    sizes = dict(manifest)
    if len(sizes) > MAX_FILES:
        return f"it has {len(sizes):,} files, the most is {MAX_FILES}"
    total = sum(sizes.values())
    return f"its files have {total:,} bytes, the most is {MAX_BYTES:,}" if total > MAX_BYTES else ""


def findings(matter: FrontMatter, folder: str) -> Findings:
    """Return what is wrong with the fields of a front matter, for a skill in a folder of that name."""
    found = Findings()
    fields = matter.fields

    def add(to: list[str], name: str, reason: str) -> None:
        line = matter.lines.get(name)
        to.append(f"{MAIN}{f', line {line}' if line else ''}: {name} {reason}")

    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > NAME_CHARS:
        shown = "is missing" if name is None else f"is {str(name)[:80]!r}"
        add(found.errors, "name", f"{shown}; it has 1 to {NAME_CHARS} lower-case letters, digits and single hyphens")
    elif name != folder:
        add(found.errors, "name", f"is {name!r}, and its folder is {folder[:80]!r}; both must be the same")
    if not isinstance(description, str) or not description.strip():
        add(found.errors, "description", "is missing or empty; it says what the skill does and when to use it")
    elif len(description) > DESCRIPTION_CHARS:
        add(found.errors, "description", f"has {len(description):,} characters, the most is {DESCRIPTION_CHARS:,}")
    for field_name in ("license", "allowed-tools"):
        if field_name in fields and not isinstance(fields[field_name], str):
            add(found.warnings, field_name, "is no text")
    compatibility = fields.get("compatibility", "-")
    if not isinstance(compatibility, str) or not 0 < len(compatibility) <= COMPATIBILITY_CHARS:
        add(found.warnings, "compatibility", f"is not 1 to {COMPATIBILITY_CHARS} characters of text")
    metadata: Any = fields.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in cast("Any", metadata).values()):
        add(found.warnings, "metadata", "is no mapping of names to text")
    if others := [each for each in fields if each not in KNOWN_FIELDS]:
        found.warnings.append(f"{MAIN}: the format does not have {', '.join(each[:40] for each in others[:5])}")
    return found


def check_content(content: SkillContent) -> None:
    """Refuse a skill that is to be saved and breaks any rule of the format, warnings included."""
    check_name(content.name)
    for path in content.files:
        check_path(path)
    folded: dict[str, str] = {}
    for path in content.files:
        if (other := folded.setdefault(path.lower(), path)) != path:
            raise BadSkill(f"{other!r} and {path!r} differ only in case, which some systems cannot store")
    folders = {str(parent) for path in content.files for parent in PurePosixPath(path).parents}
    if clashes := sorted(folders & {*content.files}):
        raise BadSkill(f"{clashes[0]!r} is both a file and a folder")
    if fault := check_sizes((path, len(data)) for path, data in content.files.items()):
        raise BadSkill(fault, hint="Leave out what can be fetched or computed when it is used")
    try:
        found = findings(content.front_matter, content.name)
    except BadFrontMatter as error:
        raise BadSkill(f"{MAIN}, {error}", hint="Begin it with ---, name: and description:, and ---") from None
    if problems := [*found.errors, *found.warnings]:
        raise BadSkill("; ".join(problems[:5]), hint="Mend the front matter of SKILL.md")


def read_folder(folder: Path) -> SkillContent:
    """Return the skill in a folder of the host, for checks and exports; BadSkill for links that lead out of it."""
    files: dict[str, bytes] = {}
    for path, _ in walk(folder):
        files[path] = (folder / path).read_bytes()
    return SkillContent(folder.name, files)


def walk(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Return the files of a skill folder by path; BadSkill for too many, and for what is no file of the folder's own.

    Links within the folder are followed, others are refused. Caches of Python and hidden files of version control are
    no part of a skill.
    """
    root, found, size = folder.resolve(), list[tuple[str, os.stat_result]](), 0
    for place, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in ("__pycache__", ".git"))
        inside = Path(place)
        for name in [*folders, *sorted(names)]:
            path = inside / name
            shown = path.relative_to(root).as_posix()
            if path.is_symlink() and not _stays_within(path, root):
                raise BadSkill(f"{shown!r} is a link out of the skill's folder", hint="Put the file itself there")
            if name in folders:
                if path.is_symlink():
                    raise BadSkill(f"{shown!r} is a link to a folder", hint="Put the folder itself there")
                continue
            if name.endswith(".pyc") or name == ".DS_Store":
                continue
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise BadSkill(f"{shown!r} is no file", hint="Remove it")
            check_path(shown)
            found.append((shown, status))
            size += status.st_size
            if len(found) > MAX_FILES or size > MAX_BYTES:
                most = f"{MAX_FILES} files and {MAX_BYTES:,} bytes"
                raise BadSkill(f"it is larger than {most}, the most that the format allows")
    return sorted(found)


def _stays_within(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def servers_of(files: Mapping[str, bytes]) -> list[str]:
    """Return the MCP servers whose tools the Python of a skill imports, as far as its text tells."""
    found: set[str] = set()
    for path, content in files.items():
        if path.endswith(".py"):
            text = content.decode(errors="replace")
            found.update(_SERVER_IMPORT.findall(text))
            for names in _SERVERS_IMPORT.findall(text):
                found.update(name.split()[0] for name in names.split(",") if name.strip())
    return sorted(found)


def module_name(name: str) -> str:
    """Return the name by which sessions import a skill."""
    return name.replace("-", "_")


def write_main(name: str, description: str, body: str, servers: Iterable[str] = ()) -> bytes:
    """Return a SKILL.md. Values are quoted as JSON, which is YAML too, so that all readers of YAML read the same."""
    plain = name if name[0].isalpha() and name not in _AMBIGUOUS else _quoted(name)
    lines = [f"name: {plain}", f"description: {_quoted(description)}"]
    if listed := ", ".join(servers):
        lines += ["metadata:", f"  {SERVERS_FIELD}: {_quoted(listed)}"]
    matter = "\n".join(lines)
    return f"---\n{matter}\n---\n\n{body.strip()}\n".encode()


def _quoted(text: str) -> str:
    # YAML takes the line ends that JSON leaves alone for its own.
    return json.dumps(text, ensure_ascii=False).translate({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})
