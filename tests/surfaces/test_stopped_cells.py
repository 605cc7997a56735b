"""Cells that are stopped and kernels that die: what the result says, and what the next call finds."""

import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import ERAS, FORKS, Caller, connected, held, opened_runtime, text_of, until_said

from belljar.environments import Environment
from belljar.kernels.base import Kernel
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.sessions import checkpoints
from belljar.sessions.session_kernel import SessionKernel
from waiting import until

pytestmark = pytest.mark.anyio
# Says it is there, then holds on whatever is asked of it.
# It says that it holds out when it already does: an interrupt just before that would end it.
STUBBORN = (
    "import time\nfirst = iter(['held'])\nwhile True:\n"
    "  try:\n    for word in first: print(word, flush=True)\n    time.sleep(60)\n"
    "  except KeyboardInterrupt: print('no', flush=True)"
)
# Heeds no interrupt from its first moment on, because no Python runs in it that could notice one.
DEAF = "sum(__import__('itertools').repeat(0))"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """An engine that kills no cell that heeds its interrupt, however slow this machine is."""
    folder = tmp_path_factory.mktemp("belljar")
    async with opened_runtime(default_environment, folder, interrupt_grace_s=60, **FORKS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def impatient(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """An engine with less patience than usual, for cells that ignore their interrupt."""
    folder = tmp_path_factory.mktemp("impatient")
    async with opened_runtime(default_environment, folder, interrupt_grace_s=1.5, **FORKS) as runtime:
        yield runtime


async def running(runtime: Runtime, caller: Caller, code: str, session_id: str = "") -> ExecutionResult:
    """A cell under way."""
    result = await caller.execute(code, session_id, wait_s=0)
    await until_said(runtime, result.execution_id, "held")
    return result


# Interrupts


@pytest.mark.parametrize("era", ERAS)
async def test_an_interrupt_by_execution_keeps_variables(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        cell = await running(runtime, caller, "kept = 7\n" + held())
        report = await caller.fields("interrupt_execution", execution_id=cell.execution_id)
        assert report == {"interrupted": [cell.execution_id], "message": "1 interrupted; variables are kept."}
        result = await caller.get(cell.execution_id)
        assert (result.status, result.success, result.state, result.lost) == ("interrupted", False, "kept", [])
        assert result.stdout == "held\n"
        assert result.traceback[-1].startswith("KeyboardInterrupt")
        assert not any("interrupts.py" in line for line in result.traceback)
        assert result.execution_count == 1
        assert (await caller.execute("kept", cell.session_id)).result == "7"


async def test_an_interrupt_by_session_stops_the_waiting_ones_too(runtime: Runtime, caller: Caller):
    first = await running(runtime, caller, "ran = []\n" + held())
    waiting = [await caller.execute(f"ran.append({n})", first.session_id, wait_s=0) for n in range(3)]
    report = await caller.fields("interrupt_execution", session_id=first.session_id)
    assert sorted(report["interrupted"]) == sorted([first.execution_id, *(result.execution_id for result in waiting)])
    for result in [first, *waiting]:
        ended = await caller.get(result.execution_id)
        assert (ended.status, ended.state) == ("interrupted", "kept")
    assert "never ran" in ((await caller.get(waiting[0].execution_id)).error or "")
    assert (await caller.execute("ran", first.session_id)).result == "[]"


async def test_a_waiting_execution_can_be_stopped_while_another_runs(runtime: Runtime, caller: Caller):
    first = await running(runtime, caller, "ran = []\n" + held())
    waiting = await caller.execute("ran.append(1)", first.session_id, wait_s=0)
    last = await caller.execute("ran.append(2)", first.session_id, wait_s=0)
    report = await caller.fields("interrupt_execution", execution_id=waiting.execution_id)
    assert report["interrupted"] == [waiting.execution_id]
    assert (await caller.get(waiting.execution_id)).status == "interrupted"
    assert (await caller.get(first.execution_id)).status == "running"
    await caller.release(first.session_id)
    assert (await caller.ended(last.execution_id)).status == "ok"
    assert (await caller.execute("ran", first.session_id)).result == "[2]"


async def test_an_interrupt_while_the_kernel_still_starts_is_not_lost(runtime: Runtime, caller: Caller):
    cell = await caller.execute(held(), wait_s=0)
    await caller.fields("interrupt_execution", execution_id=cell.execution_id)
    result = await caller.get(cell.execution_id, wait_s=25)  # a second interrupt would come after 30 s
    assert (result.status, result.state) == ("interrupted", "kept")
    assert (await caller.execute("'usable'", cell.session_id)).result == "'usable'"


async def test_an_interrupt_at_any_moment_of_a_cells_start_stops_it(runtime: Runtime, caller: Caller):
    session_id = await caller.new_session()
    await caller.execute("kept = 1", session_id)
    for turns in range(0, 40, 2):
        cell = await caller.execute("while True: pass", session_id, wait_s=0)
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        await caller.fields("interrupt_execution", execution_id=cell.execution_id)
        result = await caller.get(cell.execution_id)
        assert (turns, result.status, result.state) == (turns, "interrupted", "kept")
    assert (await caller.execute("kept", session_id)).result == "1"


async def test_an_interrupt_reaches_shell_commands_and_awaits(runtime: Runtime, caller: Caller):
    first = await running(runtime, caller, "kept = 1\nprint('held', flush=True)\n!sleep 600")
    await caller.fields("interrupt_execution", execution_id=first.execution_id)
    assert (await caller.get(first.execution_id)).status == "interrupted"
    code = "import asyncio\nprint('held', flush=True)\nawait asyncio.sleep(600)"
    second = await running(runtime, caller, code, first.session_id)
    await caller.fields("interrupt_execution", execution_id=second.execution_id)
    assert (await caller.get(second.execution_id)).status == "interrupted"
    assert (await caller.execute("kept", first.session_id)).result == "1"


async def test_code_that_ignores_the_interrupt_is_killed_and_its_variables_are_lost(impatient: Runtime):
    async with connected(impatient) as caller:
        first = await caller.execute("precious = 1\nopen('file', 'w').write('stays')")
        cell = await running(impatient, caller, STUBBORN, first.session_id)
        report = await caller.fields("interrupt_execution", execution_id=cell.execution_id)
        assert "killed" in report["message"]
        assert "variables are lost" in report["message"]
        result = await caller.get(cell.execution_id)
        assert (result.status, result.state) == ("interrupted", "lost")
        assert "precious" in result.lost
        assert result.stdout.startswith("held\nno\n")
        after = await caller.execute("'precious' in globals(), open('file').read()", first.session_id)
        assert (after.result, after.state) == ("(False, 'stays')", "lost")


async def test_interrupting_what_has_ended_says_that_nothing_ran(caller: Caller, shared_session: str):
    done = await caller.execute("1", shared_session)
    nothing: dict[str, Any] = {"interrupted": [], "message": "Nothing was running."}
    assert await caller.fields("interrupt_execution", execution_id=done.execution_id) == nothing
    assert await caller.fields("interrupt_execution", session_id=shared_session) == nothing


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "invalid-argument"),
        ({"execution_id": "a", "session_id": "b"}, "invalid-argument"),
        ({"execution_id": "ab" * 16}, "execution-not-found"),
        ({"session_id": "ab" * 16}, "session-not-found"),
    ],
)
async def test_an_interrupt_of_nothing_in_particular_is_refused(caller: Caller, arguments: dict[str, str], code: str):
    assert (await caller.refusal("interrupt_execution", **arguments)).startswith(f"{code}: ")


