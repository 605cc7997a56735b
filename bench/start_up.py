"""From spawn to the first answer to `tools/list` over stdio: `belljar serve` beside a bare server with one tool."""

import time

from bench.figures import Figure, Round, paired
from bench.servers import bare_command, belljar_command, open_stdio
from bench.stage import Stage

TARGET = 1.5


async def measure(stage: Stage) -> list[Figure]:
    """Interleaved, after one of each that fills the disk cache."""
    await _start(stage, bare_command())
    await _start(stage, belljar_command())
    taken = Round()
    for _ in stage.rounds(stage.pick(11, 5), within_s=stage.pick(40, 14)):
        taken.peer.append(await _start(stage, bare_command()))
        taken.ours.append(await _start(stage, belljar_command()))
    note = f"peer: bare MCP server; n={len(taken.ours)}"
    fastest = Figure("start-up", "spawn → tools/list, fastest", "ms", min(taken.ours) * 1000, min(taken.peer) * 1000)
    return [*paired("start-up", "spawn → tools/list", [taken], target=TARGET, note=note), fastest]


async def _start(stage: Stage, command: list[str]) -> float:
    began = time.perf_counter()
    async with open_stdio(stage, command, "modern") as client:
        await client.list_tools()
        return time.perf_counter() - began
