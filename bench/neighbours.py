"""What others do to a caller: connections that never ask anything, and a session that does nothing but call tools.

The peer of every figure is the same server while nobody does anything.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from bench.figures import Figure, Round, paired
from bench.one_plus_one import timed
from bench.servers import belljar_command, new_session, open_http
from bench.stage import Stage

HALF_OPEN = 400
TARGET = 3.0
CALLS = 40
HALF_A_REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
_ONE_BY_ONE = """
from servers.bare import nothing
while True: nothing("x")
"""
_AT_ONCE = """
import asyncio
from servers.bare import nothing
async def call():
    while True: await nothing.aio("x")
await asyncio.gather(*(call() for _ in range(64)))
"""
_REFUSED = """
import os, socket, threading
line = b'{"id": %d, "op": "call", "server": "bare", "tool": "none", "arguments": {}}\\n'
lines = b"".join(line % number for number in range(1, 5_000))
def flood():
    way = socket.socket(socket.AF_UNIX)
    way.connect(os.environ["BELLJAR_TOOLBOX"])
    def send():
        while True: way.sendall(lines)
    threading.Thread(target=send, daemon=True).start()
    while way.recv(1 << 20): pass
threads = [threading.Thread(target=flood) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
_SEARCHES = """
import threading, toolbox
def search():
    while True: toolbox.search("does nothing and says so", limit=50, detail="source")
threads = [threading.Thread(target=search) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
_TAKEN_BACK = """
import os, socket
way = socket.socket(socket.AF_UNIX)
way.connect(os.environ["BELLJAR_TOOLBOX"])
while True: way.sendall(b'{"id": 7, "op": "cancel"}\\n' * 10_000)
"""
SESSIONS = 4
FLOODS = {
    "one by one": _ONE_BY_ONE,
    "64 at once": _AT_ONCE,
    "refused ones": _REFUSED,
    "searches": _SEARCHES,
    "none but taken back": _TAKEN_BACK,
}
KEYS = {name: name[0] * 40 for name in ("ada", "bob")}


async def measure(stage: Stage) -> list[Figure]:
    """Health beside half-open connections, and `1+1` beside a session that floods the toolbox."""
    config = stage.folder / "neighbours.json"
    bare = {"command": sys.executable, "args": [str(Path(__file__).with_name("bare_server.py"))]}
    config.write_text(json.dumps({"mcpServers": {"bare": bare}}))
    variables = {
        "BELLJAR_API_KEYS": ",".join(f"{name}:{key}" for name, key in KEYS.items()),
        "BELLJAR_MCP_CONFIG": str(config),
    }
    async with open_http(stage, belljar_command(), variables) as url:
        return [*await _half_open(stage, url), *await _floods(stage, url)]


async def _half_open(stage: Stage, url: str) -> list[Figure]:
    port = urlsplit(url).port

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"/health answered {answer[:100]!r}")

    taken = Round()
    taken.peer.extend(await timed(ask, stage.pick(CALLS, 10)))
    async with AsyncExitStack() as stack:
        for _ in range(HALF_OPEN):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(HALF_A_REQUEST)
        taken.ours.extend(await timed(ask, stage.pick(CALLS, 10)))
    note = "peer: without them"
    return paired("neighbours", f"/health beside {HALF_OPEN} half-open connections", [taken], target=TARGET, note=note)


async def _floods(stage: Stage, url: str) -> list[Figure]:
    figures: list[Figure] = []
    async with _calling(url, "ada") as ada, _calling(url, "bob") as bob:
        his = await new_session(bob)

        async def one_plus_one() -> None:
            await bob.call_tool("execute_code", {"code": "1+1", "session_id": his})

        floods = [(name, code, 1) for name, code in FLOODS.items()]
        # Cores are shared out by the operating system: what is tried here is the event loop, which is not.
        floods += [(f"{name}, {SESSIONS} sessions", FLOODS[name], SESSIONS) for name in ("one by one", "64 at once")]
        for name, code, sessions in floods:
            taken = Round()
            hers = [await new_session(ada) for _ in range(sessions)]
            taken.peer.extend(await timed(one_plus_one, stage.pick(CALLS, 15)))
            for each in hers:
                await ada.call_tool("execute_code", {"code": code, "session_id": each, "wait_s": 1})
            taken.ours.extend(await timed(one_plus_one, stage.pick(CALLS, 15)))
            for each in hers:
                await ada.call_tool("clear_session", {"session_id": each})
            what = f"1+1 beside a flood of tool calls, {name}"
            figures += paired("neighbours", what, [taken], target=TARGET, with_p99=True, note="peer: alone")
    return figures


@asynccontextmanager
async def _calling(url: str, name: str) -> AsyncGenerator[Client]:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client
