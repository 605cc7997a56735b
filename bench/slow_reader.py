"""A reader that looks away for three seconds while a cell prints and flushes: what arrives of what was written."""

import asyncio
import time

from belljar.outputs.events import Stream
from bench.figures import Figure
from bench.ipykernels import open_ipykernel
from bench.stage import Stage

PAUSE_S = 3.0
# Several times what the pipes between a kernel and its host hold: the cell has to wait for its reader.
BLOCKS = 50_000


async def measure(stage: Stage) -> list[Figure]:
    """Bytes lost on each side."""
    count = stage.pick(20_000, 5_000)
    written = sum(len(f"{number}\n") for number in range(count))
    code = f"for i in range({count}): print(i, flush=True)"
    peer_took, peer_arrived = await _ipykernel(stage, code)
    our_took, our_arrived = await _ours(stage, code, PAUSE_S)
    note = f"of {written:,} written; peer: ipykernel"
    more = BLOCKS * 100
    _, more_arrived = await _ours(stage, f"for i in range({BLOCKS}): print('x' * 99, flush=True)", 1.0)
    return [
        Figure("slow-reader", "bytes lost", "bytes", written - our_arrived, written - peer_arrived, 0, "value", note),
        Figure(
            "slow-reader",
            "bytes lost, more than the pipes hold",
            "bytes",
            more - more_arrived,
            target=0,
            bound="value",
            note=f"of {more:,} written",
        ),
        Figure("slow-reader", f"time, with {PAUSE_S:g} s of pause", "s", our_took, peer_took),
    ]


async def _ipykernel(stage: Stage, code: str) -> tuple[float, int]:
    arrived = 0
    last = 0.0

    def on_text(text: str) -> None:
        nonlocal arrived, last
        arrived += len(text)
        last = time.perf_counter()

    async with open_ipykernel(stage) as kernel:
        await kernel.execute("1+1")
        began = time.perf_counter()
        await kernel.execute_with_pause(code, PAUSE_S, on_text)
    return last - began, arrived


async def _ours(stage: Stage, code: str, pause_s: float) -> tuple[float, int]:
    arrived = 0
    async with stage.open_kernel() as kernel:
        began = time.perf_counter()
        async for event in kernel.execute(code, allow_input=False):
            if isinstance(event, Stream):
                if not arrived:
                    await asyncio.sleep(pause_s)
                arrived += len(event.text)
        return time.perf_counter() - began, arrived
