import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import install
from belljar.cli.install import launch_command

Run = Callable[..., Any]


def servers(path: Path, key: str = "mcpServers") -> dict[str, Any]:
    return json.loads(path.read_text())[key]


@pytest.mark.parametrize(
    ("client", "file", "key", "has_type"),
    [
        ("claude-desktop", ".config/Claude/claude_desktop_config.json", "mcpServers", False),
        ("claude-code", ".claude.json", "mcpServers", True),
        ("vscode", "work/.vscode/mcp.json", "servers", True),
        ("cursor", ".cursor/mcp.json", "mcpServers", True),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the folders are those of Linux")
def test_what_is_printed_is_what_is_written_for_every_client(
    belljar: Run, place: Path, client: str, file: str, key: str, has_type: bool
) -> None:
    printed = belljar("install", client, "--", "--sandbox", "process")
    path = place.parent / file
    assert str(path) in printed.err
    assert not path.exists()
    command, *first = launch_command()
    entry = {"command": command, "args": [*first, "serve", "--sandbox", "process"]}
    assert json.loads(printed.out) == {key: {"belljar": {"type": "stdio", **entry} if has_type else entry}}
    written = belljar("install", client, "--write", "--", "--sandbox", "process")
    assert (written.code, written.out) == (0, "")
    assert json.loads(path.read_text()) == json.loads(printed.out)
    assert [child.name for child in path.parent.iterdir() if child.name != "work"] == [path.name]


def test_claude_code_is_found_where_its_own_variable_says(
    belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(place))
    belljar("install", "claude-code", "--write")
    assert "belljar" in servers(place / ".claude.json")


def test_the_command_works_from_any_folder(tmp_path: Path) -> None:
    command = launch_command()
    assert Path(command[0]).is_absolute()
    answer = subprocess.run([*command, "--version"], cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("belljar ")


def test_without_a_script_the_interpreter_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launch_command() == [str(tmp_path / "python"), "-P", "-m", "belljar"]


def test_everything_else_in_the_file_stays_and_a_backup_is_made(belljar: Run, place: Path) -> None:
    path = place / "config.json"
    before = (
        '{\n    "theme": "därk",\n    "numbers": [1, 2.5, 1e3, null],\n    "mcpServers": {\n        "other": '
        '{"command": "x"},\n        "belljar": {"command": "old", "env": {"A": "b"}}\n    },\n    "last": {}\n}'
    )
    path.write_text(before, "utf-8")
    path.chmod(0o640)
    outcome = belljar("install", "cursor", "--write", "--path", "config.json")
    assert outcome.code == 0
    expected = json.loads(before)
    expected["mcpServers"]["belljar"] |= {"type": "stdio", "command": launch_command()[0]}
    expected["mcpServers"]["belljar"]["args"] = [*launch_command()[1:], "serve"]
    assert json.loads(path.read_text("utf-8")) == expected
    assert list(json.loads(path.read_text("utf-8"))) == ["theme", "numbers", "mcpServers", "last"]
    assert path.read_text("utf-8").startswith('{\n    "theme": "därk",\n')
    backup = place / "config.json.bak"
    assert str(backup) in outcome.err
    assert backup.read_text("utf-8") == before
    assert [oct(file.stat().st_mode & 0o777) for file in (path, backup)] == ["0o640", "0o640"]


def test_a_second_change_keeps_the_first_backup_and_no_change_makes_none(belljar: Run, place: Path) -> None:
    path = place / "config.json"
    path.write_text("{}")
    belljar("install", "cursor", "--write", "--path", "config.json")
    belljar("install", "cursor", "--write", "--path", "config.json")
    belljar("install", "cursor", "--write", "--path", "config.json", "--name", "second")
    assert sorted(servers(path)) == ["belljar", "second"]
    assert sorted(file.name for file in place.iterdir()) == ["config.json", "config.json.bak", "config.json.bak1"]
    assert (place / "config.json.bak").read_text() == "{}"


def test_a_link_stays_a_link(belljar: Run, place: Path) -> None:
    (place / "dotfiles").mkdir()
    (place / "dotfiles" / "mcp.json").write_text("{}")
    (place / "mcp.json").symlink_to("dotfiles/mcp.json")
    belljar("install", "cursor", "--write", "--path", "mcp.json")
    assert (place / "mcp.json").is_symlink()
    assert "belljar" in servers(place / "dotfiles" / "mcp.json")


def test_an_empty_file_is_filled(belljar: Run, place: Path) -> None:
    (place / "mcp.json").write_text("\n")
    assert belljar("install", "vscode", "--write", "--path", "mcp.json").code == 0
    assert "belljar" in servers(place / "mcp.json", "servers")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{\n  // mine\n  "servers": {}\n}', "comments"),
        (b'{"servers": {} /* mine */}', "comments"),
        (b'{"servers": {},}', "not plain JSON"),
        (b'{"url": "http://x", ', "line 1"),
        (b'{"servers": {}, "servers": {"a": {}}}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "written back"),
        (b'{"a": "\\ud800"}', "written back"),
        (b"\xff\xfe{", "not plain JSON"),
        (b"[]", "no JSON object"),
        (b'{"servers": []}', "no JSON object"),
        (b'{"servers": {"belljar": {"url": "https://x"}}}', "another kind"),
    ],
)
def test_a_file_that_could_not_be_kept_whole_is_refused_untouched_with_the_snippet(
    belljar: Run, place: Path, content: bytes, reason: str
) -> None:
    path = place / "mcp.json"
    path.write_bytes(content)
    outcome = belljar("install", "vscode", "--write", "--path", "mcp.json")
    assert outcome.code == 2
    assert reason in outcome.err
    assert "hint: Add the JSON above by hand" in outcome.err
    assert "belljar" in json.loads(outcome.out)["servers"]
    assert path.read_bytes() == content
    assert [file.name for file in place.iterdir()] == ["mcp.json"]


def test_slashes_inside_strings_are_no_comments(belljar: Run, place: Path) -> None:
    (place / "mcp.json").write_text('{"a": "http://x", "b": "\\"/*"}')
    assert belljar("install", "vscode", "--write", "--path", "mcp.json").code == 0


def test_what_the_client_wrote_meanwhile_is_not_undone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "mcp.json"
    path.write_text("{}")

    def client_writes_now(_: int) -> None:
        path.write_text('{"new": 1}')

    monkeypatch.setattr(install.os, "fsync", client_writes_now)
    with pytest.raises(install.UsageError, match="changed by another program"):
        install.add_server(path, "servers", "belljar", {"command": "x"})
    assert path.read_text() == '{"new": 1}'
    assert sorted(file.name for file in place.iterdir()) == ["mcp.json", "mcp.json.bak"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can write for somebody else")
def test_root_leaves_the_file_to_its_owner(place: Path) -> None:
    path = place / "mcp.json"
    path.write_text("{}")
    os.chown(path, 12345, 12345)
    backup = install.add_server(path, "servers", "belljar", {"command": "x"})
    assert backup is not None
    assert [(file.stat().st_uid, file.stat().st_gid) for file in (path, backup)] == [(12345, 12345)] * 2


def test_an_unknown_client_is_refused_with_the_known_ones(belljar: Run) -> None:
    outcome = belljar("install", "emacs")
    assert outcome.code == 2
    assert "claude-desktop" in outcome.err
