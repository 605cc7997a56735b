"""Memory of one idle session after `1+1`: the whole process tree of ours, sandbox included, beside an ipykernel's."""

import os
import statistics
from contextlib import AsyncExitStack

from bench.figures import Figure
from bench.ipykernels import open_ipykernel
from bench.one_plus_one import consume
from bench.processes import descendants, proportional_mb
from bench.stage import Stage


async def measure(stage: Stage) -> list[Figure]:
    """All sessions stay open until the end, so both sides share pages with as many of their own."""
    trees: dict[str, list[set[int]]] = {"peer": [], "ours": []}
    async with AsyncExitStack() as stack:
        for _ in range(stage.pick(4, 2)):
            before = descendants(os.getpid())
            await (await stack.enter_async_context(open_ipykernel(stage))).execute("1+1")
            between = descendants(os.getpid())
            await consume(await stack.enter_async_context(stage.open_kernel()), "1+1")
            trees["peer"].append(between - before)
            trees["ours"].append(descendants(os.getpid()) - between)
        peer, ours = (statistics.median(map(proportional_mb, trees[side])) for side in ("peer", "ours"))
    note = f"peer: ipykernel; median of {len(trees['ours'])}"
    return [Figure("memory", "PSS of an idle session, namespace", "MB", ours, peer, note=note)]
