"""Several servers beside each other: what those that share a data directory cost each other."""

import asyncio
import json
import sys
from pathlib import Path

from bench.figures import Figure, Round, percentile
from bench.servers import new_session, open_stdio
from bench.stage import Stage

SERVERS = 4
MOST = 3.0
STREAM = """
import time
for number in range(20):
    print(number, flush=True)
    time.sleep(0.005)
"""


def timed_command() -> list[str]:
    """Ours, which tells how long its event loop stood still for the journal."""
    return [sys.executable, str(Path(__file__).with_name("timed_server.py")), "serve"]


async def measure(stage: Stage) -> list[Figure]:
    """One server that streams output, and several of them on one data directory, in turns."""
    rounds = [
        Round(await _journal_calls(stage, 1), await _journal_calls(stage, SERVERS))
        for _ in stage.rounds(stage.pick(4, 2), within_s=stage.pick(90, 20))
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
