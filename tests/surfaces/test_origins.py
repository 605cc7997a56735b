"""Forks, rewinds, sleep and takeover for sessions of every origin: each has its variables and its files afterwards."""

import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from calls import Caller, connected, opened_runtime, text_of
from keep_alive_servers import ServerRun, kept_directory

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import Runtime
from belljar.sessions import checkpoints
from waiting import until

pytestmark = pytest.mark.anyio

MAKE = "x = [1]\nopen('f', 'w').write('one')"
SPOIL = "x.append(2)\nopen('f', 'w').write('two')\nopen('g', 'w').close()"
LOOK = "x, open('f').read(), __import__('os').path.exists('g')"
GOOD, SPOILED = "([1], 'one', False)", "([1, 2], 'two', True)"
HOW = "'runner' in open('/proc/self/cmdline').read().split('\\0')"
# When the process started, by a clock that the host and the sandbox share.
SINCE = "int(open('/proc/self/stat').read().rpartition(')')[2].split()[19]) / __import__('os').sysconf('SC_CLK_TCK')"
ORIGINS = ["cold", "early", "pooled", "forked", "woken", "rewound"]
# Those that differ most in what holds their processes; the others go through everything under one server, and here in
# long runs.
TAKEN_OVER = {"cold", "forked"}
if "BELLJAR_SOAK" in os.environ:
    ORIGINS.append("fork of a fork")
    TAKEN_OVER |= {"pooled", "woken", "rewound"}


@dataclass
class Place:
    """An engine that forks sessions, one that does not, and a session from before the first could."""

    forking: Runtime
    cold: Runtime
    early: str


