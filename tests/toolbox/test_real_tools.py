"""Servers that others wrote, called from cells: what they declare, what they send, and both together."""

import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from mcp_servers import node_server, python_server

from belljar.environments import Environment
from belljar.executions.cell import Cell
from belljar.models import ExecutionResult
from belljar.runtime import Runtime, open_runtime
from belljar.sessions.session import Session
from belljar.toolbox.server_config import StdioServer
from shared_environment import settings_with

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and a repository with one commit."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "numbers.txt").write_text("\n".join(map(str, range(1_000))))
    git = ["git", "-C", str(folder), "-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "the first"]):
        subprocess.run([*git, *words], check=True)
    return folder


@pytest.fixture(scope="module")
async def session(
    anyio_backend: str, default_environment: Environment, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Session]:
    servers = {
        "everything": node_server("everything"),
        "files": node_server("filesystem", str(place)),
        "git": python_server("git", "--repository", str(place)),
        "db": python_server("sqlite", "--db-path", str(place / "db")),
    }
    settings = settings_with(
        data_directory=tmp_path_factory.mktemp("belljar"),
        environment=str(default_environment.python),
        mcp_servers={name: _entry(server) for name, server in servers.items()},
        fork_start=False,
        hibernate=False,
        log_level="ERROR",
    )
    async with open_runtime(settings) as runtime:
        yield await _ready(runtime)


def _entry(server: StdioServer) -> dict[str, Any]:
    return {"command": server.command, "args": [*server.arguments]}


async def _ready(runtime: Runtime) -> Session:
    assert runtime.toolbox is not None
    await runtime.toolbox.wait_until_ready()
    catalogue = await runtime.toolbox.catalogue()
    assert {name: server.error for name, server in catalogue.servers.items() if server.error} == {}
    return runtime.sessions.create("local")


async def run(session: Session, code: str) -> ExecutionResult:
    execution = session.submit(Cell(code, timeout_s=60))
    await execution.wait(60)
    result = execution.result()
    assert result.status == "ok", result.error
    return result


async def test_a_large_file_is_read_and_one_number_comes_out(session: Session, place: Path):
    path = str(place / "numbers.txt")
    result = await run(
        session, f"from servers.files import read_text_file\nsum(map(int, read_text_file({path!r})['content'].split()))"
    )
    assert result.result == "499500"


async def test_results_of_one_server_go_to_another_in_code(session: Session, place: Path):
    code = f"""
from servers.git import git_log
from servers.db import create_table, write_query, read_query
log = str(git_log({str(place)!r}))
create_table("CREATE TABLE commits (message TEXT)")
write_query("INSERT INTO commits VALUES ('" + ("the first" if "the first" in log else log.replace("'", "")) + "')")
str(read_query("SELECT * FROM commits"))
"""
    assert "the first" in str((await run(session, code)).result)


async def test_declared_results_pictures_and_errors_are_what_they_are(session: Session):
    found = await run(
        session, "import toolbox, servers.everything as e\n[n for n in dir(e) if 'image' in n or 'structured' in n]"
    )
    assert "get_structured_content" in str(found.result)
    weather = await run(session, "e.get_structured_content(location='Chicago')['temperature'] > -100")
    assert weather.result == "True"
    picture = await run(session, "[p for p in e.get_tiny_image() if isinstance(p, toolbox.Media)][0]")
    assert [display.mime for display in picture.displays] == ["image/png"]
    refused = await run(
        session,
        "try: e.get_structured_content(location='Nowhere')\n"
        "except toolbox.ToolError as error: print(error.tool, error.parameters)",
    )
    assert refused.stdout.startswith("get-structured-content [\"location: Literal['New York', ")


async def test_progress_of_a_real_server_arrives(session: Session):
    said: list[str] = []
    execution = session.submit(Cell("e.trigger_long_running_operation(duration=0.5, steps=2)", timeout_s=60))
    while not execution.is_finished:
        await execution.wait_for_change(60)
        said.append(execution.latest_text())
    assert execution.result().status == "ok", execution.result().error
    assert any("everything.trigger-long-running-operation: 1/2" in text for text in said)
