"""A way to a pool on which things go wrong: requests that are refused, answers that are lost, sessions that end.

Stands between the kernel and a real server, on a port of its own. It reads whole requests and answers, and decides for
each what becomes of it. What it counts are requests, never executions: those are counted by the code of the cells.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import h11
import httpx

Fate = Literal["pass", "refuse-429", "refuse-503", "cut-before", "cut-after", "fail-after", "late", "expire"]


@dataclass
class PoolProxy:
    """Forwards to `target`. `decide` says what becomes of a request, by its method and path."""

    target: str
    url: str = ""
    decide: Callable[[str, str], Fate] = lambda _method, _path: "pass"
    before: Callable[[str, str, dict[str, str]], Awaitable[None]] | None = None
    versions: tuple[str, ...] = ()
    """The only versions that it knows; all where there are none."""
    fates: Counter[str] = field(default_factory=Counter[str])
    seen: list[str] = field(default_factory=list[str])
    _late: set["asyncio.Task[httpx.Response]"] = field(default_factory=set["asyncio.Task[httpx.Response]"])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, h11.RemoteProtocolError):
            connection = h11.Connection(h11.SERVER)
            while (request := await self._request(connection, reader)) is not None:
                if not await self._answer(connection, writer, *request):
                    break
                if connection.our_state is h11.MUST_CLOSE:
                    break
                connection.start_next_cycle()
        writer.close()

    async def _request(
        self, connection: h11.Connection, reader: asyncio.StreamReader
    ) -> tuple[h11.Request, bytes] | None:
        request, body = None, bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65_536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request, bytes(body)
            else:
                return None

    async def _answer(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
    ) -> bool:
        """Return whether the connection goes on."""
        method, target = request.method.decode(), request.target.decode()
        path = target.partition("?")[0]
        headers = {name.decode(): value.decode() for name, value in request.headers if name != b"host"}
        if self.before is not None:
            await self.before(method, target, headers)
        fate = self.decide(method, path)
        self.fates[fate] += 1
        self.seen.append(f"{method} {path}")
        if self.versions and not any(f"api-version={version}" in target for version in self.versions):
            words = b'{"error": {"code": "InvalidApiVersion", "message": "not a version of this pool"}}'
            headers = {"content-type": "application/json", "content-length": str(len(words))}
            await self._send(connection, writer, 400, headers, words)
            return True
        if fate == "cut-before":
            return False
        if fate in ("refuse-429", "refuse-503", "expire"):
            status = {"refuse-429": 429, "refuse-503": 503, "expire": 401}[fate]
            await self._send(connection, writer, status, {"content-length": "0"}, b"")
            return True
        if fate == "late":
            # The caller sees a connection that breaks; the request gets through all the same, some time later.
            task = asyncio.create_task(self._forward(method, target, headers, body, delay_s=0.5))
            self._late.add(task)
            return False
        answer = await self._forward(method, target, headers, body)
        if fate == "cut-after":
            return False
        if fate == "fail-after":
            await self._send(connection, writer, 503, {"content-length": "0"}, b"")
            return True
        kept = {name: answer.headers[name] for name in ("content-type", "x-ms-error-code") if name in answer.headers}
        content = answer.content
        await self._send(connection, writer, answer.status_code, {**kept, "content-length": str(len(content))}, content)
        return True

    async def _forward(
        self, method: str, target: str, headers: dict[str, str], body: bytes, delay_s: float = 0.0
    ) -> httpx.Response:
        await asyncio.sleep(delay_s)
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            return await client.request(method, f"{self.target}{target}", headers=headers, content=body)

    async def _send(
        self,
        connection: h11.Connection,
        writer: asyncio.StreamWriter,
        status: int,
        headers: dict[str, str],
        body: bytes,
    ) -> None:
        writer.write(connection.send(h11.Response(status_code=status, headers=[*headers.items()])) or b"")
        if body and status not in (204, 304):
            writer.write(connection.send(h11.Data(data=body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()

    async def settled(self) -> None:
        """Until requests that come late have come."""
        await asyncio.gather(*self._late, return_exceptions=True)
        self._late.clear()


@asynccontextmanager
async def opened_proxy(target: str) -> AsyncGenerator[PoolProxy]:
    proxy = PoolProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.settled()
