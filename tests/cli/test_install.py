import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from belljar.cli import install
from belljar.cli.clients import CLIENTS
from belljar.cli.install import launch_command

Run = Callable[..., Any]


def servers(path: Path, key: str = "mcpServers") -> dict[str, Any]:
    return json.loads(path.read_text())[key]


COMMAND = [*launch_command(), "serve", "--sandbox", "process"]
PLAIN = {"command": COMMAND[0], "args": COMMAND[1:]}
TYPED = {"type": "stdio", **PLAIN}
GOOSE = {"enabled": True, "name": "belljar", "timeout": 300}
URL = "https://example.com/mcp"
HEADERS = {"Authorization": "Bearer x:y"}
READ: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": yaml.safe_load}


def read(path: Path) -> Any:
    return READ.get(path.suffix, json.loads)(path.read_text())


@pytest.mark.parametrize(
    ("client", "file", "key", "started", "reached"),
    [
        ("claude-desktop", ".config/Claude/claude_desktop_config.json", "mcpServers", PLAIN, None),
        ("claude-code", ".claude.json", "mcpServers", TYPED, {"type": "http", "url": URL, "headers": HEADERS}),
        ("vscode", "work/.vscode/mcp.json", "servers", TYPED, {"type": "http", "url": URL, "headers": HEADERS}),
        ("cursor", ".cursor/mcp.json", "mcpServers", TYPED, {"url": URL, "headers": HEADERS}),
        ("codex", ".codex/config.toml", "mcp_servers", PLAIN, {"url": URL, "http_headers": HEADERS}),
        ("gemini-cli", ".gemini/settings.json", "mcpServers", PLAIN, {"httpUrl": URL, "headers": HEADERS}),
        ("zed", ".config/zed/settings.json", "context_servers", PLAIN, {"url": URL, "headers": HEADERS}),
        (
            "windsurf",
            ".codeium/windsurf/mcp_config.json",
            "mcpServers",
            PLAIN,
            {"serverUrl": URL, "headers": HEADERS},
        ),
        (
            "cline",
            ".cline/data/settings/cline_mcp_settings.json",
            "mcpServers",
            PLAIN,
            {"type": "streamableHttp", "url": URL, "headers": HEADERS},
        ),
        (
            "continue",
            ".continue/config.yaml",
            "mcpServers",
            TYPED,
            {"type": "streamable-http", "url": URL, "requestOptions": {"headers": HEADERS}},
        ),
        (
            "goose",
            ".config/goose/config.yaml",
            "extensions",
            {"type": "stdio", **GOOSE, "cmd": COMMAND[0], "args": COMMAND[1:]},
            {"type": "streamable_http", **GOOSE, "uri": URL, "headers": HEADERS},
        ),
        (
            "opencode",
            ".config/opencode/opencode.json",
            "mcp",
            {"type": "local", "command": COMMAND},
            {"type": "remote", "url": URL, "headers": HEADERS},
        ),
        ("lm-studio", ".lmstudio/mcp.json", "mcpServers", PLAIN, {"url": URL, "headers": HEADERS}),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the folders are those of Linux")
def test_what_is_printed_is_what_is_written_for_every_client(
    belljar: Run, place: Path, client: str, file: str, key: str, started: dict[str, Any], reached: dict[str, Any] | None
) -> None:
    printed = belljar("install", client, "--", "--sandbox", "process")
    path = place.parent / file
    assert str(path) in printed.err
    assert not path.exists()
    written = belljar("install", client, "--write", "--", "--sandbox", "process")
    assert (written.code, written.out) == (0, "")
    servers = read(path)[key]
    assert servers == READ.get(path.suffix, json.loads)(printed.out)[key]
    entry = servers[0] if isinstance(servers, list) else servers["belljar"]
    entry.pop("description", None)
    assert entry == ({"name": "belljar", **started} if isinstance(servers, list) else started)
    assert [child.name for child in path.parent.iterdir() if child.name != "work"] == [path.name]

    refused = belljar("install", client, "--url", URL, "--write")
    assert refused.code == 2
    if path.suffix == ".yaml":
        again = belljar("install", client, "--url", URL)
        assert again.err == f"This belongs in {path}.\n"
        path.unlink()
    options = ("--name", "far", "--url", URL, "--header", "Authorization: Bearer x:y", "--write")
    outcome = belljar("install", client, *options)
    if reached is None:
        assert "Connectors" in outcome.err
        return
    assert outcome.code == 0, outcome.err
    servers = read(path)[key]
    names = [server["name"] for server in servers] if isinstance(servers, list) else [*servers]
    assert sorted(names) == ["far"] if path.suffix == ".yaml" else ["belljar", "far"]
    entry = servers[names.index("far")] if isinstance(servers, list) else servers["far"]
    entry.pop("description", None)
    wanted = {**reached, "name": "far"} if "name" in entry else reached
    assert entry == wanted


def test_opencode_2_keeps_its_own_form(belljar: Run, place: Path) -> None:
    path = place.parent / ".config/opencode/opencode.jsonc"
    path.parent.mkdir(parents=True)
    path.write_text('{"mcp": {"servers": {"a": {"type": "remote", "url": "x"}}}}')
    assert belljar("install", "opencode", "--write").code == 0
    (key, both), *others = servers(path, "mcp").items()
    assert (key, others) == ("servers", [])
    assert (both["a"], both["belljar"]["type"]) == ({"type": "remote", "url": "x"}, "local")


@pytest.mark.parametrize(
    ("client", "before", "after"),
    [
        (
            "zed",
            '{\n\t"context_servers": {\n\t\t"a": {}\n\t}\n}\n',
            '{\n\t"context_servers": {\n\t\t"a": {},\n\t\t"belljar": {\n\t\t\t"command": "C",\n'
            '\t\t\t"args": [\n\t\t\t\t"serve"\n\t\t\t]\n\t\t}\n\t}\n}\n',
        ),
        (
            "zed",
            '\ufeff{\r\n    "context_servers": {\r\n        "belljar": {\r\n            "command": "x",\r\n'
            '            "env": {\r\n                "A": "b\\n"\r\n            }\r\n        }\r\n    }\r\n}',
            '\ufeff{\r\n    "context_servers": {\r\n        "belljar": {\r\n            "command": "C",\r\n'
            '            "env": {\r\n                "A": "b\\n"\r\n            },\r\n            "args": [\r\n'
            '                "serve"\r\n            ]\r\n        }\r\n    }\r\n}',
        ),
        (
            "codex",
            '# Codex\nmodel = "o" # best\n\n[mcp_servers.a]\ncommand = "a"\nargs = [\n  "x", # ]\n]\n# end',
            '# Codex\nmodel = "o" # best\n\n[mcp_servers.a]\ncommand = "a"\nargs = [\n  "x", # ]\n]\n# end\n\n'
            '[mcp_servers.belljar]\ncommand = "C"\nargs = ["serve"]\n',
        ),
        (
            "codex",
            'x = """\r\n[no]\r\n"""\r\n',
            'x = """\r\n[no]\r\n"""\r\n\r\n[mcp_servers.belljar]\r\ncommand = "C"\r\nargs = ["serve"]\r\n',
        ),
    ],
)
def test_what_is_in_the_file_stays_with_its_layout(
    belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch, client: str, before: str, after: str
) -> None:
    monkeypatch.setattr(install, "launch_command", lambda: ["C"])
    path = place / "file"
    path.write_bytes(before.encode())
    for _ in range(2):
        outcome = belljar("install", client, "--write", "--path", "file")
        assert outcome.code == 0, outcome.err
        assert path.read_bytes().decode() == after


@pytest.mark.parametrize(
    ("client", "content"),
    [
        ("codex", 'mcp_servers = { a = { command = "x" } }'),
        ("codex", '[mcp_servers.belljar]\ncommand = "other"\n[mcp_servers.belljar.env]\nA = "b"'),
        ("codex", "mcp_servers = 3"),
        ("codex", "[[mcp_servers.belljar]]"),
        ("codex", "a = 1\na = 2"),
        ("continue", "mcpServers: []"),
        ("goose", "extensions: {}"),
    ],
)
def test_toml_and_yaml_that_could_not_be_kept_are_refused_untouched(
    belljar: Run, place: Path, client: str, content: str
) -> None:
    (place / "file").write_text(content)
    outcome = belljar("install", client, "--write", "--path", "file")
    assert outcome.code == 2
    assert "by hand" in outcome.err
    assert "belljar" in outcome.out
    assert (place / "file").read_text() == content
    assert [file.name for file in place.iterdir()] == ["file"]


def test_an_interpreter_in_a_cache_is_never_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached, lasting = tmp_path / "uv-cache" / "archive-v0" / "abc" / "bin", tmp_path / "bin"
    for folder, names in {cached: ("belljar", "uv", "uvx"), lasting: ("uvx",)}.items():
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setattr(sys, "executable", str(cached / "python"))
    monkeypatch.setenv("PATH", f"{cached}:{lasting}")
    monkeypatch.setattr(install, "_source", list)
    assert launch_command() == [str(lasting / "uvx"), "belljar-mcp"]
    (lasting / "uvx").rename(lasting / "uv")
    assert launch_command() == [str(lasting / "uv"), "tool", "run", "belljar-mcp"]
    monkeypatch.setenv("PATH", str(cached))
    with pytest.raises(install.UsageError, match="in a cache") as refused:
        launch_command()
    assert "uv tool install belljar-mcp" in refused.value.hint


def test_a_belljar_that_came_from_no_index_is_fetched_from_where_it_came() -> None:
    # The tests' own is installed from this folder.
    assert install._source() == ["--from", Path(__file__).parents[2].as_uri()]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--url", "localhost:8000"), "is no URL"),
        (("--url", "http://x/mcp", "--docker"), "runs already"),
        (("--url", "http://x/mcp", "--header", "Authorization"), "is no header"),
        (("--header", "A: b"), "is for a server at a URL"),
    ],
)
def test_what_does_not_belong_together_is_refused(belljar: Run, arguments: tuple[str, ...], reason: str) -> None:
    outcome = belljar("install", "cursor", *arguments)
    assert outcome.code == 2
    assert reason in outcome.err


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
        (b'{"url": "http://x", ', "line 1"),
        (b'{"servers": {}, "servers": {"a": {}}}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1 "b": 2}', "line 1"),
        (b'{\n// mine\n"a": 1}', "has comments: Expecting property name enclosed in double quotes: line 2"),
        (b'{"a": 1, /* mine */ "b": 2}', "has comments"),
        (b'{"a": [1,],}', "has comments"),
        (b'{"a": 1e999}', "the number 1e999 cannot be kept"),
        (b'{"a": 0.12345678901234567890123}', "cannot be kept"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b"[" * 100_000, "recursion"),
        (b"\xff\xfe{", "codec"),
        (b"[]", "no object"),
        (b'{"servers": []}', "no object"),
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
    before = {"a": "http://x", "b": '"/*', "c": 1e3, "d": "\u2028"}
    (place / "mcp.json").write_text(json.dumps(before))
    assert belljar("install", "vscode", "--write", "--path", "mcp.json").code == 0
    assert read(place / "mcp.json").items() >= before.items()


def test_what_the_client_wrote_meanwhile_is_not_undone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "mcp.json"
    path.write_text("{}")

    def client_writes_now(_: int) -> None:
        path.write_text('{"new": 1}')

    monkeypatch.setattr(install.os, "fsync", client_writes_now)
    with pytest.raises(install.UsageError, match="changed by another program"):
        install.add_server(CLIENTS["vscode"], path, "belljar", {"command": "x"})
    assert path.read_text() == '{"new": 1}'
    assert sorted(file.name for file in place.iterdir()) == ["mcp.json", "mcp.json.bak"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can write for somebody else")
def test_root_leaves_the_file_to_its_owner(place: Path) -> None:
    path = place / "mcp.json"
    path.write_text("{}")
    os.chown(path, 12345, 12345)
    backup = install.add_server(CLIENTS["vscode"], path, "belljar", {"command": "x"})
    assert backup is not None
    assert [(file.stat().st_uid, file.stat().st_gid) for file in (path, backup)] == [(12345, 12345)] * 2


def test_an_unknown_client_is_refused_with_the_known_ones(belljar: Run) -> None:
    outcome = belljar("install", "emacs")
    assert outcome.code == 2
    assert "claude-desktop" in outcome.err
