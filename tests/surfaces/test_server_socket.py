"""The socket of a server, by which its user's commands and console reach it, and what nobody may say over TCP."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from calls import Caller, connected, opened_runtime

from belljar import ipc
from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.engine.remote import RemoteEngine, ServerGone
from belljar.environments import Environment
from belljar.errors import EngineError, FileMissing, InvalidPath
from belljar.request_headers import SPEAKER_HEADERS
from belljar.runtime import Runtime
from belljar.servers import HTTP_SOCKET
from live_server import live_server
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    # Deeper than the 107 bytes that an address of a socket holds.
    deep = tmp_path_factory.mktemp("reached") / ("d" * 90)
    deep.mkdir()
    async with opened_runtime(default_environment, deep) as opened:
        yield opened


@pytest.fixture(scope="module")
async def agent(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with connected(runtime) as caller:
        yield caller


def socket_of(runtime: Runtime) -> Path:
    return runtime.settings.data_directory / "runs" / runtime.name / HTTP_SOCKET


@asynccontextmanager
async def asking(runtime: Runtime) -> AsyncGenerator[httpx2.AsyncClient]:
    with ipc.reachable(socket_of(runtime)) as address:
        transport = httpx2.AsyncHTTPTransport(uds=address, verify=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://belljar/api/v1") as client:
            yield client


async def test_only_the_servers_user_can_open_it(runtime: Runtime) -> None:
    path = socket_of(runtime)
    assert len(os.fsencode(path)) > 107
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


async def test_who_says_nothing_asks_as_the_operator_and_who_says_a_name_sees_what_that_name_may(
    runtime: Runtime, agent: Caller
) -> None:
    session_id = await agent.new_session()
    async with asking(runtime) as client:
        assert (await client.get(f"/sessions/{session_id}")).json()["session_id"] == session_id
        own = {"Belljar-Principal": "local", "Belljar-Name": "Ann%C3%A9"}
        assert (await client.get(f"/sessions/{session_id}", headers=own)).status_code == 200
        other = {"Belljar-Principal": "key:stranger"}
        assert (await client.get(f"/sessions/{session_id}", headers=other)).status_code == 404
        operator = other | {"Belljar-Operator": "1"}
        assert (await client.get(f"/sessions/{session_id}", headers=operator)).status_code == 200
        queued = await client.post(f"/sessions/{session_id}/executions", json={"code": "1"}, headers=own)
        entry = await client.get(f"/executions/{queued.json()['execution_id']}")
        assert entry.json()["author"] == "Anné"


@pytest.mark.parametrize(
    "said",
    [
        [("Belljar-Principal", "")],
        [("Belljar-Principal", "local"), ("Belljar-Principal", "key:other")],
        [("Belljar-Principal", "p" * 1_001)],
        [("Belljar-Principal", "local"), ("Belljar-Operator", "yes")],
        [("Belljar-Principal", "local"), ("Belljar-Via", "dream")],
        [("Belljar-Principal", "local"), ("Belljar-Name", "a%1B[2Jb")],
        [("Belljar-Principal", "local%00")],
        [("Belljar-Operator", "%0A")],
    ],
)
async def test_what_is_said_of_who_asks_is_checked(runtime: Runtime, said: list[tuple[str, str]]) -> None:
    async with asking(runtime) as client:
        refused = await client.get("/sessions", headers=said)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid-argument")
        assert (await client.get("/sessions")).status_code == 200


async def test_bad_requests_are_refused_in_words_and_the_server_goes_on(runtime: Runtime, agent: Caller) -> None:
    session_id = await agent.new_session()
    async with asking(runtime) as client:
        path = f"/sessions/{session_id}"
        for body in (b"{", b"[]", b'{"code": 1}', b'{"code": "1", "timeout_s": -1}', b"\xff\xfe", b"[" * 100_000):
            assert (await client.post(f"{path}/executions", content=body)).status_code == 400, body[:20]
        many = b'{"code": "1", "x": [' + b"0," * 2_000_000 + b"0]}"
        assert (await client.post(f"{path}/executions", content=many)).status_code in (400, 413)
        for query in ("executions?limit=0", "executions?limit=x", "blocks?size=-1", "executions?cursor=%00"):
            assert (await client.get(f"{path}/{query}")).status_code == 400, query
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.patch("/sessions")).status_code == 405
        assert (await client.get(f"{path}/executions")).json()["items"] == []


async def test_noise_and_half_a_request_disturb_nobody(runtime: Runtime) -> None:
    halves: list[socket.socket] = []
    for sent in (b"\x00\x01\x02\r\n\r\n", b"GET /api/v1/sess", b'{"op": "sessions"}\n'):
        half = socket.socket(socket.AF_UNIX)
        ipc.connect(half, socket_of(runtime))
        half.send(sent)
        halves.append(half)
    async with asking(runtime) as client:
        assert (await client.get("/health")).status_code == 200
    for half in halves:
        half.close()


async def test_a_hundred_callers_at_once_are_all_answered(runtime: Runtime) -> None:
    engine = servers_of(runtime.settings.data_directory)
    answers = await asyncio.gather(*(engine.health(Access("local", is_operator=True)) for _ in range(100)))
    assert {answer.servers[0].name for answer in answers} == {runtime.name}


async def test_names_of_files_reach_the_session_as_they_are(runtime: Runtime, agent: Caller) -> None:
    engine, me = servers_of(runtime.settings.data_directory), Access("local")
    session_id = await agent.new_session()
    for name in ("a b.txt", "täglich/ü?.csv", "100%25.bin", "x#y&z=1", "..."):
        content = name.encode() * 3
        await engine.write_file(me, session_id, name, content)
        part = await engine.read_part(me, session_id, name, 1, 4)
        assert (part.content, part.size) == (content[1:5], len(content)), name
        assert (await engine.read_part(me, session_id, name, 0, 0)).content == b""
        assert (await engine.read_part(me, session_id, name, 10_000, 5)).content == b""
        await engine.delete_file(me, session_id, name)
    for outside in ("../other", "a/../../b", "./.", "/etc/passwd"):
        with pytest.raises((InvalidPath, FileMissing)):
            await engine.read_part(me, session_id, outside, 0, 5)


async def test_a_server_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "1-aaaa"
    run.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        ipc.bind(left, run / HTTP_SOCKET)  # as a server that was killed leaves it
    with pytest.raises(ServerGone):
        await RemoteEngine(run / HTTP_SOCKET).health(Access("local"))
    engine = servers_of(tmp_path)
    with pytest.raises(EngineError, match="no running server answers"):
        await engine.health(Access("local"))
    with pytest.raises(EngineError, match="no running server answers"):
        await engine.session(Access("local"), "0" * 32)


async def test_a_reader_who_leaves_a_stream_leaves_nothing_behind(runtime: Runtime) -> None:
    async with asking(runtime) as client, client.stream("GET", "/events") as stream:
        assert stream.status_code == 200
        before = len(asyncio.all_tasks())

    async def is_over() -> bool:
        return len(asyncio.all_tasks()) < before

    await until(is_over)


async def test_over_tcp_nobody_says_for_whom_they_ask(default_environment: Environment, tmp_path: Path) -> None:
    with live_server(tmp_path, default_environment.python) as url:
        async with httpx2.AsyncClient(base_url=url.removesuffix("/mcp")) as client:
            for path in ("/mcp", "/api/v1/sessions", "/console", "/health"):
                for header in SPEAKER_HEADERS:
                    refused = await client.get(path, headers={header: "local"})
                    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "forged-speaker"), path
            assert (await client.get("/health")).status_code == 200


@asynccontextmanager
async def made_up_server(folder: Path, status: str, body: str, kind: str = "application/json") -> AsyncGenerator[Path]:
    """A server of another version, which gives this answer to whatever it is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        writer.close()

    path = folder / "other.sock"
    with ipc.reachable(path) as address:
        async with await asyncio.start_unix_server(answer, address):
            yield path


