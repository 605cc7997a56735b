"""The MCP clients that `belljar install` knows: where each keeps its servers, and in what form.

As their documentation says in November 2026. A client is one line of `CLIENTS`. Knows nothing of how files are changed.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs

ServerEntry = dict[str, Any]
Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Client:
    """An MCP client, and how it is told about a server."""

    title: str
    path: Callable[[], Path]
    key: str
    """The object in the client's file that maps names to servers."""
    then: str
    """What the person has to do before the client starts the server."""
    process: Callable[[Sequence[str]], ServerEntry]
    """Return the entry of a server that the client starts, from its command."""
    address: Callable[[str, Headers], ServerEntry] | None
    """Return the entry of a server at a URL; None where the file cannot have one."""
    form: Literal["json", "toml", "yaml"] = "json"
    is_list: bool = False
    """Whether its servers are a list, each with its name in it, and no object."""
    new_file: Mapping[str, Any] | None = None
    """What a new file has to have beside its servers."""
    repeats_name: bool = False
    """Whether an entry has its name in it, too."""


# Files


def _home(*parts: str) -> Callable[[], Path]:
    return lambda: Path.home().joinpath(*parts)


def _claude_desktop() -> Path:
    folder = platformdirs.user_config_path("Claude", appauthor=False, roaming=True)
    return folder / "claude_desktop_config.json"


def _claude_code() -> Path:
    # The user's file rather than a project's .mcp.json, because projects are shared and the command is a local path.
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home()) / ".claude.json"


def _codex() -> Path:
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex") / "config.toml"


def _cline() -> Path:
    """Return the file of Cline's own folder, or of its extension for VS Code where only that is there."""
    if chosen := os.environ.get("CLINE_MCP_SETTINGS_PATH"):
        return Path(chosen)
    name = "cline_mcp_settings.json"
    own = Path.home() / ".cline" / "data" / "settings" / name
    code = platformdirs.user_config_path("Code", appauthor=False, roaming=True)
    extension = code / "User" / "globalStorage" / "saoudrizwan.claude-dev" / "settings" / name
    return extension if extension.parent.is_dir() and not own.parent.is_dir() else own


def _config_home() -> Path:
    """Return the folder that programs use that follow Linux's conventions on macOS, too."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _goose() -> Path:
    if sys.platform == "win32":
        return platformdirs.user_config_path("goose", "Block", roaming=True) / "config" / "config.yaml"
    return _config_home() / "goose" / "config.yaml"


def _opencode() -> Path:
    folder = _config_home() / "opencode"
    with_comments, plain = folder / "opencode.jsonc", folder / "opencode.json"
    return with_comments if with_comments.exists() else plain


# Entries


def _command(command: Sequence[str]) -> ServerEntry:
    return {"command": command[0], "args": [*command[1:]]}


def _typed_command(command: Sequence[str]) -> ServerEntry:
    return {"type": "stdio", **_command(command)}


def _url(url: str, headers: Headers) -> ServerEntry:
    return {"url": url, **({"headers": dict(headers)} if headers else {})}


def _typed_url(kind: str) -> Callable[[str, Headers], ServerEntry]:
    return lambda url, headers: {"type": kind, **_url(url, headers)}


def _url_as(key: str) -> Callable[[str, Headers], ServerEntry]:
    return lambda url, headers: {key: url, **({"headers": dict(headers)} if headers else {})}


def _codex_url(url: str, headers: Headers) -> ServerEntry:
    return {"url": url, **({"http_headers": dict(headers)} if headers else {})}


def _continue_url(url: str, headers: Headers) -> ServerEntry:
    return {
        "type": "streamable-http",
        "url": url,
        **({"requestOptions": {"headers": dict(headers)}} if headers else {}),
    }


_GOOSE = {"enabled": True, "description": "Runs Python in stateful sessions", "timeout": 300}


def _goose_command(command: Sequence[str]) -> ServerEntry:
    return {"type": "stdio", **_GOOSE, "cmd": command[0], "args": [*command[1:]]}


def _goose_url(url: str, headers: Headers) -> ServerEntry:
    return {"type": "streamable_http", **_GOOSE, "uri": url, **({"headers": dict(headers)} if headers else {})}


def _opencode_command(command: Sequence[str]) -> ServerEntry:
    return {"type": "local", "command": [*command]}


CLIENTS: dict[str, Client] = {
    "claude-desktop": Client(
        "Claude Desktop", _claude_desktop, "mcpServers", "Quit Claude Desktop and open it again", _command, None
    ),
    "claude-code": Client(
        "Claude Code",
        _claude_code,
        "mcpServers",
        "Start a new Claude Code session; /mcp shows it",
        _typed_command,
        _typed_url("http"),
    ),
    "vscode": Client(
        "VS Code",
        lambda: Path(".vscode/mcp.json"),
        "servers",
        "Start it from MCP: List Servers",
        _typed_command,
        _typed_url("http"),
    ),
    "cursor": Client(
        "Cursor",
        _home(".cursor", "mcp.json"),
        "mcpServers",
        "Turn it on in Cursor's MCP settings",
        _typed_command,
        _url,
    ),
    "codex": Client(
        "Codex", _codex, "mcp_servers", "Start Codex again; /mcp shows it", _command, _codex_url, form="toml"
    ),
    "gemini-cli": Client(
        "Gemini CLI",
        _home(".gemini", "settings.json"),
        "mcpServers",
        "Start Gemini CLI again; /mcp shows it",
        _command,
        _url_as("httpUrl"),
    ),
    "zed": Client(
        "Zed",
        lambda: _config_home() / "zed" / "settings.json",
        "context_servers",
        "Zed starts it at once; its agent settings show it",
        _command,
        _url,
    ),
    "windsurf": Client(
        "Windsurf",
        _home(".codeium", "windsurf", "mcp_config.json"),
        "mcpServers",
        "Press Refresh in Windsurf's MCP settings",
        _command,
        _url_as("serverUrl"),
    ),
    "cline": Client(
        "Cline",
        _cline,
        "mcpServers",
        "Cline starts it at once; MCP Servers, Configure shows it",
        _command,
        _typed_url("streamableHttp"),
    ),
    "continue": Client(
        "Continue",
        _home(".continue", "config.yaml"),
        "mcpServers",
        "Reload Continue's configuration; its agent mode uses it",
        _typed_command,
        _continue_url,
        form="yaml",
        is_list=True,
        new_file={"name": "Local Config", "version": "1.0.0", "schema": "v1"},
    ),
    "goose": Client(
        "goose",
        _goose,
        "extensions",
        "Start a new goose session",
        _goose_command,
        _goose_url,
        form="yaml",
        repeats_name=True,
    ),
    "opencode": Client("opencode", _opencode, "mcp", "Start opencode again", _opencode_command, _typed_url("remote")),
    "lm-studio": Client(
        "LM Studio",
        _home(".lmstudio", "mcp.json"),
        "mcpServers",
        "Turn it on under Program, Install in LM Studio",
        _command,
        _url,
    ),
}
