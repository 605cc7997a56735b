"""A wall clock that is set ends nothing, loses nothing and keeps nobody waiting."""

import time
from pathlib import Path

import pytest
from calls import connected, held, opened_runtime, until_said

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
        await runtime.sessions.endings.retire(runtime.sessions.get(asleep.session_id, "local"), "was put to sleep")
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
