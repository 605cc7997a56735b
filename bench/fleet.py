"""Several servers that share an address or a data directory: what they gain, and what passing on costs."""

import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.figures import Figure, Round, paired, percentile
from bench.load import LoadClient, loaded, open_client
from bench.one_plus_one import taken_in_turns, timed
from bench.processes import descendants, processor_time, proportional_mb
from bench.servers import belljar_command, new_session, open_http, open_stdio
from bench.stage import Stage
from bench.stored_wakes import measure_wakes

SERVERS = 4
MOST = 3.0
MOST_OWN, MOST_PASSED, MOST_LEGACY, MOST_RELAY, MOST_HOSTS = 1.05, 1.3, 1.6, 0.3, 1.4
MOST_NEW, MOST_LINES, MOST_FILES, MOST_MEMORY, MOST_LOSS_S = 1.3, 1.2, 1.5, 1.0, 1.0
KEY = "k" * 40
LINES = "for number in range(1_000_000): print(number)"
FILE_BYTES = 128_000_000
MANY_CORES = 16
OPEN_SESSIONS = 1_000
MOST_BESIDE_MANY = 1.2
STREAM = """
import time
for number in range(20):
    print(number, flush=True)
    time.sleep(0.005)
"""


async def measure(stage: Stage) -> list[Figure]:
    """Measure servers that share a data directory, two of one machine, two machines, workers, and a store."""
    passed_on = [*await _passing_on(stage), *await _host_to_host(stage)]
    return [*await _journals(stage), *passed_on, *await measure_workers(stage), *await measure_wakes(stage)]


# Servers of one data directory


def timed_command() -> list[str]:
    """Ours, which tells how long its event loop stood still for the journal."""
    return [sys.executable, str(Path(__file__).with_name("timed_server.py")), "serve"]


async def _journals(stage: Stage) -> list[Figure]:
    """One server that streams output, and several of them on one data directory, in turns."""
    rounds = [
        Round(await _journal_calls(stage, 1), await _journal_calls(stage, SERVERS))
        for _ in stage.rounds(stage.pick(4, 2), within_s=stage.pick(60, 15))
    ]
    peer, ours = (
        [one * 1000 for each in rounds for one in each.peer],
        [one * 1000 for each in rounds for one in each.ours],
    )
    note = f"peer: one server; {SERVERS} that stream into one data directory"
    return [
        Figure("fleet", "a journal call over stdio, p50", "ms", percentile(ours, 50), percentile(peer, 50), note=note),
        Figure("fleet", "a journal call over stdio, p99", "ms", percentile(ours, 99), percentile(peer, 99), MOST),
    ]


async def _journal_calls(stage: Stage, servers: int) -> list[float]:
    """Stream from so many servers at once; return how long each call of a journal took in them, in seconds."""
    before = set(stage.folder.glob("*.times"))
    ready = asyncio.Barrier(servers)
    await asyncio.gather(*(_stream(stage, ready) for _ in range(servers)))
    files = set(stage.folder.glob("*.times")) - before
    return [taken for file in files for taken in json.loads(file.read_text())]


async def _stream(stage: Stage, ready: asyncio.Barrier) -> None:
    async with open_stdio(stage, timed_command(), "modern", {"TIMES": str(stage.folder)}) as client:
        session_id = await new_session(client)
        await ready.wait()
        for _ in range(stage.pick(60, 30)):
            await client.call_tool("execute_code", {"code": STREAM, "session_id": session_id})


# Two servers of one machine


@dataclass
class _Server:
    """One server, its process, a session of it, and connections in both versions of the protocol."""

    pid: int
    session_id: str
    client: LoadClient
    legacy: LoadClient

    async def make(self) -> None:
        """Make a session, and clear it."""
        await self.client.call("clear_session", session_id=await self.client.new_session())

    async def carry(self, session_id: str) -> None:
        """Put a file into a session, and fetch it."""
        path = f"/api/v1/sessions/{session_id}/files/carried.bin"
        await self.client.request("PUT", path, bytes(FILE_BYTES))
        _, found = await self.client.request("GET", path)
        if len(found) != FILE_BYTES:
            raise RuntimeError(f"{len(found)} bytes came back of {FILE_BYTES}")


@asynccontextmanager
async def _open_server(stage: Stage, folder: Path, variables: dict[str, str]) -> AsyncGenerator[_Server]:
    pids: list[int] = []
    chosen = {**_folder_of(stage, folder), "BELLJAR_API_KEYS": f"bench:{KEY}", **variables}
    async with (
        open_http(stage, belljar_command(), chosen, pids.append) as url,
        open_client(url, key=KEY) as client,
        open_client(url, key=KEY, is_legacy=True) as legacy,
    ):
        yield _Server(pids[0], await client.new_session(), client, legacy)