# Timeouts


@pytest.mark.parametrize("era", ERAS)
async def test_a_timeout_interrupts_the_cell_and_keeps_variables(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        session_id = (await caller.execute("import time")).session_id
        answer = await caller.whole(
            "execute_code", code="kept = 3\nprint('before')\ntime.sleep(600)", session_id=session_id, timeout_s=1.5
        )
        assert answer.is_error
        result = ExecutionResult.model_validate(answer.structured_content)
        assert (result.status, result.success, result.state) == ("timeout", False, "kept")
        assert result.error == "timeout: interrupted after 1.5 s; variables are kept"
        assert result.stdout == "before\n"
        assert "variables are kept" in text_of(answer)
        assert (await caller.execute("kept", session_id)).result == "3"


async def test_a_timeout_that_is_ignored_kills_the_process(impatient: Runtime):
    async with connected(impatient) as caller:
        session_id = (await caller.execute("precious = 1")).session_id
        answer = await caller.whole("execute_code", code=DEAF, session_id=session_id, timeout_s=0.8)
        result = ExecutionResult.model_validate(answer.structured_content)
        assert (result.status, result.state) == ("timeout", "lost")
        assert result.error == "timeout: killed after 0.8 s, because it ignored the interrupt"
        assert "precious" in result.lost
        assert "precious" in text_of(answer)
        assert (await caller.execute("2", session_id)).result == "2"


async def test_the_time_in_the_queue_does_not_count(runtime: Runtime, caller: Caller):
    first = await running(runtime, caller, held())
    waiting = await caller.execute("'ran'", first.session_id, timeout_s=1.5, wait_s=0)
    with anyio.move_on_after(1.7):
        await anyio.sleep_forever()
    await caller.release(first.session_id)
    assert (await caller.ended(waiting.execution_id)).result == "'ran'"


async def test_the_time_a_kernel_takes_to_start_does_not_count(caller: Caller, monkeypatch: pytest.MonkeyPatch):
    start = SessionKernel.ensure_started

    async def start_late(kernel: SessionKernel) -> Kernel:
        with anyio.move_on_after(1.7):
            await anyio.sleep_forever()
        return await start(kernel)

    monkeypatch.setattr(SessionKernel, "ensure_started", start_late)
    assert (await caller.execute("'ran'", timeout_s=1.5)).result == "'ran'"


# Deaths


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os\nos._exit(3)", "exit status 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "signal SIGSEGV"),
        ("import os\nos.abort()", "signal SIGABRT"),
        ("import os\nos._exit(0)", "exit status 0"),
    ],
    ids=["_exit", "kill", "segfault", "abort", "exit-0"],
)
async def test_a_cell_that_ends_its_process_has_died_with_the_cause(caller: Caller, code: str, cause: str):
    first = await caller.execute("precious, other = 1, 2\nopen('file', 'w').write('stays')")
    answer = await caller.whole(
        "execute_code", code=f"print('last words', flush=True)\n{code}", session_id=first.session_id
    )
    assert answer.is_error
    result = ExecutionResult.model_validate(answer.structured_content)
    assert (result.status, result.success, result.state) == ("died", False, "lost")
    assert result.error == f"kernel-died: the kernel's process ended with {cause}"
    assert result.stdout == "last words\n"
    assert {"precious", "other"} <= {*result.lost}
    assert "precious" in text_of(answer)

    told = await caller.whole("execute_code", code="open('file').read()", session_id=first.session_id)
    after = ExecutionResult.model_validate(told.structured_content)
    assert (after.status, after.state, after.result) == ("ok", "lost", "'stays'")
    assert {"precious", "other"} <= {*after.lost}
    assert "fresh kernel" in "".join(after.output)
    assert cause in "".join(after.output)
    assert text_of(told).count("precious") == 1, "what is lost is told once"
    assert after.stdout == ""

    later = await caller.execute("1", first.session_id)
    assert (later.state, later.lost, later.output) == ("kept", [], [])


