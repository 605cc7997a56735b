"""Two servers that share a data directory race for one run: one drives it, and when it is killed, the other does."""

import json
import sqlite3
import sys
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from served import Served
from workflow_texts import code, form, tool, workflow

from belljar.environments import Environment
from waiting import until

pytestmark = pytest.mark.anyio
LEDGER = Path(__file__).parents[1] / "ledger_server.py"
# The first time, it goes on until its server is killed.
HELD = """
import pathlib, time
place = pathlib.Path('seen')
is_first = not place.exists()
place.write_text('x')
while is_first:
    time.sleep(0.05)
"""
STEPS = workflow(
    form("ask", "Go on?"), code("held", HELD, repeat=True), tool("put", "write", text="once"), code("end", "6 * 7")
)

STATES = "SELECT path, attempt, state FROM steps WHERE run_id = ? ORDER BY path, attempt"


@pytest.fixture
async def servers(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[list[Served]]:
    ledger = {"command": sys.executable, "args": [str(LEDGER), str(tmp_path / "ledger")]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"ledger": ledger}}))
    variables = {
        "BELLJAR_WORKFLOWS": "on",
        "BELLJAR_WORKFLOW_HOLD_S": "0.05",
        "BELLJAR_MCP_CONFIG": str(config),
        "BELLJAR_FORK_START": "false",
        "BELLJAR_HIBERNATE": "true",
    }
    found = [Served(default_environment, tmp_path, **variables) for _ in range(2)]
    async with anyio.create_task_group() as starting:
        for server in found:
            starting.start_soon(anyio.to_thread.run_sync, server.start)
    yield found
    for server in found:
        await server.aclose()


async def called(server: Served, **arguments: Any) -> dict[str, Any]:
    async with server.client() as caller:
        answer = await caller.client.call_tool("run_workflow", arguments)
    return answer.structured_content or {"refusal": str(answer.content)}


def rows(folder: Path, query: str, *values: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True)) as reader:
        return reader.execute(query, values).fetchall()


async def test_one_server_drives_a_run_and_the_other_when_it_is_killed(servers: list[Served], tmp_path: Path):
    run = (await called(servers[0], definition=STEPS, wait_s=0))["run"]
    query = "SELECT state, server FROM runs WHERE id = ?"
    await until(lambda: rows(tmp_path, query, run) == [("waiting", "")])

    answers: list[dict[str, Any]] = []

    async def answer(server: Served) -> None:
        answers.append(await called(server, run_id=run, answer={}, wait_s=0))

    async with anyio.create_task_group() as racing:
        for server in servers * 2:
            racing.start_soon(answer, server)
    assert sum("run" in each for each in answers) == 1, answers
    await until(lambda: rows(tmp_path, STATES, run) == [("ask", 1, "done"), ("held", 1, "running")])
    await until(lambda: [*tmp_path.glob("sessions/**/seen")])
    for server in servers:
        assert (await called(server, run_id=run, wait_s=0))["state"] == "running"
    ((_, holder),) = rows(tmp_path, query, run)
    (driver,) = (server for server in servers if holder.startswith(f"{server.pid}-"))
    (other,) = (server for server in servers if server is not driver)

    await driver.kill()
    after = await called(other, run_id=run, wait_s=60)
    assert (after["state"], after["result"]) == ("done", 42), after
    assert rows(tmp_path, STATES, run) == [
        ("ask", 1, "done"),
        ("end", 1, "done"),
        ("held", 1, "repeated"),
        ("held", 2, "done"),
        ("put", 1, "done"),
    ]
    keys = rows(tmp_path, "SELECT key, count(*) FROM executions WHERE key LIKE ? GROUP BY key", f"{run}/%")
    assert sorted(keys) == [(f"{run}/{step}", 1) for step in ("end/1", "held/1", "held/2", "put/1")]
    assert (tmp_path / "ledger").read_text().splitlines() == ["write once"]
