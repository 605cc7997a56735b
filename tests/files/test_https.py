import asyncio
import datetime
import io
import re
import socket
import ssl
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from belljar.egress.rules import Address, parse_rule, refusal
from belljar.errors import BelljarError, InvalidArgument, TooLarge
from belljar.files.https import Reach, fetch_https, fetch_https_into, is_loopback_name, post_https, send_https

pytestmark = pytest.mark.anyio

SECRET = "sig=do-not-show"


@dataclass
class Certificate:
    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate for localhost, store.example and 127.0.0.1, and a client that trusts it alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.DNSName("store.example"),
        x509.IPAddress(ip_address("127.0.0.1")),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path: Path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return Certificate(server, ssl.create_default_context(cafile=str(path)))


@dataclass
class Store:
    """What the server was asked, and what it sends: raw bytes, then `then` if there is more to do."""

    certificate: Certificate
    answer: bytes = b""
    then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
    port: int = 0
    requests: list[str] = field(default_factory=list[str])
    bodies: list[bytes] = field(default_factory=list[bytes])
    server_names: list[str | None] = field(default_factory=list[str | None])

    def url(self, path: str = "/file", host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}?{SECRET}"

    async def fetch(self, url: str, max_bytes: int = 1000, **options: float) -> bytes:
        return await fetch_https(
            url,
            max_bytes,
            reach=Reach(allow_private=True),
            ssl_context=self.certificate.client,
            deadline_s=options.get("s", 30.0),
        )

    async def send(self, url: str, content: bytes, *rules: str) -> int:
        reach = Reach([parse_rule(rule) for rule in rules] if rules else None, allow_private=True)
        return await send_https(
            url, io.BytesIO(content), len(content), reach=reach, ssl_context=self.certificate.client
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            if length := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
                self.bodies.append(await reader.readexactly(int(length[1])))
            writer.write(self.answer)
            await writer.drain()
            if self.then is not None:
                await self.then(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def open_store(certificate: Certificate, answer: bytes = b"") -> AsyncGenerator[Store, None]:
    store = Store(certificate, answer)

    def note_name(_socket: object, name: str | None, _context: object) -> None:
        store.server_names.append(name)

    certificate.server.sni_callback = note_name
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0, ssl=certificate.server)
    store.port = server.sockets[0].getsockname()[1]
    try:
        yield store
    finally:
        server.close()
        await server.wait_closed()


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def resolver(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Every name resolves to these; returns the list of names asked for."""
    asked: list[str] = []

    async def resolve(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(anyio, "getaddrinfo", resolve)
    return asked


async def test_a_file_is_fetched_with_the_right_name_in_tls_and_request(certificate: Certificate):
    async with open_store(certificate, ok(b"content")) as store:
        assert await store.fetch(store.url("/a b/ü.csv")) == b"content"

    assert store.server_names == ["localhost"]
    head = store.requests[0].split("\r\n")
    assert head[0] == f"GET /a%20b/%C3%BC.csv?{SECRET} HTTP/1.1"
    assert f"Host: localhost:{store.port}" in head


async def test_a_name_is_resolved_once_and_the_connection_goes_to_that_address(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
):
    asked = resolver(monkeypatch, "127.0.0.1")
    async with open_store(certificate, ok(b"content")) as store:
        assert await store.fetch(store.url(host="store.example")) == b"content"
    assert (asked, store.server_names) == (["store.example"], ["store.example"])


async def test_the_next_address_is_tried_when_one_refuses(certificate: Certificate, monkeypatch: pytest.MonkeyPatch):
    resolver(monkeypatch, "127.0.0.99", "127.0.0.1")
    async with open_store(certificate, ok(b"content")) as store:
        assert await store.fetch(store.url(host="store.example")) == b"content"


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"],
)
async def test_our_own_machine_is_refused_in_every_spelling(certificate: Certificate, host: str):
    async with open_store(certificate, ok(b"content")) as store:
        with pytest.raises(InvalidArgument) as refused:
            await fetch_https(store.url(host=host), 1000, ssl_context=certificate.client)
    assert store.server_names == []
    assert refused.value.message.startswith("https://")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "addresses", [("10.0.0.1",), ("169.254.169.254",), ("8.8.8.8", "192.168.1.1"), ("8.8.8.8", "::ffff:10.0.0.1")]
)
async def test_one_bad_address_among_the_good_refuses_the_host(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
):
    resolver(monkeypatch, *addresses)
    with pytest.raises(InvalidArgument, match=r"https://store\.example leads to .* which is not fetched"):
        await fetch_https("https://store.example/", 1000)


async def test_metadata_is_refused_even_where_private_addresses_are_fine(monkeypatch: pytest.MonkeyPatch):
    resolver(monkeypatch, "168.63.129.16")
    with pytest.raises(InvalidArgument, match="a metadata service"):
        await fetch_https("https://store.example/", 1000, reach=Reach(allow_private=True))


async def test_redirects_are_followed(certificate: Certificate):
    async with open_store(certificate, redirect("../there?a=b")) as store:

        async def answer_next(writer: asyncio.StreamWriter) -> None:
            store.answer = ok(b"there")

        store.then = answer_next
        assert await store.fetch(store.url("/x/y")) == b"there"
    assert [request.split()[1] for request in store.requests] == [f"/x/y?{SECRET}", "/there?a=b"]


async def test_a_redirect_to_a_private_address_is_refused(certificate: Certificate, monkeypatch: pytest.MonkeyPatch):
    async with open_store(certificate) as store:
        store.answer = redirect(f"https://127.0.0.1:{store.port}/inner?{SECRET}")
        resolver(monkeypatch, "127.0.0.1")

        def refuse_from_the_second_hop(address: Address, port: int, *, allow_private: bool) -> str:
            # The first hop stands for a public host, though it must be on this machine.
            return refusal(address, port, allow_private=allow_private) if store.requests else ""

        monkeypatch.setattr("belljar.files.https.refusal", refuse_from_the_second_hop)
        with pytest.raises(InvalidArgument, match=r"https://127\.0\.0\.1:\d+ leads to a private address") as refused:
            await fetch_https(store.url(host="store.example"), 1000, ssl_context=certificate.client)
    assert len(store.requests) == 1
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (f"http://localhost/?{SECRET}", "the scheme 'http', and only https is fetched"),
        ("file:///etc/passwd", "the scheme 'file'"),
        ("https://169.254.169.254/", "an address that is not public"),
        ("https://[/", "cannot be parsed"),
        ("https://user:word@localhost/", "contains a user name"),
    ],
)
async def test_a_redirect_is_checked_like_the_first_url(certificate: Certificate, location: str, words: str):
    async with open_store(certificate, redirect(location)) as store:
        with pytest.raises(InvalidArgument, match=words) as refused:
            await store.fetch(store.url())
    assert SECRET not in str(refused.value)
    assert "word@" not in str(refused.value)


async def test_endless_redirects_end(certificate: Certificate):
    async with open_store(certificate, redirect(f"/again?{SECRET}")) as store:
        with pytest.raises(InvalidArgument, match="more than 5 redirects"):
            await store.fetch(store.url())
    assert len(store.requests) == 6


async def test_a_file_that_says_it_is_too_large_is_not_read(certificate: Certificate):
    async with open_store(certificate, ok(b"x" * 1001)) as store:
        with pytest.raises(TooLarge, match="is 1001 bytes, and the limit is 1000"):
            await store.fetch(store.url())
        store.answer = ok(b"x" * 1000)
        assert len(await store.fetch(store.url())) == 1000


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 100),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"64\r\n" + b"x" * 100 + b"\r\n"),
    ],
)
async def test_an_endless_body_is_cut_at_the_limit(certificate: Certificate, head: bytes, piece: bytes):
    async with open_store(certificate, head) as store:

        async def go_on(writer: asyncio.StreamWriter) -> None:
            while not writer.is_closing():
                writer.write(piece)
                await writer.drain()

        store.then = go_on
        with pytest.raises(TooLarge, match="more than 1000 bytes"):
            await store.fetch(store.url())


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", ok(b"xx")[:-1]])
async def test_a_silent_server_meets_the_deadline(certificate: Certificate, start: bytes):
    async with open_store(certificate, start) as store:
        done = asyncio.Event()

        async def say_nothing(_writer: asyncio.StreamWriter) -> None:
            await done.wait()

        store.then = say_nothing
        with pytest.raises(InvalidArgument, match=r"was not done with the file within 0\.2 s") as refused:
            await store.fetch(store.url(), s=0.2)
        done.set()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "answered 302"),
        (ok(b"12345")[:-1], "stopped half-way"),
        (b"", "could not be reached"),
        (b"not http\r\n\r\n", "broke the rules of HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, "broke the rules of HTTP"),
        (ok(b"\x1f\x8b", "Content-Encoding: gzip"), "Content-Encoding 'gzip'"),
    ],
)
async def test_bad_answers_are_errors_without_the_query(certificate: Certificate, answer: bytes, words: str):
    async with open_store(certificate, answer) as store:
        with pytest.raises(InvalidArgument, match=words) as refused:
            await store.fetch(store.url())
    assert SECRET not in str(refused.value)


async def test_a_certificate_for_another_name_or_of_no_authority_is_refused(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
):
    resolver(monkeypatch, "127.0.0.1")
    async with open_store(certificate, ok(b"content")) as store:
        with pytest.raises(InvalidArgument, match="certificate not accepted: Hostname mismatch"):
            await store.fetch(store.url(host="other.example"))
        with pytest.raises(InvalidArgument, match="certificate not accepted: self"):
            await fetch_https(store.url(host="store.example"), 1000, reach=Reach(allow_private=True))
    assert store.requests == []


@pytest.mark.parametrize(
    "url",
    [
        f"http://store.example/?{SECRET}",
        f"ftp://store.example/?{SECRET}",
        f"store.example/?{SECRET}",
        f"https://?{SECRET}",
        f"https:///path?{SECRET}",
        f"https://.example/?{SECRET}",
        f"https://a b/?{SECRET}",
        f"https://[::1%25lo]/?{SECRET}",
        f"https://store.example:99999/?{SECRET}",
        f"https://store.example:port/?{SECRET}",
        f"https://name:word@store.example/?{SECRET}",
        f"https://\ud800/?{SECRET}",
        f"https://store.example/\ud800?{SECRET}",
        f"https://{'x' * 300}/?{SECRET}",
        "",
    ],
)
async def test_urls_that_cannot_be_fetched_are_errors_without_the_query(url: str):
    with pytest.raises(InvalidArgument) as refused:
        await fetch_https(url, 1000)
    assert SECRET not in str(refused.value)
    assert "word" not in str(refused.value)


async def test_an_unknown_host_is_an_error_without_the_query(monkeypatch: pytest.MonkeyPatch):
    async def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(anyio, "getaddrinfo", resolve)
    with pytest.raises(InvalidArgument, match=r"^https://store\.example could not be reached: the host is not known"):
        await fetch_https(f"https://store.example/?{SECRET}", 1000)


async def test_nothing_of_the_url_is_logged_or_kept_in_the_cause(
    certificate: Certificate, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("DEBUG")
    async with open_store(certificate, b"HTTP/1.1 302 Found\r\nBad Name: " + SECRET.encode() + b"\r\n\r\n") as store:
        with pytest.raises(BelljarError) as refused:
            await store.fetch(store.url())
    assert SECRET not in caplog.text
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


# Sending


async def test_a_file_is_sent_by_put_as_blob_stores_take_it(certificate: Certificate) -> None:
    content = bytes(range(256)) * 4_000
    async with open_store(certificate, b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n") as store:
        assert await store.send(store.url("/out/result.csv"), content) == 201
    assert store.bodies == [content]
    assert store.requests[0].startswith(f"PUT /out/result.csv?{SECRET} HTTP/1.1\r\n")
    assert "x-ms-blob-type: BlockBlob" in store.requests[0]


async def test_a_store_that_refuses_a_file_is_told_without_the_signature(certificate: Certificate) -> None:
    for answer in (b"HTTP/1.1 403 Forbidden\r\n\r\n", redirect("https://other.example/"), b""):
        async with open_store(certificate, answer) as store:
            with pytest.raises(InvalidArgument) as refused:
                await store.send(store.url(), b"content")
        assert "do-not-show" not in str(refused.value)


async def test_only_hosts_of_the_rules_are_reached_also_by_redirect(certificate: Certificate) -> None:
    async with open_store(certificate) as store:
        with pytest.raises(InvalidArgument, match="no host that the setting egress allows"):
            await store.send(store.url(), b"content", "store.example:443")
        assert store.requests == []
        again = f"HTTP/1.1 307 Elsewhere\r\nLocation: https://127.0.0.1:{store.port}/\r\nContent-Length: 0\r\n\r\n"
        store.answer = again.encode()
        with pytest.raises(InvalidArgument, match=r"https://127\.0\.0\.1:\d+ is not reached"):
            await store.send(store.url(), b"content", f"localhost:{store.port}")
        assert len(store.requests) == 1


async def test_a_redirect_to_a_private_address_gets_no_file(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(certificate) as store:
        store.answer = b"HTTP/1.1 307 Elsewhere\r\nLocation: https://168.63.129.16/\r\nContent-Length: 0\r\n\r\n"
        with pytest.raises(InvalidArgument, match="a metadata service"):
            await store.send(store.url(), b"content")
    with pytest.raises(InvalidArgument, match="a private address"):
        await send_https("https://127.0.0.1/", io.BytesIO(b""), 0, reach=Reach())


async def test_a_large_file_is_fetched_to_disk_and_not_into_memory(certificate: Certificate, tmp_path: Path) -> None:
    size, piece = 24 * 1024 * 1024, b"x" * 65_536
    async with open_store(certificate, f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()) as store:

        async def send_all(writer: asyncio.StreamWriter) -> None:
            for _ in range(size // len(piece)):
                writer.write(piece)
                await writer.drain()

        store.then = send_all
        tracemalloc.start()
        try:
            with (tmp_path / "fetched").open("wb") as file:
                reach = Reach(allow_private=True)
                got = await fetch_https_into(file, store.url(), size, reach=reach, ssl_context=certificate.client)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert got == (tmp_path / "fetched").stat().st_size == size
    assert peak < size / 2


async def test_a_fetched_file_that_cannot_be_written_is_told_with_its_reason(certificate: Certificate) -> None:
    async with open_store(certificate, ok(b"content")) as store:
        with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(TooLarge, match="no room"):
            await fetch_https_into(
                file, store.url(), 1000, reach=Reach(allow_private=True), ssl_context=certificate.client
            )


async def test_a_post_is_answered_with_a_status_and_follows_no_redirect(certificate: Certificate) -> None:
    answer = b"HTTP/1.1 307 There\r\nLocation: https://store.example/\r\nRetry-After: 7\r\n\r\n"
    async with open_store(certificate, answer) as store:
        reach = Reach([parse_rule(f"localhost:{store.port}")], allow_own=True)
        given: dict[str, Any] = {"reach": reach, "deadline_s": 30.0, "ssl_context": certificate.client}
        assert await post_https(store.url(), b"told", [("webhook-id", "a")], **given) == (307, "7")
        with pytest.raises(InvalidArgument, match="no host that the setting egress allows"):
            await post_https(store.url(host="127.0.0.1"), b"told", [], **given)
    assert store.bodies == [b"told"]
    assert store.requests[0].startswith(f"POST /file?{SECRET} ")


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "10.0.0.1", "[::2]", "localhost.example"])
async def test_a_post_without_tls_goes_to_this_machine_only(host: str) -> None:
    with pytest.raises(InvalidArgument, match="only https"):
        await post_https(f"http://{host}/", b"told", [], reach=Reach(allow_own=True), deadline_s=30.0)
    with pytest.raises(InvalidArgument, match="only https"):
        await post_https("http://localhost/", b"told", [], reach=Reach(allow_private=True), deadline_s=30.0)


@pytest.mark.parametrize(
    ("host", "is_own"), [("localhost", True), ("::1", True), ("127.0.0.9", True), ("127.a", False)]
)
def test_a_loopback_name_is_told_from_others(host: str, is_own: bool) -> None:
    assert is_loopback_name(host) is is_own
