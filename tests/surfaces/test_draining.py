"""Servers with a store that are told to stop: cells end, sessions go into the store, and the next server goes on."""

import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from calls import Caller, held
from mcp import Client

from belljar.environments import Environment
from serving_process import COLD, http_server, serve_over_http
from waiting import until

pytestmark = pytest.mark.anyio

KEY = "k" * 40


@asynccontextmanager
async def server(
    environment: Environment, folder: Path, store: Path, **chosen: str
) -> AsyncGenerator[tuple[str, Caller, "subprocess.Popen[str]"]]:
    for each in (folder, store):
        each.mkdir(exist_ok=True)
    chosen = {"BELLJAR_STORE": f"file://{store}", "BELLJAR_STORE_KEY": KEY, **COLD, **chosen}
    async with AsyncExitStack() as stack:
        url, process = stack.enter_context(http_server(serve_over_http(environment), folder, **chosen))
        client = await stack.enter_async_context(Client(f"{url}/mcp"))
        yield url, Caller(client), process


async def test_a_server_that_is_told_to_stop_lets_cells_end_and_the_next_one_goes_on(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (url, caller, process):
        idle = await caller.execute("idle = 1")
        busy = await caller.execute("count = 1")
        running = await caller.execute(f"{held()}count += 1", busy.session_id, wait_s=0)
        process.terminate()

        async def stops() -> bool:
            async with httpx.AsyncClient() as client:
                answer = (await client.get(f"{url}/ready")).json()
            return answer["checks"].get("server") == "is being stopped"

        await until(stops)
        refused = await caller.execute("1")
        assert "is being stopped and takes no new sessions" in str(refused.error)
        answers: list[str] = []

        async def call_again() -> None:
            answers.append(str((await caller.execute("count", busy.session_id)).error))

        async with anyio.create_task_group() as group:
            group.start_soon(call_again)
            await until(lambda: [*store.glob(f"sessions/{idle.session_id}/*.head")])
            assert answers == [], "the call waits"
            (tmp_path / "one" / "sessions" / busy.session_id / "workspace" / "go").touch()
        assert "sleeps, because its server is being stopped" in answers[0]
        await anyio.to_thread.run_sync(process.wait)
    async with server(default_environment, tmp_path / "other", store) as (_, caller, _):
        woken = await caller.execute("count", busy.session_id)
        assert (woken.result, woken.state) == ("2", "kept")
        assert (await caller.get(running.execution_id)).status == "ok"
        assert (await caller.execute("idle", idle.session_id)).result == "1"


async def test_a_cell_that_does_not_end_in_time_is_interrupted_and_its_session_moves(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store, BELLJAR_DRAIN_S="0.1") as (_, caller, process):
        made = await caller.execute("kept = 1")
        running = await caller.execute("import time\ntime.sleep(600)", made.session_id, wait_s=0)
        process.terminate()
        await anyio.to_thread.run_sync(process.wait)
    async with server(default_environment, tmp_path / "other", store) as (_, caller, _):
        assert (await caller.execute("kept", made.session_id)).result == "1"
        assert (await caller.get(running.execution_id)).status == "interrupted"


async def test_a_drain_that_is_killed_in_the_middle_leaves_each_session_in_one_place(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (_, caller, process):
        idle = await caller.execute("idle = 1")
        busy = await caller.execute("open('file', 'w').write('kept') and None")
        running = await caller.execute(held(), busy.session_id, wait_s=0)
        process.terminate()
        await until(lambda: [*store.glob(f"sessions/{idle.session_id}/*.head")])
        os.kill(process.pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(process.wait)
    async with (
        server(default_environment, tmp_path / "one", store) as (_, caller, _),
        server(default_environment, tmp_path / "other", store) as (_, elsewhere, _),
    ):
        assert (await elsewhere.execute("idle", idle.session_id)).result == "1"
        assert "is open at another server" in str((await caller.execute("idle", idle.session_id)).error)
        # What was not put yet is there as after any killed server.
        assert (await caller.get(running.execution_id)).status == "died"
        assert (await caller.execute("open('file').read()", busy.session_id)).result == "'kept'"
        assert (await elsewhere.execute("1", busy.session_id)).status == "rejected"


async def test_a_second_signal_ends_the_wait_for_cells(default_environment: Environment, tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (_, caller, process):
        made = await caller.execute("kept = 1")
        idle = await caller.execute("idle = 1")
        await caller.execute("import time\ntime.sleep(600)", made.session_id, wait_s=0)
        process.terminate()
        await until(lambda: [*store.glob(f"sessions/{idle.session_id}/*.head")])
        process.terminate()
        await anyio.to_thread.run_sync(process.wait)
        assert process.returncode == 0
        assert [*store.glob(f"sessions/{made.session_id}/*.head")] != []
