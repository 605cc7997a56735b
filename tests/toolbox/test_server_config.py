import json
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import SettingsError
from belljar.settings import explain, load_settings
from belljar.toolbox.server_config import HttpServer, StdioServer, UnusableServer, load_servers, read_file
from trusted_settings import write_trusted


def written(folder: Path, text: str | dict[str, Any], name: str = "mcp.json") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


def refusal(folder: Path, entry: dict[str, Any], **variables: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read_file(written(folder, {"mcpServers": {"one": entry}}), variables)
    return str(caught.value)


def test_a_claude_desktop_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {
            "globalShortcut": "Ctrl+Space",
            "mcpServers": {
                "files": {"command": "npx", "args": ["-y", "server-filesystem", "/srv"], "env": {"DEBUG": "1", "N": 3}},
                "remote": {"type": "http", "url": "https://example.com/mcp", "headers": {"Authorization": "Bearer t"}},
            },
        },
    )
    assert read_file(file) == {
        "files": StdioServer("files", "npx", ("-y", "server-filesystem", "/srv"), {"DEBUG": "1", "N": "3"}),
        "remote": HttpServer("remote", "https://example.com/mcp", {"Authorization": "Bearer t"}),
    }


def test_a_vs_code_file_is_read_with_its_comments_and_variables(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """{
          // what VS Code writes
          "inputs": [{"type": "promptString", "id": "key", "password": true}],
          "servers": {
            "db": {
              "type": "stdio", "command": "uvx", /* a tool */
              "args": ["server", "--root=${workspaceFolder}", "http://not//a-comment", "${env:DB:x}"],
              "env": {"TOKEN": "${env:TOKEN}"}, "cwd": "data",
            },
          },
        }""".replace("${env:DB:x}", "${DB:-none}"),
        ".vscode/mcp.json",
    )
    arguments = ("server", f"--root={tmp_path}", "http://not//a-comment", "none")
    folder = str(tmp_path / ".vscode" / "data")
    assert read_file(file, {"TOKEN": "s3cret"}) == {
        "db": StdioServer("db", "uvx", arguments, {"TOKEN": "s3cret"}, folder)
    }


def test_vs_code_settings_hold_their_servers_one_level_down(tmp_path: Path) -> None:
    file = written(tmp_path, {"editor.fontSize": 12, "mcp": {"servers": {"a": {"url": "http://localhost:1/mcp"}}}})
    assert read_file(file) == {"a": HttpServer("a", "http://localhost:1/mcp")}


def test_a_cursor_file_may_name_an_env_file(tmp_path: Path) -> None:
    written(tmp_path, "# keys\nexport KEY='a b'\nOTHER=1\n\n", "keys.env")
    file = written(
        tmp_path,
        {"mcpServers": {"a": {"command": "x", "envFile": "${workspaceFolder}/keys.env", "env": {"OTHER": "2"}}}},
    )
    (server,) = read_file(file, {}).values()
    assert isinstance(server, StdioServer)
    assert server.environment == {"KEY": "a b", "OTHER": "2"}


def test_what_an_editor_would_ask_for_is_in_a_variable_or_has_a_default(tmp_path: Path) -> None:
    servers = {"one": {"command": "x", "env": {"KEY": "${input:api-key}", "PLACE": "${input:place}"}}}
    inputs = [{"id": "api-key", "type": "promptString"}, {"id": "place", "type": "pickString", "default": "here"}]
    file = written(tmp_path, {"inputs": inputs, "servers": servers})
    assert read_file(file, {"MCP_INPUT_API_KEY": "s3cret"}) == {
        "one": StdioServer("one", "x", (), {"KEY": "s3cret", "PLACE": "here"})
    }
    assert read_file(file, {"MCP_INPUT_API_KEY": "s3cret", "MCP_INPUT_PLACE": "there"}) == {
        "one": StdioServer("one", "x", (), {"KEY": "s3cret", "PLACE": "there"})
    }


