"""Several servers of a data directory as one engine."""

import sqlite3
from collections.abc import AsyncGenerator

import pytest
from calls import opened_runtime

from belljar.engine.contract import Access, Engine, SessionFilter
from belljar.engine.many import servers_of
from belljar.environments import Environment
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
