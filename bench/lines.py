"""Much output: a million printed lines through the engine with its journal, and what a server's memory makes of it."""

import os
import statistics
import time

from belljar.executions.cell import Cell
from belljar.runtime import Runtime, open_runtime
from belljar.sessions.session import Session
from bench.figures import Figure
from bench.ipykernels import IPyKernel, open_ipykernel
from bench.processes import children, peak_resident_mb, resident_mb
from bench.servers import belljar_command, new_session, open_stdio
from bench.stage import Stage

TIME_TARGET = 0.5
GROWTH_TARGET_MB = 30.0
TIMEOUT_S = 120.0


async def measure(stage: Stage) -> list[Figure]:
    """Time first, then memory, in a server process of its own."""
    count = stage.pick(1_000_000, 100_000)
    return [*await _time(stage, count), *await _growth(stage, count)]


async def _time(stage: Stage, count: int) -> list[Figure]:
    peer: list[float] = []
    ours: list[float] = []
    peer_lost = our_lost = 0
    async with open_ipykernel(stage) as kernel, open_runtime(stage.settings()) as runtime:
        session = runtime.sessions.create("bench")
        await _through_engine(runtime, session, 1_000)
        for _ in stage.rounds(stage.pick(3, 1), within_s=stage.pick(40, 1)):
            took, arrived = await _through_ipykernel(kernel, count)
            peer.append(took)
            peer_lost += count - arrived
            took, arrived = await _through_engine(runtime, session, count)
            ours.append(took)
            our_lost += count - arrived
    what = f"{count:,} × print(i)"
    note = f"peer: ipykernel and client; n={len(ours)}"
    return [
        Figure("lines", what, "s", statistics.median(ours), statistics.median(peer), TIME_TARGET, note=note),
        Figure("lines", "lines lost", "lines", our_lost, peer_lost, 0, bound="value"),
    ]


async def _through_ipykernel(kernel: IPyKernel, count: int) -> tuple[float, int]:
    arrived = 0

    def on_text(text: str) -> None:
        nonlocal arrived
        arrived += text.count("\n")

    began = time.perf_counter()
    await kernel.execute(_code(count), on_text)
    return time.perf_counter() - began, arrived


async def _through_engine(runtime: Runtime, session: Session, count: int) -> tuple[float, int]:
    began = time.perf_counter()
    execution = session.submit(Cell(_code(count), timeout_s=TIMEOUT_S))
    await execution.wait(TIMEOUT_S)
    took = time.perf_counter() - began
    if (status := execution.result().status) != "ok":
        raise RuntimeError(f"{count:,} lines ended with status {status}: {execution.result().cause}")
    whole = await runtime.sessions.executions.whole_output(execution.id, "bench", 0, 0)
    return took, whole.count("\n")


async def _growth(stage: Stage, count: int) -> list[Figure]:
    before = children(os.getpid())
    async with open_stdio(stage, belljar_command(), "modern") as client:
        arguments = {"session_id": await new_session(client), "wait_s": TIMEOUT_S}
        (server,) = children(os.getpid()) - before
        resident, peak = resident_mb(server), peak_resident_mb(server)
        times = stage.pick(3, 1)
        for _ in range(times):
            await client.call_tool("execute_code", {**arguments, "code": _code(count)})
        growth, peak_growth = resident_mb(server) - resident, peak_resident_mb(server) - peak
    what = f"server's RSS grew, {times} × {count:,} lines"
    note = f"{resident:.0f} MB before; at its highest {peak_growth:+.0f} MB"
    return [Figure("lines", what, "MB", growth, target=GROWTH_TARGET_MB, bound="value", note=note)]


def _code(count: int) -> str:
    return f"for i in range({count}): print(i)"
