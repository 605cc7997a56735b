"""A load generator that costs little beside what it asks for: MCP over bare HTTP, many connections a process.

`python -m bench.load URL CLIENTS SECONDS [new]`: so many clients call `1+1` in a session each, or with `new` make a
session and clear it, again and again. It prints what each call took, as JSON.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

_ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "load", "version": "0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
_LEGACY = "2025-11-25"
_SESSION = re.compile(r"session_id: ([a-z]{17})")


class LoadClient:
    """One connection that takes one call after the other."""

    def __init__(self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = "") -> None:
        self._own = {"host": urlsplit(url).netloc, **({"authorization": f"Bearer {key}"} if key else {})}
        self._reader = reader
        self._writer = writer
        self._count = 0
        self._mcp_session = ""

    async def begin_legacy(self) -> None:
        """Speak the protocol of 2025 from now on."""
        params = {"protocolVersion": _LEGACY, "capabilities": {}, "clientInfo": {"name": "load", "version": "0"}}
        heads, _ = await self._ask("initialize", params, {})
        self._mcp_session = heads["mcp-session-id"]
        body = json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
        await self.request("POST", "/mcp", body, {**_ACCEPT, **self._legacy_headers()})

    async def call(self, tool: str, **arguments: Any) -> str:
        """Call a tool; return what came back, as text."""
        if self._mcp_session:
            _, text = await self._ask("tools/call", {"name": tool, "arguments": arguments}, self._legacy_headers())
        else:
            own = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": tool}
            _, text = await self._ask("tools/call", {"name": tool, "arguments": arguments, "_meta": _META}, own)
        if '"isError":true' in text or '"error":{' in text:
            raise RuntimeError(f"{tool} answered {text[:300]}")
        return text

    async def new_session(self) -> str:
        """Make a session by running a first cell; return its id."""
        found = _SESSION.search(await self.call("execute_code", code="1+1"))
        if found is None:
            raise RuntimeError("execute_code told no session")
        return found[1]

    async def _ask(self, method: str, params: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Any, str]:
        self._count += 1
        body = json.dumps({"jsonrpc": "2.0", "id": self._count, "method": method, "params": params}).encode()
        heads, answer = await self.request("POST", "/mcp", body, {**_ACCEPT, **headers})
        return heads, answer.decode()

    def _legacy_headers(self) -> dict[str, str]:
        return {"mcp-session-id": self._mcp_session, "mcp-protocol-version": _LEGACY}

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> tuple[dict[str, str], bytes]:
        """Send a request; return the headers and the body of its answer."""
        own = {**self._own, **headers, "content-length": str(len(body))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items()), "", ""]
        self._writer.write("\r\n".join(lines).encode() + body)
        await self._writer.drain()
        first, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        heads = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        answer = await self._body(heads)
        if not first.split()[1].startswith("2"):
            raise RuntimeError(f"{method} {path} answered {first}: {answer[:300]!r}")
        return heads, answer

    async def _body(self, heads: Mapping[str, str]) -> bytes:
        if "content-length" in heads:
            return await self._reader.readexactly(int(heads["content-length"]))
        if heads.get("transfer-encoding") != "chunked":
            return b""
        parts: list[bytes] = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(parts)


@asynccontextmanager
async def open_client(url: str, *, is_legacy: bool = False, key: str = "") -> AsyncGenerator[LoadClient]:
    """Connect to a server."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    try:
        client = LoadClient(url, reader, writer, key)
        if is_legacy:
            await client.begin_legacy()
        yield client
    finally:
        writer.close()


async def load(url: str, clients: int, seconds: float, *, makes_sessions: bool) -> list[float]:
    """Call for so long with so many clients at once, once they are told to begin; return what each call took."""
    taken: list[float] = []
    ready = asyncio.Barrier(clients + 1)

    told = asyncio.Event()

    async def one() -> None:
        async with open_client(url) as client:
            session_id = "" if makes_sessions else await client.new_session()
            await ready.wait()
            await told.wait()
            ends_at = time.perf_counter() + seconds
            while (began := time.perf_counter()) < ends_at:
                if makes_sessions:
                    session_id = await client.new_session()
                else:
                    await client.call("execute_code", code="1+1", session_id=session_id)
                taken.append(time.perf_counter() - began)
                if makes_sessions:
                    await client.call("clear_session", session_id=session_id)
            if not makes_sessions:
                await client.call("clear_session", session_id=session_id)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(one())
        await ready.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        told.set()
    return taken


async def loaded(
    url: str, clients: int, seconds: float, processes: int, *, makes_sessions: bool = False
) -> list[float]:
    """Do the same from several processes, because one generator is slower than several servers."""
    shares = [clients // processes + (number < clients % processes) for number in range(processes)]
    kind = ["new"] if makes_sessions else []
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.load", url, str(share), str(seconds), *kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        for share in shares
    ]
    for process in started:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("a generator of load did not begin")
    outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in started))
    return [taken for output, _ in outputs for taken in json.loads(output)]


if __name__ == "__main__":
    _url, _clients, _seconds, *_kind = sys.argv[1:]
    print(json.dumps(asyncio.run(load(_url, int(_clients), float(_seconds), makes_sessions=_kind == ["new"]))))
