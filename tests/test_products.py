"""The core without its products: their folders can be removed, and nothing else of belljar minds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

import belljar
from belljar.products import PRODUCTS

PACKAGE = Path(belljar.__file__).parent


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without the folders of products."""
    folder = tmp_path_factory.mktemp("core")
    gone = [name.removeprefix("belljar.") for name in PRODUCTS]
    shutil.copytree(PACKAGE, folder / "belljar", ignore=lambda place, _: gone if Path(place) == PACKAGE else [])
    return folder


def variables_of(core: Path, data: Path) -> dict[str, str]:
    """What a process of the copy has in its environment, and nothing that this one is told."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BELLJAR_", "AZURE_"))}
    told = {"SANDBOX": "process", "ENVIRONMENT": sys.executable, "FORK_START": "false", "DATA_DIRECTORY": str(data)}
    return {**kept, "PYTHONPATH": str(core), **{f"BELLJAR_{name}": value for name, value in told.items()}}


def ran(core: Path, data: Path, *command: str) -> subprocess.CompletedProcess[str]:
    program, variables = [sys.executable, *command], variables_of(core, data)
    return subprocess.run(program, env=variables, capture_output=True, text=True, timeout=60, check=False, cwd=core)


def belljar_ran(core: Path, data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return ran(core, data, "-m", "belljar", *words)


def test_every_module_of_the_core_can_be_imported_without_its_products(core: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pathlib, pkgutil, belljar\n"
        "assert pathlib.Path(belljar.__file__).is_relative_to(pathlib.Path.cwd()), belljar.__file__\n"
        "from belljar.products import products\n"
        "assert products() == ()\n"
        "for module in pkgutil.walk_packages(belljar.__path__, 'belljar.'):\n"
        "    if '.inside.' not in module.name and not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
    )
    done = ran(core, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.anyio
async def test_a_server_runs_cells_and_commands_see_it_without_products(core: Path, tmp_path: Path) -> None:
    variables = {**variables_of(core, tmp_path), "BELLJAR_WORKFLOWS": "on"}
    server = StdioServerParameters(command=sys.executable, args=["-m", "belljar", "serve"], env=variables, cwd=core)
    async with Client(stdio_client(server)) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert "execute_code" in tools
        assert "run_workflow" not in tools
        answer: Any = await client.call_tool("execute_code", {"code": "import forms\n6 * 7", "wait_s": 60})
        assert answer.structured_content["result"] == "42", answer
        listed = await anyio.to_thread.run_sync(belljar_ran, core, tmp_path, "sessions", "--json")
    (session,) = json.loads(listed.stdout)
    assert session["session_id"] == answer.structured_content["session_id"]


def test_a_command_runs_code_without_products(core: Path, tmp_path: Path) -> None:
    done = belljar_ran(core, tmp_path, "run", "-c", "print(6 * 7)")
    assert done.stdout == "42\n", done.stderr


def test_doctor_knows_nothing_of_products_that_are_not_there(core: Path, tmp_path: Path) -> None:
    done = belljar_ran(core, tmp_path, "doctor", "--json")
    assert "Traceback" not in done.stderr
    sections = {finding["section"] for finding in json.loads(done.stdout)}
    assert "host" in sections
    assert "azure" not in sections


def test_a_surface_of_a_product_that_is_not_there_is_refused_by_name(core: Path, tmp_path: Path) -> None:
    done = belljar_ran(core, tmp_path, "serve", "--surface", "foundry", "--http", "127.0.0.1:0")
    assert done.returncode == 2
    assert "the surface foundry is not part of this installation" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_of_a_product_that_is_not_there_is_refused_by_name(core: Path, tmp_path: Path) -> None:
    told = belljar_ran(core, tmp_path, "--help")
    assert told.returncode == 0
    assert "sessions" in told.stdout
    assert "workflow" not in told.stdout
    unknown = belljar_ran(core, tmp_path, "nope")
    for words in (["list"], ["run", "a.yaml", "--var", "n=1"], ["--help"]):
        done = belljar_ran(core, tmp_path, "workflow", *words)
        assert (done.returncode, done.stdout) == (unknown.returncode, "")
        assert done.stderr.startswith(
            "error: this installation of belljar has no workflows\nhint: belljar workflow comes "
        )
