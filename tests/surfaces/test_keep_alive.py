"""Sessions whose processes outlive their server: killed or stopped, the next one goes on with their variables."""

import os
import signal
import sqlite3
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import Caller, connected, held, opened_runtime, until_said
from keep_alive_servers import KeptDirectory, ServerRun, kept_directory

from belljar.distribution import own_version
from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.supervisor import client, open_supervisor
from belljar.supervisor.deposit_format import FORM, read, written
from left_deposits import PRESENT, as_left, kind_of, left_by, shape
from serving_process import COLD, alive
from waiting import until

pytestmark = pytest.mark.anyio

RESUMED = "its server ended while it ran; it went on under the next one"


@pytest.fixture
def directory(default_environment: Environment, tmp_path: Path) -> Generator[KeptDirectory]:
    yield from kept_directory(default_environment, tmp_path)


# One server is killed at its busiest, and the next one looked at from all sides.

FLOOD = r"""
from IPython.display import display
import itertools, os
print('flooding', flush=True)
for number in itertools.count():
    print('x' * 100, number)
    if number % 50 == 0: display({'image/png': 'A' * 400_000}, raw=True)
    if os.path.exists('enough'): break
print('\nthe last line')
flooded = number
"""


@dataclass
class TakenOver:
    """The second server, and what the first one was at when it was killed."""

    server_run: ServerRun
    directory: KeptDirectory
    idle: ExecutionResult
    running: ExecutionResult
    waiting: ExecutionResult
    flooding: ExecutionResult
    early: ExecutionResult
    jupyter: ExecutionResult
    rewindable: tuple[ExecutionResult, ExecutionResult]


