"""What another server answers is bounded in size and time, and named when it cannot be read."""

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any, cast

import anyio
import httpx2
import pytest

from belljar import ipc
from belljar.engine import remote
from belljar.engine.contract import Access
from belljar.engine.remote import RemoteEngine, ServerSilent, lines_of
from belljar.errors import EngineError

pytestmark = pytest.mark.anyio

ME = Access("local", is_operator=True)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CLOSED = HEAD + b"Connection: close\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def server_that_says(folder: Path, first: bytes, again: bytes = b"", pause_s: float = 0) -> AsyncGenerator[Path]:
    """A server that says this to whatever it is asked, and then one thing again and again, until nobody listens."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            while again:
                writer.write(again)
                await writer.drain()
                await asyncio.sleep(pause_s)
        except ConnectionError:
            pass
        finally:
            writer.close()

    path = folder / "other.sock"
    with ipc.reachable(path) as address:
        async with await asyncio.start_unix_server(answer, address):
            yield path


async def read_all(engine: RemoteEngine) -> None:
    async for _ in engine.server_events(ME):
        pass


async def health(engine: RemoteEngine) -> None:
    await engine.health(ME)


async def part(engine: RemoteEngine) -> None:
    await engine.read_part(ME, "s", "a.bin", 0, 1_000)


@pytest.mark.parametrize(
    ("ask", "first", "again"),
    [
        (health, CLOSED, bytes(65_536)),
        (health, HEAD + b"Content-Length: 10000000000\r\n\r\n", bytes(65_536)),
        (health, HEAD + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzip.compress(bytes(2**25)), b""),
        (health, b"HTTP/1.1 500 Broken\r\n\r\n", bytes(65_536)),
        (part, CLOSED, bytes(65_536)),
        (read_all, STREAM + b"data: ", b"x" * 65_536),
    ],
    ids=["without an end", "10 GB", "a small file that grows", "a refusal", "more of a file than was asked", "a line"],
)
async def test_an_answer_that_is_too_long_is_not_read_to_its_end(
    ask: Callable[[RemoteEngine], Any], first: bytes, again: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MOST_BYTES", 4_000_000)
    async with server_that_says(tmp_path, first, again) as path:
        with anyio.fail_after(30), pytest.raises(EngineError, match=r"is longer than [14],000(,000)? bytes"):
            await ask(RemoteEngine(path))


@pytest.mark.parametrize(
    ("first", "again", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n", "has not answered health for 0.5 s"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "has not answered health for 0.5 s"),
        (CLOSED, b" ", "answer to health stood still after"),
        (b"HTTP/1.1 500 Broken\r\n\r\n", b" ", "answer to health stood still after"),
    ],
    ids=["a head", "what comes before a head", "a body", "a refusal"],
)
async def test_a_server_that_dribbles_is_not_waited_for(
    first: bytes, again: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BODY_S", 0.5)
    monkeypatch.setattr(remote, "CONNECT_S", 0.2)
    async with server_that_says(tmp_path, first, again, 0.02) as path:
        with anyio.fail_after(30), pytest.raises(ServerSilent, match=said):
            await RemoteEngine(path, 0.5).health(ME)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (health, CLOSED + b"\xff\xfe{"),
        (health, CLOSED + b"[" * 100_000),
        (health, HEAD + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\nno gzip"),
        (part, CLOSED + b"content"),
        (part, HEAD + b'ETag: "zz-1"\r\nConnection: close\r\n\r\ncontent'),
        (read_all, STREAM + b"event: x\ndata: {\n\n"),
        (read_all, STREAM + b"event: x\ndata: [1]\n\n"),
        (read_all, STREAM + b"event: error\ndata: {}\n\n"),
        (read_all, STREAM + b"event: x\ndata: " + b"[" * 100_000 + b"\n\n"),
    ],
)
async def test_an_answer_of_another_form_is_said_to_be_one(
    ask: Callable[[RemoteEngine], Any], said: bytes, tmp_path: Path
) -> None:
    async with server_that_says(tmp_path, said) as path:
        with pytest.raises(ServerSilent, match="in another form than this version knows") as refused:
            await ask(RemoteEngine(path))
    assert "restart the older ones" in refused.value.hint


async def test_a_long_line_is_put_together_in_linear_time() -> None:
    async def took(size: int) -> float:
        async def chunks() -> AsyncGenerator[bytes]:
            for _ in range(size):
                yield b"x" * 256
            yield b"\n"

        response = cast("httpx2.Response", SimpleNamespace(aiter_bytes=chunks))
        begun = thread_time()
        (line,) = [line async for line in lines_of(response, "map")]
        assert len(line) == size * 256
        return thread_time() - begun

    assert min([await took(8_000) for _ in range(5)]) < 3 * min([await took(4_000) for _ in range(5)])


async def test_an_answer_as_large_as_the_output_of_an_execution_is_read(tmp_path: Path) -> None:
    usage = json.dumps({"interval_s": 1, "gauges": {"x" * 30_000_000: []}}).encode()
    async with server_that_says(tmp_path, CLOSED + usage) as path:
        assert (await RemoteEngine(path, 30).usage(ME)).gauges
