"""Messages over UNIX sockets, and every server of ours that reads them from peers who may send anything."""

import asyncio
import contextlib
import errno
import json
import os
import select
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from belljar import ipc
from belljar.control import ServerAnswer, ask_servers
from belljar.environments import Environment
from belljar.http.server_socket import open_reachable_runtime
from belljar.inside.supervisor.packets import MAX_DESCRIPTORS, PACKET_BYTES, Unreceived, receive
from belljar.provisioning.request_server import PackageReply, open_package_server
from belljar.supervisor.client import GONE, SupervisorConnection
from belljar.toolbox.broker import Broker, ToolCatalogue
from belljar.toolbox.fair_share import FairShares
from belljar.toolbox.session_server import SearchMessage, open_tool_server
from shared_environment import settings_with
from waiting import until

pytestmark = pytest.mark.anyio

DEADLINE_S = 30
LIMIT_BYTES = 4_096
JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(), inner, max_size=4),
    max_leaves=20,
)
SEARCH = b'{"id": 1, "op": "search", "query": "x"}\n'
PACKAGES = b'{"requirements": ["house"]}\n'
SESSIONS = b'{"op": "sessions"}\n'
HOSTILE = [
    b"",
    b"\n",
    b"\n" * 10_000,
    b"\0\n",
    b"{",
    b"{}\n",
    b"[]\n",
    b"null\n",
    b'{"op": "attach"}\n',
    b'{"op": "attach", "session_id": 5}\n',
    b'{"op": "open", "environment": []}\n',
    b'{"op": "sessions", "op": "nothing"}\n',
    b'{"op": NaN, "id": Infinity, "requirements": [NaN]}\n',
    b'{"id": 1e999, "op": "search", "query": "x"}\n',
    b'{"id": -1, "op": "search", "query": "x"}\n',
    b'{"id": ' + b"9" * 10_000 + b', "op": "search", "query": "x"}\n',
    b'{"id": 1, "op": "call", "server": "", "tool": "", "arguments": {"x": ' + b"9" * 4_200 + b"}}\n",
    b'{"id": 1, "op": "search", "query": "\\ud800"}\n',
    b'{"requirements": ["\\udfff\\ud800"]}\n',
    b'"\xed\xa0\x80"\n',
    b"\xff\xfe\n",
    b"[" * 60_000 + b"\n",
    b'{"op":' * 5_000 + b"\n",
    b'{"id": 1, "op": "cancel"}\n' * 50,
    b'{"number": 1, "request": {"op": "end"}}\n',
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    SEARCH[:-1],
    PACKAGES[:-1],
    SESSIONS[:-1],
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


# Addresses


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    folder = tmp_path / ("long" * 30) / ("longer" * 20)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_path_may_be_longer_than_an_address(deep: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
        ipc.bind(listener, deep / "socket")
        listener.listen()
        ipc.connect(sock, deep / "socket")
        assert ipc.peer_of(sock) == ipc.PeerProcess(os.getpid(), os.geteuid())


@pytest.mark.parametrize("wanted", [0o600, 0o666])
@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_a_socket_has_its_mode_whatever_the_umask_is(
    umask: Callable[[int], object], tmp_path: Path, mask: int, wanted: int
) -> None:
    umask(mask)
    with socket.socket(socket.AF_UNIX) as listener:
        ipc.bind(listener, tmp_path / "socket", wanted)
    assert mode(tmp_path / "socket") == wanted


def test_a_socket_is_private_from_its_first_moment(umask: Callable[[int], object], tmp_path: Path) -> None:
    class Watched(socket.socket):
        seen = 0

        def bind(self, address: Any, /) -> None:
            super().bind(address)
            self.seen = mode(Path(address))

    umask(0)
    with Watched(socket.AF_UNIX) as listener:
        ipc.bind(listener, tmp_path / "socket")
        assert listener.seen == 0o600


def test_a_link_that_takes_a_sockets_place_changes_the_mode_of_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch(0o600)

    class Swapped(socket.socket):
        def bind(self, address: Any, /) -> None:
            super().bind(address)
            Path(address).unlink()
            Path(address).symlink_to(victim)

    with Swapped(socket.AF_UNIX) as listener:
        ipc.bind(listener, tmp_path / "socket", 0o666)
    assert mode(victim) == 0o600


def test_a_socket_that_was_left_is_replaced_only_on_demand(tmp_path: Path) -> None:
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as listener:
            ipc.bind(listener, tmp_path / "socket", replaces=True)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="in use"):
        ipc.bind(listener, tmp_path / "socket")


def test_a_link_to_a_socket_of_the_hosts_is_not_followed(deep: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
        ipc.bind(listener, deep / "socket")
        listener.listen()
        (deep / "link").symlink_to("socket")
        with pytest.raises(OSError, match="non-socket") as refused:
            ipc.connect_unlinked(sock, deep / "link")
        assert refused.value.errno == errno.ENOTSOCK
        ipc.connect_unlinked(sock, deep / "socket")


# Lines


@given(
    whole=some.lists(some.binary(max_size=3 * LIMIT_BYTES).map(lambda line: line.replace(b"\n", b"")), max_size=6),
    rest=some.binary(max_size=100),
    cuts=some.lists(some.integers(0, 20 * LIMIT_BYTES), max_size=20),
)
def test_lines_are_the_same_wherever_they_are_cut(whole: list[bytes], rest: bytes, cuts: list[int]) -> None:
    rest = rest.replace(b"\n", b"")
    data = b"".join(line + b"\n" for line in whole) + rest
    lines = ipc.Lines(LIMIT_BYTES)
    found = [line for piece in pieces(data, cuts) for line in lines.feed(piece)]
    assert found == [
        ipc.Overlong(LIMIT_BYTES, line[:1_024], line[-1_024:]) if len(line) > LIMIT_BYTES else line for line in whole
    ]
    assert lines.size == len(rest)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


# Messages


async def streams() -> tuple[ipc.MessageStream, ipc.MessageStream]:
    return cast(
        "tuple[ipc.MessageStream, ipc.MessageStream]",
        tuple(
            [
                ipc.MessageStream(*await asyncio.open_unix_connection(sock=sock, limit=LIMIT_BYTES))
                for sock in socket.socketpair()
            ]
        ),
    )


@given(messages=some.lists(JSON, max_size=5))
async def test_messages_arrive_as_they_were_sent(messages: list[Any]) -> None:
    ours, theirs = await streams()
    try:
        for message in messages:
            await ours.send(message)
            assert await theirs.receive(json.loads) == message
    finally:
        ours.close()
        theirs.close()


async def test_half_a_character_does_not_cost_the_message() -> None:
    ours, theirs = await streams()
    await ours.send({"name": "a\ud800b"})
    assert await theirs.receive(json.loads) == {"name": "a?b"}
    ours.close()
    with pytest.raises(ConnectionResetError):
        await theirs.receive(json.loads)
    theirs.close()


@given(
    data=some.binary(max_size=2_000) | some.sampled_from([b"x" * LIMIT_BYTES * 3, *HOSTILE]),
    cuts=some.lists(some.integers(0, 2_000), max_size=5),
)
async def test_whatever_a_peer_sends_is_a_message_or_malformed_or_the_end(data: bytes, cuts: list[int]) -> None:
    sock, other = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=other, limit=LIMIT_BYTES)
    stream = ipc.MessageStream(reader, writer)

    async def write() -> None:
        for piece in pieces(data, cuts):
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(sock, piece)
        sock.shutdown(socket.SHUT_WR)

    sock.setblocking(False)
    writing = asyncio.create_task(write())
    count = 0
    try:
        async with asyncio.timeout(DEADLINE_S):
            ended = None
            while ended is None:
                try:
                    await stream.receive(json.loads)
                    count += 1
                except (ipc.Malformed, ConnectionResetError) as error:
                    ended = error
    finally:
        stream.close()
        await asyncio.gather(writing, return_exceptions=True)
        sock.close()
    assert count <= data.count(b"\n")
    is_complete = data.endswith(b"\n") or not data
    assert isinstance(ended, ipc.Malformed) or is_complete


async def test_no_more_than_one_message_waits_for_a_peer_that_does_not_read() -> None:
    ours, theirs = await streams()
    message = "x" * 1_000_000
    waiting = [asyncio.create_task(ours.send(message)) for _ in range(20)]
    await asyncio.sleep(0)
    assert ours._writer.transport.get_write_buffer_size() <= len(message) + 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    ours.close()
    theirs.close()


# Every server that reads messages


@dataclass(frozen=True)
class Served:
    path: Path
    check: Callable[[], Awaitable[bool]]
    """Whether a peer that means well is served."""


@pytest.fixture(scope="module", params=["operators", "packages", "tools"])
async def served(
    request: pytest.FixtureRequest, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    kind = cast("str", request.param)
    async with contextlib.AsyncExitStack() as stack:
        if kind == "operators":
            spared = {"fork_start": False, "pool_size": 0, "checkpoints": 0}
            given_ = settings_with(data_directory=folder, environment=str(default_environment.python), **spared)
            await stack.enter_async_context(open_reachable_runtime(given_))
            (path,) = folder.glob("runs/*/http.sock")

            async def check() -> bool:
                return await ask_servers(folder) == [ServerAnswer(os.getpid(), [])]

        elif kind == "packages":
            path = folder / kind

            async def fulfil(_: object) -> PackageReply:
                return PackageReply(lines=["installed"])

            await stack.enter_async_context(open_package_server(folder, kind, session_id="session", fulfil=fulfil))

            async def check() -> bool:
                return json.loads(await said_to(path, PACKAGES))["lines"] == ["installed"]

        else:
            path = folder / kind

            async def find(_: SearchMessage) -> dict[str, Any]:
                return {"outcome": "found"}

            broker = Broker("session", cast("ToolCatalogue", None), limit_bytes=1_000)
            await stack.enter_async_context(
                open_tool_server(folder, kind, broker=broker, find=find, folder_inside="/", paces=FairShares())
            )

            async def check() -> bool:
                reader, writer = await asyncio.open_unix_connection(str(path))
                writer.write(SEARCH)
                answer = await reader.readline()
                writer.close()
                return json.loads(answer) == {"id": 1, "outcome": "found"}

        yield Served(path, check)


async def said_to(path: Path, *parts: bytes, descriptors: list[int] | None = None) -> bytes:
    """What a server says to these bytes, and then to the end, until it hangs up."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.setblocking(False)
        answer = b""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                if descriptors:
                    socket.send_fds(sock, [parts[0][:1] or b"\n"], descriptors)
                    parts = (parts[0][1:], *parts[1:])
                for part in parts:
                    await loop.sock_sendall(sock, part)
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while chunk := await loop.sock_recv(sock, 65_536):
                    answer += chunk
    return answer


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_hostile_message_is_answered_or_hung_up_on_and_the_next_peer_served(
    served: Served, data: bytes
) -> None:
    await said_to(served.path, data)
    assert await served.check()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    line=some.sampled_from([SEARCH, PACKAGES, SESSIONS]),
    noise=some.binary(max_size=50),
    place=some.integers(0, 50),
    dropped=some.integers(0, 10),
    cuts=some.lists(some.integers(0, 150), max_size=5),
)
async def test_a_message_that_is_cut_and_mangled_harms_nobody_else(
    served: Served, line: bytes, noise: bytes, place: int, dropped: int, cuts: list[int]
) -> None:
    mangled = line[:place] + noise + line[place + dropped :]
    await said_to(served.path, *pieces(mangled, cuts))
    assert await served.check()


@pytest.mark.parametrize("data", [SEARCH, PACKAGES, SESSIONS, b"x\n", b"x"])
async def test_descriptors_that_nobody_asked_for_are_closed(served: Served, data: bytes) -> None:
    before = open_descriptors()
    reading, writing = os.pipe()
    await said_to(served.path, data, descriptors=[writing] * 100)
    os.close(writing)
    assert is_hung_up(reading)
    os.close(reading)
    assert await served.check()
    await until(lambda: open_descriptors() <= before, limit_s=DEADLINE_S)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def is_hung_up(reading: int) -> bool:
    """Whether nobody holds the other end of a pipe any more."""
    poll = select.poll()
    poll.register(reading, 0)
    return bool(poll.poll(DEADLINE_S * 1_000))


# Packets with descriptors


@pytest.fixture
def packets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
        yield ours, theirs


def test_a_packet_that_is_too_long_is_refused_and_its_descriptors_closed(
    packets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = packets
    reading, writing = os.pipe()
    socket.send_fds(theirs, [b"x" * (PACKET_BYTES + 1)], [writing])
    os.close(writing)
    with pytest.raises(Unreceived) as refused:
        receive(ours)
    assert refused.value.errno == errno.EMSGSIZE
    assert is_hung_up(reading)
    os.close(reading)


def test_as_many_descriptors_as_a_packet_holds_arrive_and_no_exec_passes_them_on(
    packets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = packets
    socket.send_fds(theirs, [b"x"], [0] * MAX_DESCRIPTORS)
    packet, descriptors = receive(ours)
    assert (packet, len(descriptors)) == (b"x", MAX_DESCRIPTORS)
    assert not any(map(os.get_inheritable, descriptors))
    for descriptor in descriptors:
        os.close(descriptor)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=some.lists(
        some.binary(min_size=1, max_size=200) | some.sampled_from([b"[" * 90_000, b"{}", b"5"]), max_size=4
    ),
    asked=some.integers(0, 4),
    count=some.integers(0, 3),
)
def test_whatever_a_supervisor_says_every_question_has_an_answer_and_nothing_stays_open(
    said: list[bytes], asked: int, count: int
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    exchange = SupervisorConnection(ours)
    questions = [exchange.ask({"op": "attend"}) for _ in range(asked)]
    for packet in said:
        with contextlib.suppress(OSError):  # it has hung up already
            socket.send_fds(theirs, [packet], [writing] * count)
    os.close(writing)
    theirs.close()
    for question in questions:
        words, descriptors = question.result(DEADLINE_S)
        assert isinstance(words, dict)
        for descriptor in descriptors:
            os.close(descriptor)
    exchange.wait(DEADLINE_S)
    exchange.close()
    assert is_hung_up(reading)
    os.close(reading)


def test_a_supervisor_that_is_gone_is_known_to_be_with_the_first_word_to_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    exchange = SupervisorConnection(ours)
    theirs.close()
    answer, _ = exchange.ask({"op": "attend"}).result(DEADLINE_S)
    assert (answer, exchange.is_over) == ({"error": GONE}, True)
    exchange.close()
