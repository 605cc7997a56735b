"""Sessions in a store: what one data directory puts to sleep there, another one wakes, with all that is theirs."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import Caller, connected, opened_runtime

from belljar.environments import Environment
from belljar.errors import Busy, SessionNotFound
from belljar.journal.run_records import RunRecord, RunRecords, StepRecord
from belljar.runtime import Runtime
from belljar.sessions.stored import StoredSessions
from waiting import until

pytestmark = pytest.mark.anyio

KEY = "k" * 40
MAKE = """
import threading
numbers, lock = [*range(10)], threading.Lock()
def double(): return 2 * sum(numbers)
open("notes.txt", "w").write("kept")
print("said")
"""
LOOK = "(double(), open('notes.txt').read())"
SEEN = "(90, 'kept')"


@asynccontextmanager
async def server(
    environment: Environment, folder: Path, store: Path | str, **chosen: Any
) -> AsyncGenerator[tuple[Runtime, Caller]]:
    """A server with a data directory of its own, and a store that it shares: a folder, or a bucket by its URL."""
    folder.mkdir(exist_ok=True)
    if isinstance(store, Path):
        store.mkdir(exist_ok=True)
        store = f"file://{store}"
    values = {
        "hibernate": True,
        "sweep_interval_s": 3600,
        "session_idle_s": 0.001,
        "store": store,
        "store_key": KEY,
    }
    async with (
        opened_runtime(environment, folder, **values | chosen) as runtime,
        connected(runtime) as caller,
    ):
        yield runtime, caller


@asynccontextmanager
async def two_servers(
    environment: Environment, folder: Path, **chosen: Any
) -> AsyncGenerator[tuple[Runtime, Caller, Runtime, Caller]]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(server(environment, folder / "one", folder / "store", **chosen))
        other = await stack.enter_async_context(server(environment, folder / "other", folder / "store", **chosen))
        yield *one, *other


def stored(runtime: Runtime) -> StoredSessions:
    assert runtime.sessions.stored is not None
    return runtime.sessions.stored


async def put(runtime: Runtime) -> None:
    """Until all that is idle sleeps, and is in the store."""
    await until(runtime.sessions.sweep)
    await until(lambda: not any(stored(runtime).waiting().values()))
    await stored(runtime).settle()


def names(store: Path) -> list[str]:
    return sorted(path.name.partition(".")[2][-6:] for path in store.glob("sessions/*/*"))


async def test_a_session_that_sleeps_is_woken_by_a_server_elsewhere_with_all_that_is_its_own(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, other, elsewhere):
        made = await caller.execute(MAKE)
        await put(one)
        assert names(tmp_path / "store") == ["bundle", "head"]
        woken = await elsewhere.execute(LOOK, made.session_id)
        assert (woken.status, woken.result, woken.lost) == ("ok", SEEN, ["lock"])
        assert woken.execution_count == 2
        assert "lock (_thread.lock)" in woken.output[0]
        assert (await elsewhere.get(made.execution_id)).stdout == "said\n"
        refused = await caller.execute(LOOK, made.session_id)
        assert "is open at another server" in str(refused.error)
        await elsewhere.execute("numbers.append(100)", made.session_id)
        await put(other)
        back = await caller.execute(LOOK, made.session_id)
        assert (back.result, back.execution_count) == ("(290, 'kept')", 4)
        assert len([*(tmp_path / "store").glob("sessions/*/*.bundle")]) == 1, "only the latest bundle is kept"


async def test_a_session_that_is_woken_where_it_slept_reads_nothing_from_the_store(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with server(default_environment, tmp_path / "one", tmp_path / "store") as (runtime, caller):
        made = await caller.execute(MAKE)
        await put(runtime)
        for bundle in (tmp_path / "store").glob("sessions/*/*.bundle"):
            bundle.unlink()
        assert (await caller.execute(LOOK, made.session_id)).result == SEEN


async def test_of_many_that_wake_one_session_at_two_servers_one_server_does(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, _other, elsewhere):
        made = await caller.execute("count = 0")
        await put(one)
        results = await asyncio.gather(
            *(each.execute("count += 1", made.session_id) for each in (caller, elsewhere) for _ in range(5))
        )
        done = [[result.status == "ok" for result in results[start : start + 5]] for start in (0, 5)]
        assert sorted(map(all, done)) == [False, True], "at one of them, all"
        assert sorted(map(any, done)) == [False, True], "at the other, none"
        refused = [result for result in results if result.status != "ok"]
        assert all("another server" in str(result.error) for result in refused)
        winner = caller if all(done[0]) else elsewhere
        assert (await winner.execute("count", made.session_id)).result == "5"
        owners = [*(tmp_path / "store").glob("sessions/*/*.owner")]
        assert len(owners) == 1


async def test_a_cleared_session_is_gone_from_the_store_and_at_every_server(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, _other, elsewhere):
        made = await caller.execute(MAKE)
        await put(one)
        await elsewhere.call("clear_session", session_id=made.session_id)
        await until(lambda: names(tmp_path / "store") == ["owner"])
        refused = await caller.execute(LOOK, made.session_id)
        assert "was cleared" in str(refused.error)
        assert not (tmp_path / "one" / "sessions" / made.session_id).exists()


async def test_another_owners_session_in_the_store_is_answered_as_an_unknown_one(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, other, _):
        made = await caller.execute(MAKE)
        await put(one)
        unknown = other.sessions.journal.new_id()
        said: list[str] = []
        for session_id in (made.session_id, unknown):
            with pytest.raises(SessionNotFound) as refused:
                await other.sessions.reach(session_id, "somebody else")
            said.append(str(refused.value).replace(session_id, "ID"))
        assert said[0] == said[1]
        assert names(tmp_path / "store") == ["bundle", "head"], "nothing was claimed"


async def test_a_store_that_is_away_leaves_sessions_on_disk_where_they_wake_and_are_put_later(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (runtime, caller):
        first, second = await caller.execute(MAKE), await caller.execute("second = 1")
        store.rmdir() if not any(store.iterdir()) else store.rename(tmp_path / "away")
        await until(runtime.sessions.sweep)
        await until(lambda: stored(runtime).waiting()["failing"] == 2)
        assert "does not exist" in stored(runtime).problem
        assert (await caller.execute(LOOK, first.session_id)).result == SEEN
        store.mkdir()
        stored(runtime).put_later()
        await until(lambda: stored(runtime).waiting() == {"queued": 0, "failing": 0, "too_large": 0})
        assert [path.name for path in store.glob("sessions/*")] == [second.session_id]


async def test_a_session_in_a_store_that_is_away_is_woken_by_nobody_until_it_is_back(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (runtime, caller):
        made = await caller.execute(MAKE)
        await put(runtime)
        store.rename(tmp_path / "away")
        with pytest.raises(Busy, match="is asked of the store, which cannot be used now"):
            await runtime.sessions.reach(made.session_id, "local")
        (tmp_path / "away").rename(store)
        assert (await caller.execute(LOOK, made.session_id)).result == SEEN


async def test_a_session_that_is_too_large_for_a_bundle_sleeps_where_it_is(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with server(default_environment, tmp_path / "one", tmp_path / "store", bundle_mb=1) as (runtime, caller):
        made = await caller.execute("import os\nopen('noise', 'wb').write(os.urandom(2_000_000)) and None")
        await until(runtime.sessions.sweep)
        await until(lambda: stored(runtime).waiting()["too_large"] == 1)
        again = await caller.execute("os.remove('noise')", made.session_id)
        assert again.status == "ok"
        await put(runtime)
        assert names(tmp_path / "store") == ["bundle", "head"]


async def test_a_server_that_stops_puts_its_sessions_and_one_elsewhere_goes_on(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with server(default_environment, tmp_path / "one", tmp_path / "store") as (_, caller):
        made = await caller.execute(MAKE)
    async with server(default_environment, tmp_path / "other", tmp_path / "store") as (_, caller):
        assert (await caller.execute(LOOK, made.session_id)).result == SEEN


async def test_a_lost_server_s_session_goes_on_from_its_latest_bundle_when_that_is_wanted(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, other, elsewhere):
        made = await caller.execute(MAKE)
        await put(one)
        await caller.execute("numbers.clear()", made.session_id)
        session = await other.sessions.go_on(made.session_id, "local")
        assert session.id == made.session_id
        assert (await elsewhere.execute(LOOK, made.session_id)).result == SEEN
        # The server that was taken for lost comes back: what it had is not put over what goes on.
        await until(one.sessions.sweep)
        await until(lambda: not any(stored(one).waiting().values()))
        refused = await caller.execute(LOOK, made.session_id)
        assert "another server" in str(refused.error)
        await put(other)
        assert (await caller.execute(LOOK, made.session_id)).result == SEEN


async def test_a_session_without_a_sleep_has_nothing_in_the_store(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with server(default_environment, tmp_path / "one", tmp_path / "store") as (_, caller):
        await caller.execute("1")
        assert not (tmp_path / "store" / "sessions").exists()
        await anyio.sleep(0)


async def test_a_server_that_ended_between_its_claim_and_the_bundle_goes_on_when_it_is_back(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (one, caller):
        made = await caller.execute(MAKE)
        await put(one)
        async with server(default_environment, tmp_path / "other", store) as (other, elsewhere):
            claimed = asyncio.Event()

            async def stop_there(*_: object) -> None:
                claimed.set()
                await asyncio.Event().wait()

            # As if it were killed: nothing that follows its claim happens.
            monkeypatch.setattr(stored(other), "_take", stop_there)
            call = asyncio.create_task(elsewhere.execute(LOOK, made.session_id))
            await claimed.wait()
            call.cancel()
            for task in stored(other)._tasks:
                task.cancel()
        assert "open at another server" in str((await caller.execute(LOOK, made.session_id)).error)
        async with server(default_environment, tmp_path / "other", store) as (_, elsewhere):
            assert (await elsewhere.execute(LOOK, made.session_id)).result == SEEN


async def test_a_bundle_that_was_changed_in_the_store_wakes_nothing_and_is_nobodys_fault(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, _, elsewhere):
        made = await caller.execute(MAKE)
        await put(one)
        (bundle,) = (tmp_path / "store").glob("sessions/*/*.bundle")
        whole = bundle.read_bytes()
        for changed in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
            bundle.write_bytes(changed)
            refused = str((await elsewhere.execute(LOOK, made.session_id)).error)
            assert "altered or cut" in refused or "cut off" in refused or "none of belljar's" in refused
        bundle.unlink()
        assert "is missing in the store" in str((await elsewhere.execute(LOOK, made.session_id)).error)
        bundle.write_bytes(whole)
        assert (await elsewhere.execute(LOOK, made.session_id)).result == SEEN


async def test_a_server_with_another_key_neither_reads_nor_writes_the_store(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store) as (one, caller):
        made = await caller.execute(MAKE)
        await put(one)
    before = sorted(store.rglob("*"))
    async with server(default_environment, tmp_path / "other", store, store_key="x" * 40) as (other, caller):
        own = await caller.execute("1")
        await until(other.sessions.sweep)
        await until(lambda: stored(other).waiting()["failing"] == 1)
        assert "has another key" in stored(other).problem
        assert (await caller.execute(LOOK, made.session_id)).status == "rejected"
        assert (await caller.execute("2", own.session_id)).result == "2"
    assert sorted(store.rglob("*")) == before


async def test_what_nobody_used_for_keep_days_goes_from_the_store_and_is_gone_everywhere(
    default_environment: Environment, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    async with server(default_environment, tmp_path / "one", store, keep_days=1) as (runtime, caller):
        old, late = await caller.execute(MAKE), await caller.execute("late = 1")
        await put(runtime)
        left = [store / "sessions" / runtime.sessions.journal.new_id() / "0000000001.abcd.bundle"]
        left[0].parent.mkdir()
        left[0].write_text("of a server that was killed before its head")
        for path in [*store.glob(f"sessions/{old.session_id}/*"), *left]:
            os.utime(path, (path.stat().st_mtime - 2 * 86_400,) * 2)
        await stored(runtime).sweep()
        assert not left[0].exists()
        assert [path.suffix for path in store.glob(f"sessions/{old.session_id}/*")] == [".owner"]
        assert "expired" in str((await caller.execute(LOOK, old.session_id)).error)
        assert (await caller.execute("late", late.session_id)).result == "1"


async def test_everything_of_the_journal_travels_names_and_workflow_runs_too(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with two_servers(default_environment, tmp_path) as (one, caller, other, elsewhere):
        session = await one.identified.reach("my-name", "local")
        made = await caller.execute("print('said')", session.id, idempotency_key="once")
        await caller.call("install_dependencies", session_id=session.id, packages=["no-such-package-here"])
        run = RunRecord("run1", "local", "name", "text", "{}", "", "d", "{}", session.id, "", "waiting", started_at=1.0)
        records = RunRecords(one.sessions.journal, one.name)
        records.enter(run)
        records.put("run1", StepRecord("steps[0]", 1, "done", session_id=session.id, value="7", began_at=1.0))
        await put(one)
        woken = await elsewhere.execute("1", session.id)
        assert woken.status == "ok"
        assert other.sessions.journal.find_key("local", "once") == made.execution_id
        assert (await other.identified.reach("my-name", "local")).id == session.id
        copied = RunRecords(other.sessions.journal, other.name)
        assert (copied.find("run1") or run).session_id == session.id
        assert [step.value for step in copied.steps("run1")] == ["7"]
        with pytest.raises(Busy, match="is open at another server"):
            await one.sessions.own(session.id, "local")  # so no run of its goes on there
