"""MCP servers that others publish, as commands: npm's are installed into one folder, PyPI's into one each."""

from functools import cache
from pathlib import Path

from registry_packages import node, npm_folder, python_environment

NODE_SERVERS = ("everything", "filesystem", "memory", "sequential-thinking")
PYTHON_SERVERS = ("time", "git", "sqlite", "fetch")
# It has not followed the SDK's second major version, and does not say so.
PINS = {"sqlite": ["mcp<2"]}


@cache
def command(name: str, kept: Path) -> list[str]:
    """What starts a server, to be followed by its arguments; installed under `kept` where it is not yet."""
    package = f"mcp-server-{name}"
    if name in PYTHON_SERVERS:
        environment = python_environment(kept / package, package, *PINS.get(name, []))
        return [str(environment / "bin" / package)]
    folder = npm_folder(kept / "node", *(f"@modelcontextprotocol/server-{each}" for each in NODE_SERVERS))
    script = folder / "node_modules/@modelcontextprotocol" / f"server-{name}" / "dist/index.js"
    return [str(node()[0]), str(script)]
