"""`belljar skills`: a person's view of what agents saved, without a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.skills.format import SkillContent, write_main
from belljar.skills.store import SkillStore, Version

Command = Callable[..., Any]


@pytest.fixture
def saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Version]:
    """Two versions of a skill, the second one proposed, and the operator's folder."""
    operator = place / "operator"
    (operator / "words").mkdir(parents=True)
    (operator / "words/SKILL.md").write_bytes(write_main("words", "Only words.", "# Words"))
    (operator / "wrong").mkdir()
    (operator / "wrong/SKILL.md").write_text("---\nname: [1\n---\n")
    monkeypatch.setenv("BELLJAR_SKILLS_DIRECTORY", str(operator))
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(place / "data"))
    store = SkillStore(place / "data", limit_mb=1).of("local")
    contents = [
        SkillContent("tidy", {"SKILL.md": write_main("tidy", "Tidies.", text), "scripts/tidy.py": b"x = 1\n"})
        for text in ("# One", "# Two")
    ]
    first = store.add(contents[0], state="approved", session_id="s1", servers=["files"])
    return [first, store.add(contents[1], state="proposed", session_id="s2", servers=[])]


def test_skills_are_listed_reviewed_exported_and_removed(belljar: Command, saved: list[Version], place: Path):
    first, second = saved
    rows = {(row["name"], row["version"]): row for row in json.loads(belljar("skills", "list", "--json").out)}
    assert rows["tidy", first.short]["state"] == "current"
    assert rows["tidy", second.short]["state"] == "proposed"
    assert rows["words", ""]["state"] == "served"
    assert rows["wrong", ""]["state"] == "refused"
    assert "line 3: it is no YAML" in rows["wrong", ""]["description"]
    assert "# One" in belljar("skills", "show", "tidy").out
    assert "# Two" in belljar("skills", "show", "tidy", "--version", second.short).out
    assert belljar("skills", "approve", "tidy").out == f"tidy {second.short} is approved\n"
    assert belljar("skills", "approve", "tidy", first.short).out == f"tidy {first.short} is approved\n"
    history = json.loads(belljar("skills", "history", "tidy", "--json").out)
    assert [(row["version"], row["state"]) for row in history] == [
        (first.short, "current"),
        (second.short, "approved"),
    ]
    assert belljar("skills", "export", "tidy", "out").code == 0
    assert belljar("skills", "check", "out/tidy").out.startswith("tidy is in order: 2 files")
    assert belljar("skills", "export", "tidy", "out").code == 2
    assert belljar("skills", "remove", "tidy").code == 0
    missing = belljar("skills", "show", "tidy")
    assert missing.code == 2
    assert "there is no saved skill 'tidy'" in missing.err


def test_a_folder_that_breaks_the_format_fails_the_check_with_line_and_reason(belljar: Command, place: Path):
    folder = place / "tidy"
    folder.mkdir()
    checked = belljar("skills", "check", "tidy")
    assert (checked.code, checked.out) == (1, "error: SKILL.md, line 1: there is no SKILL.md\n")
    (folder / "SKILL.md").write_text("---\nname: other\ndescription: x\nversion: 2\n---\n")
    checked = belljar("skills", "check", "tidy")
    assert checked.code == 1
    assert checked.out.splitlines() == [
        "error: SKILL.md, line 2: name is 'other', and its folder is 'tidy'; both must be the same",
        "warning: SKILL.md: the format does not have version",
    ]
    (folder / "SKILL.md").write_text("---\nname: tidy\ndescription: x\n---\n")
    (folder / "out").symlink_to("/etc/passwd")
    assert "is a link out of the skill's folder" in belljar("skills", "check", "tidy").out
    assert belljar("skills", "check", "nowhere").code == 2


def test_with_several_owners_one_has_to_be_named(
    belljar: Command, saved: list[Version], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BELLJAR_API_KEYS", f"ann:{'a' * 40},bob:{'b' * 40}")
    assert "there are several owners" in belljar("skills", "history", "tidy").err
    assert "there is no saved skill" in belljar("skills", "history", "tidy", "--owner", "key:ann").err
