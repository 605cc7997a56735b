"""The socket of a session from outside a session: what its code may keep in the server's memory."""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import termios
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from belljar.toolbox import session_server
from belljar.toolbox.broker import Broker, ToolCatalogue
from belljar.toolbox.fair_share import FairShares
from belljar.toolbox.session_server import LINE_BYTES, SearchMessage, ToolServer, open_tool_server
from belljar.toolbox.toolbox import INSIDE
from waiting import until

pytestmark = pytest.mark.anyio

MEBIBYTE = 1024 * 1024
CONNECTIONS = 16
LEFT_UNREAD = (
    "the host has closed the connection in the middle of an answer, as it does when code leaves answers unread: "
    "await calls soon after they are started; whether this one was made is not known"
)
UNREAD_CELL = """
import asyncio, json, sys
from toolbox.connection import host_connection

def search(words, limit):
    return host_connection().ask_in_loop({"op": "search", "query": words, "limit": limit})

async def main():
    tasks = [asyncio.ensure_future(search("x", 3)) for _ in range(12)]
    await asyncio.sleep(0)
    sys.stdin.readline()  # the event loop reads no answers meanwhile
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps([f"{type(each).__name__}: {each}" if isinstance(each, Exception) else "an answer"
                      for each in outcomes]))
    print((await search("again", 1))["text"][:5])

asyncio.run(main())
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def served(folder: Path) -> AsyncGenerator[tuple[ToolServer, Callable[[], socket.socket]]]:
    """A tool server that answers every search with as many megabytes as its limit says."""

    async def find(asked: SearchMessage) -> dict[str, Any]:
        return {"outcome": "found", "text": asked.query * asked.limit * MEBIBYTE}

    with contextlib.ExitStack() as sockets:

        def connected() -> socket.socket:
            sock = sockets.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(folder / "tools"))
            sock.setblocking(False)
            return sock

        broker = Broker("session", cast("ToolCatalogue", None), limit_bytes=MEBIBYTE)
        async with open_tool_server(
            folder, "tools", broker=broker, find=find, folder_inside="/", paces=FairShares()
        ) as tool_server:
            yield tool_server, connected


def search(number: int, limit: int = 1, query: str = "x") -> bytes:
    return json.dumps({"id": number, "op": "search", "query": query, "limit": limit}).encode() + b"\n"


async def pushed(socks: list[socket.socket], data: bytes) -> list[int]:
    """How many bytes of it the server takes over each connection before it takes no more."""
    sent = [0] * len(socks)
    quiet = 0
    while quiet < 20:
        quiet += 1
        for number, sock in enumerate(socks):
            piece = data[sent[number] : sent[number] + 65_536]
            with contextlib.suppress(BlockingIOError):
                sent[number] += sock.send(piece)
                quiet = 0 if piece else quiet
        await asyncio.sleep(0)
    return sent


def is_taken(sock: socket.socket) -> bool:
    """Whether the server, which runs in this thread, has read and dealt with all that was sent."""
    left = array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, left)
    return left[0] == 0


async def lines(sock: socket.socket, count: int) -> list[dict[str, Any]]:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=8 * MEBIBYTE)
    try:
        return [json.loads(await reader.readline()) for _ in range(count)]
    finally:
        writer.close()


async def test_of_long_lines_without_end_only_one_is_kept(tmp_path: Path):
    async with served(tmp_path) as (_, connected):
        socks = [connected() for _ in range(CONNECTIONS)]
        taken = await pushed(socks, b"x" * (LINE_BYTES - 1))
        assert max(taken) == LINE_BYTES - 1
        # What a socket itself holds is not the server's memory, and less than a megabyte.
        assert all(size < MEBIBYTE for size in sorted(taken)[:-1])
        # The next comes in when that one is complete.
        [longest] = [sock for sock, size in zip(socks, taken, strict=True) if size == LINE_BYTES - 1]
        longest.setblocking(True)
        longest.sendall(b"\n")
        [refused] = await lines(longest, 1)
        assert refused["message"] == "the request cannot be read"
        others = [sock for sock in socks if sock is not longest]
        assert max(await pushed(others, b"x" * 3 * MEBIBYTE)) == 3 * MEBIBYTE


async def test_a_line_that_is_too_long_is_hung_up_on(tmp_path: Path):
    async with served(tmp_path) as (_, connected):
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await pushed([connected()], b"x" * (2 * LINE_BYTES))


async def test_what_is_fetched_late_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_server, "BACKLOG_S", 60)
    async with served(tmp_path) as (tool_server, connected):
        sock = connected()
        await pushed([sock], b"".join(search(number, 3) for number in range(1, 13)))
        await until(lambda: 0 < tool_server.under_way == tool_server.unread_answers.waiting)
        assert tool_server.unread_answers.size_bytes > session_server.MAX_BYTES
        answers = await lines(sock, 12)
        assert {answer["id"]: len(answer["text"]) for answer in answers} == dict.fromkeys(range(1, 13), 3 * MEBIBYTE)


async def test_who_never_reads_loses_its_connection_and_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(session_server, "BACKLOG_S", 0.2)
    async with served(tmp_path) as (tool_server, connected):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "tools")
        writer.write(search(1, query=""))
        assert json.loads(await reader.readline())["id"] == 1
        sock = connected()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await pushed([sock], b"".join(search(number, 3) for number in range(1, 13)))
        await until(lambda: tool_server.under_way == 0 and "unread" in caplog.text)
        assert (tool_server.unread_answers.waiting, tool_server.unread_answers.size_bytes) == (0, 0)
        writer.write(search(2, query=""))
        assert json.loads(await reader.readline())["id"] == 2
        writer.close()
        await writer.wait_closed()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.send(search(13))


async def test_while_too_much_is_unread_no_further_request_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_server, "BACKLOG_S", 60)
    async with served(tmp_path) as (tool_server, connected):
        sock = connected()
        for number in range(1, 4):
            sock.send(search(number, 3))
            await until(lambda number=number: tool_server.unread_answers.waiting == number)
        sock.send(b"".join(search(number, 3) for number in range(4, 9)))
        await until(lambda: is_taken(sock))
        assert (tool_server.under_way, tool_server.unread_answers.is_full) == (3, True)
        assert sorted(answer["id"] for answer in await lines(sock, 8)) == [*range(1, 9)]


async def test_who_is_refused_all_the_time_and_never_reads_is_hung_up_on(tmp_path: Path):
    deep = (
        b'{"id": 1, "op": "call", "server": "a", "tool": "b", "arguments": {"x": ' + b"[" * 300 + b"]" * 300 + b"}}\n"
    )
    async with served(tmp_path):
        _, writer = await asyncio.open_unix_connection(tmp_path / "tools")
        writer.write(deep * 30_000)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await asyncio.wait_for(writer.drain(), 60)
        writer.close()


async def test_code_that_was_hung_up_on_is_told_so_and_can_call_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(session_server, "BACKLOG_S", 0.2)
    async with served(tmp_path) as (tool_server, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            UNREAD_CELL,
            env={**os.environ, "PYTHONPATH": str(INSIDE), "BELLJAR_TOOLBOX": str(tmp_path / "tools")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        await until(lambda: tool_server.under_way == 0 and "unread" in caplog.text)
        told, _ = await process.communicate(b"the connection is closed\n")
    outcomes, again = told.decode().splitlines()
    assert set(json.loads(outcomes)) <= {"ToolError: " + LEFT_UNREAD, "an answer"}
    assert "ToolError: " + LEFT_UNREAD in json.loads(outcomes)
    assert again == "again"


async def test_a_flood_of_requests_is_read_as_it_is_answered(tmp_path: Path):
    async with served(tmp_path) as (_, connected):
        sock = connected()
        data = b"".join(search(number, query="") for number in range(1, 5_001))
        assert await pushed([sock], data) == [len(data)]
        assert sorted(answer["id"] for answer in await lines(sock, 5_000)) == [*range(1, 5_001)]


async def test_what_is_taken_back_makes_room_however_much_waits_before_the_word_of_it(tmp_path: Path):
    async def find(asked: SearchMessage) -> dict[str, Any]:
        if asked.query == "never":
            await asyncio.Event().wait()
        return {"outcome": "found", "text": asked.query}

    numbers = range(1, 1_001)
    broker = Broker("session", cast("ToolCatalogue", None), limit_bytes=MEBIBYTE)
    async with open_tool_server(
        tmp_path, "tools", broker=broker, find=find, folder_inside="/", paces=FairShares()
    ) as tool_server:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "tools")
        writer.writelines(search(number, query="never") for number in numbers)
        writer.writelines(json.dumps({"id": number, "op": "cancel"}).encode() + b"\n" for number in numbers)
        writer.write(search(2_000, query="hello"))
        async with asyncio.timeout(30):
            assert json.loads(await reader.readline()) == {"id": 2_000, "outcome": "found", "text": "hello"}
        assert tool_server.under_way <= 1
        writer.close()
        await writer.wait_closed()


async def test_who_passes_too_deep_a_value_is_told_and_not_hung_up_on(tmp_path: Path):
    arguments = json.dumps({"id": 1, "op": "call", "server": "a", "tool": "b", "arguments": {}})
    deep = arguments.replace("{}}", '{"x": ' + "[" * 300 + "]" * 300 + "}}").encode() + b"\n"
    async with served(tmp_path):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "tools")
        writer.writelines([deep, search(2, query="")])
        answers = [json.loads(await reader.readline()) for _ in range(2)]
        writer.close()
        await writer.wait_closed()
    assert [(answer["id"], answer["outcome"]) for answer in answers] == [(1, "error"), (2, "found")]
    assert "too deeply" in answers[0]["message"]
