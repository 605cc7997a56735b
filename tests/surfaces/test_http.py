import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import MCPServer
from mcp.types import TextContent
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from belljar.errors import KernelDied, SettingsError
from belljar.http.app import build_app, check_bind, parse_bind, serve_http, told_address, transport_security
from belljar.http.auth import current_principal
from belljar.settings import Settings

ADA, BOB = "a" * 40, "b" * 40
ADAS_AND_BOBS = [SecretStr(f"ada:{ADA}"), SecretStr(f"bob:{BOB}")]
MODES = ["legacy", "2026-07-28"]
VERSION = {"legacy": "2025-11-25", "2026-07-28": "2026-07-28"}


@pytest.fixture(autouse=True)
def only_our_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def whoami_server(name: str = "whoami") -> MCPServer[Any]:
    server = MCPServer(name)

    @server.tool(structured_output=False)
    async def whoami() -> str:
        return f"{name} {current_principal()}"

    @server.tool(structured_output=False)
    async def length(text: str) -> str:
        return str(len(text))

    return server


@asynccontextmanager
async def serving_app(app: Starlette, log_level: str = "WARNING") -> AsyncGenerator[str]:
    urls: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async def serve() -> None:
        await serve_http(app, "127.0.0.1", 0, on_ready=on_ready, log_level=log_level)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await ready.wait()
        yield urls[0]
        tasks.cancel_scope.cancel()


def serving(
    settings: Settings | None = None, servers: Mapping[str, MCPServer[Any]] | None = None, **options: Any
) -> AbstractAsyncContextManager[str]:
    return serving_app(build_app(servers or {"/mcp": whoami_server()}, settings or Settings(), **options))


async def call(url: str, mode: str, tool: str = "whoami", key: str | None = None, **arguments: object) -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        result = await client.call_tool(tool, arguments)
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


def request(mode: str, **headers: str) -> dict[str, Any]:
    """The first message a client of that era would POST."""
    version = VERSION[mode]
    info = {"name": "test", "version": "1"}
    if mode == "legacy":
        method = "initialize"
        params: dict[str, Any] = {"protocolVersion": version, "capabilities": {}, "clientInfo": info}
    else:
        method = "server/discover"
        prefix = "io.modelcontextprotocol/"
        meta = {"protocolVersion": version, "clientInfo": info, "clientCapabilities": {}}
        params = {"_meta": {prefix + name: value for name, value in meta.items()}}
    return {
        "content": json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}),
        "headers": {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": version,
            "mcp-method": method,
            **headers,
        },
    }


# Binds


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("localhost:0", ("localhost", 0)),
        (":8000", ("127.0.0.1", 8000)),
        ("[::1]:8000", ("::1", 8000)),
        ("[::]:65535", ("::", 65535)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
    ],
)
def test_a_bind_is_a_host_and_a_port(bind: str, expected: tuple[str, int]) -> None:
    assert parse_bind(bind) == expected


@pytest.mark.parametrize(
    ("bind", "fact"),
    [
        ("", "no port"),
        ("localhost", "no port"),
        ("8000", "no port"),
        ("localhost:", "no port"),
        ("localhost:http", "no port"),
        ("localhost:-1", "no port"),
        ("localhost:٨", "no port"),
        ("localhost:65536", "above 65535"),
        ("::1:8000", "brackets"),
        ("http://localhost:8000", "brackets"),
        ("[::1:8000", "brackets"),
        ("a b:8000", "not a host"),
        ("me@host:8000", "not a host"),
        ("*:8000", "not a host"),
    ],
)
def test_what_is_no_bind_is_refused_with_the_way_to_write_one(bind: str, fact: str) -> None:
    with pytest.raises(SettingsError, match=fact) as raised:
        parse_bind(bind)

    assert "[::1]:8000" in raised.value.hint


