"""MCP servers for tests, none of them mocks: those of the registries, each installed once, and the awkward one.

npm's are installed into one folder; PyPI's into an environment each, since they pin what they like. All is kept where
the shared environment is. A registry that cannot be reached skips the test.
"""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import registry_servers
from belljar.toolbox.server_config import HttpServer, StdioServer
from registry_packages import Unreachable
from shared_environment import shared_settings

AWKWARD = Path(__file__).with_name("awkward_server.py")


def awkward(era: str = "both", *arguments: str, **chosen: Any) -> StdioServer:
    return StdioServer("awkward", sys.executable, (str(AWKWARD), "--era", era, *arguments), **chosen)


@contextmanager
def awkward_http(era: str = "both", *, port: int = 0, **chosen: Any) -> Generator[HttpServer]:
    """The awkward server at a port of its own."""
    command = [sys.executable, str(AWKWARD), "--era", era, "--http", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield HttpServer("awkward", process.stderr.readline().split()[-1], **chosen)
        finally:
            process.terminate()


def node_server(name: str, *arguments: str, **chosen: Any) -> StdioServer:
    """A server of npm's: everything, filesystem, memory or sequential-thinking."""
    return _server(name, arguments, chosen)


def python_server(name: str, *arguments: str, **chosen: Any) -> StdioServer:
    """A server of PyPI's: time, git, sqlite or fetch."""
    return _server(name, arguments, chosen)


def _server(name: str, arguments: tuple[str, ...], chosen: dict[str, Any]) -> StdioServer:
    try:
        program, *first = registry_servers.command(name, shared_settings().data_directory / "mcp-servers")
    except Unreachable as error:
        pytest.skip(str(error))
    return StdioServer(name, program, (*first, *arguments), **chosen)