async def test_a_kernel_that_dies_between_two_cells_is_replaced_for_the_next(runtime: Runtime, caller: Caller):
    code = (
        "import os, threading, time\nprecious = 1\ndef end():\n  while not os.path.exists('go'): time.sleep(0.005)\n"
        "  os._exit(9)\n"
    )
    first = await caller.execute(code + "threading.Thread(target=end).start()")
    kernel = runtime.sessions.get(first.session_id, "local").session_kernel.kernel
    assert kernel is not None
    await caller.release(first.session_id)
    await until(lambda: not kernel.is_alive())
    after = await caller.execute("'ran'", first.session_id)
    assert (after.status, after.state, after.result) == ("ok", "lost", "'ran'")
    assert "precious" in after.lost


async def test_what_waits_behind_a_dying_cell_runs_in_the_fresh_kernel(runtime: Runtime, caller: Caller):
    first = await running(runtime, caller, held() + "os._exit(1)")
    waiting = await caller.execute("'ran'", first.session_id, wait_s=0)
    await caller.release(first.session_id)
    assert (await caller.ended(first.execution_id)).status == "died"
    ended = await caller.ended(waiting.execution_id)
    assert (ended.status, ended.state, ended.result) == ("ok", "lost", "'ran'")


async def test_a_cell_that_breaks_its_own_connection_harms_only_its_session(caller: Caller, shared_session: str):
    code = "import os\nos.closerange(3, 65_536)\nprint('on')"
    broken = await caller.execute(code)
    assert (broken.status, broken.state) == ("died", "lost")
    assert (await caller.execute("1", broken.session_id)).status == "ok"
    assert (await caller.execute("1", shared_session)).status == "ok"


async def test_children_of_a_cell_end_with_its_session(runtime: Runtime, caller: Caller):
    code = f"import subprocess\nchild = subprocess.Popen(['sleep', {NAP_S!r}])\nchild.pid"
    result = await caller.execute(code)
    assert result.status == "ok"
    # Python goes on as soon as the child's descriptors are closed, a moment before it has its command line.
    await until(lambda: len(sleepers()) == 1)
    await caller.fields("clear_session", session_id=result.session_id)
    await until(lambda: not sleepers())


NAP_S = f"12345.{os.getpid()}"
"""A time that no other run of this test beside this one has."""


def sleepers() -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == f"sleep\0{NAP_S}\0".encode():
                found.append(int(path.parent.name))
    return found


async def test_a_cold_session_that_ignores_the_interrupt_is_killed_though_states_of_it_are_kept(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
    chosen = {"fork_start": False, "interrupt_grace_s": 0.5, "checkpoints": 2}
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime, connected(runtime) as caller:
        made = await caller.execute("x = 1")
        await caller.execute("x = 2", made.session_id)
        stopped = await caller.execute(DEAF, made.session_id, timeout_s=0.8)
        assert (stopped.status, stopped.state, stopped.lost) == ("timeout", "lost", ["x"])
        assert (await caller.execute("1 + 1", made.session_id)).result == "2"
