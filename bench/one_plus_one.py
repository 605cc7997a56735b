"""A warm `1+1` at the kernel contract: ipykernel to idle and reply, ours to `Finished`."""

import time
from collections.abc import Awaitable, Callable

from belljar.kernels.base import Kernel
from bench.figures import Figure, Round, paired
from bench.ipykernels import open_ipykernel
from bench.stage import Stage

TARGET = 0.3
CALLS = 200
TURN = 10


async def measure(stage: Stage) -> list[Figure]:
    """Rounds of both, from the quietest of which the figures are."""
    rounds: list[Round] = []
    async with open_ipykernel(stage) as peer, stage.open_kernel() as kernel:

        async def run_peer() -> None:
            await peer.execute("1+1")

        async def run_ours() -> None:
            await consume(kernel, "1+1")

        await taken_in_turns(run_peer, run_ours, 20)
        for _ in stage.rounds(stage.pick(6, 2), within_s=stage.pick(20, 6)):
            rounds.append(await taken_in_turns(run_peer, run_ours, CALLS))
    return paired("one-plus-one", "kernel contract", rounds, target=TARGET, with_p99=True, note="peer: ipykernel")


async def consume(kernel: Kernel, code: str) -> None:
    """Run a cell to its end."""
    async for _ in kernel.execute(code, allow_input=False):
        pass


async def timed(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds that each of `count` calls took."""
    samples: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - began)
    return samples


async def taken_in_turns(
    run_peer: Callable[[], Awaitable[object]], run_ours: Callable[[], Awaitable[object]], count: int
) -> Round:
    """`count` calls of each, a few of one and a few of the other: what else the machine does disturbs both alike."""
    taken = Round()
    for _ in range(0, count, TURN):
        taken.peer.extend(await timed(run_peer, TURN))
        taken.ours.extend(await timed(run_ours, TURN))
    return taken
