"""An MCP server whose tools leave a line in a file, so that a test can count what was really called."""

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

LEDGER = Path(sys.argv[1])
server = MCPServer("ledger")


def _enter(line: str) -> None:
    with LEDGER.open("a") as file:
        file.write(f"{line}\n")


@server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False))
def write(text: str) -> str:
    """Write a line."""
    _enter(f"write {text}")
    return f"written {text}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look(text: str) -> str:
    """Read without a change, and say what was asked."""
    _enter(f"look {text}")
    return f"seen {text}"


@server.tool(annotations=ToolAnnotations(read_only_hint=False, idempotent_hint=True))
def put(key: str, value: int = 0) -> dict[str, int]:
    """Put a value under a key."""
    _enter(f"put {key}")
    return {key: value}


if __name__ == "__main__":
    server.run()
