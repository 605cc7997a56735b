"""Fan-out: many children of one state, each for one line and gone, and many snippets each in a session of its own.

Ours is an engine in this process, so that its own processor time counts, and so does that of sandboxes and kernels;
no earlier states are kept, as a map keeps none. Peers: `os.fork()` of a plain Python that holds the same, which is
what any of this costs at least; ipykernels started anew; a pool of processes that each take one snippet; a session
opened, used and ended for each snippet. Sides are taken in turns.
"""

import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import belljar
from belljar.settings import Settings
from bench.figures import Figure
from bench.ipykernels import open_ipykernel
from bench.processes import descendants, proportional_mb, whole_processor_time
from bench.stage import Stage

HELD = "import numpy, pandas\nheld = numpy.ones(500_000_000 // 8)\n"
LINE = "int(held[0]) + 1"
AT_ONCE = 16
FORK_TARGET = 45.0
CHILD_TARGET_MB = 4.0
POOL_TARGET = 3.0
SESSIONS_TARGET = 3.0
_FORKS = f"""
import json, os, sys, time
{HELD}
for line in sys.stdin:
    began, before = time.perf_counter(), os.times()
    for _ in range(int(line)):
        child = os.fork()
        if not child:
            assert {LINE} == 2
            os._exit(0)
        os.waitpid(child, 0)
    spent = [now - then for now, then in zip(os.times()[:4], before[:4])]
    print(json.dumps([time.perf_counter() - began, sum(spent)]), flush=True)
"""
_POOL = """
import concurrent.futures, json, multiprocessing, sys, time
if __name__ == "__main__":
    for line in sys.stdin:
        count, workers = json.loads(line)
        began = time.perf_counter()
        with concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            assert [*pool.map(eval, ["1 + 1"] * count)] == [2] * count
        print(json.dumps([time.perf_counter() - began]), flush=True)
"""


@dataclass(slots=True)
class _Taken:
    """Of one round: seconds that passed, and of processor time of this process and of all that it has started."""

    passed_s: float
    spent_s: float


async def measure(stage: Stage) -> list[Figure]:
    """All sides in turns, in one engine."""
    settings = stage.settings().model_copy(update={"pool_size": 0, "max_sessions": 128, "checkpoints": 0})
    with whole_processor_time() as (spent_s, gap):
        return await _measure(stage, settings, spent_s, gap)


async def _measure(stage: Stage, settings: Settings, spent_s: Callable[[], float], gap: str) -> list[Figure]:
    async with belljar.open_engine(settings) as engine, engine.open_session() as session:
        await session.execute(HELD)
        return [
            *await _children(stage, session, spent_s, gap),
            await _memory(stage, session),
            *await _snippets(stage, engine),
        ]


async def _children(
    stage: Stage, session: belljar.SessionHandle, spent_s: Callable[[], float], gap: str
) -> list[Figure]:
    count, ours, forks, kernels = stage.pick(100, 20), list[_Taken](), list[_Taken](), list[_Taken]()
    command = [str(stage.environment.python), "-c", _FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forking:
        for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(90, 15)):
            forks.append(_Taken(*await asyncio.to_thread(_ask, forking, count)))
            ours.append(await _timed(lambda: _mapped(session, count), spent_s))
            kernels.append(await _timed(lambda: _one_ipykernel(stage), spent_s))
        forking.communicate()
    spent, passed = _each(ours, count), statistics.median(one.passed_s for one in ours) / count
    least, kernel = _each(forks, count), _each(kernels, 1)
    what = "a child of a session with 500 MB, one line and gone, processor time"
    note = f"{count} children, {AT_ONCE} at once, {len(ours)} rounds; {passed * 1000:.1f} ms passed for each"
    note += f"; {gap}" if gap else ""
    return [
        Figure("fanout", what, "ms", spent * 1000, kernel * 1000, FORK_TARGET, "gain", f"peer: ipykernel; {note}"),
        Figure("fanout", what, "ms", spent * 1000, least * 1000, None, "ratio", "peer: os.fork(), no sandbox"),
        Figure("fanout", "children a second", "/s", 1 / passed, note=f"on {os.cpu_count()} processors, one server"),
    ]


def _each(rounds: list[_Taken], count: int) -> float:
    return statistics.median(one.spent_s for one in rounds) / count


async def _mapped(session: belljar.SessionHandle, count: int) -> None:
    async for result in session.map([LINE] * count, at_once=AT_ONCE):
        if result.result != "2":
            raise RuntimeError(f"a piece answered {result}")


async def _one_ipykernel(stage: Stage) -> None:
    async with open_ipykernel(stage) as kernel:
        await kernel.execute("import numpy, pandas\n1 + 1")


async def _timed(work: Callable[[], Awaitable[None]], spent_s: Callable[[], float] = lambda: 0.0) -> _Taken:
    before, began = spent_s(), time.perf_counter()
    await work()
    return _Taken(time.perf_counter() - began, spent_s() - before)


def _ask(process: "subprocess.Popen[str]", question: object) -> list[float]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the peer has no pipes")
    process.stdin.write(f"{json.dumps(question)}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


async def _memory(stage: Stage, session: belljar.SessionHandle) -> Figure:
    count = stage.pick(40, 10)
    before = proportional_mb(descendants(os.getpid()))
    forks = await session.fork(count=count)
    await asyncio.gather(*(fork.execute(LINE) for fork in forks))
    added = (proportional_mb(descendants(os.getpid())) - before) / len(forks)
    await asyncio.gather(*(fork.aclose() for fork in forks))
    note = f"{len(forks)} forks that have run a line"
    return Figure("fanout", "memory of a child of 500 MB", "MB", added, None, CHILD_TARGET_MB, "value", note)


async def _snippets(stage: Stage, engine: belljar.Engine) -> list[Figure]:
    count = stage.pick(1_000, 40)
    ours, pools, alone = list[float](), list[float](), list[float]()

    async def by_map() -> None:
        async for result in engine.map(["1 + 1"] * count, at_once=AT_ONCE):
            if result.result != "2":
                raise RuntimeError(f"a piece answered {result}")

    async def one_by_one() -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def run() -> None:
            async with places, engine.open_session() as session:
                await session.execute("1 + 1")

        await asyncio.gather(*(run() for _ in range(count)))

    with subprocess.Popen(
        [str(stage.environment.python), "-c", _POOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as pool:
        for _ in stage.rounds(stage.pick(3, 2), within_s=stage.pick(180, 15)):
            ours.append((await _timed(by_map)).passed_s)
            pools.append((await asyncio.to_thread(_ask, pool, [count, AT_ONCE]))[0])
            alone.append((await _timed(one_by_one)).passed_s)
        pool.communicate()
    passed, of_pool, of_sessions = (statistics.median(one) / count * 1000 for one in (ours, pools, alone))
    what, note = "a snippet in a session of its own, by a map", f"{count} snippets, {AT_ONCE} at once"
    pool_note = f"peer: ProcessPoolExecutor, a process each, no sandbox; {note}"
    return [
        Figure("fanout", what, "ms", passed, of_pool, POOL_TARGET, "ratio", pool_note),
        Figure("fanout", what, "ms", passed, of_sessions, SESSIONS_TARGET, "gain", "peer: open, execute, end"),
    ]
