"""Who calls a tool many times: the official client, code in a session of ours, and the peers in processes of their own.

Each does so in its own way and tells how many seconds each call took.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from mcp import Client

from bench.one_plus_one import timed
from bench.registries import python_environment
from bench.toolbox_place import Place

PEERS = {
    # It asks for no version of the SDK, and works with the first only.
    "ipybox": ["ipybox", "mcp<2"],
    "fastmcp": ["fastmcp[code-mode]>=4"],
}
PEER_START_S = 90.0
PEER_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    server: str
    tool: str
    arguments: dict[str, Any]


class Side(Protocol):
    """One way to call tools."""

    async def one_by_one(self, call: Call, count: int) -> list[float]:
        """Seconds of each call."""
        ...

    async def at_once(self, call: Call, count: int, times: int) -> list[float]:
        """Seconds until that many calls at once are all back, some times."""
        ...


class Direct:
    """The official client."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients

    async def one_by_one(self, call: Call, count: int) -> list[float]:
        return await timed(lambda: self._called(call), count)

    async def at_once(self, call: Call, count: int, times: int) -> list[float]:
        return await timed(lambda: asyncio.gather(*(self._called(call) for _ in range(count))), times)

    async def _called(self, call: Call) -> None:
        answer = await self._clients[call.server].call_tool(call.tool, call.arguments)
        if answer.is_error:
            raise RuntimeError(f"{call.tool} answered {answer.content}")


_LOOP = """
import time
from servers.{server} import {tool} as called

took = []
for _ in range({count}):
    began = time.perf_counter()
    called(**{arguments!r})
    took.append(time.perf_counter() - began)
print(took)
"""

_GATHER = """
import asyncio, time
from servers.{server} import {tool} as called

took = []
for _ in range({times}):
    began = time.perf_counter()
    await asyncio.gather(*(called.aio(**{arguments!r}) for _ in range({count})))
    took.append(time.perf_counter() - began)
print(took)
"""


class Session:
    """A cell that calls, in one session of a `belljar serve`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session_id = ""

    async def one_by_one(self, call: Call, count: int) -> list[float]:
        return await self._run(_LOOP.format(count=count, **asdict(call)))

    async def at_once(self, call: Call, count: int, times: int) -> list[float]:
        return await self._run(_GATHER.format(count=count, times=times, **asdict(call)))

    async def _run(self, cell: str) -> list[float]:
        answer = await self._client.call_tool("execute_code", {"code": cell, "session_id": self._session_id})
        result: dict[str, Any] = answer.structured_content or {}
        if result.get("status") != "ok":
            raise RuntimeError(f"execute_code answered {answer.content}")
        self._session_id = str(result["session_id"])
        return json.loads("".join(result["output"]))


class Peer:
    """Another way to call tools from code, in a process with an environment of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.version = ""
        self.definitions: list[dict[str, Any]] = []

    async def one_by_one(self, call: Call, count: int) -> list[float]:
        return await self._ask(PEER_ANSWER_S, op="one-by-one", count=count, **asdict(call))

    async def at_once(self, call: Call, count: int, times: int) -> list[float]:
        return await self._ask(PEER_ANSWER_S, op="at-once", count=count, times=times, **asdict(call))

    async def start(self) -> None:
        """Until it has started, and said what it is and what a model sees of it."""
        description = await self._ask(PEER_START_S, op="describe")
        self.version, self.definitions = description["version"], description["definitions"]

    async def _ask(self, within_s: float, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        async with asyncio.timeout(within_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with {await self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]


@asynccontextmanager
async def open_peer(name: str, place: Place, servers: Sequence[str], kept: Path) -> AsyncGenerator[Peer]:
    """Install and start one; these are the servers that it is given."""
    environment = await asyncio.to_thread(python_environment, kept / f"peer-{name}", *PEERS[name])
    folder = place.folder / name
    folder.mkdir()
    config = {"mcpServers": {server: _entry(place.servers[server]) for server in servers}}
    with (folder / "peer.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            str(environment / "bin/python"),
            str(Path(__file__).parent / "peers" / f"{name}_calls.py"),
            json.dumps(config),
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=1024 * 1024,
        )
        try:
            peer = Peer(process)
            await peer.start()
            yield peer
        finally:
            await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """It ends what it has started when nobody asks any more."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(20):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _entry(command: list[str]) -> dict[str, Any]:
    return {"command": command[0], "args": command[1:]}
