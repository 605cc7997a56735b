"""Sessions by fork, through a sandboxed server over MCP: how soon, how small, how many, cloned and taken back.

The peer is a plain ipykernel under jupyter_client. Servers differ in single settings; all others are the defaults.
"""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client

from bench.figures import Figure, Round, paired, percentile
from bench.ipykernels import IPyKernel, open_ipykernel
from bench.one_plus_one import taken_in_turns
from bench.processes import ProcessorTime, children, command_line, descendants, processor_time, proportional_mb
from bench.servers import belljar_command, open_stdio, warm_session
from bench.stage import Stage

CELL = "import numpy, pandas, matplotlib.pyplot\n1+1"
HOLD_500_MB = "import numpy\nheld = numpy.ones(500_000_000 // 8)\n1+1"
ON_DEMAND_TARGET = 40.0
POOL_TARGET = 100.0
MEMORY_TARGET = 13.0
CLONE_TARGET_MS = 100.0
CLONE_TARGET_MB = 25.0
SESSIONS_TARGET = 40.0
KEPT_TARGET_MB = 3.5
TIMEOUT_S = 60.0
ROOM = {"BELLJAR_MAX_SESSIONS": "400"}
SERVERS: dict[str, dict[str, str]] = {
    "cold": {"BELLJAR_FORK_START": "false"},
    "forked on demand": {"BELLJAR_POOL_SIZE": "0", **ROOM},
    "from the pool": {},
    "without checkpoints": {"BELLJAR_POOL_SIZE": "0", "BELLJAR_CHECKPOINTS": "0", **ROOM},
}

Figures = list[float]


@dataclass(frozen=True, slots=True)
class Server:
    """One of ours, with its client."""

    client: Client
    pid: int

    async def run(self, code: str, session_id: str = "") -> str:
        """Run a cell that gives 2; the session it ran in."""
        result = await self.call("execute_code", code=code, session_id=session_id)
        if result.get("result") != "2":
            raise RuntimeError(f"execute_code answered {result}")
        return str(result["session_id"])

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """A tool's structured answer."""
        answer = await self.client.call_tool(tool, arguments)
        if answer.is_error:
            raise RuntimeError(f"{tool} answered {answer.content}")
        return answer.structured_content or {}

    async def clear(self, *sessions: str) -> None:
        """End sessions."""
        await asyncio.gather(*(self.call("clear_session", session_id=session) for session in sessions))

    async def become_warm(self) -> None:
        """Until a new session is a fork."""
        await self.clear(await warm_session(self.client))

    def memory_mb(self) -> float:
        """PSS of everything below the server: what its sessions hold together, shared pages counted once."""
        return proportional_mb(descendants(self.pid))


async def measure(stage: Stage) -> list[Figure]:
    """All servers side by side, so that each figure has its peer in the same minutes."""
    # Before there are servers, which have the same libraries open: pages that are shared with them would not count.
    alone, crowd = await _ipykernels_mb(stage, 1), await _ipykernels_mb(stage, stage.pick(12, 4))
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(_open(stage, variables)) for name, variables in SERVERS.items()
        }
        for name, server in servers.items():
            if name != "cold":
                await server.become_warm()
        on_demand, lean = servers["forked on demand"], servers["without checkpoints"]
        return [
            *await _first_cell(stage, servers),
            *await _memory(stage, lean, on_demand, alone, crowd),
            *await _clone(stage, lean),
            await _rewind(stage, on_demand),
            *await _round_trip(stage, on_demand),
            *await _burst(stage, on_demand),
            *await _one_core(stage, lean),
        ]


@asynccontextmanager
async def _open(stage: Stage, variables: Mapping[str, str]) -> AsyncGenerator[Server]:
    before = children(os.getpid())
    async with open_stdio(stage, belljar_command(), "modern", variables) as client:
        await client.list_tools()
        (server,) = children(os.getpid()) - before
        yield Server(client, server)


# Request to result


async def _first_cell(stage: Stage, servers: Mapping[str, Server]) -> list[Figure]:
    peer: list[float] = []
    ours: dict[str, list[float]] = {name: [] for name in SERVERS if name != "without checkpoints"}
    for _ in stage.rounds(stage.pick(9, 4), within_s=stage.pick(60, 12)):
        # A cold start takes longer than the pool needs to fill up again.
        peer.append(await _cold_ipykernel(stage))
        for name, samples in ours.items():
            began = time.perf_counter()
            session = await servers[name].run(CELL)
            samples.append(time.perf_counter() - began)
            await servers[name].clear(session)
    targets = {"forked on demand": ON_DEMAND_TARGET, "from the pool": POOL_TARGET}
    return [
        Figure(
            "forking",
            f"new session → imports, {name}, p50",
            "ms",
            statistics.median(samples) * 1000,
            statistics.median(peer) * 1000,
            targets.get(name),
            "gain",
            f"peer: cold ipykernel; n={len(samples)}; fastest {min(samples) * 1000:.0f} ms, "
            f"{min(peer) / min(samples):.0f}× less than its fastest",
        )
        for name, samples in ours.items()
    ]


