"""From nothing to the first result: a cold ipykernel beside a new session of ours, in both sandboxes."""

import time
from contextlib import AsyncExitStack

from belljar.executions.cell import Cell
from belljar.runtime import Runtime, open_runtime
from bench.figures import Figure, Round, paired
from bench.ipykernels import open_ipykernel
from bench.stage import Stage

SANDBOXES = ("process", "namespace")


async def measure(stage: Stage) -> list[Figure]:
    """Interleaved, after one warm-up of each that does not count."""
    samples = {sandbox: Round() for sandbox in SANDBOXES}
    async with AsyncExitStack() as stack:
        runtimes = {
            sandbox: await stack.enter_async_context(open_runtime(stage.settings(sandbox))) for sandbox in SANDBOXES
        }
        await _cold_ipykernel(stage)
        for runtime in runtimes.values():
            await runtime.starter.wait_until_warm("default")
            await _new_session(runtime)
        for _ in stage.rounds(stage.pick(8, 3), within_s=stage.pick(30, 6)):
            peer = await _cold_ipykernel(stage)
            for sandbox, runtime in runtimes.items():
                samples[sandbox].peer.append(peer)
                samples[sandbox].ours.append(await _new_session(runtime))
    return [
        figure
        for sandbox, taken in samples.items()
        for figure in paired(
            "first-result", f"new session → 1+1, {sandbox}", [taken], note=f"peer: cold ipykernel; n={len(taken.ours)}"
        )
    ]


async def _cold_ipykernel(stage: Stage) -> float:
    began = time.perf_counter()
    async with open_ipykernel(stage) as kernel:
        await kernel.execute("1+1")
        return time.perf_counter() - began


async def _new_session(runtime: Runtime) -> float:
    began = time.perf_counter()
    session = runtime.sessions.create("bench")
    execution = session.submit(Cell("1+1", timeout_s=60))
    await execution.wait(60)
    took = time.perf_counter() - began
    if execution.result().result != "2":
        raise RuntimeError(f"1+1 gave {execution.result()}")
    await runtime.sessions.clear(session.id, "bench")
    return took
