"""A wall clock that is set ends nothing, loses nothing and keeps nobody waiting."""

import time
from pathlib import Path

import anyio
import pytest
from calls import connected, held, opened_runtime, until_said
from mcp.types import ElicitResult

from belljar.environments import Environment

pytestmark = pytest.mark.anyio

YEAR_S = 365 * 24 * 60 * 60
wall = time.time


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
async def test_a_clock_that_jumps_ends_nothing(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    chosen = {"hibernate": True, "sweep_interval_s": 3600, "session_idle_s": 1800}
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime, connected(runtime) as caller:
        asleep = await caller.execute("x = 1")
        await runtime.sessions.endings.hibernate(runtime.sessions.get(asleep.session_id, "local"), "was put to sleep")
        made = await caller.execute("x = 2")
        running = await caller.execute(held(), wait_s=0)
        await until_said(runtime, running.execution_id, "held")

        monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
        assert await runtime.sessions.sweep() == []
        again = await caller.execute("x + 1", made.session_id)
        assert (again.result, again.state) == ("3", "kept")
        # Its own clock is not the wall's either.
        assert (await caller.execute("import time\nwhile True: time.sleep(0.01)", timeout_s=0.5)).status == "timeout"
        await caller.release(running.session_id)
        assert (await caller.ended(running.execution_id)).status == "ok"
        assert await runtime.sessions.sweep() == []
        # It was put to sleep a moment ago, whatever the clock says now.
        woken = await caller.execute("x + 10", asleep.session_id)
        assert (woken.result, woken.state) == ("11", "kept")

        monkeypatch.undo()
        assert await runtime.sessions.sweep() == []
        order = await caller.fields("list_sessions")
        assert {each["session_id"] for each in order["sessions"]} >= {asleep.session_id, made.session_id}
        uri = f"session://{made.session_id}/notebook"
        notebook = await caller.read_text(uri)
        assert notebook.index("x = 2") < notebook.index("x + 1")


# The runner is an object in the same process as the cell.
FORGED_QUESTIONS = """
import gc, json, struct
gc.unfreeze()  # where the session was forked
(runner,) = [one for one in gc.get_objects() if type(one).__name__ == 'Runner']
def forge(**message):
    body = json.dumps({'id': runner._execution, **message}).encode()
    runner.channel._sock.sendall(struct.pack('!I', len(body)) + body)
for number in range(1_000): forge(type='input', prompt=str(number), is_password=False)
while True: pass
"""


async def test_a_cell_cannot_stop_its_own_clock(default_environment: Environment, tmp_path: Path) -> None:
    """Where nobody can be asked a question is refused, and where somebody can, all of them together stop it so long."""

    async def never(*_: object) -> ElicitResult:
        await anyio.sleep_forever()
        raise AssertionError

    chosen = {"execution_timeout_s": 2, "ask_timeout_s": 2, "interrupt_grace_s": 1, "fork_start": False}
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime:
        async with connected(runtime) as caller:
            result = await caller.execute(FORGED_QUESTIONS)
            assert (result.status, result.state) == ("died", "lost")
            assert result.cause is not None
            assert "asked for input, which this execution does not allow" in result.cause
        async with connected(runtime, elicitation_callback=never) as caller:
            with anyio.fail_after(60):  # a thousand questions of two seconds each would take half an hour
                running = await caller.execute(FORGED_QUESTIONS, wait_s=0)
                execution = runtime.sessions.executions.find(running.execution_id, "local")
                assert execution is not None
                while not execution.is_finished:
                    await execution.wait_for_change(1)
            assert execution.result().status == "timeout"