def test_a_server_that_only_others_can_use_leaves_the_rest_of_the_file_alone(tmp_path: Path) -> None:
    asks = {"url": "http://a/mcp", "headers": {"X": "${input:key}"}}
    file = written(
        tmp_path, {"servers": {"asks": asks, "old": {"type": "sse", "url": "http://a/sse"}, "ok": {"command": "x"}}}
    )
    found = read_file(file, {})
    assert found["ok"] == StdioServer("ok", "x")
    assert isinstance(found["old"], UnusableServer)
    assert found["old"].reason == "speaks SSE, a transport that MCP has given up"
    assert isinstance(found["asks"], UnusableServer)
    assert "/" not in found["asks"].reason  # sessions read it
    assert found["asks"].detail == f"set MCP_INPUT_KEY, or write {file}: servers.asks.headers.X without ${{input:key}}"


def test_a_server_that_is_switched_off_is_not_looked_into(tmp_path: Path) -> None:
    off = {"command": "x", "env": {"KEY": "${input:key}"}, "disabled": True}
    assert read_file(written(tmp_path, {"mcpServers": {"off": off, "also": {**off, "enabled": False}}})) == {}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({}, "has no server in it"),
        ({"command": "x", "url": "http://a/mcp"}, "both a command and a url"),
        ({"type": "http", "command": "x"}, "has no server in it"),
        ({"command": ["x"]}, "command is not text"),
        ({"command": "x", "args": "a b"}, "args is not a list of text"),
        ({"command": "x", "args": [1]}, "args[0] is not text"),
        ({"command": "x", "env": {"A=B": "1"}}, "env.A=B is not text"),
        ({"command": "x", "args": ["${env:MISSING}"]}, "needs the variable MISSING"),
        ({"command": "x", "args": ["${MISSING}"]}, "needs the variable MISSING"),
        ({"command": "x", "args": ["${command:pick}"]}, "means nothing here"),
        ({"url": "http://a/mcp", "headers": {"X": "a\r\nB: c"}}, "cannot be a header"),
    ],
)
def test_an_entry_that_cannot_be_used_says_where_and_why(tmp_path: Path, entry: dict[str, Any], reason: str) -> None:
    said = refusal(tmp_path, entry)
    assert "mcpServers.one" in said
    assert reason in said


@pytest.mark.parametrize(
    "url", ["ftp://a/tok3n", "file:///tok3n", "http://", "http://a:b/tok3n", "tok3n", "http://a b/tok3n"]
)
def test_an_address_that_is_none_is_refused_without_being_repeated(tmp_path: Path, url: str) -> None:
    said = refusal(tmp_path, {"url": url})
    assert "is no address" in said
    assert "tok3n" not in said


@pytest.mark.parametrize("name", ["../up", "a/b", "", " a", "a\nb", "x" * 65, ".hidden"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="is no name for a server"):
        read_file(written(tmp_path, {"mcpServers": {name: {"command": "x"}}}))


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": []}', "{}", '{"mcpServers": {"a": 1}}', "[" * 100_000])
def test_a_file_that_is_no_list_of_servers_is_refused(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        read_file(file)
    assert str(file) in caught.value.message


def test_variables_name_addresses_and_keep_the_headers_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, {"mcpServers": {"git-hub": {"url": "http://old/mcp", "headers": {"A": "b"}}}})
    monkeypatch.setenv("MCP_SERVER_GIT_HUB_URL", "http://new/mcp")
    monkeypatch.setenv("MCP_SERVER_WEATHER_URL", "https://weather/mcp")
    monkeypatch.setenv("MCP_SERVER_EMPTY_URL", "")
    assert load_servers(load_settings({"mcp_config": str(file), "data_directory": tmp_path})) == {
        "git-hub": HttpServer("git-hub", "http://new/mcp", {"A": "b"}),
        "weather": HttpServer("weather", "https://weather/mcp"),
    }


def test_tables_in_the_settings_file_are_servers_and_their_secrets_are_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("BELLJAR_CONFIG", raising=False)
    write_trusted('[mcp_servers.time]\ncommand = "mcp-server-time"\nenv = {KEY = "s3cret"}\n')
    assert load_servers(load_settings()) == {"time": StdioServer("time", "mcp-server-time", (), {"KEY": "s3cret"})}
    assert "s3cret" not in repr(explain())


def test_secrets_of_a_server_are_not_in_its_repr() -> None:
    assert "s3cret" not in repr(StdioServer("a", "x", (), {"KEY": "s3cret"}))
    assert "s3cret" not in repr(HttpServer("a", "http://a/?key=s3cret", {"A": "s3cret"}))