@pytest.fixture(scope="module")
def taken_over(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[TakenOver]:
    directories = kept_directory(default_environment, tmp_path_factory.mktemp("kept"))
    directory = next(directories)
    with directory.server() as first:
        results = anyio.run(make_busy, first)
        first.kill()
    with directory.server() as second:
        yield TakenOver(second, directory, *results)
    for _ in directories:
        pass


async def make_busy(server_run: ServerRun) -> list[Any]:
    async with server_run.client() as client:
        caller = Caller(client)
        idle = await caller.execute("import threading\nlock, x = threading.Lock(), 1\nprint('said')")
        early = await caller.execute("y = 1")
        made = await caller.fields("new_session", environment="kernel:python3")
        jupyter = await caller.execute("y = 1", made["session_id"])
        await server_run.until_ready()  # a session that is forked can be rewound
        one = await caller.execute("steps = [1]\nopen('file', 'w').write('one')")
        two = await caller.execute("steps.append(2)\nopen('file', 'w').write('two')", one.session_id)
        await until_rewindable(caller, one.session_id, states=2)
        running = await caller.execute(f"z = 1\n{held()}print('went on')\nz += 1\nz", wait_s=0)
        await until_told(caller, running, "held")
        waiting = await caller.execute("z = 'never'", running.session_id, wait_s=0)
        flooding = await caller.execute(FLOOD, wait_s=0)
        await until_flooded(caller, flooding)
        return [idle, running, waiting, flooding, early, jupyter, (one, two)]


async def until_rewindable(caller: Caller, session_id: str, *, states: int) -> None:
    async def has_states() -> bool:
        listed = (await caller.fields("list_sessions"))["sessions"]
        return [one["checkpoints"] for one in listed if one["session_id"] == session_id] == [states]

    await until(has_states)


async def until_told(caller: Caller, execution: ExecutionResult, text: str) -> None:
    async def is_told() -> bool:
        return text in (await caller.get(execution.execution_id, wait_s=0)).stdout

    await until(is_told)


async def until_flooded(caller: Caller, execution: ExecutionResult) -> None:
    async def is_flooded() -> bool:
        return (await caller.get(execution.execution_id, wait_s=0)).sequence >= 20

    await until(is_flooded)


async def test_a_session_that_was_idle_has_everything_in_memory(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        assert (await caller.get(taken_over.idle.execution_id)).stdout == "said\n"
        again = await caller.execute("x += 1\n(x, lock.locked())", taken_over.idle.session_id)
        assert (again.status, again.result, again.state, again.execution_count) == ("ok", "(2, False)", "kept", 2)
        (listed,) = [
            one
            for one in (await caller.fields("list_sessions"))["sessions"]
            if one["session_id"] == taken_over.idle.session_id
        ]
        assert (listed["executions"], listed["last_status"]) == (2, "ok")


async def test_a_cell_that_ran_goes_on_to_its_end_and_says_what_happened(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        seen = await caller.get(taken_over.running.execution_id, wait_s=0)
        assert (seen.status, seen.stdout) == ("running", "held\n")
        waiting = await caller.get(taken_over.waiting.execution_id)
        assert (waiting.status, waiting.state) == ("rejected", "kept")
        assert waiting.cause == "its server ended without notice before its turn came; it never ran"
        await caller.release(taken_over.running.session_id)
        done = await caller.ended(taken_over.running.execution_id)
        assert (done.status, done.result, done.state, done.cause) == ("ok", "2", "kept", RESUMED)
        assert done.stdout == "held\nwent on\n"
        with closing(sqlite3.connect(taken_over.directory.folder / "journal.sqlite")) as journal:
            query = "SELECT ended_at - started_at FROM executions WHERE id = ?"
            (ran_s,) = journal.execute(query, (done.execution_id,)).fetchone()
        assert done.usage.wall_s == pytest.approx(ran_s, abs=0.5)  # under both servers
        assert RESUMED in "".join(done.output)
        rest = await caller.get(taken_over.running.execution_id, since=seen.sequence)
        assert rest.stdout == "went on\n"
        assert (await caller.execute("z", taken_over.running.session_id)).result == "2"


async def test_a_flood_that_was_cut_in_the_middle_flows_on_and_the_next_cell_is_clean(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        await caller.release(taken_over.flooding.session_id, "enough")
        done = await caller.ended(taken_over.flooding.execution_id)
        assert (done.status, done.cause) == ("ok", RESUMED)
        assert done.stdout.endswith("the last line\n")
        after = await caller.execute("print(flooded > 100)\nflooded * 0", taken_over.flooding.session_id)
        assert (after.status, after.stdout, after.result) == ("ok", "True\n", "0")


async def test_a_session_that_was_taken_over_can_be_forked_and_asks_for_packages(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        session_id = taken_over.early.session_id
        fork = await caller.fields("fork_session", session_id=session_id)
        assert (await caller.execute("y", fork["session_id"])).result == "1"
        refused = await caller.execute("!pip install 'not a name'", session_id)
        assert "not a name" in "".join(refused.output)


async def test_a_session_that_was_taken_over_goes_back_to_states_from_before_it(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        first, second = taken_over.rewindable
        session_id = first.session_id
        await caller.fields("rewind_session", session_id=session_id, to=second.execution_id)
        assert (await caller.execute("steps, open('file').read()", session_id)).result == "([1], 'one')"
        await caller.fields("rewind_session", session_id=session_id, to=first.execution_id)
        begun = await caller.execute("import os\n'steps' in globals(), os.listdir('.')", session_id)
        assert begun.result == "(False, [])"


async def test_a_session_of_a_jupyter_kernel_is_lost_and_says_why(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        again = await Caller(client).execute("'y' in globals()", taken_over.jupyter.session_id)
        assert (again.result, again.state) == ("False", "lost")
        told = "its server ended without notice, which a session of kernel:python3 does not outlive"
        assert told in "".join(again.output)


async def test_nothing_of_it_is_left_when_all_sessions_are_cleared_and_the_server_stops(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        for listed in (await caller.fields("list_sessions"))["sessions"]:
            await caller.fields("clear_session", session_id=listed["session_id"])
    taken_over.directory.look()
    taken_over.server_run.stop()
    await taken_over.directory.until_empty()
    left = {
        path.name for name in ("sessions", "runs", "keep") for path in (taken_over.directory.folder / name).iterdir()
    }
    assert left == {"lock", "log"}


# Other ends


async def test_two_servers_in_a_row_are_killed_and_a_session_that_started_cold_survives_both(
    directory: KeptDirectory,
) -> None:
    with directory.server(BELLJAR_FORK_START="false") as first:
        async with first.client() as client:
            made = await Caller(client).execute("import threading\nlock, x = threading.Lock(), 1")
        first.kill()
    with directory.server(BELLJAR_FORK_START="false") as second:
        second.kill()
    with directory.server(BELLJAR_FORK_START="false") as third:
        async with third.client() as client:
            caller = Caller(client)
            again = await caller.execute("(x, lock.locked())", made.session_id)
            assert (again.status, again.result, again.state) == ("ok", "(1, False)", "kept")
            died = await caller.execute("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", made.session_id)
            assert died.cause == "kernel-died: the kernel's process ended with signal SIGKILL"
            await caller.fields("clear_session", session_id=made.session_id)
    await directory.until_empty()


# The rest is asked of engines in this process: they stop, they are not killed.


@asynccontextmanager
async def engine(directory: KeptDirectory, **chosen: Any) -> AsyncGenerator[tuple[Runtime, Caller]]:
    settings = {"keep_alive": True, "keep_alive_s": 60, "hibernate": True, **chosen}
    async with (
        opened_runtime(directory.environment, directory.folder, **settings) as runtime,
        connected(runtime) as caller,
    ):
        yield runtime, caller
        directory.look()


async def test_a_server_that_stops_leaves_its_sessions_and_their_cells_running(directory: KeptDirectory) -> None:
    async with engine(directory) as (runtime, caller):
        idle = await caller.execute("import threading\nlock, x = threading.Lock(), 1")
        running = await caller.execute(f"{held()}print('went on')", wait_s=0)
        await until_said(runtime, running.execution_id, "held")
    async with engine(directory) as (_, caller):
        again = await caller.execute("(x, lock.locked())", idle.session_id)
        assert (again.result, again.state, again.output) == ("(1, False)", "kept", [])
        await caller.release(running.session_id)
        done = await caller.ended(running.execution_id)
        assert (done.status, done.stdout, done.cause) == ("ok", "held\nwent on\n", RESUMED)
        for result in (idle, running):
            await caller.fields("clear_session", session_id=result.session_id)
    await directory.until_empty()


async def test_a_session_that_nobody_came_for_in_time_is_woken_from_disk(directory: KeptDirectory) -> None:
    async with engine(directory, keep_alive_s=0.01) as (_, caller):
        made = await caller.execute("import threading\nlock, x = threading.Lock(), 1")
    await directory.until_empty()
    async with engine(directory) as (_, caller):
        woken = await caller.execute("x", made.session_id)
        assert (woken.result, woken.state, woken.lost) == ("1", "lost", ["lock"])
        await caller.fields("clear_session", session_id=made.session_id)
    await directory.until_empty()


async def test_a_supervisor_that_is_killed_takes_the_kernels_along_and_the_server_starts_another(
    directory: KeptDirectory,
) -> None:
    async with engine(directory) as (_, caller):
        made = await caller.execute("x = 1")
        (supervisor,) = directory.supervisors()
        directory.look()
        os.kill(supervisor, signal.SIGKILL)
        await until(lambda: not alive(directory.members))
        again = await caller.execute("'x' in globals()", made.session_id)
        assert (again.status, again.result, again.state, again.lost) == ("ok", "False", "lost", ["x"])
        await caller.execute("y = 2", made.session_id)
        assert len(directory.supervisors()) == 1
    async with engine(directory) as (_, caller):
        assert (await caller.execute("y", made.session_id)).result == "2"
        await caller.fields("clear_session", session_id=made.session_id)
    await directory.until_empty()


async def test_a_second_server_at_the_same_time_works_and_its_sessions_end_with_it(
    directory: KeptDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(directory) as (_, one):
        mine = await one.execute("x = 1")
        async with engine(directory) as (_, other):
            theirs = await other.execute("import threading\nlock, x = threading.Lock(), 2")
            assert "another server keeps its sessions here" in caplog.text
        assert (await one.execute("x", mine.session_id)).result == "1"
        assert (await one.execute("x", theirs.session_id)).lost == ["lock"]
        for result in (mine, theirs):
            await one.fields("clear_session", session_id=result.session_id)
    await directory.until_empty()


async def see_it_go_on(directory: KeptDirectory, running: ExecutionResult) -> None:
    """The next server takes a held cell over, and it ends as if nothing had been."""
    async with engine(directory) as (_, caller):
        await caller.release(running.session_id)
        done = await caller.ended(running.execution_id)
        assert (done.status, done.stdout, done.cause) == ("ok", "held\nwent on\n", RESUMED)
        await caller.fields("clear_session", session_id=running.session_id)
    await directory.until_empty()


async def test_a_second_server_leaves_what_the_first_one_is_about_to_take_over(directory: KeptDirectory) -> None:
    async with engine(directory) as (runtime, caller):
        running = await caller.execute(f"{held()}print('went on')", wait_s=0)
        await until_said(runtime, running.execution_id, "held")
    # Somebody has the supervisor and has not come to the sessions yet.
    with open_supervisor(directory.folder, 60) as taken:
        assert taken is not None
        async with engine(directory, pool_size=0):
            pass
    await see_it_go_on(directory, running)


async def test_a_server_without_keep_alive_leaves_what_is_kept_alive_to_one_with_it(
    directory: KeptDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(directory) as (runtime, caller):
        running = await caller.execute(f"{held()}print('went on')", wait_s=0)
        await until_said(runtime, running.execution_id, "held")
    async with engine(directory, pool_size=0, keep_alive=False) as (runtime, _):
        record = runtime.sessions.journal.find(running.execution_id)
        assert record is not None
        assert record.result is None
    assert "keep_alive is off, and sessions of an earlier server are kept alive" in caplog.text
    await see_it_go_on(directory, running)


# Upgrades


async def test_what_a_server_leaves_has_the_fields_of_its_form(directory: KeptDirectory) -> None:
    async with engine(directory, fork_start=True) as (_, caller):
        made = await caller.execute("x = 1")
        await until_rewindable(caller, made.session_id, states=1)
    seen = set[str]()
    with open_supervisor(directory.folder, 0.01) as supervisor:
        assert supervisor is not None
        for key in supervisor.found:
            deposit = supervisor.take(key)
            for descriptor in deposit.descriptors:
                os.close(descriptor)
            seen.add(kind := kind_of(deposit.fields))
            # Where they differ: raise FORM, and keep the present file as what the version before leaves.
            assert shape(written(deposit.fields)) == shape(left_by(PRESENT)[kind])
    assert seen >= {"session", "sandbox", "fresh checkpoint"}
    await directory.until_empty()


async def test_what_was_taken_over_is_left_in_the_present_format(
    directory: KeptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = left_by(f"deposits-{FORM - 1}")

    def as_the_former(fields: dict[str, Any]) -> dict[str, Any]:
        return {**as_left(former[kind_of(fields)], written(fields)), "form": FORM - 1}

    with monkeypatch.context() as patch:
        patch.setattr(client, "written", as_the_former)
        async with engine(directory, fork_start=True) as (_, caller):
            made = await caller.execute("import threading\nlock, x = threading.Lock(), 1")
            await caller.execute("x = 2", made.session_id)
            await until_rewindable(caller, made.session_id, states=2)
    async with engine(directory) as (_, caller):
        assert (await caller.execute("(x, lock.locked())", made.session_id)).result == "(2, False)"
    forms = set[int]()

    def noting(stored: dict[str, Any]) -> dict[str, Any]:
        forms.add(stored["form"])
        return read(stored)

    monkeypatch.setattr(client, "read", noting)
    async with engine(directory) as (_, caller):
        await caller.fields("rewind_session", session_id=made.session_id, to=2)
        assert (await caller.execute("x", made.session_id)).result == "1"
        await caller.fields("clear_session", session_id=made.session_id)
    assert forms == {FORM}
    await directory.until_empty()


LATER = f"""
from belljar.supervisor import deposit_format
deposit_format.FORM = {FORM + 1}
deposit_format.own_version = lambda: "9.9"
"""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
async def test_sessions_of_a_version_that_cannot_be_read_sleep_and_their_cells_end_in_words(
    directory: KeptDirectory, *, is_killed: bool
) -> None:
    (plugins := directory.folder / "plugins").mkdir()
    (plugins / "later.py").write_text(LATER)
    with directory.server(BELLJAR_PLUGINS_DIRECTORY=str(plugins), **COLD) as first:
        async with first.client() as client:
            caller = Caller(client)
            idle = await caller.execute("x = 1\nopen('file', 'w').write('kept')")
            busy = await caller.execute("y = 1")
            running = await caller.execute(held(), busy.session_id, wait_s=0)
            await until_told(caller, running, "held")
        first.kill() if is_killed else first.stop()
    maker = f"it was made by belljar 9.9, and this is belljar {own_version()}, which cannot read it"
    with directory.server(**COLD) as second:
        async with second.client() as client:
            caller = Caller(client)
            ended = await caller.get(running.execution_id)
            assert (ended.status, ended.stdout) == ("died", "held\n")
            why = f"and it could not be taken over: {maker}"
            assert ended.cause == f"its server ended without notice while it ran, {why}"
            lost = await caller.execute("1", busy.session_id)
            assert (lost.lost, lost.output[0].count(f"{why})")) == (["y"], 1)
            # A server that stops has saved the variables of idle sessions.
            woken = await caller.execute("open('file').read(), 'x' in globals()", idle.session_id)
            assert (woken.result, woken.lost) == (f"('kept', {not is_killed})", ["x"] if is_killed else [])
            for result in (idle, busy):
                await caller.fields("clear_session", session_id=result.session_id)
        second.stop()
    await directory.until_empty()


async def test_a_sandbox_that_cannot_be_handed_on_is_refused(directory: KeptDirectory) -> None:
    with pytest.raises(SettingsError, match="keep_alive cannot be used: a sandbox of process"):
        async with engine(directory, sandbox="process"):
            pass


async def test_sessions_that_come_and_go_leave_no_descriptor_in_the_server_or_the_supervisor(
    directory: KeptDirectory,
) -> None:
    async def come_and_go(caller: Caller) -> None:
        made = await caller.execute("x = 1")
        died = await caller.execute("import os\nos._exit(1)", made.session_id)
        assert died.status == "died"
        await caller.execute("x = 1", made.session_id)
        await caller.fields("clear_session", session_id=made.session_id)

    async with engine(directory, pool_size=0) as (_, caller):
        await come_and_go(caller)
        held = descriptors(os.getpid(), *directory.supervisors())
        for _ in range(3):
            await come_and_go(caller)
        assert descriptors(os.getpid(), *directory.supervisors()) == held
    await directory.until_empty()


def descriptors(*pids: int) -> list[int]:
    """How many each has; those of the journal count as one, because SQLite keeps some for its next connection."""
    names = [[str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()] for pid in pids]
    return [len([name for name in each if not name.endswith("/journal.sqlite")]) for each in names]
