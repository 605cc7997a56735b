"""Workers of one `belljar serve` behind one port: clients do not know which of them they reach."""

from collections.abc import Generator
from pathlib import Path

import anyio
import pytest
from calls import Caller
from mcp import Client

from belljar.environments import Environment
from belljar.servers import FLEET_SOCKET
from serving_process import http_server, serve_command
from waiting import until_blocking

pytestmark = pytest.mark.anyio
CALLERS, SESSIONS = 6, 4


@pytest.fixture(scope="module")
def served(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("workers")
    command = serve_command(default_environment, "--http", "127.0.0.1:0", "--workers", "2")
    with http_server(command, folder) as (url, _):
        until_blocking(lambda: [*folder.glob(f"workers/2/runs/*/{FLEET_SOCKET}")])
        yield url, folder


@pytest.mark.parametrize("era", ["legacy", "2026-07-28"])
async def test_every_connection_reaches_every_session(served: tuple[str, Path], era: str):
    url, _ = served
    made: list[str] = []
    for number in range(SESSIONS):
        async with Client(f"{url}/mcp", mode=era) as client:
            made.append((await Caller(client).execute(f"number = {number}")).session_id)
    seen: list[list[str | None]] = []

    async def call() -> None:
        async with Client(f"{url}/mcp", mode=era) as client:
            caller = Caller(client)
            seen.append([(await caller.execute("number", session_id)).result for session_id in made])
            listed = {info["session_id"] for info in (await caller.fields("list_sessions"))["sessions"]}
            assert listed >= {*made}

    async with anyio.create_task_group() as tasks:
        for _ in range(CALLERS):
            tasks.start_soon(call)
    assert seen == [[f"{number}" for number in range(SESSIONS)]] * CALLERS
