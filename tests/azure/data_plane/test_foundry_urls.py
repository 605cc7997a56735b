"""Data in and out by URL, and no signature of one in logs, errors, the journal or results."""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import opened_runtime
from data_plane import KEY, Plane, opened_plane, problem_in

from belljar.environments import Environment
from belljar.files import https
from belljar.runtime import Runtime
from certificates import make_certificate

pytestmark = pytest.mark.anyio
SECRET = "S3cret%2FSignature%3D"
SPELLINGS = (b"S3cret%2FSignature", b"S3cret/Signature")


class BlobStore:
    """A store that keeps what is put, and gives it out to whoever has the signature."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {"/in/table.csv": b"a,b\n1,2\n"}
        self.port = 0

    def url(self, path: str) -> str:
        return f"https://localhost:{self.port}{path}?sv=2024&sig={SECRET}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        path, _, query = target.partition("?")
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1])) if length else b""
        status, content = "403 Forbidden", b""
        if f"sig={SECRET}" in query and method == "PUT":
            status, self.kept[path] = "201 Created", body
        elif f"sig={SECRET}" in query and path in self.kept:
            status, content = "200 OK", self.kept[path]
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
async def store(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[BlobStore]:
    files = make_certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    store = BlobStore()
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0, ssl=context)
    store.port = server.sockets[0].getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(files.certificate))
        https._verifying_context.cache_clear()
        yield store
    https._verifying_context.cache_clear()
    server.close()
    await server.wait_closed()


@pytest.fixture(scope="module")
async def runtime(
    store: BlobStore, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    chosen = {
        "surfaces": ["foundry"],
        "api_keys": [f"ada:{KEY}"],
        "egress": [f"localhost:{store.port}"],
        "egress_allow_private": True,
    }
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **chosen) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def plane(runtime: Runtime) -> AsyncGenerator[Plane]:
    async with opened_plane(runtime) as plane:
        yield plane


async def test_code_in_a_session_moves_files_and_leaves_no_signature(
    plane: Plane, store: BlobStore, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    source, target = store.url("/in/table.csv"), store.url("/out/result.csv")
    code = f"""
from belljar_transfer import fetch, send
path = fetch({source!r}, 'sub/table.csv')
print(path.read_text(), send('/mnt/data/sub/table.csv', {target!r}))
kept = {target!r}
print(kept)
kept
"""
    told = await plane.execute(code)
    assert told["status"] == "Succeeded", told
    assert told["result"]["stdout"].startswith("a,b\n1,2\n 8\n")
    assert "sig=[signature]" in told["result"]["stdout"]
    assert store.kept["/out/result.csv"] == b"a,b\n1,2\n"
    again = await plane.execute("print(kept)\nfetch(kept.replace('/out/', '/no/'), 'x')")
    assert "TransferError" in again["result"]["stderr"]
    assert "answered 403" in again["result"]["stderr"]
    raised = await plane.execute(f"raise ValueError({source!r})")
    assert "ValueError" in raised["result"]["stderr"]
    decoded = await plane.execute("import urllib.parse; urllib.parse.unquote(kept)")
    elsewhere = await plane.execute(f"fetch('https://127.0.0.1:9/?sig={SECRET}', 'x')")
    assert "egress" in elsewhere["result"]["stderr"]
    seen = repr([told, again, raised, decoded, elsewhere]).encode() + caplog.text.encode()
    runtime.sessions.journal.commit()
    journal = b"".join(path.read_bytes() for path in runtime.settings.data_directory.glob("journal.sqlite*"))
    for spelling in SPELLINGS:
        assert spelling not in seen
        assert spelling not in journal


async def test_rest_brings_data_in_and_sends_files_out(plane: Plane, store: BlobStore) -> None:
    data = {"name": "hello.txt", "url": "data:text/plain;base64,aGVsbG8="}
    assert (await plane.ok("POST", "/files", json=data, params={"path": "sub"}))["sizeInBytes"] == 5
    sent = await plane.ok("POST", "/files/sub/hello.txt/send", json={"url": store.url("/out/hello.txt")})
    assert sent == {"name": "sub/hello.txt", "sizeInBytes": 5, "status": 201}
    assert store.kept["/out/hello.txt"] == b"hello"
    foreign = await plane.ask("POST", "/files/sub/hello.txt/send", json={"url": f"https://example.org/?sig={SECRET}"})
    assert "egress" in problem_in(foreign, 400, "InvalidRequest", "url")
    private = await plane.ask("POST", "/files", json={"name": "x", "url": store.url("/in/table.csv")})
    assert "a private address" in problem_in(private, 400, "InvalidRequest", "url")
    for fields, target in [
        ({"name": "x"}, "url"),
        ({"name": "../x", "url": "data:,1"}, "name"),
        ({"name": "x", "url": "data:;base64,%%%"}, "url"),
        ({"name": "x", "url": "ftp://x/"}, "url"),
        ({"url": "data:,1"}, "name"),
    ]:
        problem_in(await plane.ask("POST", "/files", json=fields), 400, "InvalidRequest", target)
    missing = await plane.ask("POST", "/files/missing/send", json={"url": store.url("/x")})
    problem_in(missing, 404, "SessionFileNotFound", "name")
    assert SECRET not in foreign.text + private.text + missing.text


async def test_a_session_that_may_reach_nothing_is_told_so_and_takes_data_urls(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("belljar")
    chosen = {"surfaces": ["foundry"], "api_keys": [f"ada:{KEY}"]}
    async with opened_runtime(default_environment, folder, **chosen) as runtime, opened_plane(runtime) as plane:
        told = await plane.execute(
            "from belljar_transfer import fetch, send\n"
            "print(fetch('data:,hello%20you', '/mnt/data/in.txt').read_text())\n"
            "send('in.txt', 'https://example.org/')"
        )
        assert told["result"]["stdout"] == "hello you\n"
        assert "egress allows no host" in told["result"]["stderr"]
        missing = await plane.execute("send('missing', 'https://example.org/')")
        assert "FileNotFoundError" in missing["result"]["stderr"]
        packages = await plane.execute("import warnings; warnings.simplefilter('ignore')\nimport pkg_resources, pip")
        assert packages["status"] == "Succeeded", packages