@asynccontextmanager
async def engine(environment: Environment, folder: Path, **chosen: object) -> AsyncGenerator[Runtime]:
    async with opened_runtime(
        environment, folder, hibernate=True, sweep_interval_s=3600, preload=[], **chosen
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    one, other = tmp_path_factory.mktemp("forking"), tmp_path_factory.mktemp("cold")
    async with engine(default_environment, one, fork_start=True, pool_size=1) as forking, connected(forking) as caller:
        if gap := forking.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        # Started before there is a warm process, so cold, and in a sandbox in which others can be nested.
        early = (await caller.execute(MAKE)).session_id
        assert (await caller.execute(HOW, early)).result == "True"
        assert await forking.starter.wait_until_warm(forking.settings.environment)
        async with engine(default_environment, other, pool_size=0) as cold:
            yield Place(forking, cold, early)
        for session in forking.sessions.all():
            await forking.sessions.clear(session.id, "local")


async def hibernate(runtime: Runtime, session_id: str) -> None:
    """Let its time be over."""
    session = runtime.sessions.get(session_id, "local")
    session.lease._idle_s = 0.0  # pyright: ignore[reportPrivateUsage]

    async def is_swept() -> bool:
        return session_id in await runtime.sessions.sweep()

    await until(is_swept)


async def session_from(origin: str, place: Place, caller: Caller, runtime: Runtime) -> str:
    """A session that has run `MAKE`."""
    if origin == "early":
        return place.early
    if origin == "pooled":
        await until(lambda: len(runtime.sessions.pool))
        return await session_from_pool(caller)
    session_id = (await caller.execute(MAKE)).session_id
    if origin in ("forked", "fork of a fork"):
        for _ in range(1 if origin == "forked" else 2):
            session_id = (await caller.fields("fork_session", session_id=session_id))["session_id"]
    elif origin == "woken":
        await hibernate(runtime, session_id)
    elif origin == "rewound":
        await caller.execute(SPOIL, session_id)
        await caller.fields("rewind_session", session_id=session_id, to=1)
    return session_id


async def session_from_pool(caller: Caller) -> str:
    """A session that has run `MAKE`, and whose kernel was there before anybody asked for it."""
    asked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    session_id = (await caller.execute(MAKE)).session_id
    assert float((await caller.execute(SINCE, session_id)).result or "inf") < asked_at
    return session_id


@pytest.mark.parametrize("origin", ORIGINS)
async def test_a_session_of_every_origin_is_rewound_forked_and_put_to_sleep(place: Place, origin: str) -> None:
    runtime = place.cold if origin == "cold" else place.forking
    async with connected(runtime) as caller:
        session_id = await session_from(origin, place, caller, runtime)
        await go_through_everything(caller, runtime, session_id, can_fork=origin != "cold")


async def go_through_everything(caller: Caller, runtime: Runtime, session_id: str, *, can_fork: bool = True) -> None:
    """Rewind a session that has run `MAKE`, let it die, fork it and put it to sleep."""
    spoiling = await caller.execute(SPOIL, session_id)
    await caller.fields("rewind_session", session_id=session_id, to=spoiling.execution_id)
    again = await caller.execute(LOOK, session_id)
    assert (again.result, again.state) == (GOOD, "kept")
    # What had held the earlier kernel may be gone only now.
    deadly = await caller.execute("import os\nos.kill(os.getpid(), 9)", session_id)
    assert deadly.status == "died"
    await caller.fields("rewind_session", session_id=session_id, to=deadly.execution_id)
    assert (await caller.execute(LOOK, session_id)).result == GOOD

    if not can_fork:
        refusal = await caller.refusal("fork_session", session_id=session_id)
        assert "fork_start is false" in refusal
    else:
        late = await caller.execute(SPOIL, session_id)
        for at, seen in (("", SPOILED), (late.execution_id, GOOD)):
            fork = (await caller.fields("fork_session", session_id=session_id, at=at))["session_id"]
            assert (await caller.execute(LOOK, fork)).result == seen
            await caller.execute("x.clear()\nopen('f', 'w').close()", fork)
            await caller.fields("clear_session", session_id=fork)
        await caller.fields("rewind_session", session_id=session_id, to=late.execution_id)
    assert (await caller.execute(LOOK, session_id)).result == GOOD

    await hibernate(runtime, session_id)
    assert session_id not in {session.id for session in runtime.sessions.all()}
    woken = await caller.execute(LOOK, session_id)
    assert (woken.result, woken.state) == (GOOD, "kept")
    await caller.fields("clear_session", session_id=session_id)


async def test_a_session_of_every_origin_outlives_a_server_that_was_killed(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as runtime, connected(runtime) as caller:
        asleep = (await caller.execute(MAKE)).session_id
    directories = kept_directory(default_environment, tmp_path)
    directory = next(directories)
    with directory.server(BELLJAR_POOL_SIZE="1", BELLJAR_PRELOAD="json", BELLJAR_HIBERNATE="true") as server_run:
        async with server_run.client() as client:
            sessions = await sessions_of_every_origin(Caller(client), server_run, asleep)
        server_run.kill()
    lasting: dict[str, object] = {"keep_alive": True, "keep_alive_s": 60, "pool_size": 0}
    async with (
        engine(default_environment, tmp_path, fork_start=True, **lasting) as runtime,
        connected(runtime) as caller,
    ):
        for origin, (session_id, since) in sessions.items():
            found = await caller.execute(f"{LOOK}, {SINCE}", session_id)
            assert (found.result, found.state) == (f"{GOOD[:-1]}, {since})", "kept"), origin
            if origin in TAKEN_OVER:
                await go_through_everything(caller, runtime, session_id)
            else:
                await caller.fields("clear_session", session_id=session_id)
        directory.look()
    # Not `until_empty`: the other engines of this process have control groups too.
    await until(lambda: not (directory.look() or directory.supervisors()))
    for _ in directories:
        pass


async def sessions_of_every_origin(caller: Caller, server_run: ServerRun, asleep: str) -> dict[str, tuple[str, str]]:
    """Sessions that have run `MAKE`, and since when their kernels run."""
    sessions = {"cold": (await caller.execute(MAKE)).session_id}
    assert (await caller.execute(HOW, sessions["cold"])).result == "True"
    await server_run.until_ready()
    await server_run.until_measured("belljar_pool_ready 1.0")
    sessions["pooled"] = await session_from_pool(caller)
    sessions["forked"] = (await caller.fields("fork_session", session_id=sessions["pooled"]))["session_id"]
    woken = await caller.execute(LOOK, asleep)
    assert (woken.result, woken.state) == (GOOD, "kept")
    sessions["woken"] = asleep
    sessions["rewound"] = (await caller.execute(MAKE)).session_id
    spoiling = await caller.execute(SPOIL, sessions["rewound"])
    await caller.fields("rewind_session", session_id=sessions["rewound"], to=spoiling.execution_id)
    return {
        origin: (session_id, (await caller.execute(SINCE, session_id)).result or "")
        for origin, session_id in sessions.items()
    }


DEADLY = """
import os
open('gate', 'w').write('open')
def pass_through():
    if open('gate').read() == 'shut': os._exit(3)
os.register_at_fork(after_in_child=pass_through)
"""


async def test_an_earlier_state_that_cannot_be_woken_leaves_the_session_as_it_was(place: Place) -> None:
    async with connected(place.cold) as caller:
        session_id = (await caller.execute(f"{MAKE}\n{DEADLY}")).session_id
        spoiling = await caller.execute(SPOIL, session_id)
        last = await caller.execute("y = 1", session_id)
        await caller.fields("upload_file", session_id=session_id, name="gate", text="shut")
        refusal = await caller.refusal("rewind_session", session_id=session_id, to=spoiling.execution_id)
        assert "could not be woken" in refusal
        assert "The session is as it was before the rewind" in refusal
        await caller.fields("upload_file", session_id=session_id, name="gate", text="open")
        after = await caller.execute(f"{LOOK}, y", session_id)
        assert (after.result, after.state) == (f"{SPOILED[:-1]}, 1)", "kept")
        assert after.execution_count == (last.execution_count or 0) + 1
        await caller.fields("rewind_session", session_id=session_id, to=spoiling.execution_id)
        assert (await caller.execute(LOOK, session_id)).result == GOOD
        await caller.fields("clear_session", session_id=session_id)


async def test_cells_that_follow_each_other_at_once_can_be_undone_one_by_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MIN_INTERVAL_S", 60.0)  # however slow this machine is
    async with connected(place.cold) as caller:
        session_id = (await caller.execute("x = []")).session_id
        session = place.cold.sessions.get(session_id, "local")
        ran = [session.submit(make_cell(session.settings, f"x.append({number})")) for number in range(4)]
        await ran[-1].wait(60)
        await caller.fields("rewind_session", session_id=session_id, to=ran[-1].id)
        assert (await caller.execute("x", session_id)).result == "[0, 1, 2]"
        many = [session.submit(make_cell(session.settings, "x.append(0)")) for _ in range(checkpoints.BURST)]
        await many[-1].wait(60)
        answer = await caller.call("get_execution", execution_id=many[-1].id)
        assert "undone" not in text_of(answer), "it is said to those who want to undo it"
        refusal = await caller.refusal("rewind_session", session_id=session_id, to=many[-1].id)
        assert refusal.startswith("no-checkpoint: ")
        assert checkpoints.TOO_FAST in refusal
        advised = refusal.partition('"')[2].partition('"')[0]
        between = [one.id for one in many].index(advised)
        count = len(many) - 1 - between
        assert f"undoes it with {'the one' if count == 1 else f'the {count}'} before it" in refusal
        rewound = await caller.fields("rewind_session", session_id=session_id, to=advised)
        assert rewound["undone"] == [one.id for one in many[between:]]
        await caller.fields("clear_session", session_id=session_id)


THREADS = """
import threading
stop, threads = threading.Event(), []
def fill(most):
    while len(threads) < most:
        thread = threading.Thread(target=stop.wait, daemon=True)
        try: thread.start()
        except RuntimeError: break
        threads.append(thread)
fill(200)
room = len(threads)
stop.set()
for thread in threads: thread.join()
stop.clear(); threads.clear()
"""


async def test_a_copy_that_finds_no_room_among_the_processes_harms_nobody(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes two forks: either of them may be the one that is refused."""
    monkeypatch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
    async with (
        engine(default_environment, tmp_path, pool_size=0, max_processes=40) as runtime,
        connected(runtime) as caller,
    ):
        session_id = (await caller.execute(THREADS)).session_id
        if (await caller.execute("room", session_id)).result == "200":
            pytest.skip("processes are not counted here")
        for left in (2, 1):
            await refuse_copies(caller, session_id, left)


async def refuse_copies(caller: Caller, session_id: str, left: int) -> None:
    filled = await caller.execute(
        f"stop.clear(); threads.clear(); fill(room - {left}); x = [1]\nlen(threads) > 20", session_id
    )
    assert filled.result == "True"
    spoiling = await caller.execute(SPOIL, session_id)
    assert (spoiling.status, spoiling.state) == ("ok", "kept")
    assert "too_many_processes" not in str(spoiling.cause), "what we were refused is not the cell's doing"
    refusal = await caller.refusal("rewind_session", session_id=session_id, to=spoiling.execution_id)
    assert "leaves no room for a copy" in refusal
    assert (await caller.execute("x", session_id)).result == "[1, 2]"
    await caller.execute("stop.set()\nfor thread in threads: thread.join()", session_id)
    spoiling = await caller.execute("x.clear()", session_id)
    await caller.fields("rewind_session", session_id=session_id, to=spoiling.execution_id)
    assert (await caller.execute("x", session_id)).result == "[1, 2]"
