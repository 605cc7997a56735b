"""Several servers of a data directory as one engine."""

import asyncio
import socket
import sqlite3
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream
from calls import opened_runtime

from belljar import ipc
from belljar.engine.contract import Access, Engine, MapOptions, SessionFilter
from belljar.engine.many import ManyEngine, servers_of
from belljar.engine.models import Piece
from belljar.engine.remote import RemoteEngine
from belljar.environments import Environment
from belljar.errors import BelljarError, QuestionNotFound, SessionNotFound
from belljar.runtime import Runtime
from belljar.servers import http_sockets

pytestmark = pytest.mark.anyio

OPERATOR = Access("local", is_operator=True)


@pytest.fixture
async def servers(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[tuple[Runtime, Runtime]]:
    place = tmp_path_factory.mktemp("many")
    async with (
        opened_runtime(default_environment, place, fork_start=False) as one,
        opened_runtime(default_environment, place, fork_start=False) as other,
    ):
        yield one, other


async def listed(engine: Engine, wanted: SessionFilter, limit: int) -> list[str]:
    """Return the ids of all sessions that pages of this size tell, in order."""
    page = await engine.sessions(OPERATOR, wanted, limit=limit)
    found = [entry.session_id for entry in page.items]
    while page.next:
        page = await engine.sessions(OPERATOR, wanted, page.next, limit)
        assert len(page.items) <= limit
        found += [entry.session_id for entry in page.items]
    return found


async def test_pages_tell_each_session_once_though_all_were_made_in_one_millisecond(
    servers: tuple[Runtime, Runtime],
) -> None:
    engines = [server.late_engine.get() for server in servers]
    made = [(await engine.create(OPERATOR)).session_id for engine in (*engines, *engines, *engines)]
    await engines[0].sessions(OPERATOR, SessionFilter())  # writes what the journal has gathered
    await engines[1].sessions(OPERATOR, SessionFilter())
    settings = servers[0].settings
    with sqlite3.connect(settings.data_directory / "journal.sqlite", timeout=10) as journal:
        for number, session_id in enumerate(made):
            at = 1_700_000_000.0005 + number / 1_000_000
            journal.execute("UPDATE sessions SET created_at = ? WHERE id = ?", (at, session_id))
    many = servers_of(settings.data_directory)
    for limit in (1, 2, 5, 6):
        assert await listed(many, SessionFilter(), limit) == made[::-1]


async def test_pages_of_one_state_miss_nothing_that_is_behind_sessions_of_another(
    servers: tuple[Runtime, Runtime],
) -> None:
    one, other = (server.late_engine.get() for server in servers)
    oldest = await other.create(OPERATOR)
    older = await one.create(OPERATOR)
    newest = await one.create(OPERATOR)
    ran = await one.submit(OPERATOR, newest.session_id, "1", wait_s=60)
    assert ran.progress is not None
    assert ran.progress.status == "ok"
    many = servers_of(servers[0].settings.data_directory)
    assert await listed(many, SessionFilter(state="fresh"), 1) == [older.session_id, oldest.session_id]


@contextmanager
def frozen_servers(folder: Path, count: int) -> Generator[None]:
    """Servers that take connections and answer nothing, as those that are stopped; all others come after them."""
    with ExitStack() as stack:
        for number in range(count):
            run = folder / "runs" / f"0-frozen{number}"
            run.mkdir()
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            ipc.bind(silent, run / "http.sock")
            silent.listen()
        yield


async def test_frozen_neighbours_cost_one_wait_and_no_sum_of_them(servers: tuple[Runtime, Runtime]) -> None:
    folder = servers[0].settings.data_directory
    made = [await server.late_engine.get().create(OPERATOR) for server in servers]
    with frozen_servers(folder, 4), anyio.fail_after(40):  # asked one after another, each verb would wait 80 s
        many = servers_of(folder, patience_s=20)
        for entry in made:
            assert (await many.session(OPERATOR, entry.session_id)).session_id == entry.session_id
            ran = await many.submit(OPERATOR, entry.session_id, "'here'", wait_s=60)
            assert ran.progress is not None
            assert ran.progress.result is not None
            assert ran.progress.result.result == "'here'"
            assert (await many.result(OPERATOR, ran.execution_id)).result == "'here'"
            async with aclosing(many.follow(OPERATOR, entry.session_id)) as told:
                assert await anext(told)
        assert {entry.session_id for entry in (await many.sessions(OPERATOR, SessionFilter())).items} == {
            entry.session_id for entry in made
        }
        assert [server.is_answering for server in await many.servers(OPERATOR)].count(False) == 4
        assert await many.create(OPERATOR)
        pieces = [Piece(code=str(number)) for number in range(4)]
        assert {result.result async for result in many.map(OPERATOR, pieces)} == {"0", "1", "2", "3"}


@pytest.mark.parametrize("verb", ["session", "delete_file"])
async def test_what_a_frozen_server_may_have_is_not_said_to_be_nowhere(
    servers: tuple[Runtime, Runtime], verb: str
) -> None:
    folder = servers[0].settings.data_directory
    with frozen_servers(folder, 4), anyio.fail_after(15):
        more = ["a.txt"] if verb == "delete_file" else []
        with pytest.raises(BelljarError, match="4 of 6 servers did not answer in time") as refused:
            await getattr(servers_of(folder, patience_s=20), verb)(OPERATOR, "0" * 32, *more)
    assert refused.value.code == "server-silent"


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n\r\n[", b"HTTP/1.1 500 Broken\r\n\r\nno", b"no HTTP"])
async def test_a_server_that_talks_nonsense_disturbs_no_other_one(
    servers: tuple[Runtime, Runtime], said: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    folder = servers[0].settings.data_directory
    made = [await server.late_engine.get().create(OPERATOR) for server in servers]
    run = folder / "runs" / "0-odd"
    run.mkdir()
    with ipc.reachable(run / "http.sock") as address:
        async with await asyncio.start_unix_server(answer, address):
            many = servers_of(folder)
            for entry in made:
                assert (await many.session(OPERATOR, entry.session_id)).session_id == entry.session_id
                assert await many.submit(OPERATOR, entry.session_id, "1")
            assert len((await many.sessions(OPERATOR, SessionFilter())).items) == 2


@pytest.mark.parametrize("retries", [False, True])
async def test_pieces_of_a_server_that_is_lost_and_no_others_are_told_as_lost_or_run_elsewhere(
    servers: tuple[Runtime, Runtime], tmp_path: Path, retries: bool
) -> None:
    one, other = servers
    (beside,) = [
        path for path in http_sockets(one.settings.data_directory) if path.parent.name == other.sessions.records.run
    ]

    async def pass_on(caller: ByteStream) -> None:
        """Answer as the other server does, until it has told one piece of a map."""
        with ipc.reachable(beside) as address:
            there = await anyio.connect_unix(address)
        async with caller, there, anyio.create_task_group() as copying:
            copying.start_soon(_copy, caller, there)
            await _copy(there, caller, b'"index"')
            copying.cancel_scope.cancel()

    async def places() -> dict[str, Engine]:
        return {"one": one.late_engine.get(), "other": RemoteEngine(tmp_path / "http.sock")}

    with ipc.reachable(tmp_path / "http.sock") as address:
        async with await anyio.create_unix_listener(address) as listener, anyio.create_task_group() as serving:
            serving.start_soon(listener.serve, pass_on)
            options = MapOptions(at_once=2, in_order=True, retries_lost=retries)
            pieces = [Piece(code=str(number)) for number in range(6)]
            told = [result async for result in ManyEngine(places).map(OPERATOR, pieces, options=options)]
            serving.cancel_scope.cancel()
    assert [result.index for result in told] == [*range(6)]
    lost = [] if retries else [3, 5]
    assert [result.index for result in told if result.state == "lost"] == lost
    assert [result.result for result in told] == [None if number in lost else str(number) for number in range(6)]


async def _copy(source: ByteStream, target: ByteStream, until: bytes = b"") -> None:
    async for piece in source:
        await target.send(piece)
        if until and until in piece:
            return


async def test_what_moved_to_another_server_is_found_there(servers: tuple[Runtime, Runtime]) -> None:
    one, other = (server.late_engine.get() for server in servers)
    names = {"one": one, "other": other}

    async def places() -> dict[str, Engine]:
        return dict(names)

    many = ManyEngine(places)
    made = await one.create(OPERATOR)
    assert await many.submit(OPERATOR, made.session_id, "1", wait_s=60)
    names["one"], names["other"] = other, one  # what was remembered is wrong now
    assert (await many.session(OPERATOR, made.session_id)).session_id == made.session_id
    del names["other"]
    with pytest.raises(SessionNotFound):
        await many.session(OPERATOR, made.session_id)


async def test_a_server_that_is_silent_may_have_taken_an_answer_and_is_named_before_those_that_know_no_such_question(
    servers: tuple[Runtime, Runtime],
) -> None:
    folder = servers[0].settings.data_directory / "runs" / "0-silent"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)  # the whole path may be longer than a socket's address can be
            silent.bind("http.sock")
        silent.listen()
        many = servers_of(servers[0].settings.data_directory, patience_s=1)
        with pytest.raises(BelljarError) as refused:
            await many.answer(OPERATOR, "nothing", "accept", {})
    assert refused.value.code == "server-silent"
    assert "look before you repeat it" in refused.value.hint
    with pytest.raises(QuestionNotFound):
        await servers_of(servers[0].settings.data_directory).answer(OPERATOR, "nothing", "accept", {})


async def test_cells_of_all_servers_are_searched_and_told_once(servers: tuple[Runtime, Runtime]) -> None:
    engines = [server.late_engine.get() for server in servers]
    ran = [(await engine.submit(OPERATOR, "", "wombat = 1", wait_s=60)).execution_id for engine in (*engines, *engines)]
    many = servers_of(servers[0].settings.data_directory)
    page = await many.search(OPERATOR, "wombat", limit=3)
    rest = await many.search(OPERATOR, "wombat", page.next or "")
    assert [cell.execution_id for cell in (*page.items, *rest.items)] == ran[::-1]
    assert [cell.execution_id for cell in (await engines[0].search(OPERATOR, "wombat")).items] == [ran[2], ran[0]]
