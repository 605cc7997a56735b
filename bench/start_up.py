"""What a user waits for or pays before anything runs: the start of a server, a command, a server that does nothing."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack

from bench.figures import Figure, Round, paired
from bench.processes import children, processor_time
from bench.servers import bare_command, belljar_command, open_stdio, warm_session
from bench.stage import Stage

TARGET = 1.5
COMMAND_TARGET, IDLE_TARGET_MS = 25.0, 2.0
"""The most times an empty Python's start that `belljar sessions` may take, and what an idle server may compute."""
SESSIONS = ["sessions", "--json", "--data-directory"]
NOTHING = [sys.executable, "-c", "pass"]


async def measure(stage: Stage) -> list[Figure]:
    """The start of a server over stdio until its first answer to `tools/list`, beside a bare server with one tool.

    Then those of a command, and of both servers while nobody calls them.
    """
    await _start(stage, bare_command())
    await _start(stage, belljar_command())
    taken = Round()
    for _ in stage.rounds(stage.pick(11, 5), within_s=stage.pick(40, 14)):
        taken.peer.append(await _start(stage, bare_command()))
        taken.ours.append(await _start(stage, belljar_command()))
    note = f"peer: bare MCP server; n={len(taken.ours)}"
    fastest = Figure("start-up", "spawn → tools/list, fastest", "ms", min(taken.ours) * 1000, min(taken.peer) * 1000)
    started = [*paired("start-up", "spawn → tools/list", [taken], target=TARGET, note=note), fastest]
    return [*started, *await _command(stage, "no server"), *await _beside_servers(stage)]


async def _start(stage: Stage, command: list[str]) -> float:
    began = time.perf_counter()
    async with open_stdio(stage, command, "modern") as client:
        await client.list_tools()
        return time.perf_counter() - began


async def _command(stage: Stage, servers: str) -> list[Figure]:
    taken, ours = Round(), [*belljar_command()[:-1], *SESSIONS, str(stage.folder)]
    await _run(ours)
    for _ in stage.rounds(stage.pick(9, 4), within_s=stage.pick(12, 5)):
        taken.peer.append(await _run(NOTHING))
        taken.ours.append(await _run(ours))
    note = f"peer: python -c pass; n={len(taken.ours)}"
    return paired("start-up", f"belljar sessions, {servers}", [taken], target=COMMAND_TARGET, note=note)


async def _run(command: list[str]) -> float:
    began = time.perf_counter()
    await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


async def _beside_servers(stage: Stage) -> list[Figure]:
    """Start both servers and a session, wait until nothing is prepared any more; ask one, then leave both alone."""
    async with AsyncExitStack() as stack:
        pids: list[int] = []
        for command in (bare_command(), belljar_command()):
            before = children(os.getpid())
            client = await stack.enter_async_context(open_stdio(stage, command, "modern"))
            await client.list_tools()
            pids += children(os.getpid()) - before
        await warm_session(client)
        asked = await _command(stage, "one server")
        peer, ours = await _idle_ms(pids, stage.pick(8, 3))
        note = "processor time of the server, with one idle session; peer: bare MCP server"
        return [
            *asked,
            Figure("start-up", "idle over stdio, per second", "ms", ours, peer, IDLE_TARGET_MS, "value", note),
        ]


async def _idle_ms(pids: list[int], for_s: float) -> list[float]:
    await asyncio.sleep(1)  # what follows the last answer is over
    before = [processor_time(pid).own_s for pid in pids]
    await asyncio.sleep(for_s)
    return [(processor_time(pid).own_s - one) * 1000 / for_s for pid, one in zip(pids, before, strict=True)]