async def test_what_a_newer_server_tells_more_is_passed_over(tmp_path: Path) -> None:
    server = '{"name": "1-a", "pid": 1, "sessions": 0, "mood": "good"}'
    health = '{"status": "ready", "checks": {}, "gauges": {}, "limits": {}, "version": "9", "more": 1, '
    async with made_up_server(tmp_path, "200 OK", health + f'"servers": [{server}]}}') as path:
        assert (await RemoteEngine(path).health(Access("local"))).servers[0].name == "1-a"


async def test_events_that_only_a_newer_server_knows_are_passed_over(tmp_path: Path) -> None:
    events = (
        'event: session\nid: 1-a:1\ndata: {"id": "1-a:1", "kind": "session", "session_id": "s", "mood": "good"}\n\n'
        'event: weather\nid: 1-a:2\ndata: {"id": "1-a:2", "kind": "weather"}\n\n'
        'event: usage\nid: 1-a:3\ndata: {"id": "1-a:3", "kind": "usage"}\n\n'
    )
    async with made_up_server(tmp_path, "200 OK", events, "text/event-stream") as path:
        told = [item.kind async for item in RemoteEngine(path).server_events(Access("local"))]
    assert told == ["session", "usage"]


@pytest.mark.parametrize(
    ("status", "body"), [("200 OK", '{"status": "ready"}'), ("200 OK", "[[["), ("404 Not Found", "Not Found")]
)
async def test_a_server_that_answers_in_another_form_is_named_as_of_another_version(
    tmp_path: Path, status: str, body: str
) -> None:
    async with made_up_server(tmp_path, status, body) as path:
        with pytest.raises(EngineError) as refused:
            await RemoteEngine(path).health(Access("local"))
    assert "restart the older ones" in refused.value.hint
