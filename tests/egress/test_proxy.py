import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from servers import certificate, echoing, serving_context

from belljar.egress import proxy as proxy_module
from belljar.egress.proxy import Proxy, ProxyLimits, open_proxy
from belljar.egress.rules import parse_rule, refusal

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def proxied(
    folder: Path, *rules: str, allow_private: bool = True, **limits: Any
) -> AsyncGenerator[tuple[Proxy, Path]]:
    async with open_proxy(
        folder,
        "egress",
        session_id="s1",
        rules=[parse_rule(rule) for rule in rules],
        judge=lambda address, _: refusal(ip_address(address), allow_private=allow_private),
        limits=ProxyLimits(**limits),
    ) as proxy:
        yield proxy, folder / "egress"


async def ask(path: Path, request: bytes) -> bytes:
    """All that comes back."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


async def connect(path: Path, place: str) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
    """The status line of a CONNECT, and the tunnel."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), reader, writer


async def test_a_tunnel_reaches_an_allowed_host_and_counts_its_bytes(tmp_path: Path):
    async with echoing() as echo, proxied(tmp_path, f"localhost:{echo.port}") as (proxy, path):
        status, reader, writer = await connect(path, f"localhost:{echo.port}")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()

        assert status == "HTTP/1.1 200 Connection established"
        assert answer.endswith(b"echo ")
        assert proxy.traffic.sent_bytes == len(b"GET / HTTP/1.1\r\n\r\n")
        assert proxy.traffic.received_bytes == len(answer)
        assert proxy.traffic.connections == 1


async def test_tls_through_a_tunnel_is_the_clients_own(tmp_path: Path):
    pem = certificate(tmp_path)
    async with echoing(serving_context(pem)) as echo, proxied(tmp_path, f"localhost:{echo.port}") as (_, path):
        _, reader, writer = await connect(path, f"localhost:{echo.port}")
        await writer.start_tls(
            ssl.create_default_context(cafile=str(tmp_path / "cert.pem")), server_hostname="localhost"
        )
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
        assert (await reader.read()).endswith(b"echo hello")
        writer.close()


async def test_much_data_passes_both_ways_unharmed(tmp_path: Path):
    body = bytes(range(256)) * 20_000
    async with echoing() as echo, proxied(tmp_path, f"localhost:{echo.port}") as (_, path):
        head = f"POST http://localhost:{echo.port}/ HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        assert (await ask(path, head.encode() + body)).endswith(b"echo " + body)


async def test_a_plain_request_is_written_anew_for_the_host_it_names(tmp_path: Path):
    async with echoing() as echo, proxied(tmp_path, f"localhost:{echo.port}") as (_, path):
        answer = await ask(
            path,
            f"GET http://LOCALHOST.:{echo.port}/a?b=c HTTP/1.1\r\nHost: elsewhere.test\r\nX-Own: 1\r\n"
            "Proxy-Authorization: secret\r\nProxy-Connection: keep-alive\r\nUpgrade: x\r\n\r\n".encode(),
        )

        assert answer.startswith(b"HTTP/1.1 200 OK")
        (request,) = echo.requests
        lines = request.decode().lower().split("\r\n")
        assert lines[0] == "get /a?b=c http/1.1"
        assert sorted(lines[1:-2]) == ["connection: close", f"host: localhost:{echo.port}", "x-own: 1"]


async def test_a_second_request_on_the_same_connection_goes_nowhere(tmp_path: Path):
    async with echoing() as echo, proxied(tmp_path, f"localhost:{echo.port}") as (_, path):
        one = f"GET http://localhost:{echo.port}/1 HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = await ask(path, (one + "GET http://elsewhere.test/2 HTTP/1.1\r\nHost: y\r\n\r\n").encode())

        assert answer.count(b"HTTP/1.1") == 1
        assert len(echo.requests) == 1


