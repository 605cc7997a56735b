import asyncio
import io
import logging
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from mcp import Client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.config import Config
from uvicorn.server import ServerState

from belljar import logs
from belljar.environments import Environment
from belljar.http import connections
from belljar.http.app import serve_http
from belljar.http.connections import ConnectionLimiter, connection_limit
from belljar.http.health import health
from certificates import make_certificate
from serving_process import COLD, http_server, serve_over_http
from waiting import until

HALF_OPEN = 400
DESCRIPTORS = 320
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HALF_BODY = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nhalf"
HALF_CHUNK = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal"
HALF_HELLO = bytes.fromhex("1603010200010001fc0303")
ASKING = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


PAUSED_S = 0.2
PAUSING_SERVER = f"""
import os, signal
import anyio
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse
from starlette.routing import Route
import belljar.http.app as serving
from belljar.http.health import health

async def pause(_):
    return PlainTextResponse("pausing", background=BackgroundTask(os.kill, os.getpid(), signal.SIGSTOP))

serving.IDLE_S = {PAUSED_S}
app = Starlette(routes=[Route("/health", health), Route("/pause", pause)])
anyio.run(lambda: serving.serve_http(app, "127.0.0.1", 0, on_ready=lambda url: print(url, flush=True)))
"""


async def _echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def _refuse(_: Request) -> Response:
    return PlainTextResponse("no", status_code=401)


async def _flow(_: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes]:
        while True:
            yield bytes(65_536)
            await anyio.lowlevel.checkpoint()

    return StreamingResponse(pieces())


@asynccontextmanager
async def _serving(most: int = 256, log_level: str = "ERROR", tls: ssl.SSLContext | None = None) -> AsyncGenerator[str]:
    routes = [
        Route("/health", health),
        Route("/echo", _echo, methods=["POST"]),
        Route("/refuse", _refuse, methods=["POST"]),
        Route("/flow", _flow),
    ]
    urls: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            lambda: serve_http(
                Starlette(routes=routes),
                "127.0.0.1",
                0,
                on_ready=on_ready,
                log_level=log_level,
                max_connections=most,
                tls=tls,
            )
        )
        await ready.wait()
        yield urls[0]
        tasks.cancel_scope.cancel()


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """The certificate of a server, which its clients trust too."""
    files = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(files.certificate)
    return context


def _trusting(tls: ssl.SSLContext) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in tls.get_ca_certs(binary_form=True):
        context.load_verify_locations(cadata=certificate)
    return context


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit of time is over soon."""
    for name in ("HEAD_S", "BODY_S", "UNREAD_S", "LINGER_S"):
        monkeypatch.setattr(connections, name, 0.2)
    monkeypatch.setattr(connections, "_WATCH_S", 0.02)


@contextmanager
def _connected(url: str, *sent: bytes) -> Generator[list[socket.socket]]:
    """One connection for each of these beginnings of a request."""
    address = urlsplit(url)
    with ExitStack() as stack:
        opened: list[socket.socket] = []
        for data in sent:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", address.port or 0), timeout=20))
            connection.sendall(data)
            opened.append(connection)
        yield opened


def _said_until_closed(connection: socket.socket) -> bytes:
    said = b""
    try:
        while piece := connection.recv(65_536):
            said += piece
    except ConnectionError:
        pass
    return said


def _send_until_closed(connection: socket.socket, piece: bytes) -> None:
    """Send a piece every now and then, for as long as somebody listens; the test's own limit is the deadline."""
    with suppress(ConnectionError):
        while True:
            connection.sendall(piece)
            select.select([connection], [], [], 0.01)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("beginning", [b"", HALF_HEAD, HALF_BODY, HALF_CHUNK, ASKING + HALF_HEAD])
async def test_a_request_that_never_ends_is_cut_off(beginning: bytes):
    async with _serving() as url:
        with _connected(url, beginning) as (connection,):
            said = await anyio.to_thread.run_sync(_said_until_closed, connection)
        assert (b"200 OK" in said) == beginning.startswith(ASKING)


