"""`belljar skills`: what agents saved and what the operator has, its versions, and a person's word on them.

Works on the data directory itself, beside running servers, whose sessions see the change with their next cell.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli.streams import indented, one_line, table
from belljar.errors import InvalidArgument, InvalidPath
from belljar.settings import Settings, load_command_settings
from belljar.skills.format import MAIN, BadSkill, check_content, findings, read_folder
from belljar.skills.front_matter import BadFrontMatter
from belljar.skills.library import SkillLibrary
from belljar.skills.store import OwnerStore, SavedSkill, SkillStore, Version

Name = Annotated[str, typer.Argument(help="The skill.", show_default=False)]
Owner = Annotated[
    str,
    typer.Option(help="Whose skills: local, key:NAME or the subject of a token; the only owner by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_command(owner: Owner = "", as_json: AsJson = False) -> None:
    """List the operator's skills and an owner's, and which of them are not in order."""
    settings = load_command_settings()
    library = _library(settings)
    scan = library.scan()
    rows = [
        {"name": skill.path, "from": "operator", "state": "plain" if skill.is_plain else "served", "version": "",
         "description": skill.description}
        for skill in scan.skills.values()
    ]  # fmt: skip
    rows += [
        {"name": path, "from": "operator", "state": "refused", "version": "", "description": reason}
        for path, reason in scan.problems.items()
    ]
    for skill in _store(settings, owner).skills().values():
        for version in _worth_listing(skill):
            state = "hidden by the operator's" if skill.name in scan.skills else _state(skill, version)
            rows.append({"name": skill.name, "from": "saved", "state": state, "version": version.short,
                         "description": version.description})  # fmt: skip
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        shown = [tuple(one_line(value)[:100] for value in row.values()) for row in rows]
        print(table([("skill", "from", "state", "version", "description"), *shown]))


def show_command(
    name: Name, version: Annotated[str, typer.Option(help="One version of it.")] = "", owner: Owner = ""
) -> None:
    """Print the SKILL.md of a skill, and name its files."""
    settings = load_command_settings()
    store = _store(settings, owner)
    operators = _library(settings).scan().skills.get(name)
    if operators is not None and not version:
        folder, files = operators.folder, [file.path for file in operators.files]
        text = (folder / MAIN if files else folder).read_text("utf-8", errors="replace")
    else:
        skill = store.get(name)
        chosen = skill.find(version) if version else skill.current or skill.find("")
        content = store.content(name, chosen)
        text, files = content.files[MAIN].decode(errors="replace"), [*content.files]
        print(f"{name} {chosen.short} {_state(skill, chosen)}, saved {_when(chosen)}\n")
    print(indented(text))
    for path in files:
        print(f"skills/{one_line(name)}/{one_line(path)}")


def check_command(folder: Annotated[Path, typer.Argument(help="The folder of a skill.", show_default=False)]) -> None:
    """Check a folder against the Agent Skills format; exits with 1 and tells line and reason if it breaks a rule."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise InvalidPath(f"{folder} is no folder", hint="Name the folder that has SKILL.md in it")
    try:
        content = read_folder(folder)
        found = findings(content.front_matter, folder.name)
    except (BadSkill, BadFrontMatter) as error:
        message = f"{MAIN}, {error}" if isinstance(error, BadFrontMatter) else str(error)
        print(f"error: {one_line(message)}")
        raise typer.Exit(1) from None
    for kind, reasons in (("error", found.errors), ("warning", found.warnings)):
        for reason in reasons:
            print(f"{kind}: {one_line(reason)}")
    if found.errors:
        raise typer.Exit(1)
    size = sum(each.size for each in content.manifest)
    print(f"{folder.name} is in order: {len(content.manifest)} files, {size:,} bytes, sha256 {content.digest[:12]}")


def approve_command(
    name: Name, version: Annotated[str, typer.Argument(help="The latest without it.")] = "", owner: Owner = ""
) -> None:
    """Let all sessions of its owner see a saved skill; an earlier version is the current one again."""
    approved = _store(load_command_settings(), owner).approve(name, version)
    print(f"{name} {approved.short} is approved")


def remove_command(
    name: Name, version: Annotated[str, typer.Argument(help="Only this version.")] = "", owner: Owner = ""
) -> None:
    """Remove a saved skill with all its versions, or one of them."""
    _store(load_command_settings(), owner).remove(name, version)
    print(f"{name}{f' {version}' if version else ''} is removed")


def history_command(name: Name, owner: Owner = "", as_json: AsJson = False) -> None:
    """List the versions of a saved skill, the latest first."""
    skill = _store(load_command_settings(), owner).get(name)
    rows: list[dict[str, Any]] = [
        {"version": each.short, "state": _state(skill, each), "saved": _when(each), "session": each.session_id,
         "files": len(each.manifest), "bytes": each.size_bytes, "servers": ", ".join(each.servers)}
        for each in reversed(skill.versions)
    ]  # fmt: skip
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(table([tuple(rows[0]), *(tuple(one_line(str(value)) for value in row.values()) for row in rows)]))


def export_command(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Where to make the skill's folder.", show_default=False)],
    version: Annotated[str, typer.Option(help="One version of it.")] = "",
    owner: Owner = "",
) -> None:
    """Write a saved skill as a folder that Claude, Codex, VS Code and Cursor read."""
    store = _store(load_command_settings(), owner)
    skill = store.get(name)
    content = store.content(name, skill.find(version) if version else skill.current or skill.find(""))
    check_content(content)
    place = folder / name
    if place.exists():
        raise InvalidArgument(f"{place} exists already", hint="Remove it, or name another folder")
    for path, data in content.files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    print(place)


def _library(settings: Settings) -> SkillLibrary:
    return SkillLibrary(Path(settings.skills_directory).resolve() if settings.skills_directory else None, None)


def _store(settings: Settings, owner: str) -> OwnerStore:
    chosen = owner or settings.only_owner
    if not chosen:
        raise InvalidArgument("there are several owners", hint="Name one with --owner, like --owner key:NAME")
    return SkillStore(settings.data_directory, limit_mb=settings.skills_mb).of(chosen)


def _worth_listing(skill: SavedSkill) -> list[Version]:
    """Return the current version and the proposals after it."""
    current = skill.current
    return [each for each in skill.versions if each == current or each.state == "proposed"]


def _state(skill: SavedSkill, version: Version) -> str:
    return "current" if version == skill.current else version.state


def _when(version: Version) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(version.saved_at))