async def test_what_no_rule_covers_is_refused_in_words_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    async with proxied(tmp_path, "api.example.com:443", "*.example.org:443") as (proxy, path):
        answer = await ask(path, b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n")
        await ask(path, b"GET http://evil.test:443/secret?token=1 HTTP/1.1\r\nHost: x\r\n\r\n")

        head, _, body = answer.decode().partition("\r\n\r\n")
        assert head.startswith(
            "HTTP/1.1 403 belljar: egress to evil.test:443 is not allowed: no entry of the setting egress covers it\r\n"
        )
        assert '"evil.test:443" in the setting egress' in body
        assert "api.example.com:443, *.example.org:443" in body
        assert proxy.traffic.refusals == 2
    assert [record.getMessage() for record in caplog.records] == [
        "session s1: egress to evil.test:443 is not allowed: no entry of the setting egress covers it"
    ]


@pytest.mark.parametrize(
    "place",
    [
        *("example.com:22", "example.com:80", "example.com.evil.test:443", "sub.example.com:443", "example.com:0443x"),
        *("93.184.215.14:443", "[::1]:443", "[::ffff:127.0.0.1]:443", "127.0.0.1:443", "127.1:443", "2130706433:443"),
        *("user@example.com:443", "user:pass@example.com:443", "example.com:99999", "example.com:-1", "example.com:"),
        *("example.com", ":443", "[::1:443", "example.com%00.evil.test:443", "xn--exmple-cua.com:443"),
    ],
)
async def test_no_other_spelling_gets_past_the_rules(tmp_path: Path, place: str):
    async with proxied(tmp_path, "example.com:443") as (proxy, path):
        status, _, writer = await connect(path, place)
        writer.close()

        assert status.split()[1] in ("400", "403")
        assert proxy.traffic.connections == 0


@pytest.mark.parametrize("place", ["EXAMPLE.com:443", "example.com.:443"])
async def test_other_spellings_of_an_allowed_name_are_that_name(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def look_up(host: str, port: int) -> list[str]:
        asked.append(host)
        raise OSError

    monkeypatch.setattr(proxy_module, "_look_up", look_up)
    async with proxied(tmp_path, "example.com:443") as (_, path):
        status, _, writer = await connect(path, place)
        writer.close()

    assert status == "HTTP/1.1 502 belljar: the name example.com is not known"
    assert asked == ["example.com"]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "168.63.129.16", "0.0.0.0"),
        *("::1", "fd00:ec2::254", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe"),
    ],
)
async def test_a_permitted_name_that_resolves_inwards_is_refused(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    # A good address beside it does not help.
    monkeypatch.setattr(proxy_module, "_look_up", lambda host, port: ["93.184.215.14", address])
    async with proxied(tmp_path, "example.com:443", allow_private=False) as (proxy, path):
        status, _, writer = await connect(path, "example.com:443")
        writer.close()

        assert status.startswith("HTTP/1.1 403 belljar: egress to example.com:443 is not allowed: it resolves to a")
        assert proxy.traffic.connections == 0
    assert "session s1: egress to example.com:443" in caplog.text


@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "168.63.129.16"])
async def test_metadata_is_refused_even_where_private_addresses_are_allowed(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(proxy_module, "_look_up", lambda host, port: [address])
    async with proxied(tmp_path, "example.com:80", allow_private=True) as (_, path):
        status, _, writer = await connect(path, "example.com:80")
        writer.close()

    assert status.startswith("HTTP/1.1 403")


async def test_a_name_is_looked_up_once_and_cannot_change_its_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = iter([["127.0.0.1"]])
    monkeypatch.setattr(proxy_module, "_look_up", lambda host, port: next(answers))
    async with echoing() as echo, proxied(tmp_path, f"rebound.test:{echo.port}") as (_, path):
        status, reader, writer = await connect(path, f"rebound.test:{echo.port}")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.read()).endswith(b"echo ")
        writer.close()

    assert status.startswith("HTTP/1.1 200")


async def test_a_host_that_does_not_answer_is_told_apart_from_one_that_is_refused(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with proxied(tmp_path, f"localhost:{port}") as (_, path):
        status, _, writer = await connect(path, f"localhost:{port}")
        writer.close()

    assert status.startswith(f"HTTP/1.1 502 belljar: localhost:{port} could not be reached: ")


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /relative HTTP/1.1\r\nHost: example.com\r\n\r\n",
        b"GET https://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
        b"GET ftp://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
        b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:///path HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"\r\n\r\n",
    ],
)
async def test_garbage_is_answered_and_the_next_client_served(tmp_path: Path, request_: bytes):
    async with echoing() as echo, proxied(tmp_path, f"localhost:{echo.port}", "example.com:80") as (_, path):
        assert (await ask(path, request_)).startswith(b"HTTP/1.1 400 belljar: ")
        good = f"GET http://localhost:{echo.port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        assert (await ask(path, good)).startswith(b"HTTP/1.1 200")


async def test_a_head_without_end_is_cut_off(tmp_path: Path):
    async with proxied(tmp_path, "example.com:443", head_bytes=4096) as (_, path):
        answer = await ask(path, b"CONNECT example.com:443 HTTP/1.1\r\n" + b"X: y\r\n" * 5_000)

    assert answer.startswith(b"HTTP/1.1 431")


async def test_a_client_that_dawdles_over_its_head_is_dropped(tmp_path: Path):
    async with proxied(tmp_path, "example.com:443", head_s=0.05) as (_, path):
        assert await ask(path, b"CONNECT example.com:443 HT") == b""


async def test_a_tunnel_that_says_nothing_is_closed(tmp_path: Path):
    # The echo waits for a request that never comes.
    async with echoing() as echo, proxied(tmp_path, f"localhost:{echo.port}", idle_s=0.05) as (_, path):
        status, reader, writer = await connect(path, f"localhost:{echo.port}")
        assert status.startswith("HTTP/1.1 200")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


async def test_connections_of_a_session_are_limited(tmp_path: Path):
    async with proxied(tmp_path, "example.com:443", connections=2) as (_, path):
        held = [await asyncio.open_unix_connection(path) for _ in range(2)]
        answer = await ask(path, b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        for _, writer in held:
            writer.close()

    assert answer.startswith(b"HTTP/1.1 503 belljar: too many connections")


async def test_closing_ends_tunnels_and_removes_the_socket(tmp_path: Path):
    async with echoing() as echo:
        async with proxied(tmp_path, f"localhost:{echo.port}") as (_, path):
            _, reader, writer = await connect(path, f"localhost:{echo.port}")
        assert await reader.read() == b""
        writer.close()
        assert not path.exists()


async def test_a_folder_with_a_long_name_is_no_obstacle(tmp_path: Path):
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    async with proxied(deep, "example.com:443"):
        assert (deep / "egress").is_socket()
