"""The public conformance suite's scenarios of the extension for tasks, with cells and workflows as the tools."""

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from test_mcp_conformance import HERE, SUITE

from belljar.environments import Environment
from node_packages import npx
from serving_process import http_server

SCENARIOS = [
    "tasks-lifecycle",
    "tasks-capability-negotiation",
    "tasks-wire-fields",
    "tasks-request-state-removal",
    "tasks-mrtr-input",
    "tasks-request-headers",
    "tasks-dispatch-and-envelope",
    "tasks-status-notifications",
    "tasks-required-task-error",
    "tasks-mrtr-composition",
]
pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    program = [sys.executable, str(HERE / "fixture_server.py"), "tasks"]
    environment = str(default_environment.python)
    folder = tmp_path_factory.mktemp("tasks")
    with http_server(program, folder, BELLJAR_ENVIRONMENT=environment, BELLJAR_HTTP="127.0.0.1:0") as (url, _):
        yield f"{url}/mcp"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_passes(url: str, tmp_path: Path, scenario: str):
    command, variables = npx(SUITE)
    words = [*command, "server", "--url", url, "--scenario", scenario, "--spec-version", "2026-07-28", "--force"]
    finished = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=120
    )
    assert finished.returncode == 0, f"{finished.stdout[-6000:]}\n{finished.stderr[-2000:]}"
    assert "Failed: 0" in finished.stdout or "0 failed" in finished.stdout, finished.stdout[-3000:]
