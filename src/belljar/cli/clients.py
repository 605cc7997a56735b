"""The MCP clients that `belljar install` knows: where each keeps its servers, and in what shape.

Read from the clients' documentation in 2026. Nothing here reads or writes a file.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ClientName = Literal["claude-desktop", "claude-code", "vscode", "cursor"]
ServerEntry = dict[str, str | list[str]]


@dataclass(frozen=True, slots=True)
class Client:
    """One client: `key` is the object in its file that maps names to servers."""

    title: str
    path: Callable[[], Path]
    key: str
    states_type: bool
    then: str
    """What makes the client notice."""


def server_entry(client: Client, arguments: Sequence[str]) -> ServerEntry:
    """How the client starts us."""
    command, *first = launch_command()
    entry: ServerEntry = {"command": command, "args": [*first, "serve", *arguments]}
    return {"type": "stdio", **entry} if client.states_type else entry


def launch_command() -> list[str]:
    """A command that works from any folder and with any PATH: clients started from a desktop have a short one."""
    interpreter = Path(sys.executable).absolute()
    script = interpreter.with_name("belljar.exe" if os.name == "nt" else "belljar")
    return [str(script)] if os.access(script, os.X_OK) else [str(interpreter), "-P", "-m", "belljar"]


def _claude_desktop() -> Path:
    import platformdirs

    folder = platformdirs.user_config_path("Claude", appauthor=False, roaming=True)
    return folder / "claude_desktop_config.json"


def _claude_code() -> Path:
    # The user's file rather than a project's .mcp.json: that one is shared, and the command is this machine's.
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home()) / ".claude.json"


CLIENTS: dict[ClientName, Client] = {
    "claude-desktop": Client(
        "Claude Desktop", _claude_desktop, "mcpServers", states_type=False, then="Quit Claude Desktop and open it again"
    ),
    "claude-code": Client(
        "Claude Code",
        _claude_code,
        "mcpServers",
        states_type=True,
        then="Start a new Claude Code session; /mcp shows it",
    ),
    "vscode": Client(
        "VS Code", lambda: Path(".vscode/mcp.json"), "servers", states_type=True, then="Start it from MCP: List Servers"
    ),
    "cursor": Client(
        "Cursor",
        lambda: Path.home() / ".cursor" / "mcp.json",
        "mcpServers",
        states_type=True,
        then="Turn it on in Cursor's MCP settings",
    ),
}