@pytest.mark.usefixtures("hurried")
async def test_one_that_dribbles_is_cut_off_as_well():
    async with _serving() as url:
        with _connected(url, HALF_HEAD) as (connection,):
            await anyio.to_thread.run_sync(_send_until_closed, connection, b"x")


@pytest.mark.usefixtures("hurried")
async def test_a_client_that_does_not_read_its_answer_is_cut_off():
    async with _serving() as url:
        with _connected(url, b"GET /flow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as (connection,):
            # Nothing is read here until the server has given up: then the rest ends.
            async with httpx.AsyncClient() as client:
                with anyio.fail_after(20):
                    while True:
                        try:
                            connection.send(b"G", socket.MSG_NOSIGNAL)
                        except ConnectionError:
                            break
                        assert (await client.get(f"{url}/health")).status_code == 200


@pytest.mark.usefixtures("hurried")
async def test_what_is_sent_after_a_refusal_is_not_read_for_ever():
    head = b"POST /refuse HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with _serving() as url:
        with _connected(url, head) as (connection,):
            answer = await anyio.to_thread.run_sync(connection.recv, 65_536)
            assert answer.startswith(b"HTTP/1.1 401")
            await anyio.to_thread.run_sync(_send_until_closed, connection, b"400\r\n" + bytes(1024) + b"\r\n")


@pytest.mark.parametrize("beginning", [b"", HALF_HEAD, HALF_BODY, HALF_CHUNK])
async def test_the_oldest_half_open_connection_makes_room_for_a_new_one(beginning: bytes):
    async with _serving(most=16) as url:
        with _connected(url, *[beginning] * 40) as opened:
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).status_code == 200
            assert await anyio.to_thread.run_sync(_said_until_closed, opened[0]) == b""
            opened[-1].setblocking(False)
            with pytest.raises(BlockingIOError):  # the newest is still waited for
                opened[-1].recv(1)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("beginning", [b"", HALF_HELLO])
async def test_a_handshake_that_never_ends_is_cut_off(beginning: bytes, tls: ssl.SSLContext):
    async with _serving(tls=tls) as url:
        with _connected(url, beginning) as (connection,):
            assert await anyio.to_thread.run_sync(_said_until_closed, connection) == b""


@pytest.mark.parametrize("beginning", [b"", HALF_HELLO, ASKING])
async def test_connections_that_left_before_their_handshake_take_no_place(beginning: bytes, tls: ssl.SSLContext):
    async with _serving(most=16, tls=tls) as url:
        for _ in range(3):
            with _connected(url, *[beginning] * 40):
                pass
        async with httpx.AsyncClient(verify=_trusting(tls)) as client:
            answers = [await client.post(f"{url}/echo", content=b"x" * 100_000) for _ in range(3)]
        assert [answer.text for answer in answers] == ["x" * 100_000] * 3


async def test_with_every_connection_at_work_the_server_still_says_how_it_is():
    flowing = b"GET /flow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with _serving(most=16) as url:
        with _connected(url, *[flowing] * 16):
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).status_code == 200
                refused = await client.post(f"{url}/echo", content=b"x")
            assert refused.status_code == 503
            assert "busy" in refused.json()["error"]
            assert "Try again" in refused.json()["hint"]


@pytest.mark.parametrize(
    "attack",
    [
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 400_000,
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 100_000,
        ASKING * 20_000,
        b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 5_000
        + b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 5_000,
    ],
    ids=["a huge header", "many headers", "pipelined requests that are never read", "floods of OPTIONS and HEAD"],
)
async def test_no_single_connection_keeps_the_others_waiting(attack: bytes):
    async with (
        _serving() as url,
        await anyio.connect_tcp("127.0.0.1", urlsplit(url).port or 0) as stream,
        anyio.create_task_group() as tasks,
    ):

        async def send() -> None:
            with suppress(anyio.BrokenResourceError):
                await stream.send(attack)

        tasks.start_soon(send)
        async with httpx.AsyncClient(timeout=20) as client:
            for _ in range(5):
                assert (await client.get(f"{url}/health")).status_code == 200
        tasks.cancel_scope.cancel()