def _folder_of(stage: Stage, folder: Path) -> dict[str, str]:
    """Return what gives a server a data directory of its own, with the environment of all."""
    if not folder.exists():
        folder.mkdir(mode=0o711, parents=True)
        (folder / "environments").symlink_to(stage.folder / "environments")
    return {"BELLJAR_DATA_DIRECTORY": str(folder)}


async def _passing_on(stage: Stage) -> list[Figure]:
    """What one server of a machine passes on to another, beside what a server does that is alone."""
    machine = stage.folder / "machine"
    _folder_of(stage, machine)
    (machine / "workers").mkdir()
    async with AsyncExitStack() as stack:
        alone = await stack.enter_async_context(_open_server(stage, stage.folder / "one-server", {}))
        first = await stack.enter_async_context(_open_server(stage, machine, {}))
        # A session of its own fills the second, so that it passes new ones on.
        full = {"BELLJAR_MAX_SESSIONS": "1", "BELLJAR_POOL_SIZE": "0"}
        second = await stack.enter_async_context(_open_server(stage, machine / "workers" / "2", full))
        own, theirs = alone.session_id, first.session_id
        found = await _calls(stage, alone, first, second, own, theirs)
        for what, most, peer, ours, count in (
            ("a new session, passed on", MOST_NEW, alone.make, second.make, 5),
            ("1,000,000 lines, passed on", MOST_LINES, _cell(alone, own, LINES), _cell(second, theirs, LINES), 1),
            (
                "128 MB there and back, passed on",
                MOST_FILES,
                partial(alone.carry, own),
                partial(second.carry, theirs),
                1,
            ),
        ):
            await peer()
            await ours()
            rounds = [
                Round(await timed(peer, count), await timed(ours, count))
                for _ in stage.rounds(stage.pick(6, 2), within_s=stage.pick(15, 5))
            ]
            found += paired("fleet", what, rounds, target=most, note="peer: one server")
        return [*found, await _loss(first, second, theirs)]