@pytest.mark.parametrize(
    ("chosen", "listening", "told"),
    [
        ({}, "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ({"allowed_hosts": ["jar.example.org", "b"]}, "http://0.0.0.0:8000", "http://jar.example.org:8000"),
        ({"allowed_hosts": ["jar.example.org:81"]}, "http://[::]:8000", "http://jar.example.org:81"),
        ({"allowed_hosts": ["[::1]"]}, "https://0.0.0.0:8000", "https://[::1]:8000"),
        ({"trust_network": True}, "http://0.0.0.0:8000", "http://localhost:8000"),
        ({"public_url": "https://jar.example.org"}, "http://127.0.0.1:8000", "https://jar.example.org"),
    ],
)
def test_people_are_told_an_address_that_the_guard_lets_through(
    chosen: dict[str, Any], listening: str, told: str
) -> None:
    assert told_address(Settings(**chosen), listening) == told


@pytest.mark.parametrize("bind", ["", "127.0.0.1:0", "127.8.9.10:8000", "localhost:8000", "[::1]:8000"])
def test_this_machine_needs_no_credentials(bind: str) -> None:
    check_bind(Settings(http=bind))


@pytest.mark.parametrize("bind", ["0.0.0.0:8000", "[::]:8000", "192.0.2.7:8000", "belljar.example:8000"])
def test_any_other_bind_demands_credentials(bind: str) -> None:
    with pytest.raises(SettingsError, match="no credentials") as raised:
        check_bind(Settings(http=bind, allowed_hosts=["belljar.example"]))

    assert "BELLJAR_API_KEYS" in raised.value.hint
    assert "`belljar key`" in raised.value.hint


def test_keys_or_oauth_open_other_binds() -> None:
    issuer, audience = "https://as.example", "https://belljar.example/mcp"

    check_bind(Settings(http="192.0.2.7:8000", api_keys=ADAS_AND_BOBS))
    check_bind(Settings(http="192.0.2.7:8000", oauth_issuer=issuer, oauth_audience=audience))
    with pytest.raises(SettingsError, match="BELLJAR_OAUTH_AUDIENCE"):
        check_bind(Settings(http="192.0.2.7:8000", api_keys=ADAS_AND_BOBS, oauth_issuer=issuer))


@pytest.mark.parametrize("bind", ["0.0.0.0:8000", "[::]:8000", "[0:0::0]:8000"])
def test_every_address_demands_the_names_to_answer_to(bind: str) -> None:
    with pytest.raises(SettingsError, match="no host names") as raised:
        check_bind(Settings(http=bind, api_keys=ADAS_AND_BOBS))

    assert "BELLJAR_ALLOWED_HOSTS" in raised.value.hint
    assert socket.gethostname() in raised.value.hint


def test_the_guard_knows_the_bind_the_allowed_names_and_their_origins() -> None:
    settings = Settings(
        http="192.0.2.7:8000",
        allowed_hosts=["Belljar.Example", "[2001:db8::7]", "other.example:8443"],
        allowed_origins=["https://app.example"],
    )
    guard = transport_security(settings)

    assert guard.enable_dns_rebinding_protection
    assert guard.allowed_hosts == [
        "192.0.2.7",
        "192.0.2.7:*",
        "belljar.example",
        "belljar.example:*",
        "[2001:db8::7]",
        "[2001:db8::7]:*",
        "other.example:8443",
    ]
    assert {"https://app.example", "https://belljar.example", "http://192.0.2.7:*"} <= set(guard.allowed_origins)


@pytest.mark.parametrize("name", ["*", "*.example", "https://a.example", "::1", "a.example:http", "a.example/mcp", ""])
def test_a_pattern_or_url_is_no_allowed_host(name: str) -> None:
    with pytest.raises(SettingsError, match="not a host"):
        transport_security(Settings(allowed_hosts=[name]))


@pytest.mark.parametrize("origin", ["*", "app.example", "https://", "https://app.example/page", "https://*.example"])
def test_a_pattern_or_page_is_no_allowed_origin(origin: str) -> None:
    with pytest.raises(SettingsError, match="not an origin"):
        transport_security(Settings(allowed_origins=[origin]))


# The app


@pytest.mark.anyio
async def test_health_needs_no_key_and_says_the_version() -> None:
    async with serving(Settings(api_keys=ADAS_AND_BOBS)) as url, httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/health")

    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert answer.json()["version"][0].isdigit()
    assert "server" not in answer.headers


@pytest.mark.anyio
async def test_the_bare_address_says_in_one_line_where_mcp_is() -> None:
    servers = {path: whoami_server() for path in ("/mcp", "/mcp/interpreter", "/mcp/toolbox")}
    async with serving(Settings(api_keys=ADAS_AND_BOBS), servers) as url, httpx.AsyncClient() as client:
        answer = await client.get(url)
        posted = await client.post(url)
    async with serving() as url, httpx.AsyncClient() as client:
        open_to_all = await client.get(url)

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == (
        "belljar serves MCP (streamable HTTP) at /mcp of this address, with `Authorization: Bearer KEY`; "
        "single surfaces at /mcp/interpreter, /mcp/toolbox.\n"
    )
    assert posted.status_code == 405
    assert open_to_all.text == "belljar serves MCP (streamable HTTP) at /mcp of this address.\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "status"), [({"host": "evil.example"}, 421), ({"origin": "https://evil.example"}, 403)]
)
async def test_the_bare_address_is_behind_the_guard_too(headers: dict[str, str], status: int) -> None:
    async with serving() as url, httpx.AsyncClient() as client:
        answer = await client.get(url, headers=headers)

    assert answer.status_code == status
    assert "/mcp" not in answer.text


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_without_keys_every_caller_is_local(mode: str) -> None:
    async with serving() as url:
        assert await call(f"{url}/mcp", mode) == "whoami local"


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_each_key_is_its_own_principal(mode: str) -> None:
    async with serving(Settings(api_keys=ADAS_AND_BOBS)) as url:
        assert await call(f"{url}/mcp", mode, key=ADA) == "whoami key:ada"
        assert await call(f"{url}/mcp", mode, key=BOB) == "whoami key:bob"


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_without_a_key_or_with_a_wrong_one_nothing_is_served(mode: str) -> None:
    async with serving(Settings(api_keys=ADAS_AND_BOBS)) as url, httpx.AsyncClient() as client:
        none = await client.post(f"{url}/mcp", **request(mode))
        wrong = await client.post(f"{url}/mcp", **request(mode, authorization=f"Bearer {ADA}x"))
        right = await client.post(f"{url}/mcp", **request(mode, authorization=f"Bearer {ADA}"))

    assert (none.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
    assert none.content == wrong.content
    assert none.headers["www-authenticate"] == wrong.headers["www-authenticate"]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_a_token_of_the_issuer_is_a_principal_beside_the_keys(mode: str) -> None:
    signing_key = ec.generate_private_key(ec.SECP256R1())
    jwk = jwt.get_algorithm_by_name("ES256").to_jwk(signing_key.public_key(), as_dict=True)

    async def keys(_: Request) -> JSONResponse:
        return JSONResponse({"keys": [{**jwk, "kid": "1"}]})

    async with serving_app(Starlette(routes=[Route("/keys", keys)])) as issuer:
        audience = "https://belljar.example/mcp"
        settings = Settings(
            oauth_issuer=issuer, oauth_audience=audience, oauth_jwks_url=f"{issuer}/keys", api_keys=ADAS_AND_BOBS
        )
        claims = {"iss": issuer, "aud": audience, "sub": "carol", "exp": int(time.time()) + 600}
        token = jwt.encode(claims, signing_key, "ES256", headers={"kid": "1"})
        async with serving(settings) as url:
            assert await call(f"{url}/mcp", mode, key=token) == f"whoami jwt:{issuer}#carol"
            assert await call(f"{url}/mcp", mode, key=ADA) == "whoami key:ada"


@pytest.mark.anyio
async def test_another_callers_protocol_session_is_answered_as_an_unknown_one() -> None:
    async with serving(Settings(api_keys=ADAS_AND_BOBS)) as url, httpx.AsyncClient() as client:
        opened = await client.post(f"{url}/mcp", **request("legacy", authorization=f"Bearer {ADA}"))
        theirs = opened.headers["mcp-session-id"]
        answers = [
            await client.post(
                f"{url}/mcp", **request("legacy", authorization=f"Bearer {BOB}", **{"mcp-session-id": session_id})
            )
            for session_id in (theirs, "f" * 32)
        ]

    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].content == answers[1].content


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_each_path_has_its_server_and_one_server_may_have_two(mode: str) -> None:
    first = whoami_server("first")
    servers = {"/mcp": first, "/mcp/first": first, "/mcp/second": whoami_server("second")}
    async with serving(servers=servers) as url:
        answers = [await call(url + path, mode) for path in servers]
        async with httpx.AsyncClient() as client:
            unknown = await client.post(f"{url}/mcp/third", **request(mode))

    assert answers == ["first local", "first local", "second local"]
    assert unknown.status_code == 404


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "localhost"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example:80"}, 421),
    ],
    ids=str,
)
async def test_foreign_origins_and_hosts_are_turned_away(mode: str, headers: dict[str, str], status: int) -> None:
    async with serving() as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/mcp", **request(mode, **headers))

    assert answer.status_code == status


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_a_public_bind_answers_to_its_names_only(mode: str) -> None:
    settings = Settings(http="0.0.0.0:0", api_keys=ADAS_AND_BOBS, allowed_hosts=["belljar.example"])
    statuses = {}
    async with serving(settings) as url, httpx.AsyncClient() as client:
        for host in ("belljar.example", "belljar.example:8000", "127.0.0.1", "0.0.0.0", "evil.example"):
            sent = request(mode, host=host, authorization=f"Bearer {ADA}")
            statuses[host] = (await client.post(f"{url}/mcp", **sent)).status_code

    assert statuses == {
        "belljar.example": 200,
        "belljar.example:8000": 200,
        "127.0.0.1": 421,
        "0.0.0.0": 421,
        "evil.example": 421,
    }


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_an_upload_passes_and_more_than_any_upload_is_too_large(mode: str) -> None:
    settings = Settings(max_upload_bytes=6 * 1024 * 1024)
    async with serving(settings) as url, httpx.AsyncClient() as client:
        assert await call(f"{url}/mcp", mode, "length", text="x" * (8 * 1024 * 1024)) == str(8 * 1024 * 1024)
        sent = request(mode)
        sent["content"] = b" " * (9 * 1024 * 1024 + 1)
        answer = await client.post(f"{url}/mcp", **sent)

    assert answer.status_code == 413


