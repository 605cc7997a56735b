"""Maps: pieces of code side by side, each in a fork of its own or a new session; here and over a server's socket."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import FORKS, Caller, connected, held, opened_runtime

from belljar.engine import map as maps
from belljar.engine.contract import Access, Engine, MapOptions
from belljar.engine.many import ManyEngine, servers_of
from belljar.engine.models import Piece
from belljar.environments import Environment
from belljar.errors import Busy, CopyRefused, InvalidArgument, SessionNotFound
from belljar.executions.outcome import SERVER_STOPPED
from belljar.journal.journal import KILLED
from belljar.models import MappedResult
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio

OWNER = Access("local")
STRANGER = Access("key:stranger")
LIMITS: dict[str, Any] = {"max_sessions": 8, "disk_mb": 50, "max_processes": 64, "memory_mb": 400}


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("maps"), **FORKS, **LIMITS) as opened:
        if gap := opened.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        yield opened


@pytest.fixture(scope="module")
async def agent(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with connected(runtime) as caller:
        yield caller


@pytest.fixture(params=["local", "remote"])
def engine(request: pytest.FixtureRequest, runtime: Runtime) -> Engine:
    return runtime.late_engine.get() if request.param == "local" else servers_of(runtime.settings.data_directory)


@pytest.fixture
async def session_id(runtime: Runtime, agent: Caller) -> AsyncGenerator[str]:
    """A session with a variable and a file; nothing else is open after the test."""
    made = (await agent.execute("x = [1]\nopen('f', 'w').write('one')")).session_id
    yield made
    for session in runtime.sessions.all():
        await runtime.sessions.clear(session.id, session.principal)


def pieces(*codes: str, keys: str = "") -> list[Piece]:
    return [Piece(code=code, key=f"{keys}{number}" if keys else "") for number, code in enumerate(codes)]


async def mapped(
    engine: Engine, given: list[Piece], session_id: str = "", access: Access = OWNER, **options: Any
) -> list[MappedResult]:
    with anyio.fail_after(120):
        async with aclosing(engine.map(access, given, session_id, MapOptions(**options))) as results:
            return [result async for result in results]


async def test_each_piece_runs_in_a_fork_of_its_own_that_is_gone_afterwards(
    engine: Engine, runtime: Runtime, session_id: str
) -> None:
    codes = [f"x.append({number})\nopen('f', 'a').write('{number}')\nx, open('f').read()" for number in range(12)]
    results = await mapped(engine, pieces(*codes), session_id, at_once=4)
    assert sorted(result.index for result in results) == [*range(12)]
    for result in results:
        number = result.index
        assert (result.result, result.session_id) == (f"([1, {number}], 'one{number}')", "")
    assert [session.id for session in runtime.sessions.all()] == [session_id]
    (listed,) = (await engine.sessions(OWNER, maps_filter())).items
    assert listed.session_id == session_id
    assert (await engine.session(OWNER, session_id)).forks == []


def maps_filter() -> Any:
    from belljar.engine.contract import SessionFilter

    return SessionFilter()


async def test_results_come_in_order_if_asked(engine: Engine, session_id: str) -> None:
    codes = ["import time; time.sleep(0.5); 'slow'", *map(str, range(5))]
    results = await mapped(engine, pieces(*codes), session_id, in_order=True, at_once=3)
    assert [(result.index, result.result) for result in results] == [
        (0, "'slow'"),
        *((number + 1, str(number)) for number in range(5)),
    ]


async def test_without_a_session_each_piece_has_a_new_one(engine: Engine, runtime: Runtime, session_id: str) -> None:
    results = await mapped(engine, pieces("'x' in globals()", "6 * 7"), in_order=True)
    assert [result.result for result in results] == ["False", "42"]
    assert [session.id for session in runtime.sessions.all()] == [session_id]


async def test_forks_are_kept_if_asked(engine: Engine, agent: Caller, session_id: str) -> None:
    results = await mapped(engine, pieces("x.append(2)", "x.append(3)"), session_id, keeps=True, in_order=True)
    told = [(await agent.execute("x", result.session_id)).result for result in results]
    assert told == ["[1, 2]", "[1, 3]"]
    assert {*(await engine.session(OWNER, session_id)).forks} == {result.session_id for result in results}


async def test_a_piece_that_was_kept_can_be_mapped_again(engine: Engine, session_id: str) -> None:
    codes = ("x.append(2); x", "import os; x.append(len(os.listdir('/proc/self/task'))); x")
    for before in ("[1", "[1, 2", "[1, 2, 2"):
        results = await mapped(engine, pieces(*codes), session_id, keeps=True, in_order=True)
        assert [result.result for result in results] == [f"{before}, 2]", f"{before}, 1]"]
        session_id = results[0].session_id


async def test_a_piece_with_a_key_runs_once(engine: Engine, runtime: Runtime, session_id: str, tmp_path: Path) -> None:
    # What each run draws is its own.
    codes, prefix = ["import uuid; str(uuid.uuid4())"] * 3, f"once-{type(engine).__name__}-"
    first = await mapped(engine, pieces(*codes, keys=prefix), session_id, in_order=True)
    again = await mapped(engine, pieces(*codes, "'new'", keys=prefix), session_id, in_order=True)
    assert [result.result for result in again] == [*(result.result for result in first), "'new'"]
    both = await asyncio.gather(
        *(mapped(engine, pieces(*codes, keys=f"{prefix}both-"), session_id, in_order=True) for _ in range(2))
    )
    assert [result.result for result in both[0]] == [result.result for result in both[1]]
    (other,) = await mapped(engine, [Piece(code="other", key=f"{prefix}0")], session_id)
    assert (other.status, other.execution_id) == ("rejected", "")
    assert "with other code before" in (other.error or "")


async def test_what_fails_in_one_piece_does_not_touch_the_others(engine: Engine, session_id: str) -> None:
    codes = [
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "import os; os._exit(3)",
        "import numpy; numpy.ones(2_000_000_000)",
        "open('big', 'wb').write(bytes(200_000_000))",
        "1/0",
        *["x"] * 4,
    ]
    results = await mapped(engine, pieces(*codes), session_id, in_order=True, at_once=5, timeout_s=3)
    assert [result.status for result in results[-4:]] == ["ok"] * 4
    assert not any(result.success for result in results[:6])
    assert (results[0].status, results[2].status, results[5].status) == ("timeout", "died", "error")


async def test_what_cannot_be_asked_is_refused_before_anything_runs(
    engine: Engine, runtime: Runtime, session_id: str
) -> None:
    for given, options in [
        (pieces(), {}),
        (pieces("1"), {"at_once": 0}),
        (pieces("1"), {"at_once": -1}),
        (pieces("1"), {"at_once": 10_000}),
        (pieces("1", "'\ud800'"), {}),
        (pieces("1", "#" * 2_000_000), {}),
        (pieces(*["1"] * 10_001), {}),
        (pieces("1"), {"timeout_s": 0}),
    ]:
        with pytest.raises(InvalidArgument):
            await mapped(engine, given, session_id, **options)
    for unknown in (session_id, "0" * 17):
        with pytest.raises(SessionNotFound):
            await mapped(engine, pieces("1"), unknown, access=STRANGER if unknown == session_id else OWNER)
    assert [session.id for session in runtime.sessions.all()] == [session_id]


async def test_a_busy_session_is_refused_and_one_that_ends_meanwhile_does_not_end_its_maps(
    engine: Engine, agent: Caller, session_id: str
) -> None:
    running = await agent.execute(held(), session_id, wait_s=0)
    with pytest.raises(Busy, match="unfinished execution"):
        await mapped(engine, pieces("x"), session_id)
    await engine.interrupt(OWNER, session_id)
    assert (await agent.ended(running.execution_id)).status == "interrupted"
    found: list[str | None] = []
    async with aclosing(engine.map(OWNER, pieces(*["x"] * 6), session_id, MapOptions(at_once=1))) as results:
        async for result in results:
            if not found:
                await engine.end(OWNER, session_id)
            found.append(result.result)
    assert found == ["[1]"] * 6


async def test_a_map_waits_for_room_and_gives_up_where_there_is_none(
    engine: Engine, runtime: Runtime, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A session, the map's fork of it, and six at once where twenty are asked for.
    results = await mapped(engine, pieces(*["x"] * 20), session_id, at_once=20)
    assert [result.result for result in results] == ["[1]"] * 20
    monkeypatch.setattr(maps, "PATIENCE_S", 0.0)
    held = [runtime.sessions.create("somebody") for _ in range(6)]
    for session in held:
        session.submit(maps_cell(runtime, "input()"))
    with pytest.raises(Busy, match="sessions are open"):
        await mapped(engine, pieces("x"), session_id)


def maps_cell(runtime: Runtime, code: str) -> Any:
    from belljar.executions.cell import make_cell

    return make_cell(runtime.settings, code, allow_input=True)


async def test_what_has_begun_goes_on_when_the_caller_leaves_and_nothing_else_begins(
    engine: Engine, runtime: Runtime, session_id: str, tmp_path: Path
) -> None:
    code, prefix = "import time; time.sleep(0.3); 'ran'", f"left-{type(engine).__name__}-"
    given = [Piece(code="'first'", key=f"{prefix}first"), *pieces(*[code] * 8, keys=prefix)]
    async with aclosing(engine.map(OWNER, given, session_id, MapOptions(at_once=2))) as results:
        async for _ in results:
            break
    await until(lambda: [session.id for session in runtime.sessions.all()] == [session_id])
    journal = runtime.sessions.journal
    known = [journal.find_key("local", f"{prefix}{number}") for number in range(8)]
    ran = [journal.find(one) for one in known if one is not None]
    assert len(ran) <= 3
    assert all(record and record.result and record.result.result == "'ran'" for record in ran)
    await mapped(engine, given, session_id, at_once=4)
    assert [journal.find_key("local", f"{prefix}{number}") for number in range(8)][: len(ran)] == known[: len(ran)]


@pytest.mark.parametrize("cause", [SERVER_STOPPED, f"{KILLED} while it ran"])
async def test_a_piece_that_was_lost_with_its_server_is_told_as_lost_and_runs_again_only_if_asked(
    runtime: Runtime, session_id: str, cause: str
) -> None:
    engine, journal, key = runtime.late_engine.get(), runtime.sessions.journal, f"lost-{len(cause)}-"
    (ran,) = await mapped(engine, pieces("x", keys=key), session_id)
    lost = {"status": "died", "state": "lost", "cause": cause, "error": cause, "success": False, "result": None}
    journal.finish(ran.model_copy(update=lost))
    (told,) = await mapped(engine, pieces("x", keys=key), session_id)
    assert (told.status, told.state, told.cause) == ("died", "lost", cause)
    (again,) = await mapped(engine, pieces("x", keys=key), session_id, retries_lost=True)
    assert (again.result, again.execution_id != ran.execution_id) == ("[1]", True)
    (known,) = await mapped(engine, pieces("x", keys=key), session_id, retries_lost=True)
    assert known.execution_id == again.execution_id


async def test_a_session_that_cannot_be_forked_is_refused_with_the_reason(engine: Engine, agent: Caller) -> None:
    session_id = (await agent.fields("new_session", environment="kernel:python3"))["session_id"]
    await agent.execute("x = 1", session_id)
    with pytest.raises(CopyRefused, match="kernel:python3 cannot be forked"):
        await mapped(engine, pieces("x"), session_id)
    await agent.fields("clear_session", session_id=session_id)


@pytest.mark.parametrize("in_order", [True, False])
async def test_new_sessions_are_shared_among_all_servers(
    runtime: Runtime, default_environment: Environment, tmp_path: Path, in_order: bool
) -> None:
    async with opened_runtime(default_environment, tmp_path, **FORKS, **LIMITS) as other:
        engines: dict[str, Engine] = {one.name: one.late_engine.get() for one in (runtime, other)}
        results = await mapped(ManyEngine(lambda: ready(engines)), pieces(*map(str, range(9))), in_order=in_order)
        assert sorted((result.index, result.result) for result in results) == [(n, str(n)) for n in range(9)]
        if in_order:
            assert [result.index for result in results] == [*range(9)]
        made = {result.execution_id[:3] for result in results}
        assert made == {runtime.sessions.journal.tag, other.sessions.journal.tag}
        # What has a key is asked of one server, which knows it.
        results = await mapped(ManyEngine(lambda: ready(engines)), pieces("1", "2", keys="shared-"))
        assert {result.execution_id[:3] for result in results} == {runtime.sessions.journal.tag}


async def ready(engines: dict[str, Engine]) -> dict[str, Engine]:
    return engines


async def test_a_session_that_sleeps_wakes_for_a_map_and_two_maps_of_one_do_not_mix(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with opened_runtime(default_environment, tmp_path, hibernate=True, **FORKS) as runtime:
        engine, sessions = runtime.late_engine.get(), runtime.sessions
        session = sessions.create("local")
        submitted = await engine.submit(OWNER, session.id, "x = 1")
        await engine.wait(OWNER, submitted.execution_id)
        await sessions.endings.hibernate(session, "was put to sleep")
        assert sessions.all() == []
        both = await asyncio.gather(
            *(mapped(engine, pieces(*[f"x + {one}"] * 4), session.id, at_once=2) for one in (1, 2))
        )
        assert [{result.result for result in results} for results in both] == [{"2"}, {"3"}]
        assert [each.id for each in sessions.all()] == [session.id]
