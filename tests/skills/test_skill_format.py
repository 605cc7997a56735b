"""The Agent Skills format: front matter, names, files, and what is refused with which words."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.skills.format import (
    BadSkill,
    SkillContent,
    check_content,
    findings,
    read_folder,
    servers_of,
    write_main,
)
from belljar.skills.front_matter import BadFrontMatter, parse

MAIN = b"---\nname: tidy\ndescription: Tidies.\n---\n\n# Tidy\n"


def test_front_matter_is_json_with_the_scalars_of_yaml_1_2():
    matter = parse("---\na: yes\nb: 010\nc: 2026-01-31\nd: 1.5\ne: ~\nf: true\ng: |\n  two\n  lines\n---\nbody\n")
    assert matter.fields == {
        "a": "yes",
        "b": 10,
        "c": "2026-01-31",
        "d": 1.5,
        "e": None,
        "f": True,
        "g": "two\nlines\n",
    }
    assert matter.body == "body\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# no front matter\n", "line 1: it does not begin with ---"),
        ("---\nname: x\n", "line 1: the front matter has no closing ---"),
        ("---\n- a\n- b\n---\n", "line 2: the front matter is no mapping"),
        ("---\njust text\n---\n", "line 2: the front matter is no mapping"),
        ("---\nname: a\ndescription: b: c\n---\n", "line 3: it is no YAML: mapping values are not allowed here"),
        ("---\nname: a\nname: b\n---\n", "line 3: 'name' is there twice"),
        ("---\na: &x [1]\nb: *x\n---\n", "line 2: anchors and aliases (& and *) are not allowed"),
        ("---\na: !!python/object/apply:os.system [id]\n---\n", "line 2: the tag "),
        ("---\n1: x\n---\n", "line 2: the name '1' is no text; put it in quotes"),
        ("---\na: 1e999\n---\n", "line 2: 1e999 is no number that JSON has"),
        ("---\n" + "".join(f"{' ' * depth}a:\n" for depth in range(40)) + "---\n", "nested more than 16 deep"),
        ("---\na: [" + "1," * 5_000 + "]\n---\n", "it has more than 2,000 values"),
        ("---\na: " + "x" * 70_000 + "\n---\n", "the front matter is over 65,536 bytes"),
    ],
)
def test_a_front_matter_that_is_none_is_told_with_its_line(text: str, told: str):
    with pytest.raises(BadFrontMatter) as caught:
        parse(text)
    assert told in str(caught.value)


@settings(max_examples=50)
@given(st.text(max_size=400))
def test_no_text_makes_the_parser_fail_otherwise(text: str):
    with contextlib.suppress(BadFrontMatter):
        assert isinstance(parse(f"---\n{text}\n---\n").fields, dict)


@settings(max_examples=50)
@given(
    st.text(min_size=1, max_size=200).filter(str.strip), st.sampled_from(["tidy", "null", "2026-01-31", "1e5", "on"])
)
def test_what_is_written_is_read_back_as_it_was(description: str, name: str):
    try:
        written = write_main(name, description, "body", ["files"])
    except UnicodeEncodeError:
        return
    try:
        fields = parse(written.decode()).fields
    except BadFrontMatter:  # characters that YAML does not have
        return
    assert fields == {"name": name, "description": description, "metadata": {"belljar-servers": "files"}}


@pytest.mark.parametrize(
    ("name", "files", "told"),
    [
        ("Tidy", {"SKILL.md": MAIN}, "the name 'Tidy' is not one of the Agent Skills format"),
        ("a--b", {"SKILL.md": MAIN}, "the name 'a--b'"),
        ("x" * 65, {"SKILL.md": MAIN}, "the name 'xxx"),
        ("tidy", {}, "SKILL.md, line 1: there is no SKILL.md"),
        ("tidy", {"SKILL.md": b"---\nname: tidy\n---\n"}, "description is missing or empty"),
        ("other", {"SKILL.md": MAIN}, "SKILL.md, line 2: name is 'tidy', and its folder is 'other'"),
        (
            "tidy",
            {"SKILL.md": b"---\nname: tidy\ndescription: " + b"x" * 1025 + b"\n---\n"},
            "SKILL.md, line 3: description has 1,025 characters, the most is 1,024",
        ),
        (
            "tidy",
            {"SKILL.md": b"---\nname: tidy\ndescription: x\nmetadata:\n  version: 1.0\n---\n"},
            "SKILL.md, line 4: metadata is no mapping of names to text",
        ),
        (
            "tidy",
            {"SKILL.md": b"---\nname: tidy\ndescription: x\ncompatibility: " + b"x" * 501 + b"\n---\n"},
            "line 4: compatibility is not 1 to 500 characters of text",
        ),
        ("tidy", {"SKILL.md": b"---\nname: tidy\ndescription: \xff\n---\n"}, "line 3: it is not in UTF-8"),
        ("tidy", {"SKILL.md": MAIN, "../x": b""}, "'../x' is no path of a file in a skill"),
        ("tidy", {"SKILL.md": MAIN, "/etc/x": b""}, "'/etc/x' is no path"),
        ("tidy", {"SKILL.md": MAIN, "a//b": b""}, "'a//b' is no path"),
        ("tidy", {"SKILL.md": MAIN, "a\nb": b""}, "is no path"),
        ("tidy", {"SKILL.md": MAIN, "a/" * 20 + "b": b""}, "is no path"),
        ("tidy", {"SKILL.md": MAIN, "A.py": b"", "a.py": b""}, "differ only in case"),
        ("tidy", {"SKILL.md": MAIN, "a": b"", "a/b": b""}, "'a' is both a file and a folder"),
        ("tidy", {"SKILL.md": MAIN, **{f"{n}": b"" for n in range(512)}}, "it has 513 files, the most is 512"),
        ("tidy", {"SKILL.md": MAIN, "big": b"x" * (16 * 1024 * 1024)}, "the most is 16,777,216"),
    ],
)
def test_a_skill_that_breaks_the_format_is_refused_with_the_reason(name: str, files: dict[str, bytes], told: str):
    with pytest.raises(BadSkill) as caught:
        check_content(SkillContent(name, files))
    assert told in str(caught.value)


def test_what_others_wrote_may_have_fields_that_the_format_lacks():
    matter = parse("---\nname: tidy\ndescription: x\nversion: 1.0\nallowed-tools: [Read]\n---\n")
    found = findings(matter, "tidy")
    assert found.errors == []
    assert len(found.warnings) == 2


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_followed(tmp_path: Path):
    skill = tmp_path / "tidy"
    (skill / "scripts").mkdir(parents=True)
    (skill / "SKILL.md").write_bytes(MAIN)
    (skill / "scripts/a.py").write_text("1\n")
    (skill / "again.py").symlink_to("scripts/a.py")
    (skill / "scripts/__pycache__").mkdir()
    (skill / "scripts/__pycache__/a.pyc").write_bytes(b"")
    assert {*read_folder(skill).files} == {"SKILL.md", "scripts/a.py", "again.py"}
    (skill / "secrets").symlink_to("/etc/passwd")
    with pytest.raises(BadSkill, match="'secrets' is a link out of the skill's folder"):
        read_folder(skill)


def test_the_servers_that_code_imports_are_found():
    code = b"from servers.github import get_issue\nimport servers.files.read\nfrom servers import mail, git as g\n"
    assert servers_of({"scripts/a.py": code, "notes.md": b"from servers.no import x"}) == [
        "files",
        "git",
        "github",
        "mail",
    ]
