"""Who is none of a fleet's machines, or may not be passed anything on: said with its reason, and nobody is harmed."""

import asyncio
import json
import re
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import settings_for
from hosts import SECRET, Hosts, free_port, in_thread

from belljar.environments import Environment
from belljar.errors import Busy
from belljar.fleet import assertions
from belljar.fleet.addresses import Addresses
from belljar.fleet.assertions import ASSERTION, PROOF, FleetKey
from belljar.fleet.peer import Own
from belljar.fleet.peers import Peers
from waiting import until_blocking

pytestmark = pytest.mark.anyio
KEY = FleetKey(SECRET)
OWN = {"id": "a" * 32, "tag": "abc", "name": "1-aaaaaaaa", "version": "1.0", "digest": "same"}
THEIRS = {**OWN, "id": "b" * 32, "tag": "xyz", "name": "2-bbbbbbbb", "state": "ready", "sessions": 0, "room": 5}
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve) -> AsyncGenerator[int]:
    """A port at which somebody answers so."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request_of(reader: Reader) -> tuple[str, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.split(": ", 1) for line in lines if line)
    return first.split()[1], {name.lower(): value for name, value in headers.items()}


def answer(content: bytes, *more: tuple[bytes, bytes]) -> bytes:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in more)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n" % (len(content), lines) + content


def server_that_says(about: dict[str, Any] | bytes, key: FleetKey = KEY, settings: bytes = b"{}") -> Serve:
    content = about if isinstance(about, bytes) else json.dumps(about).encode()

    async def serve(reader: Reader, writer: Writer) -> None:
        while True:
            path, headers = await request_of(reader)
            said = headers[ASSERTION.decode()].encode()
            body = content if path == "/fleet/about" else settings
            writer.write(answer(body, (PROOF, key.proof(said, body))))
            await writer.drain()

    return serve


@asynccontextmanager
async def peers_of(environment: Environment, folder: Path, *ports: int) -> AsyncGenerator[Peers]:
    """What a server knows of the machines at these ports, after it has looked."""
    file = folder / "peers"
    file.write_text("".join(f"http://127.0.0.1:{port}\n" for port in ports))
    own = Own(folder, folder, OWN["name"], OWN["id"], OWN["tag"], OWN["version"], {"egress": "1"}, OWN["digest"])
    settings = settings_for(environment, folder, fleet_peers=f"file:{file}")
    peers = Peers(own, Addresses(settings), KEY)
    async with peers.watching():
        yield peers


async def judged(environment: Environment, folder: Path, serve: Serve) -> tuple[str, str, Peers]:
    """The state of one machine and the reason for it, once there is one."""
    async with listening(serve) as port, peers_of(environment, folder, port) as peers:
        with anyio.fail_after(20):
            while not (host := next(iter(peers.hosts.values()), None)) or not (
                host.refusal or host.about or host.misses
            ):
                await peers.look()
        await peers.look()
        return host.state, host.refusal, peers


async def test_a_machine_that_proves_itself_is_ready(default_environment: Environment, tmp_path: Path):
    state, why, peers = await judged(default_environment, tmp_path, server_that_says(THEIRS))
    assert (state, why) == ("ready", "")
    assert peers.id_of_tag("xyz") == THEIRS["id"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "2.0"}, "it runs version 2.0, and this server 1.0"),
        ({"digest": "other"}, "it differs in egress"),
        ({"tag": "abc"}, "its ids begin with abc as this server's do"),
        ({"id": OWN["id"]}, "it has a copy of this server's data directory"),
        ({"id": OWN["id"], "name": OWN["name"]}, "this server"),
    ],
)
async def test_a_machine_that_is_otherwise_is_listed_with_its_reason_and_gets_nothing(
    default_environment: Environment, tmp_path: Path, changed: dict[str, str], said: str
):
    serve = server_that_says({**THEIRS, **changed}, settings=b'{"egress": "2", "policy": "3"}')
    state, why, peers = await judged(default_environment, tmp_path, serve)
    assert state == "refused"
    assert why.startswith(said)
    assert not peers.ready
    assert peers.elected("any name") == OWN["id"]
    assert peers.freest(5, 0) is None
    if "version" in changed or "digest" in changed:
        with pytest.raises(Busy, match="nothing is passed on"):
            await peers.awaited(peers.id_of_tag("xyz"))


async def test_letters_that_two_have_drawn_are_drawn_anew_by_who_has_no_sessions(
    default_environment: Environment, tmp_path: Path
):
    with hosts_of_one_tag(default_environment, tmp_path) as hosts:
        hosts.start(1)
        async with hosts.client(1) as caller:
            held = await hosts.session_of(caller, 1)
            await caller.execute("kept = 42", held)
            hosts.start(2)
            await in_thread(hosts.see_each_other, 1, 2)
            async with hosts.client(2) as other:
                assert (await other.execute("kept", held)).result == "42"
                fresh = await hosts.session_of(other, 2)
            assert fresh[:3] != held[:3] == "faa"
            assert (await caller.execute("1 + 2", fresh)).result == "3"


async def test_letters_of_two_that_have_sessions_stay_and_both_say_what_to_do(
    default_environment: Environment, tmp_path: Path
):
    with hosts_of_one_tag(default_environment, tmp_path) as hosts:
        hosts.ports.update({1: free_port(), 2: free_port()})
        for number in (1, 2):
            hosts.write_list(hosts.inner_url(number))  # they do not know each other yet
            hosts.start(number)
            async with hosts.client(number) as caller:
                await hosts.session_of(caller, number)
        hosts.write_list()

        def said() -> list[str]:
            rows = [row for number in (1, 2) for row in hosts.status(number)[1:]]
            return [row["why"] for row in rows if row["state"] == "refused" and "faa" in row["why"]]

        assert (
            await in_thread(lambda: until_blocking(lambda: len(found := said()) == 2 and found))
            == [
                "its ids begin with faa as this server's do, and not one of both is without sessions: give one a new "
                "data_directory, and bring there what sleeps in the old one with belljar sessions import"
            ]
            * 2
        )


@contextmanager
def hosts_of_one_tag(environment: Environment, folder: Path) -> Generator[Hosts]:
    hosts = Hosts(environment, folder)
    try:
        for number in (1, 2):
            hosts.data_directory(number).mkdir(mode=0o711)
            with closing(sqlite3.connect(hosts.data_directory(number) / "journal.sqlite")) as journal:
                journal.execute("PRAGMA application_id = 6")
        yield hosts
    finally:
        hosts.close()


@pytest.mark.parametrize(
    "about", [b"null", b"{", b"[]", json.dumps({**THEIRS, "tag": "../"}).encode(), b"\xff" * 1_000, b"[" * 60_000]
)
async def test_a_proved_answer_that_makes_no_sense_is_refused(
    default_environment: Environment, tmp_path: Path, about: bytes
):
    state, why, _ = await judged(default_environment, tmp_path, server_that_says(about))
    assert (state, why) == ("refused", "it says of itself what this version does not understand")


async def test_another_key_and_another_service_are_told_from_machines_of_ours(
    default_environment: Environment, tmp_path: Path
):
    async def web_site(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(answer(b"<html>Welcome"))
        await writer.drain()

    for serve in (server_that_says(THEIRS, FleetKey("g" * 32)), web_site):
        state, why, peers = await judged(default_environment, tmp_path, serve)
        assert (state, why) == ("refused", "another service answers there, or a server with another fleet_key")
        assert not peers.ready


async def test_a_machine_that_answers_slowly_for_ever_too_much_or_not_at_all_holds_nothing_up(
    default_environment: Environment, tmp_path: Path
):
    sent = 0

    async def silent(reader: Reader, _: Writer) -> None:
        await reader.read(-1)

    async def endless_head(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: " + b"x" * 1_000 + b"\r\n")
            await writer.drain()

    async def ten_gigabytes(reader: Reader, writer: Writer) -> None:
        nonlocal sent
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
        while sent < 10_000_000_000:
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 65_536

    async def trickle(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        for byte in answer(b"x" * 1_000):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async def no_http(_: Reader, writer: Writer) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()

    async with (
        listening(silent) as one,
        listening(endless_head) as two,
        listening(ten_gigabytes) as three,
        listening(trickle) as four,
        listening(no_http) as five,
        listening(server_that_says(THEIRS)) as good,
        peers_of(default_environment, tmp_path, one, two, three, four, five, free_port(), good) as peers,
    ):
        with anyio.fail_after(20):
            while not peers.ready or any(host.misses < 1 for host in peers.hosts.values() if host.about is None):
                began = time.monotonic()
                await peers.look()
                assert time.monotonic() - began < 5
        assert [*peers.ready] == [THEIRS["id"]]
        assert {host.state for host in peers.hosts.values()} == {"ready", "starting"}
    assert sent < 100_000_000


async def test_clocks_that_are_apart_are_told(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hosts = Hosts(default_environment, tmp_path)
    try:
        await in_thread(hosts.start, 1)
        now = time.time
        monkeypatch.setattr(assertions.time, "time", lambda: now() + 600)
        async with peers_of(default_environment, tmp_path, hosts.ports[1]) as peers:
            with anyio.fail_after(20):
                while not peers.hosts or not (host := next(iter(peers.hosts.values()))).refusal:
                    await peers.look()
            assert re.fullmatch(r"the clocks of two machines are (599|600) s apart. Set them by NTP", host.refusal)
    finally:
        monkeypatch.undo()
        hosts.close()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            {"BELLJAR_FLEET_ADDRESS": "203.0.113.9:8100", "BELLJAR_TRUST_NETWORK": "true"},
            "fleet_address is 203.0.113.9:8100, and cannot listen on",
        ),
        ({"BELLJAR_SANDBOX": "process"}, "cannot be used in a fleet"),
        ({"BELLJAR_FLEET_KEY": "short"}, "it has 5 bytes"),
    ],
)
def test_a_server_that_can_be_no_machine_of_a_fleet_does_not_start_and_says_why(
    default_environment: Environment, tmp_path: Path, chosen: dict[str, str], said: str
):
    hosts = Hosts(default_environment, tmp_path)
    with pytest.raises(AssertionError) as ended:
        hosts.start(1, **chosen)
    assert said in str(ended.value)
    assert "hint: " in str(ended.value)
    assert "Traceback" not in str(ended.value)


async def test_machines_with_another_key_or_other_settings_serve_alone_and_say_so(
    default_environment: Environment, tmp_path: Path
):
    hosts = Hosts(default_environment, tmp_path)
    try:
        await in_thread(hosts.start, 1)
        hosts.ports |= {2: free_port(), 3: free_port()}
        hosts.write_list()
        hosts.data_directory(2).mkdir()
        hosts.data_directory(3).mkdir()
        await in_thread(lambda: hosts.start(2, BELLJAR_FLEET_KEY="g" * 32))
        await in_thread(lambda: hosts.start(3, BELLJAR_EGRESS="example.com:443"))
        await in_thread(
            until_blocking,
            lambda: hosts.states(1) == {hosts.inner_url(2): "refused", hosts.inner_url(3): "refused"},
        )
        why = {row["at"]: row["why"] for row in hosts.status(1)}
        assert why[hosts.inner_url(2)] == "another service answers there, or a server with another fleet_key"
        assert why[hosts.inner_url(3)] == "it differs in egress"
        for number in (1, 2, 3):
            async with hosts.client(number) as caller:
                assert (await caller.execute("6 * 7")).result == "42"
                assert len((await caller.fields("list_sessions"))["sessions"]) == 1
    finally:
        hosts.close()
