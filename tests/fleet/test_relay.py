"""The relay beside servers that do what they should not, and callers that do not read."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from belljar.fleet.peer import Peer
from belljar.fleet.relay import Connections, PeerAway, SessionLost, relay

pytestmark = pytest.mark.anyio
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def peer(folder: Path, serve: Serve) -> AsyncGenerator[Connections]:
    """A server that answers so."""
    path = folder / "fleet.sock"
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_unix_server(run, path)
    connections = Connections(path)
    try:
        yield connections
    finally:
        connections.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Asked:
    """A request, and what its caller gets."""

    def __init__(self, body: bytes = b"{}", *, leaves: asyncio.Event | None = None) -> None:
        self.body = body
        self.leaves = leaves or asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def through(self, connections: Connections) -> bytes:
        headers = [(b"host", b"belljar"), (b"content-type", b"application/json")]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/mcp",
            "raw_path": b"/mcp",
            "query_string": b"",
            "headers": headers,
        }
        await relay(connections, scope, self._receive, self._send, headers, self.body, last_event=b"event: end\n\n")
        return b"".join(message.get("body", b"") for message in self.messages)

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_send.wait()
        self.messages.append(message)

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body")


async def head_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
    await reader.readexactly(length)
    return head


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    ],
)
async def test_what_is_no_answer_is_told_as_a_lost_session_and_never_asked_again(tmp_path: Path, said: bytes):
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await head_of(reader)
        asked += 1
        writer.write(said)
        await writer.drain()

    async with peer(tmp_path, serve) as connections:
        request = Asked()
        with pytest.raises(SessionLost):
            await request.through(connections)
        assert (asked, request.messages) == (1, [])


async def test_where_nobody_listens_nothing_was_sent(tmp_path: Path):
    with pytest.raises(PeerAway):
        await Asked().through(Connections(tmp_path / "fleet.sock"))


async def test_a_stream_that_breaks_off_ends_with_its_last_event(tmp_path: Path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(OK + b"7\r\ndata: 1\r\n")
        await writer.drain()

    async with peer(tmp_path, serve) as connections:
        request = Asked()
        assert await request.through(connections) == b"data: 1event: end\n\n"
        assert request.is_whole


async def test_a_download_that_breaks_off_is_not_made_whole(tmp_path: Path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")
        await writer.drain()

    async with peer(tmp_path, serve) as connections:
        request = Asked()
        assert await request.through(connections) == b"12345"
        assert not request.is_whole


async def test_a_caller_who_does_not_read_slows_an_endless_answer_and_leaving_ends_it(tmp_path: Path):
    sent, is_over = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head_of(reader)
        writer.write(OK)
        try:
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
                sent += 65536
        finally:
            is_over.set()

    async with peer(tmp_path, serve) as connections:
        request = Asked()
        request.may_send.clear()
        relaying = asyncio.create_task(request.through(connections))
        seen = -1
        while seen != sent or not sent:  # until it is held up
            seen = sent
            for _ in range(200):
                await asyncio.sleep(0)
        assert sent < 16 * 1024 * 1024
        request.leaves.set()
        await relaying
        await is_over.wait()


async def test_connections_are_used_again_and_one_that_was_closed_meanwhile_is_not(tmp_path: Path):
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        for _ in range(3):
            await head_of(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()

    async with peer(tmp_path, serve) as connections:
        for number in range(7):
            assert await Asked().through(connections) == b"ok"
            if number % 3 == 2:
                await asyncio.sleep(0.05)  # until the end of the connection has come through
        assert opened == 3


GOOD = b'{"id": "i", "tag": "abc", "name": "1-aaaaaaaa", "state": "ready", "version": "1", "sessions": 0, "room": 1}'


@pytest.mark.parametrize(
    "about",
    [
        b"null",
        b"[]",
        b'{"tag": 1}',
        b"{",
        b"x" * 5_000_000,
        GOOD.replace(b"abc", b"ABC"),
        GOOD.replace(b"ready", b"away"),
        GOOD.replace(b": 0", b": -1"),
        GOOD.replace(b": 1}", b": 1e400}"),
        GOOD.replace(b"}", b', "ports": [0]}'),
        b"[" * 60_000,
    ],
)
async def test_who_does_not_answer_as_a_server_of_ours_is_none(tmp_path: Path, about: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(about) + about)
        await writer.drain()

    async with peer(tmp_path, serve):
        path = tmp_path / "fleet.sock"
        one = Peer(path, Connections(path))
        await one.look()
        assert one.about is None
        assert one.misses == 1
        one.connections.close()
