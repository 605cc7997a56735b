"""Several servers of a data directory as one engine."""

import socket
import sqlite3
from collections.abc import AsyncGenerator

import pytest
from calls import opened_runtime

from belljar.engine.contract import Access, Engine, SessionFilter
from belljar.engine.many import servers_of
from belljar.environments import Environment
from belljar.errors import BelljarError, QuestionNotFound
from belljar.runtime import Runtime

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