@pytest.mark.anyio
async def test_ours_is_open_around_the_servers_and_closed_after_them() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def logged(name: str) -> AsyncGenerator[None]:
        events.append(f"{name} open")
        try:
            yield
        finally:
            events.append(f"{name} closed")

    server = MCPServer("inner", lifespan=lambda _: logged("server"))
    async with serving(servers={"/mcp": server}, lifespan=lambda: logged("ours")):
        events.append("ready")

    assert events == ["ours open", "server open", "ready", "server closed", "ours closed"]


@pytest.mark.anyio
async def test_what_keeps_it_from_starting_comes_out_as_it_is() -> None:
    @asynccontextmanager
    async def broken() -> AsyncGenerator[None]:
        raise KernelDied("no")
        yield

    with pytest.raises(KernelDied):
        await serve_http(build_app({}, Settings(), lifespan=broken), "127.0.0.1", 0, on_ready=pytest.fail)


@pytest.mark.anyio
@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
async def test_an_address_that_cannot_be_had_is_named(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"Cannot listen on {host}:{port}"):
            await serve_http(build_app({}, Settings()), host, port, on_ready=pytest.fail)


@pytest.mark.anyio
async def test_queries_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with serving_app(build_app({}, Settings()), log_level="DEBUG") as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            await anyio.to_thread.run_sync(client.sendall, b"GET /health?key=hush HTTP/1.0\r\n\r\n")
            assert (await anyio.to_thread.run_sync(client.recv, 9)) == b"HTTP/1.1 "

    assert "hush" not in caplog.text