async def _host_to_host(stage: Stage) -> list[Figure]:
    """What one machine passes on to another, beside what a server does that is alone."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in (one, other)]
    peers = stage.folder / "peers"
    peers.write_text("".join(f"http://{address}\n" for address in addresses))
    shared = {"BELLJAR_FLEET_PEERS": f"file:{peers}", "BELLJAR_FLEET_KEY": KEY}
    async with AsyncExitStack() as stack:
        alone = await stack.enter_async_context(_open_server(stage, stage.folder / "no-host", {}))
        first, second = [
            await stack.enter_async_context(
                _open_server(stage, stage.folder / f"host-{address[-5:]}", {**shared, "BELLJAR_FLEET_ADDRESS": address})
            )
            for address in addresses
        ]
        peer, ours = _cell(alone, alone.session_id), _cell(second, first.session_id)
        await taken_in_turns(peer, ours, 10)
        rounds = [
            await taken_in_turns(peer, ours, 100) for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(15, 4))
        ]
        return paired("fleet", "1+1, from host to host", rounds, target=MOST_HOSTS, note="peer: one server")


def _cell(server: _Server, session_id: str, code: str = "1+1") -> Callable[[], Awaitable[object]]:
    return partial(server.client.call, "execute_code", code=code, session_id=session_id)


def _legacy_cell(server: _Server, session_id: str) -> Callable[[], Awaitable[object]]:
    return partial(server.legacy.call, "execute_code", code="1+1", session_id=session_id)


async def _calls(stage: Stage, alone: _Server, first: _Server, second: _Server, own: str, theirs: str) -> list[Figure]:
    """`1+1` at home and passed on, in both versions of the protocol, and the processor time of passing on."""
    found: list[Figure] = []
    for what, most, peer, ours in (
        ("1+1, one of two on its own connection", MOST_OWN, _cell(alone, own), _cell(first, theirs)),
        ("1+1, passed on", MOST_PASSED, _cell(alone, own), _cell(second, theirs)),
        ("1+1, passed on from 2025's protocol", MOST_LEGACY, _legacy_cell(alone, own), _legacy_cell(second, theirs)),
    ):
        await taken_in_turns(peer, ours, 10)
        rounds = [
            await taken_in_turns(peer, ours, 100) for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(15, 4))
        ]
        found += paired("fleet", what, rounds, target=most, note="peer: one server")
    calls = stage.pick(400, 150)
    before = [processor_time(server.pid).own_s for server in (alone, second)]
    await taken_in_turns(_cell(alone, own), _cell(second, theirs), calls)
    used = [
        (processor_time(server.pid).own_s - start) / calls * 1000
        for server, start in zip((alone, second), before, strict=True)
    ]
    note = "peer: the server that answers"
    return [
        *found,
        Figure("fleet", "processor time of passing on, a call", "ms", used[1], used[0], MOST_RELAY, note=note),
    ]


async def _loss(first: _Server, second: _Server, session_id: str) -> Figure:
    """How long after its server was killed a call is told."""
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        await asyncio.sleep(1.0)  # within which the call below has begun
        killed_at = time.perf_counter()
        os.kill(first.pid, signal.SIGKILL)

    # Not at the first, which has closed the connection of a client that was idle for so long.
    await second.client.call("execute_code", code="import time", session_id=session_id)
    killing = asyncio.create_task(kill())
    try:
        await second.client.call("execute_code", code="import time; time.sleep(60)", session_id=session_id)
    except RuntimeError as error:
        if "session-lost" not in str(error):
            raise
    await killing
    return Figure("fleet", "a server's loss is told", "s", time.perf_counter() - killed_at, None, MOST_LOSS_S, "value")


# Workers


async def measure_workers(stage: Stage) -> list[Figure]:
    """Throughput of `--workers` beside one server: eight of them where there are many cores, else two."""
    cores = len(os.sched_getaffinity(0))
    has_many = cores >= MANY_CORES
    workers, clients = (8, 64) if has_many else (2, 16)
    least_calls, least_sessions = (6.0, 5.0) if has_many else (1.6, None)
    seconds, generators = stage.pick(8, 4), (4 if has_many else 1)
    rates: dict[tuple[int, bool], list[float]] = {}
    memory: dict[int, float] = {}
    beside: list[Figure] = []
    for number in stage.rounds(stage.pick(3, 2), within_s=stage.pick(90, 30)):
        for count in (1, workers):
            async with _open_workers(stage, count, number) as (url, pid):
                for makes_sessions in (False, True):
                    taken = await loaded(url, clients, seconds, generators, makes_sessions=makes_sessions)
                    rates.setdefault((count, makes_sessions), []).append(len(taken) / seconds)
                    if not makes_sessions:
                        memory[count] = proportional_mb(descendants(pid) | {pid})
                if has_many and count > 1 and not beside:
                    beside.append(await _beside_many(url))
    note = f"peer: one server; {clients} clients, {workers} workers, {cores} cores"
    best = {key: 1000 / max(values) for key, values in rates.items()}
    return [
        Figure(
            "fleet", "a call, of all of them", "ms", best[workers, False], best[1, False], least_calls, "gain", note
        ),
        Figure(
            "fleet", "a new session, of all", "ms", best[workers, True], best[1, True], least_sessions, "gain", note
        ),
        Figure(
            "fleet",
            "memory of one more worker",
            "MB",
            (memory[workers] - memory[1]) / (workers - 1),
            memory[1],
            MOST_MEMORY,
        ),
        *beside,
    ]


@asynccontextmanager
async def _open_workers(stage: Stage, count: int, number: int) -> AsyncGenerator[tuple[str, int]]:
    """Start so many that share an address, in a folder of their own; their URL, once all answer, and their parent."""
    folder = stage.folder / f"{count}-workers-{number}"
    chosen = {**_folder_of(stage, folder), "BELLJAR_MAX_SESSIONS": str(2 * OPEN_SESSIONS), "BELLJAR_POOL_SIZE": "0"}
    pids: list[int] = []
    command = [*belljar_command(), "--workers", str(count)]
    async with open_http(stage, command, chosen, pids.append) as url:
        async with asyncio.timeout(60):
            while len([*folder.glob("runs/*/address"), *folder.glob("workers/*/runs/*/address")]) < count:
                await asyncio.sleep(0.05)
        yield url, pids[0]


async def _beside_many(url: str) -> Figure:
    """A call where one session is open, and where many are."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(open_client(url)) for _ in range(16)]
        session_id = await clients[0].new_session()
        call = partial(clients[0].call, "execute_code", code="1+1", session_id=session_id)
        await timed(call, 50)
        alone = await timed(call, 300)

        async def fill(client: LoadClient) -> None:
            for _ in range(OPEN_SESSIONS // len(clients)):
                await client.new_session()

        await asyncio.gather(*map(fill, clients))
        beside = await timed(call, 300)
    ours, peer = (statistics.median(taken) * 1000 for taken in (beside, alone))
    what = f"1+1 beside {OPEN_SESSIONS:,} open sessions, p50"
    return Figure("fleet", what, "ms", ours, peer, MOST_BESIDE_MANY, note="peer: with one session open")