async def _cold_ipykernel(stage: Stage) -> float:
    began = time.perf_counter()
    async with open_ipykernel(stage) as kernel:
        await kernel.execute(CELL)
        return time.perf_counter() - began


# Memory


async def _memory(stage: Stage, lean: Server, default: Server, alone: Figures, crowd: Figures) -> list[Figure]:
    """Of ours: everything but the server, what sessions are forked from included, over the number of sessions."""
    count = stage.pick(100, 30)
    note = f"{count} sessions, their zygote included; peer: "
    one, many = f"{note}one ipykernel", f"{note}each of {len(crowd)} ipykernels"
    held: dict[str, float] = {}
    for what, server in (("no checkpoints", lean), ("checkpoints on", default)):
        sessions = [await server.run(CELL) for _ in range(count)]
        # A second cell, before which the state after the first is kept where states are kept.
        await asyncio.gather(*(server.run("1+1", session) for session in sessions))
        # Until the states after the second cells are there too: they are taken while a session is idle.
        await asyncio.sleep(1)
        held[f"PSS of an idle session, {what}"] = server.memory_mb() / count
        await server.clear(*sessions)
    (what, ours), (kept, more) = held.items()
    single, each = alone[0], statistics.mean(crowd)
    return [
        Figure("forking", what, "MB", ours, single, MEMORY_TARGET, "gain", one),
        Figure("forking", what, "MB", ours, each, None, "gain", many),
        Figure("forking", kept, "MB", more, single, None, "gain", one),
        Figure("forking", "PSS of a state that is kept", "MB", more - ours, None, KEPT_TARGET_MB, "value"),
    ]


async def _ipykernels_mb(stage: Stage, count: int) -> Figures:
    """Of each of so many that have run the cell and share what they can."""
    trees: list[set[int]] = []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            before = descendants(os.getpid())
            await (await stack.enter_async_context(open_ipykernel(stage))).execute(CELL)
            trees.append(descendants(os.getpid()) - before)
        return [*map(proportional_mb, trees)]


# Copies


async def _clone(stage: Stage, server: Server) -> list[Figure]:
    origin = await server.run(HOLD_500_MB)
    clones = [str((await server.call("fork_session", session_id=origin))["session_id"])]
    before = server.memory_mb()
    samples: list[float] = []
    for _ in range(stage.pick(8, 4)):
        began = time.perf_counter()
        clones.append(str((await server.call("fork_session", session_id=origin))["session_id"]))
        samples.append(time.perf_counter() - began)
    added = (server.memory_mb() - before) / len(samples)
    await server.run("int(held[0]) + 1", clones[-1])
    await server.clear(origin, *clones)
    note = f"n={len(samples)}; fastest {min(samples) * 1000:.0f} ms"
    took = statistics.median(samples) * 1000
    return [
        Figure("forking", "clone of a session with 500 MB, p50", "ms", took, None, CLONE_TARGET_MS, "value", note),
        Figure("forking", "clone of a session with 500 MB, added PSS", "MB", added, None, CLONE_TARGET_MB, "value"),
    ]


async def _rewind(stage: Stage, server: Server) -> Figure:
    session = await server.run(HOLD_500_MB)
    async with asyncio.timeout(TIMEOUT_S):
        # Cells within a tenth of a second share a checkpoint: there may be none after the first one yet.
        while await _undone(server, session, "1+1") is None:
            pass
    samples = [await _undone(server, session, "held[0] = 5\n1+1") or 0.0 for _ in range(stage.pick(8, 4))]
    await server.run("int(held[0]) + 1", session)
    await server.clear(session)
    took = statistics.median(samples) * 1000
    return Figure("forking", "rewind of a session with 500 MB, p50", "ms", took, note=f"n={len(samples)}")


async def _undone(server: Server, session: str, code: str) -> float | None:
    """How long it takes to take a cell back; None when it cannot be."""
    await server.run(code, session)
    began = time.perf_counter()
    answer = await server.client.call_tool("rewind_session", {"session_id": session, "to": 1})
    return None if answer.is_error else time.perf_counter() - began


