"""Sessions that outlive their time and their server: on disk, and awake again with the next call."""

import json
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from calls import Caller, connected, held, images, opened_runtime, settings_for, text_of, until_said
from mcp import Client, MCPError

from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.environments import Environment
from belljar.errors import SessionNotFound
from belljar.runtime import Runtime, open_runtime
from belljar.servers import tell_address
from serving_process import http_server, serve_over_http
from waiting import until

pytestmark = pytest.mark.anyio

MAKE = """
import threading, numpy as np, pandas as pd
numbers, frame, lock = np.arange(10), pd.DataFrame({"a": [1, 2]}), threading.Lock()
def double(): return 2 * numbers.sum()
class Point:
    def __init__(self, x): self.x = x
point = Point(3)
open("notes.txt", "w").write("kept")
"""
LOOK = "(int(double()), frame.shape, point.x, type(point) is Point, open('notes.txt').read())"
SEEN = "(90, (2, 1), 3, True, 'kept')"


@asynccontextmanager
async def engine(environment: Environment, folder: Path, **chosen: object) -> AsyncGenerator[tuple[Runtime, Caller]]:
    async with (
        opened_runtime(environment, folder, hibernate=True, sweep_interval_s=3600, **chosen) as runtime,
        connected(runtime) as caller,
    ):
        yield runtime, caller


async def expire(runtime: Runtime) -> None:
    await until(runtime.sessions.sweep)


async def test_an_expired_session_sleeps_and_the_next_call_wakes_it(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path, session_idle_s=0.001) as (runtime, caller):
        made = await caller.execute(MAKE)
        await expire(runtime)
        assert runtime.sessions.all() == []
        woken = await caller.execute(LOOK, made.session_id)
        assert (woken.status, woken.result, woken.state, woken.lost) == ("ok", SEEN, "lost", ["lock"])
        assert "lock (_thread.lock)" in woken.output[0]
        assert "expired at" in woken.output[0]
        again = await caller.execute(LOOK, made.session_id)
        assert (again.result, again.state) == (SEEN, "kept")


async def test_what_a_session_lost_in_its_sleep_is_told_without_a_rewind_that_would_not_help(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path, session_idle_s=0.001) as (runtime, caller):
        made = await caller.execute("_hidden = 1\nimport threading\nlock = threading.Lock()")
        await expire(runtime)
        text = text_of(await caller.call("execute_code", code="0", session_id=made.session_id))
        assert "1 of 2 variables are back" in text
        assert text.count("lock (_thread.lock)") == 1, "what is lost is told once"
        assert "Lost before" not in text
        assert "rewind_session" not in text


async def test_a_figure_is_a_picture_again_after_its_session_slept(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path, session_idle_s=0.001, fork_start=False) as (runtime, caller):
        made = await caller.execute("from matplotlib.figure import Figure\nfigure = Figure(); figure.subplots()")
        await expire(runtime)
        answer = await caller.call("execute_code", code="figure", session_id=made.session_id)
        assert [image.mime_type for image in images(answer)] == ["image/png"]


async def test_a_call_while_a_session_goes_to_sleep_is_told_to_come_again(
    default_environment: Environment, tmp_path: Path
) -> None:
    slow = "import time\nclass Slow:\n  def __reduce__(self): time.sleep(0.5); return (Slow, ())\nslow, x = Slow(), 1"
    async with engine(default_environment, tmp_path, session_idle_s=0.001) as (runtime, caller):
        made = await caller.execute(slow)
        async with anyio.create_task_group() as group:
            group.start_soon(expire, runtime)
            await until(lambda: not runtime.sessions.all())
            refused = await caller.execute("x", made.session_id)
        assert refused.status == "rejected"
        assert str(refused.error).startswith(f"busy: session {made.session_id} is being put to sleep")
        assert (await caller.execute("x", made.session_id)).result == "1"


async def test_while_the_disk_is_full_idle_sessions_stay_awake(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"session_idle_s": 0.001, "max_sessions": 1}
    async with engine(default_environment, tmp_path, **chosen) as (runtime, caller):
        made = await caller.execute("x = 1")
        session = runtime.sessions.get(made.session_id, "local")
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
            await until(lambda: session.is_expired)
            assert await runtime.sessions.sweep() == []
            refused = await caller.execute("1")
            assert refused.status == "rejected"
            assert "1 sessions are open, the most that max_sessions allows" in str(refused.error)
            assert (await caller.execute("x", made.session_id)).state == "kept"
        await expire(runtime)
        woken = await caller.execute("x", made.session_id)
        assert (woken.result, woken.state) == ("1", "kept")


