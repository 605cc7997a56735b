"""Runs examples as their readers would, but in this process: starting one takes seconds otherwise."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from inspect import iscoroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from example_runs import KEY, Show
from uv import find_uv_bin

from belljar.environments import Environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def servers() -> None:
    """The servers from PyPI, fetched before a test's own clock runs."""
    for pins, package in (([], "mcp-server-time"), (["--with", "mcp<2"], "mcp-server-sqlite")):
        command = [find_uv_bin(), "tool", "run", *pins, package, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        if done.returncode:
            pytest.skip(f"no package index in reach: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture
def show(
    default_environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Show]:
    """Runs an example in an empty working directory, and returns what it prints."""
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", str(default_environment.python))
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path / "data"))
    monkeypatch.setenv("BELLJAR_FORK_START", "false")
    monkeypatch.setenv("BELLJAR_PRELOAD", "json")  # the usual modules take two seconds of a processor
    monkeypatch.setenv("BELLJAR_LOG_LEVEL", "ERROR")
    for name in ("PLUGINS_DIRECTORY", "MCP_SERVERS"):  # one example sets them
        monkeypatch.setenv(f"BELLJAR_{name}", "")
        monkeypatch.delenv(f"BELLJAR_{name}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])

    def run(name: str, *arguments: str) -> str:
        if name == "12_complex_workflow":  # its branches run in forks
            monkeypatch.delenv("BELLJAR_FORK_START")
        main: Any = importlib.import_module(name).main
        try:
            if iscoroutine(started := main(*arguments)):

                async def wait() -> None:
                    await started

                anyio.run(wait)
        except SystemExit as end:
            if end.code not in (None, 0):
                pytest.fail(f"{name} ended with {end.code}: {capfd.readouterr()}")
        said = capfd.readouterr()
        assert KEY not in said.err
        # What servers warn of is nothing to a reader, and what an example has read it does not call unread.
        assert not re.search(r"WARNING|is not read", said.err), said.err
        return said.out

    yield run
    for name in [name for name in sys.modules if name in ("shared", "azure_agent") or re.match(r"\d\d_", name)]:
        del sys.modules[name]
