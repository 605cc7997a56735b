"""The MCP Inspector's command line as a client that we have no part in, over stdio and HTTP, in both protocol eras."""

import json
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from node_packages import npx
from serving_process import COLD, http_server, serve_command, serve_over_http, variables

INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def http_url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with http_server(serve_over_http(default_environment), tmp_path_factory.mktemp("inspected"), **COLD) as (url, _):
        yield f"{url}/mcp"


@pytest.fixture
def targets(default_environment: Environment, http_url: str, tmp_path: Path) -> dict[str, list[str]]:
    """What the Inspector is pointed at, by transport."""
    settings = [
        argument for name, value in {**variables(tmp_path), **COLD}.items() for argument in ("-e", f"{name}={value}")
    ]
    return {
        "http": ["--transport", "http", http_url],
        "stdio": [*settings, "--", *serve_command(default_environment)],
    }


def inspect(target: list[str], folder: Path, era: str, method: str, *arguments: str) -> dict[str, Any]:
    command, environment = npx(INSPECTOR)
    # A server that is started on a busy machine may take longer than the Inspector would wait.
    options = ["--connect-timeout", "90000", "--protocol-era", era, "--method", method, *arguments]
    finished = subprocess.run(
        [*command, "--cli", *options, *target],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # The developer's own servers and settings are no part of the test.
        env={
            **environment,
            "MCP_CATALOG_PATH": str(folder / "c.json"),
            "MCP_CLIENT_CONFIG_PATH": str(folder / "s.json"),
        },
        cwd=folder,
        timeout=120,
    )
    assert finished.returncode == 0, f"{finished.stdout}{finished.stderr}"
    return json.loads(finished.stdout)


# Each run of the Inspector takes seconds of a processor, so each transport and each era is in one of them.
@pytest.mark.parametrize(("transport", "era"), [("stdio", "legacy")])
def test_the_inspector_lists_the_tools_and_finds_no_fault_with_them(
    targets: dict[str, list[str]], tmp_path: Path, transport: str, era: str
):
    tools = inspect(targets[transport], tmp_path, era, "tools/list", "--strict")["tools"]
    assert "execute_code" in [tool["name"] for tool in tools]
    assert len(tools) == 13


@pytest.mark.parametrize(("transport", "era"), [("http", "modern")])
def test_the_inspector_runs_code(targets: dict[str, list[str]], tmp_path: Path, transport: str, era: str):
    arguments = json.dumps({"code": "import sys\nprint('out'); print('err', file=sys.stderr)\n6 * 7"})
    call = ["--tool-name", "execute_code", "--tool-args-json", arguments]
    answer = inspect(targets[transport], tmp_path, era, "tools/call", *call)
    assert answer.get("isError", False) is False
    fields = answer["structuredContent"]
    assert (fields["status"], fields["stdout"], fields["stderr"], fields["result"]) == ("ok", "out\n", "err\n", "42")
    assert answer["content"][0]["text"].startswith("out\nerr\nOut[1]: 42\n")