# Many


async def _round_trip(stage: Stage, server: Server) -> list[Figure]:
    session = await server.run(CELL)
    async with open_ipykernel(stage) as kernel:
        await kernel.execute(CELL)
        rounds = await _rounds(stage, kernel, server, session)
    await server.clear(session)
    return paired("forking", "1+1 in a warm session", rounds, with_p99=True, note="peer: ipykernel, without MCP")


async def _rounds(stage: Stage, kernel: IPyKernel, server: Server, session: str) -> list[Round]:
    async def run_peer() -> None:
        await kernel.execute("1+1")

    async def run_ours() -> None:
        await server.run("1+1", session)

    await taken_in_turns(run_peer, run_ours, 20)
    return [
        await taken_in_turns(run_peer, run_ours, 100)
        for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(10, 2))
    ]


async def _burst(stage: Stage, server: Server) -> list[Figure]:
    """All at once: the last one has waited for the others."""
    count = stage.pick(100, 40)
    samples: list[float] = []

    async def create() -> str:
        began = time.perf_counter()
        session = await server.run(CELL)
        samples.append(time.perf_counter() - began)
        return session

    began = time.perf_counter()
    sessions = await asyncio.gather(*(create() for _ in range(count)))
    took = time.perf_counter() - began
    await server.clear(*sessions)
    what = f"burst of {count} new sessions → imports"
    return [
        Figure("forking", f"{what}, p50", "ms", statistics.median(samples) * 1000, note=f"all in {took:.1f} s"),
        Figure("forking", f"{what}, p99", "ms", percentile(samples, 99) * 1000),
    ]


async def _one_core(stage: Stage, server: Server) -> list[Figure]:
    """Server, zygote and sessions on one processor; the client is on the others."""
    count, at_once = stage.pick(60, 24), 4
    everywhere = os.sched_getaffinity(server.pid)
    _bind(server, {min(everywhere)})
    before = _processor_times(server)
    try:
        began = time.perf_counter()
        waiting = asyncio.Semaphore(at_once)

        async def create() -> str:
            async with waiting:
                return await server.run(CELL)

        sessions = await asyncio.gather(*(create() for _ in range(count)))
        took = time.perf_counter() - began
    finally:
        _bind(server, everywhere)
    split = _split(before, _processor_times(server), count)
    await server.clear(*sessions)
    note = f"{count} sessions, {at_once} at once, each to the result of its first cell"
    together, passed = sum(split.values()), f"{took / count * 1000:.0f} ms passed"
    return [
        Figure("forking", "new sessions on one core", "/s", count / took, None, SESSIONS_TARGET, "least", note),
        Figure("forking", "processor time of a new session", "ms", together, note=passed),
        *(Figure("forking", f"… of it, {what}", "ms", spent) for what, spent in split.items()),
    ]


def _processor_times(server: Server) -> dict[int, tuple[str, ProcessorTime]]:
    """By process, with its kind."""
    pids = (server.pid, *descendants(server.pid))
    return {pid: ("server" if pid == server.pid else _kind(pid), processor_time(pid)) for pid in pids}


def _kind(pid: int) -> str:
    words = command_line(pid)
    if "user_namespaces" in words:
        return "sandbox"
    # By the name alone: bubblewrap may lie in a folder of Python's.
    return "python" if words and Path(words[0]).name.startswith("python") else "sandbox"


def _split(
    before: Mapping[int, tuple[str, ProcessorTime]], after: Mapping[int, tuple[str, ProcessorTime]], count: int
) -> dict[str, float]:
    """Milliseconds for each of so many sessions, by who spent them."""
    spent: defaultdict[str, float] = defaultdict(float)
    for pid, (kind, now) in after.items():
        then = before[pid][1] if pid in before else ProcessorTime()
        own, of_children = now.own_s - then.own_s, now.of_children_s - then.of_children_s
        if kind == "server":
            spent["the server"] += own
            spent["making the sandbox"] += of_children
        elif kind == "sandbox":
            spent["making the sandbox"] += own + of_children
        elif pid in before:
            spent["the zygote's forks"] += own
            spent["entering the sandbox, in a process between zygote and kernel"] += of_children
        else:
            spent["the kernel, to the end of its first cell"] += own + of_children
    return {what: seconds / count * 1000 for what, seconds in spent.items()}


def _bind(server: Server, processors: set[int]) -> None:
    for pid in (server.pid, *descendants(server.pid)):
        try:
            os.sched_setaffinity(pid, processors)
        except ProcessLookupError:
            continue
