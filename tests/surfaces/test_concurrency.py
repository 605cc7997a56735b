"""Several calls at once: turns in one session, sessions side by side, clients that go away and come back."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import ERAS, LEGACY, Caller, connected, held, opened_runtime, text_of, until_said

from belljar.environments import Environment
from belljar.errors import Busy
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("era", ERAS)
async def test_calls_to_one_session_run_in_the_order_they_came(runtime: Runtime, era: str):
    results: dict[int, ExecutionResult] = {}
    async with connected(runtime, era) as caller:
        session_id = await caller.new_session()
        first = await caller.execute(held() + "order = []", session_id, wait_s=0)

        async def call(number: int) -> None:
            results[number] = await caller.execute(f"order.append({number})\norder", session_id)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(call, number)
                await until(
                    lambda most=number + 2: len(runtime.sessions.get(session_id, "local").queue.running()) >= most
                )
            assert results == {}
            await caller.release(session_id)
        assert (await caller.ended(first.execution_id)).status == "ok"
    assert [results[number].result for number in range(5)] == [str(list(range(number + 1))) for number in range(5)]
    assert [results[number].execution_count for number in range(5)] == [2, 3, 4, 5, 6]
    assert results[4].usage.queue_s > 0


@pytest.mark.parametrize("era", ERAS)
async def test_sessions_run_side_by_side_and_a_slow_cell_blocks_nobody(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        slow = await caller.execute(held(), wait_s=0)
        await until_said(runtime, slow.execution_id, "held")
        quick = await caller.execute("'quick'")
        assert quick.result == "'quick'"
        await caller.fields("upload_file", session_id=slow.session_id, name="meanwhile.txt", text="x")
        listing = await caller.fields("list_session_files", session_id=slow.session_id)
        assert [file["name"] for file in listing["files"]] == ["meanwhile.txt"]
        assert (await caller.get(slow.execution_id)).status == "running"
        await caller.release(slow.session_id)
        assert (await caller.ended(slow.execution_id)).status == "ok"


async def test_two_cells_of_two_sessions_run_at_the_same_time(runtime: Runtime, caller: Caller):
    one = await caller.execute(held("from-two"), wait_s=0)
    two = await caller.execute(held("from-one"), wait_s=0)
    await until_said(runtime, one.execution_id, "held")
    await until_said(runtime, two.execution_id, "held")
    await caller.release(two.session_id, "from-one")
    assert (await caller.ended(two.execution_id)).status == "ok"
    await caller.release(one.session_id, "from-two")
    assert (await caller.ended(one.execution_id)).status == "ok"


# Waiting


@pytest.mark.parametrize("era", ERAS)
async def test_wait_zero_returns_at_once_and_the_rest_comes_without_gaps_or_repeats(runtime: Runtime, era: str):
    code = "".join(held(f"go-{step}").replace("'held'", f"'step {step}'") for step in range(4)) + "'end'"
    async with connected(runtime, era) as caller:
        first = await caller.execute(code, wait_s=0)
        assert (first.status, first.success, first.result) == ("running", True, None)
        assert first.session_info is not None
        pieces, since = [first.stdout], first.sequence
        for step in range(4):
            await until_said(runtime, first.execution_id, f"step {step}")
            part = await caller.get(first.execution_id, since=since)
            assert part.status == "running"
            assert part.sequence > since
            pieces.append(part.stdout)
            since = part.sequence
            again = await caller.get(first.execution_id, since=since)
            assert (again.stdout, again.output, again.sequence) == ("", [], since)
            await caller.release(first.session_id, f"go-{step}")
        last = await caller.get(first.execution_id, since=since, wait_s=60)
        assert (last.status, last.result) == ("ok", "'end'")
        pieces.append(last.stdout)
        assert "".join(pieces) == "step 0\nstep 1\nstep 2\nstep 3\n"
        assert (await caller.get(first.execution_id)).stdout == "".join(pieces)


async def test_a_cell_says_what_it_waits_for_and_whether_it_has_printed_anything(runtime: Runtime, caller: Caller):
    session_id = await caller.new_session()
    code = held().replace("print('held', flush=True)", "pass")
    first = await caller.call("execute_code", code=code, session_id=session_id, wait_s=0)
    assert text_of(first).startswith("(no output yet)")
    first_id = (first.structured_content or {})["execution_id"]
    second = await caller.call("execute_code", code="print(2)", session_id=session_id, wait_s=0)
    awaited = f"execution {first_id} of this session to end"
    assert text_of(second).startswith(f"It has not started yet: it waits for {awaited}\n")
    third = await caller.execute("3", session_id, wait_s=0)
    assert third.waits_for == f"execution {first_id} and 1 more of this session to end"
    await caller.release(session_id)
    ended = await caller.ended(third.execution_id)
    assert (ended.result, ended.waits_for) == ("3", None)
    told = await caller.get((second.structured_content or {})["execution_id"])
    assert (told.output, told.waits_for) == (["2\n"], None)


async def test_a_running_result_says_how_to_get_the_rest(runtime: Runtime, caller: Caller):
    answer = await caller.whole("execute_code", code=held(), wait_s=0)
    assert answer.structured_content is not None
    running = ExecutionResult.model_validate(answer.structured_content)
    call = f'get_execution(execution_id="{running.execution_id}", since={running.sequence}, wait_s=45)'
    assert call in text_of(answer)
    await caller.release(running.session_id)
    await caller.ended(running.execution_id)


async def test_a_patient_look_returns_when_the_cell_ends(runtime: Runtime, caller: Caller):
    running = await caller.execute(held() + "'end'", wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    results: list[ExecutionResult] = []

    async def look() -> None:
        results.append(await caller.get(running.execution_id, wait_s=300))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(look)
        await caller.release(running.session_id)
    assert [result.result for result in results] == ["'end'"] * 3


@pytest.mark.parametrize("era", ERAS)
async def test_progress_carries_output_and_strictly_increases(runtime: Runtime, era: str):
    seen: list[tuple[float, float | None, str | None]] = []
    said = [anyio.Event(), anyio.Event()]

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))
        for number, event in enumerate(said):
            if f"part {number}" in (message or ""):
                event.set()

    code = held("go-0").replace("'held'", "'part   0'") + held("go-1").replace("'held'", "'part 1', '.' * 500")
    async with connected(runtime, era) as caller:
        session_id = await caller.new_session()
        async with anyio.create_task_group() as tasks:
            arguments = {"code": code, "session_id": session_id}

            async def call() -> None:
                await caller.client.call_tool("execute_code", arguments, progress_callback=on_progress)

            tasks.start_soon(call)
            with anyio.fail_after(30):
                await said[0].wait()
                await caller.release(session_id, "go-0")
                await until(lambda: len(seen) >= 2)
                await caller.release(session_id, "go-1")
    numbers = [progress for progress, _, _ in seen]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 2
    assert seen[0][2] == "part 0"
    assert all(len(message or "") <= 200 for _, _, message in seen)


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_gives_up_waiting_need_not_stop_the_execution(
    default_environment: Environment, tmp_path: Path, era: str
):
    kept = opened_runtime(default_environment, tmp_path, interrupt_on="nothing")
    async with kept as runtime, connected(runtime, era) as caller:
        session_id = await caller.new_session()
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                await caller.execute(held() + "survived = 'yes'", session_id)

            tasks.start_soon(call)
            running = await first_running(runtime, session_id)
            await until_said(runtime, running, "held")
            tasks.cancel_scope.cancel()
        (running,) = [execution.id for execution in runtime.sessions.get(session_id, "local").queue.running()]
        assert (await caller.get(running)).status == "running"
        await caller.release(session_id)
        assert (await caller.ended(running)).status == "ok"
        assert (await caller.execute("survived", session_id)).result == "'yes'"


async def first_running(runtime: Runtime, session_id: str) -> str:
    session = runtime.sessions.get(session_id, "local")
    await until(session.queue.running)
    return session.queue.running()[0].id


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_disconnects_loses_nothing(runtime: Runtime, era: str):
    async with connected(runtime, era) as first:
        running = await first.execute(held() + "'found again'", wait_s=0)
        await until_said(runtime, running.execution_id, "held")
    async with connected(runtime, era) as second:
        await second.release(running.session_id)
        assert (await second.ended(running.execution_id)).result == "'found again'"


async def test_both_eras_see_the_same_sessions(runtime: Runtime, caller: Caller):
    async with connected(runtime, LEGACY) as older:
        made = await older.execute("shared = 1")
        assert (await caller.execute("shared", made.session_id)).result == "1"


# Limits


async def test_a_full_queue_is_a_busy_error_and_loses_nothing(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, max_queue=3) as runtime,
        connected(runtime) as caller,
    ):
        first = await caller.execute(held() + "count = 0", wait_s=0)
        waiting = [await caller.execute("count += 1", first.session_id, wait_s=0) for _ in range(2)]
        refused = await caller.execute("count += 1", first.session_id, wait_s=0)
        assert (refused.status, refused.session_id) == ("rejected", first.session_id)
        assert refused.error is not None
        assert refused.error.startswith(f"busy: session {first.session_id} has 3 executions")
        assert "get_execution" in refused.error
        await caller.release(first.session_id)
        assert [(await caller.ended(result.execution_id)).status for result in waiting] == ["ok", "ok"]
        assert (await caller.execute("count", first.session_id)).result == "2"


async def test_too_many_sessions_is_a_busy_error(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, max_sessions=2) as runtime,
        connected(runtime) as caller,
    ):
        first = await caller.execute("1")
        await caller.new_session()
        refused = await caller.execute("1")
        assert refused.status == "rejected"
        assert refused.error is not None
        assert refused.error.startswith("busy: 2 sessions are open")
        assert "clear_session" in refused.error
        assert "busy: " in await caller.refusal("new_session")
        await caller.fields("clear_session", session_id=first.session_id)
        assert (await caller.execute("1")).status == "ok"
        with pytest.raises(Busy) as other:
            runtime.sessions.create("another")
        assert other.value.hint == "They are others': try again when an idle one has expired"


@pytest.mark.parametrize("arguments", [{"code": "1", "filename": "../x"}, {"code": "x" * 1_100_000}])
async def test_a_refused_first_call_leaves_no_session_that_nobody_knows_of(
    default_environment: Environment, tmp_path: Path, arguments: dict[str, Any]
):
    async with opened_runtime(default_environment, tmp_path) as runtime, connected(runtime) as caller:
        refused = await caller.execute(**arguments)
        assert refused.status == "rejected"
        listed = [info["session_id"] for info in (await caller.fields("list_sessions"))["sessions"]]
        assert listed == ([refused.session_id] if refused.session_id else [])


async def test_the_file_of_a_waiting_cell_is_not_the_running_cells_doing(runtime: Runtime, caller: Caller):
    first = await caller.execute(held(), wait_s=0)
    await until_said(runtime, first.execution_id, "held")
    second = await caller.execute("2", first.session_id, filename="second.py", wait_s=0)
    await caller.release(first.session_id)
    assert "second.py" not in [file.name for file in (await caller.ended(first.execution_id)).files]
    assert (await caller.ended(second.execution_id)).status == "ok"


async def test_whatever_a_caller_is_told_is_on_disk_by_then(runtime: Runtime, caller: Caller):
    running = await caller.execute(held(), wait_s=0)
    waiting = await caller.execute("1", running.session_id, wait_s=0)
    query = "SELECT id FROM executions WHERE session_id = ? ORDER BY rowid"
    said = "SELECT max(sequence) FROM events WHERE execution_id = ?"
    with closing(sqlite3.connect(runtime.settings.data_directory / "journal.sqlite")) as other:
        found = other.execute(query, (running.session_id,)).fetchall()
        assert found == [(running.execution_id,), (waiting.execution_id,)]
        await until_said(runtime, running.execution_id, "held")
        told = await caller.get(running.execution_id)
        assert other.execute(said, (running.execution_id,)).fetchone() == (told.sequence,)
    await caller.release(running.session_id)
    assert (await caller.ended(waiting.execution_id)).status == "ok"