async def test_a_server_that_stops_and_starts_again_has_its_sessions(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        made = await caller.execute("x = 1\nprint('said')")
    async with engine(default_environment, tmp_path) as (runtime, caller):
        assert (await caller.get(made.execution_id)).stdout == "said\n"
        woken = await caller.execute("x += 1\nx", made.session_id)
        assert (woken.result, woken.state, woken.execution_count) == ("2", "kept", 2)
        session = runtime.sessions.get(made.session_id, "local")
        cells = json.loads(await runtime.sessions.executions.notebook(session.id))["cells"]
        assert ["".join(cell["source"]) for cell in cells] == ["x = 1\nprint('said')", "x += 1\nx"]


async def test_a_sleeping_session_is_its_owners_alone(default_environment: Environment, tmp_path: Path) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        made = await caller.execute("x = 1")
    async with engine(default_environment, tmp_path) as (runtime, _):
        with pytest.raises(SessionNotFound, match="does not exist"):
            runtime.sessions.get(made.session_id, "somebody else")
        runtime.sessions.get(made.session_id, "local")


async def test_a_session_that_nothing_was_done_in_leaves_nothing(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as (runtime, _):
        blank = runtime.sessions.create("local")
    async with engine(default_environment, tmp_path) as (runtime, _):
        with pytest.raises(SessionNotFound):
            runtime.sessions.get(blank.id, "local")
    assert [*(tmp_path / "sessions").iterdir()] == []


async def test_a_cleared_session_never_wakes(default_environment: Environment, tmp_path: Path) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        made = await caller.execute("x = 1")
        await caller.fields("clear_session", session_id=made.session_id)
    async with engine(default_environment, tmp_path) as (_, caller):
        again = await caller.execute("x", made.session_id)
        assert again.status == "rejected"
        assert again.error is not None
        assert "was cleared" in again.error


async def test_a_sleeping_session_is_read_and_cleared_without_a_place_among_those_that_are_awake(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        slept = (await caller.execute("open('notes.txt', 'w').write('kept')")).session_id
        other = (await caller.execute("1")).session_id
    async with engine(default_environment, tmp_path, max_sessions=1) as (runtime, caller):
        busy = await caller.execute(held(), wait_s=0)
        awake = [session.id for session in runtime.sessions.all()]
        answer = await caller.call("download_file", session_id=slept, name="notes.txt")
        assert not answer.is_error
        assert await caller.read_text(f"kernel://{slept}/notes.txt") == "kept"
        cells = json.loads(await caller.read_text(f"session://{slept}/notebook"))["cells"]
        assert ["".join(cell["source"]) for cell in cells] == ["open('notes.txt', 'w').write('kept')"]
        assert (await caller.fields("interrupt_execution", session_id=slept))["interrupted"] == []
        cleared = await caller.fields("clear_session", session_id=slept)
        assert cleared["success"]
        assert [session.id for session in runtime.sessions.all()] == awake
        assert not (tmp_path / "sessions" / slept).exists()
        gone = await caller.execute("1", slept)
        assert "was cleared" in str(gone.error)
        assert "session-not-found" in await caller.refusal("download_file", session_id=slept, name="notes.txt")
        # The one that nobody asked for sleeps on, and belongs to its owner alone.
        assert [info.session_id for info in runtime.sessions.asleep("local")] == [other]
        with pytest.raises(SessionNotFound):
            runtime.sessions.workspace(other, "somebody else")
        with pytest.raises(SessionNotFound):
            await runtime.sessions.clear(other, "somebody else")
        await caller.release(busy.session_id)
        await caller.ended(busy.execution_id)


async def test_what_nobody_asks_for_is_removed_in_the_end(default_environment: Environment, tmp_path: Path) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        made = await caller.execute("open('file', 'w').write('x')")
    async with engine(default_environment, tmp_path, keep_days=1e-9) as (runtime, caller):
        await runtime.sessions.sweep()
        assert (await caller.execute("1", made.session_id)).status == "rejected"
        assert made.execution_id in await caller.refusal("get_execution", execution_id=made.execution_id)
        assert [*(tmp_path / "sessions").iterdir()] == []


async def test_folders_that_the_journal_has_no_record_of_are_told_and_removed_in_the_end(
    default_environment: Environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        made = await caller.execute("open('file', 'w').write('x')")
    (tmp_path / "journal.sqlite").unlink()
    folder = tmp_path / "sessions" / made.session_id
    async with engine(default_environment, tmp_path) as (runtime, _):
        assert any("the journal has no record of 1 session folders" in line for line in caplog.messages)
        await runtime.sessions.sweep()
        assert (folder / "workspace" / "file").read_text() == "x"
    async with engine(default_environment, tmp_path, keep_days=1e-9) as (runtime, _):
        await runtime.sessions.sweep()
        assert not folder.exists()


async def test_a_pickle_that_harms_its_kernel_harms_nothing_else(
    default_environment: Environment, tmp_path: Path
) -> None:
    bomb = "import os\nclass Bomb:\n  def __reduce__(self): return (os._exit, (3,))\nbomb, x = Bomb(), 1"
    async with engine(default_environment, tmp_path, session_idle_s=0.001) as (runtime, caller):
        made = await caller.execute(bomb)
        await expire(runtime)
        woken = await caller.execute("x", made.session_id)
        assert woken.status in ("ok", "error", "died", "rejected")
        assert (await caller.execute("1 + 1", made.session_id)).result == "2"
        assert (await caller.execute("1 + 1")).result == "2"


async def test_a_killed_server_loses_no_finished_execution_and_names_what_it_lost(
    default_environment: Environment, tmp_path: Path
) -> None:
    command = serve_over_http(default_environment)
    variables = {"BELLJAR_FORK_START": "false", "BELLJAR_SWEEP_INTERVAL_S": "0.01"}
    with http_server(command, tmp_path, **variables) as (url, process):
        async with Client(f"{url}/mcp") as client:
            caller = Caller(client)
            done = await caller.execute("kept = 41\nopen('file.txt', 'w').write('x')\nprint('first')")
            running = await caller.execute("print('second', flush=True)\n" + held(), done.session_id, wait_s=1)
            assert running.status == "running"
            process.kill()
            process.wait()
    with http_server(command, tmp_path, BELLJAR_FORK_START="false") as (url, process):
        async with Client(f"{url}/mcp") as client:
            caller = Caller(client)
            first = await caller.get(done.execution_id)
            assert (first.status, first.stdout) == ("ok", "first\n")
            second = await caller.get(running.execution_id)
            assert (second.status, second.state) == ("died", "lost")
            assert second.stdout.startswith("second\n")
            assert second.cause == "its server ended without notice while it ran"
            assert second.usage.wall_s > running.usage.wall_s / 2
            woken = await caller.execute("(open('file.txt').read(), 'kept' in globals())", done.session_id)
            assert (woken.status, woken.state, woken.lost) == ("ok", "lost", ["kept"])
            assert woken.result == "('x', False)"
            assert "its server ended without notice" in woken.output[0]


async def test_a_cell_whose_first_act_ends_its_server_is_on_record(
    default_environment: Environment, tmp_path: Path
) -> None:
    command = serve_over_http(default_environment)
    with http_server(command, tmp_path, BELLJAR_SANDBOX="process", BELLJAR_FORK_START="false") as (url, process):
        with suppress(MCPError, ExceptionGroup):  # whichever the client makes of a server that is gone
            async with Client(f"{url}/mcp") as client:
                caller = Caller(client)
                session_id = (await caller.execute("from os import kill")).session_id
                await caller.execute(f"kill({process.pid}, 9)", session_id)
        process.wait()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal:
        rows = journal.execute("SELECT code, started_at IS NOT NULL, result IS NULL FROM executions").fetchall()
    assert rows == [("from os import kill", 1, 0), (f"kill({process.pid}, 9)", 1, 1)]


LEFT = Path(__file__).parent.parent / "left"


@pytest.mark.parametrize("path", sorted(LEFT.glob("directory-*.tar.gz")), ids=lambda path: path.name)
async def test_a_data_directory_of_each_earlier_version_is_gone_on_with(
    default_environment: Environment, tmp_path: Path, path: Path
) -> None:
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal, journal:
        assert str(journal.execute("PRAGMA user_version").fetchone()[0]) in path.name
        environment = str(default_environment.python)
        journal.execute("UPDATE sessions SET environment = ?, used_at = ?", (environment, time.time()))
        (asleep,) = journal.execute("SELECT id FROM sessions WHERE state = 'asleep'").fetchone()
        (live,) = journal.execute("SELECT id FROM sessions WHERE state = 'live'").fetchone()
        (said,) = journal.execute("SELECT id FROM executions WHERE session_id = ?", (asleep,)).fetchone()
        (cut_off,) = journal.execute("SELECT id FROM executions WHERE code LIKE '%begun%'").fetchone()
    async with engine(default_environment, tmp_path) as (_, caller):
        woken = await caller.execute("(x + 1, names, math.pi > 3, open('notes.txt').read())", asleep)
        assert (woken.result, woken.lost) == ("(42, ['a', {'b': (1, 2)}], True, 'kept')", [])
        assert (await caller.get(said)).stdout == "said\n"
        killed = await caller.get(cut_off)
        assert (killed.status, killed.stdout) == ("died", "begun\n")
        assert (await caller.execute("1", live)).lost == ["y"]


async def test_two_servers_on_one_data_directory_keep_out_of_each_others_sessions(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with (
        engine(default_environment, tmp_path) as (first, one),
        engine(default_environment, tmp_path) as (_, other),
    ):
        tell_address(tmp_path / "runs", first.name, "http://127.0.0.1:8000")
        mine = await one.execute("x = 1")
        refused = await other.execute("x", mine.session_id)
        assert (refused.status, refused.error) == (
            "rejected",
            f"busy: session {mine.session_id} is open in another server (pid {os.getpid()}, http://127.0.0.1:8000). "
            "Use it there; here it can be used once that server has stopped",
        )
        assert (await one.execute("x", mine.session_id)).result == "1"


async def test_a_server_says_that_there_is_another_whichever_came_first(
    default_environment: Environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(default_environment, tmp_path, sweep_interval_s=0.01)

    def told() -> set[str]:
        return {line for line in caplog.messages if "another server uses" in line}

    async with open_runtime(settings, takes_runs=True) as first:
        tell_address(tmp_path / "runs", first.name, "over stdio")
        async with open_runtime(settings, takes_runs=True) as second:
            tell_address(tmp_path / "runs", second.name, "http://127.0.0.1:8000")
            await until(lambda: len(told()) == 2)
    words = (
        f"another server uses {tmp_path} as well: pid {os.getpid()}, {{}}. A session is open in one of them at a time"
    )
    assert told() == {words.format("over stdio"), words.format("http://127.0.0.1:8000")}


async def test_a_session_whose_server_died_meanwhile_is_recovered_by_whoever_is_asked(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as (runtime, caller):
        made = await caller.execute("x = 1")
        session = runtime.sessions.get(made.session_id, "local")
        await runtime.sessions.endings.hibernate(session, "slept")
        # As a server leaves it that was killed: its folder below `runs` is gone, or nobody holds its lock.
        runtime.sessions.journal.write(
            "UPDATE sessions SET state = 'live', run = '1-gone' WHERE id = ?", (made.session_id,)
        )
        again = await caller.execute("1 + 1", made.session_id)
        assert (again.status, again.result) == ("ok", "2")


async def test_variables_that_come_back_are_not_called_lost_in_the_log(
    default_environment: Environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "belljar")
    async with engine(default_environment, tmp_path) as (_, caller):
        stopped = (await caller.execute("x = 1")).session_id
        killed = (await caller.execute("y = 2")).session_id
    caplog.clear()
    async with engine(default_environment, tmp_path) as (runtime, _):
        for session_id in (stopped, killed):  # awake, and without a kernel yet
            runtime.sessions.get(session_id, "local")
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal, journal:
        journal.execute("UPDATE sessions SET state = 'live', run = '1-gone' WHERE id = ?", (killed,))
    async with engine(default_environment, tmp_path) as (_, caller):
        assert not [line for line in caplog.messages if "lost" in line]
        assert [line for line in caplog.messages if stopped in line and "sleeps" in line]
        assert [line for line in caplog.messages if killed in line and "without notice" in line]
        assert (await caller.execute("x", stopped)).result == "1"
        assert (await caller.execute("y", killed)).result == "2"


async def test_an_execution_that_runs_when_the_server_stops_is_on_record(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as (runtime, caller):
        running = await caller.execute("x = 5\n" + held(), wait_s=0)
        await until_said(runtime, running.execution_id, "held")
    async with engine(default_environment, tmp_path) as (_, caller):
        ended = await caller.get(running.execution_id)
        assert ended.status == "interrupted"
        assert (await caller.execute("x", running.session_id)).result == "5"


async def test_sleeping_sessions_are_listed_as_such(default_environment: Environment, tmp_path: Path) -> None:
    async with engine(default_environment, tmp_path, session_idle_s=0.001) as (runtime, caller):
        made = await caller.execute("x = 1")
        await expire(runtime)
        (listed,) = (await caller.fields("list_sessions"))["sessions"]
        assert (listed["session_id"], listed["state"], listed["executions"]) == (made.session_id, "asleep", 1)


async def test_a_sleeping_session_is_renamed_in_its_sleep_and_keeps_its_name(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path, session_idle_s=0.001) as (runtime, caller):
        made = await caller.execute("x = 1")
        await caller.fields("rename_session", session_id=made.session_id, reason="first")
        await expire(runtime)
        (listed,) = (await caller.fields("list_sessions"))["sessions"]
        assert (listed["state"], listed["reason"]) == ("asleep", "first")
        await caller.fields("rename_session", session_id=made.session_id, reason="second")
        (listed,) = (await caller.fields("list_sessions"))["sessions"]
        assert (listed["state"], listed["reason"]) == ("asleep", "second")
    async with engine(default_environment, tmp_path) as (_, caller):
        assert (await caller.execute("x", made.session_id)).result == "1"
        (listed,) = (await caller.fields("list_sessions"))["sessions"]
        assert (listed["state"], listed["reason"]) == ("idle", "second")
        await caller.fields("clear_session", session_id=made.session_id)
        assert "was cleared" in await caller.refusal("rename_session", session_id=made.session_id, reason="third")


async def test_a_session_is_renamed_by_the_server_that_has_it(default_environment: Environment, tmp_path: Path) -> None:
    async with (
        engine(default_environment, tmp_path) as (_, one),
        engine(default_environment, tmp_path) as (_, other),
    ):
        made = await one.execute("x = 1")
        refused = await other.refusal("rename_session", session_id=made.session_id, reason="theirs")
        assert "is open in another server" in refused
        many, access = servers_of(tmp_path), Access("local", is_operator=True)
        assert (await many.rename(access, made.session_id, "ours")).reason == "ours"
        (listed,) = (await one.fields("list_sessions"))["sessions"]
        assert listed["reason"] == "ours"


async def test_a_known_key_with_other_code_is_refused_also_after_a_restart(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with engine(default_environment, tmp_path) as (_, caller):
        first = await caller.execute("x = 1", idempotency_key="job")
        fenced = await caller.execute("```python\nx = 1\n```", first.session_id, idempotency_key="job")
        assert fenced.execution_id == first.execution_id
        other = await caller.execute("x = 2", first.session_id, idempotency_key="job")
        assert (other.status, other.execution_id) == ("rejected", "")
    async with engine(default_environment, tmp_path) as (_, caller):
        assert (await caller.execute("x = 2", first.session_id, idempotency_key="job")).error == other.error
        assert other.error is not None
        assert f"'job' was given with other code before, for execution {first.execution_id}" in other.error
        assert (await caller.execute("x", first.session_id)).result == "1"


async def test_a_call_with_a_known_key_runs_nothing_and_answers_the_same(
    default_environment: Environment, tmp_path: Path
) -> None:
    count = "open('log', 'a').write('x'); print(len(open('log').read()))"
    async with engine(default_environment, tmp_path) as (runtime, caller):
        first = await caller.execute(count, idempotency_key="job-1")
        again = await caller.execute(count, first.session_id, idempotency_key="job-1")
        assert (again.execution_id, again.stdout) == (first.execution_id, "1\n")
        other = await caller.execute(count, first.session_id, idempotency_key="job-2")
        assert other.stdout == "2\n"
        running = await caller.execute(held(), first.session_id, idempotency_key="job-3", wait_s=0)
        await until_said(runtime, running.execution_id, "held")
        joined = await caller.execute(held(), first.session_id, idempotency_key="job-3", wait_s=0)
        assert (joined.execution_id, joined.status) == (running.execution_id, "running")
        await caller.release(first.session_id)
        assert (await caller.execute(held(), idempotency_key="job-3", wait_s=30)).status == "ok"
        refused = await caller.execute("1", idempotency_key="x" * 201)
        assert refused.error is not None
        assert "idempotency_key has 201 characters" in refused.error
    async with engine(default_environment, tmp_path) as (_, caller):
        assert (await caller.execute(count, idempotency_key="job-1")).execution_id == first.execution_id
