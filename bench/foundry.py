"""The REST data plane beside MCP on the same server: a warm `1+1`, a first call, and a large file up and down."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
from mcp import Client

from bench.figures import Figure, Round, paired
from bench.one_plus_one import taken_in_turns, timed
from bench.servers import belljar_command, new_session, open_http
from bench.stage import Stage

TARGET = 1.2
FIRST_TARGET = 1.2
GROWTH_TARGET_MB = 30.0
CALLS = 100
QUICK_CALLS = 60
FILE_MB = 100
POOL_S = 5.0
"""How long to wait for a session in the pool; without one, both sides start a session."""
VERSION = "2025-10-02-preview"
_PIECE = bytes(1024 * 1024)


async def measure(stage: Stage) -> list[Figure]:
    """One server with both surfaces, and one client of each."""
    variables = {"BELLJAR_SURFACES": "interpreter,foundry"}
    async with open_http(stage, belljar_command(), variables) as mcp_url:
        url = mcp_url.removesuffix("/mcp")
        async with (
            Client(mcp_url, mode="auto") as client,
            httpx.AsyncClient(base_url=url, timeout=120) as rest,
        ):
            return [
                *await _calls(stage, client, rest),
                *await _first_calls(stage, client, rest),
                *await _large_file(rest),
            ]


def _query(identifier: str) -> dict[str, str]:
    return {"api-version": VERSION, "identifier": identifier}


async def _execute(rest: httpx.AsyncClient, identifier: str) -> None:
    answer = await rest.post("/executions", params=_query(identifier), json={"code": "1+1"})
    if answer.json()["result"]["executionResult"] != 2:
        raise RuntimeError(f"POST /executions answered {answer.text}")


async def _calls(stage: Stage, client: Client, rest: httpx.AsyncClient) -> list[Figure]:
    arguments = {"code": "1+1", "session_id": await new_session(client)}

    async def run_mcp() -> None:
        await client.call_tool("execute_code", arguments)

    async def run_rest() -> None:
        await _execute(rest, "bench-calls")

    await taken_in_turns(run_mcp, run_rest, 20)
    rounds = [
        await taken_in_turns(run_mcp, run_rest, stage.pick(CALLS, QUICK_CALLS))
        for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(10, 3))
    ]
    note = "peer: execute_code over MCP, same server"
    return paired("foundry", "POST /executions 1+1", rounds, target=TARGET, with_p99=True, note=note)


async def _first_calls(stage: Stage, client: Client, rest: httpx.AsyncClient) -> list[Figure]:
    """A call that allocates a session, and one over MCP that makes one: both from the pool, if it is full."""
    taken = Round()

    async def run_mcp() -> None:
        await client.call_tool("execute_code", {"code": "1+1"})

    for number in range(stage.pick(8, 3)):
        # A pool of one is filled again between two calls.
        await _pool_filled(rest)
        taken.peer.extend(await timed(run_mcp, 1))
        await _pool_filled(rest)
        began = time.perf_counter()
        await _execute(rest, f"bench-first-{number}-{secrets.token_hex(4)}")
        taken.ours.append(time.perf_counter() - began)
    note = "peer: execute_code without a session_id"
    return paired("foundry", "first call of an identifier", [taken], target=FIRST_TARGET, note=note)


async def _pool_filled(rest: httpx.AsyncClient) -> None:
    ends_at = time.monotonic() + POOL_S
    while time.monotonic() < ends_at:
        if "belljar_pool_ready 1" in (await rest.get("/metrics")).text:
            return
        await asyncio.sleep(0.1)


async def _large_file(rest: httpx.AsyncClient) -> list[Figure]:
    pid = _server_pid()
    await _execute(rest, "bench-files")
    before = _resident_mb(pid)
    began = time.perf_counter()
    head = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="large.bin"\r\n\r\n'
    end = b"\r\n--edge--\r\n"

    async def body() -> AsyncGenerator[bytes]:
        yield head
        for _ in range(FILE_MB):
            yield _PIECE
        yield end

    headers = {
        "content-type": "multipart/form-data; boundary=edge",
        "content-length": str(len(head) + FILE_MB * len(_PIECE) + len(end)),
    }
    answer = await rest.post("/files", params=_query("bench-files"), content=body(), headers=headers)
    if answer.json()["sizeInBytes"] != FILE_MB * len(_PIECE):
        raise RuntimeError(f"POST /files answered {answer.text}")
    up_s, began = time.perf_counter() - began, time.perf_counter()
    received = 0
    async with rest.stream("GET", "/files/large.bin/content", params=_query("bench-files")) as response:
        async for piece in response.aiter_bytes():
            received += len(piece)
    if received != FILE_MB * len(_PIECE):
        raise RuntimeError(f"GET of the file gave {received} bytes")
    down_s = time.perf_counter() - began
    growth = max(0.0, _peak_mb(pid) - before)
    return [
        Figure("foundry", f"{FILE_MB} MB up", "ms", up_s * 1000),
        Figure("foundry", f"{FILE_MB} MB down", "ms", down_s * 1000),
        Figure("foundry", "server memory for both", "MB", growth, target=GROWTH_TARGET_MB, bound="value"),
    ]


def _server_pid() -> int:
    """The server is the child of this process that was started last."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    serving = [int(child) for child in children if b"serve" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return serving[-1]


def _resident_mb(pid: int) -> float:
    """Resident memory now; the peak is counted from here."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_mb(pid, "VmRSS")


def _peak_mb(pid: int) -> float:
    return _status_mb(pid, "VmHWM")


def _status_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))