def test_a_quarter_of_the_descriptors_is_the_most(monkeypatch: pytest.MonkeyPatch):
    def limits(_: int) -> tuple[int, int]:
        return 400, 400

    monkeypatch.setattr(resource, "getrlimit", limits)
    assert connection_limit(256) == 100
    assert connection_limit(50) == 50


def test_health_answers_beside_400_half_open_connections(default_environment: Environment, tmp_path: Path):
    """Of a server that may have few files open; some say nothing, some half a head or half a body."""
    command = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *serve_over_http(default_environment)]
    beginnings = [b"", HALF_HEAD, HALF_BODY.replace(b"/echo", b"/mcp")]

    async def ask(url: str) -> None:
        async with Client(f"{url}/mcp") as client:
            answer = await client.call_tool("execute_code", {"code": "1 + 1"})
            assert not answer.is_error, answer

    with (
        http_server(command, tmp_path, **COLD) as (url, _),
        httpx.Client(timeout=20) as client,
        ExitStack() as stack,
    ):
        for _ in range(HALF_OPEN // 50):
            stack.enter_context(_connected(url, *(beginnings[number % 3] for number in range(50))))
            assert client.get(f"{url}/health", headers={"connection": "close"}).json()["status"] == "ok"
        anyio.run(ask, url)


async def test_requests_that_cannot_be_read_leave_a_few_lines_in_the_log():
    lines = io.StringIO()
    handlers = logging.getLogger().handlers[:]
    logging.getLogger().handlers.clear()
    logs.configure("INFO", "text", lines)
    try:
        async with _serving(log_level="INFO") as url:
            for _ in range(50):
                with _connected(url, b"?\r\n\r\n") as (connection,):
                    assert b" 400 " in await anyio.to_thread.run_sync(_said_until_closed, connection)
    finally:
        logging.getLogger().handlers[:] = handlers
    assert 1 <= lines.getvalue().count("Invalid HTTP request") <= 5


def test_a_request_that_came_while_the_server_was_paused_is_answered_on_the_connection_it_came_by() -> None:
    with subprocess.Popen([sys.executable, "-c", PAUSING_SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            with _connected(server.stdout.readline().strip(), ASKING.replace(b"health", b"pause")) as [connection]:
                os.waitid(os.P_PID, server.pid, os.WSTOPPED)
                assert b"pausing" in connection.recv(65_536)
                connection.sendall(ASKING)
                # The pause itself: it has to be longer than an idle connection is kept.
                threading.Event().wait(2 * PAUSED_S)
                server.send_signal(signal.SIGCONT)
                assert b"200 OK" in connection.recv(65_536)
        finally:
            server.kill()


async def test_a_server_that_nobody_is_connected_to_looks_for_no_overdue_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise every idle server takes processor time once a second, for as long as it runs."""
    monkeypatch.setattr(connections, "_WATCH_S", 0.02)
    loop = asyncio.get_running_loop()
    limiter = ConnectionLimiter(4)
    config = Config(Starlette(routes=[Route("/health", health)]), log_config=None, lifespan="off")
    config.load()
    state = ServerState()
    looking = loop.create_task(limiter.close_overdue())

    def ticks() -> bool:
        soon = loop.time() + 1
        return any(timer.when() < soon and not timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]

    await anyio.lowlevel.checkpoint()
    assert not ticks()
    async with await loop.create_server(lambda: limiter.protocol(config, state, {}), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(ASKING)
        assert b"200" in await reader.readline()
        assert ticks()
        writer.close()
        await until(lambda: not ticks())
    looking.cancel()
