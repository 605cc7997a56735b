"""What waking a session from a store takes, where it slept and elsewhere, beside a wake without a store."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from mcp import Client
from pydantic import SecretStr

from belljar.mcp.server import build_server
from belljar.runtime import Runtime, open_runtime
from bench.figures import Figure, percentile
from bench.servers import new_session
from bench.stage import Stage

MOST_HERE, MOST_ELSEWHERE = 1.1, 2.0


async def measure_wakes(stage: Stage) -> list[Figure]:
    """Wake a session of 50 MB: without a store, with one where it slept, and with one elsewhere, in turns."""
    (stage.folder / "store").mkdir(exist_ok=True)
    shared = {"store": f"file://{stage.folder / 'store'}", "store_key": SecretStr("b" * 40)}
    async with AsyncExitStack() as stack:
        alone, one, other = [
            await stack.enter_async_context(_open_server(stage, name, chosen))
            for name, chosen in (("alone", {}), ("one", shared), ("other", shared))
        ]
        rounds = [
            [await _wake(alone, alone), await _wake(one, one), await _wake(one, other)]
            for _ in stage.rounds(stage.pick(12, 3), within_s=stage.pick(120, 30))
        ]
    today, here, elsewhere = (percentile([1000 * each[at] for each in rounds], 50) for at in range(3))
    note = "peer: without a store; a session of 50 MB, to the result of its first cell"
    return [
        Figure("fleet", "a wake where it slept, with a store", "ms", here, today, MOST_HERE, note=note),
        Figure("fleet", "a wake elsewhere, from a folder", "ms", elsewhere, today, MOST_ELSEWHERE),
    ]


@asynccontextmanager
async def _open_server(stage: Stage, name: str, chosen: dict[str, object]) -> AsyncGenerator[tuple[Runtime, Client]]:
    folder = stage.folder / name
    folder.mkdir()
    environment = str(stage.environment.python)
    own = {"data_directory": folder, "environment": environment, "hibernate": True, **chosen}
    async with open_runtime(stage.settings().model_copy(update=own)) as runtime:
        await runtime.starter.wait_until_warm(environment)
        async with Client(build_server(runtime, ["interpreter"])) as client:
            yield runtime, client


async def _wake(there: tuple[Runtime, Client], here: tuple[Runtime, Client]) -> float:
    """Put a session to sleep there; return how long its first cell here takes, in seconds."""
    runtime, client = there
    session_id = await new_session(client)
    made = {"code": "import os\nkept = os.urandom(50_000_000)", "session_id": session_id}
    await client.call_tool("execute_code", made)
    session = runtime.sessions.find_open(session_id)
    assert session is not None
    await runtime.sessions.endings.hibernate(session, "slept")
    if runtime.sessions.stored is not None:
        await runtime.sessions.stored.put(session_id)
    began = time.perf_counter()
    answer = await here[1].call_tool("execute_code", {"code": "len(kept)", "session_id": session_id})
    took = time.perf_counter() - began
    if "50000000" not in str(answer.content):
        raise RuntimeError(f"the session did not wake: {answer.content}")
    await here[1].call_tool("clear_session", {"session_id": session_id})
    return took