# Stopping


SERVER = """
import anyio, sys
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from mcp.server import MCPServer
from belljar.settings import Settings
from belljar.http.app import build_app, serve_http

server = MCPServer("slow")

@server.tool()
async def hang() -> str:
    print("hanging", flush=True)
    await anyio.sleep_forever()

@asynccontextmanager
async def lifespan():
    yield
    print("closed", flush=True)

def ready(url):
    print(url, flush=True)

app = build_app({"/mcp": server}, Settings(), lifespan=lifespan)
anyio.run(lambda: serve_http(app, "127.0.0.1", 0, on_ready=ready))
print("returned", flush=True)
"""


@contextmanager
def running_server() -> Generator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-X", "dev", "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def hang_request(mode: str, session_id: str = "") -> dict[str, Any]:
    sent = request(mode, **({"mcp-session-id": session_id} if session_id else {}))
    message = json.loads(sent["content"])
    meta = message["params"].get("_meta", {})
    message |= {"id": 2, "method": "tools/call", "params": {"name": "hang", "arguments": {}, "_meta": meta}}
    sent["headers"] |= {"mcp-method": "tools/call", "mcp-name": "hang"}
    return {**sent, "content": json.dumps(message)}


@contextmanager
def hanging_call(client: httpx.Client, url: str, mode: str) -> Generator[None]:
    """A call under way, and in the older era a stream for notifications too."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        session_id = ""
        if mode == "legacy":
            session_id = client.post(f"{url}/mcp", **request(mode)).headers["mcp-session-id"]
            listening = {"accept": "text/event-stream", "mcp-session-id": session_id}
            with client.stream("GET", f"{url}/mcp", headers=listening) as stream:
                assert stream.status_code == 200
                send_raw(connection, url, hang_request(mode, session_id))
                yield
        else:
            send_raw(connection, url, hang_request(mode))
            yield


def send_raw(connection: socket.socket, url: str, sent: dict[str, Any]) -> None:
    body = sent["content"].encode()
    headers = {**sent["headers"], "host": url.removeprefix("http://"), "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body)


@pytest.mark.parametrize(("mode", "number"), [("legacy", signal.SIGINT), ("2026-07-28", signal.SIGTERM)])
def test_a_signal_stops_it_in_good_order_though_calls_and_streams_are_open(mode: str, number: int) -> None:
    with running_server() as (process, url), httpx.Client(timeout=30) as client:
        assert process.stdout
        assert process.stderr
        with hanging_call(client, url, mode):
            assert process.stdout.readline() == "hanging\n"
            os.kill(process.pid, number)
            # The call would hang for ever.
            assert process.wait(timeout=30) == 0
        assert process.stdout.read() == "closed\nreturned\n"
        errors = process.stderr.read()

    assert "Traceback" not in errors
    assert "Warning" not in errors
