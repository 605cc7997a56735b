"""Saved skills on disk: versions by digest, review, limits, two processes on one data directory."""

import threading
from pathlib import Path

import pytest

from belljar.errors import EngineError, TooLarge
from belljar.skills import store as stores
from belljar.skills.format import SkillContent, write_main
from belljar.skills.library import SkillLibrary
from belljar.skills.store import OwnerStore, SkillMissing, SkillStore, Version


def content(name: str = "tidy", code: str = "x = 1\n") -> SkillContent:
    return SkillContent(name, {"SKILL.md": write_main(name, "Tidies up.", code), "scripts/tidy.py": code.encode()})


@pytest.fixture
def store(tmp_path: Path) -> OwnerStore:
    return SkillStore(tmp_path, limit_mb=1).of("ann")


def add(store: OwnerStore, code: str, state: stores.State = "approved", session_id: str = "s1") -> Version:
    return store.add(content(code=code), state=state, session_id=session_id, servers=[])


def test_every_version_is_kept_and_the_latest_approved_one_is_current(store: OwnerStore):
    first, second = add(store, "x = 1\n"), add(store, "x = 2\n")
    assert store.get("tidy").current == second
    assert store.content("tidy", store.get("tidy").find(first.short)).files["scripts/tidy.py"] == b"x = 1\n"
    assert add(store, "x = 1\n").digest == first.digest
    assert [each.digest for each in store.get("tidy").versions] == [second.digest, first.digest]


def test_a_proposal_is_seen_by_its_session_alone_until_it_is_approved(store: OwnerStore):
    old = add(store, "x = 1\n")
    new = add(store, "x = 2\n", "proposed", "s2")
    skill = store.get("tidy")
    assert (skill.current, skill.seen_by("s1"), skill.seen_by("s2"), skill.seen_by("")) == (old, old, new, old)
    store.approve("tidy")
    assert store.get("tidy").seen_by("s1") == store.get("tidy").current
    assert store.get("tidy").current == stores.replace(new, state="approved")
    add(store, "x = 1\n", "proposed", "s3")  # what was approved once stays so
    current = store.get("tidy").current
    assert current is not None
    assert (current.digest, current.state) == (old.digest, "approved")


def test_the_current_version_is_not_dropped_whatever_is_proposed_after_it(store: OwnerStore):
    first = add(store, "x = 0\n")
    for number in range(1, 30):
        add(store, f"x = {number}\n", "proposed", "s2")
    skill = store.get("tidy")
    assert skill.current is not None
    assert skill.current.digest == first.digest
    assert len(skill.versions) == stores.MAX_VERSIONS + 1
    assert len([*(store.folder / "versions").iterdir()]) == stores.MAX_VERSIONS + 1
    store.approve("tidy")
    assert store.get("tidy").current == store.get("tidy").versions[-1]


def test_what_is_removed_is_gone_from_disk(store: OwnerStore):
    first, second = add(store, "x = 1\n"), add(store, "x = 2\n")
    store.remove("tidy", second.short)
    assert store.get("tidy").current == first
    store.remove("tidy")
    assert store.skills() == {}
    assert [*(store.folder / "versions").iterdir()] == []
    for change in (store.get, store.approve, store.remove):
        with pytest.raises(SkillMissing):
            change("tidy")


def test_a_store_that_is_full_refuses_and_keeps_what_it_has(store: OwnerStore, monkeypatch: pytest.MonkeyPatch):
    add(store, "x = 1\n")
    with pytest.raises(TooLarge, match="skills_mb allows 1,048,576"):
        add(store, "#" * 1_100_000)
    monkeypatch.setattr(stores, "MAX_SKILLS", 1)
    with pytest.raises(TooLarge, match="1 saved skills already"):
        store.add(content("other"), state="approved", session_id="", servers=[])
    assert [*store.skills()] == ["tidy"]
    assert len([*(store.folder / "versions").iterdir()]) == 1


def test_files_that_were_changed_on_disk_are_not_passed_on(store: OwnerStore):
    version = add(store, "x = 1\n")
    (store.path(version) / "scripts/tidy.py").write_text("x = 'evil'\n")
    with pytest.raises(EngineError, match="was changed on disk"):
        store.content("tidy", version)
    (store.folder / "skills.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        OwnerStore(store.folder, store.limit_bytes).skills()


def test_many_writers_lose_nothing(tmp_path: Path):
    def save(number: int) -> None:
        own = SkillStore(tmp_path, limit_mb=1).of("ann")
        own.add(content(f"skill-{number}"), state="approved", session_id="", servers=[])

    threads = [threading.Thread(target=save, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(SkillStore(tmp_path, limit_mb=1).of("ann").skills()) == 12


def test_the_operators_skill_wins_and_an_owners_are_nobody_elses(tmp_path: Path):
    folder = tmp_path / "operator"
    for name in ("tidy", "group/deep-one"):
        (folder / name / "scripts").mkdir(parents=True)
        (folder / name / "SKILL.md").write_bytes(write_main(name.rpartition("/")[2], "The operator's.", "body"))
    (folder / "broken").mkdir()
    (folder / "broken/SKILL.md").write_text("---\nname: other\ndescription: x\n---\n")
    (folder / "plain.py").write_text('"""Adds numbers.\n\nMore."""\n')
    (folder / "linked").mkdir()
    (folder / "linked/SKILL.md").write_bytes(write_main("linked", "Leads away.", "body"))
    (folder / "linked/out").symlink_to("/etc/passwd")
    library = SkillLibrary(folder, SkillStore(tmp_path, limit_mb=1))
    assert library.store is not None
    library.store.of("ann").add(content("tidy"), state="approved", session_id="", servers=[])
    library.store.of("ann").add(content("mine"), state="approved", session_id="", servers=[])
    assert {skill.path: skill.version is None for skill in library.skills("ann")} == {
        "group/deep-one": True,
        "mine": False,
        "plain.py": True,
        "tidy": True,
    }
    assert [skill.path for skill in library.skills("bob")] == ["group/deep-one", "plain.py", "tidy"]
    assert library.read("bob", "mine/SKILL.md") is None
    assert "and its folder is 'broken'" in library.scan().problems["broken"]
    assert "is a link out of the skill's folder" in library.scan().problems["linked"]
    assert [skill.path for skill in library.search("ann", "adding numbers", limit=3)][:1] == ["plain.py"]
    (found,) = [skill for skill in library.skills("ann") if skill.path == "group/deep-one"]
    assert (found.uri, found.module) == ("skill://group/deep-one/SKILL.md", "skills.group.deep_one")
