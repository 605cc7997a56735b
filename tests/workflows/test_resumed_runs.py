"""Runs that one engine leaves and the next goes on with, on the same data directory."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from workflow_texts import code, form, loop, workflow

from belljar.environments import Environment
from belljar.journal.run_records import RunRecords
from belljar.runtime import Runtime, open_runtime
from belljar.settings import Settings
from belljar.workflows.workflows import MAX_TRIES, workflows_of
from waiting import until

pytestmark = pytest.mark.anyio
GATE = "import os, time\nseen.append('b')\nwhile not os.path.exists('go'): time.sleep(0.01)\n"


@asynccontextmanager
async def engine(environment: Environment, folder: Path, *, takes_runs: bool = False) -> AsyncGenerator[Runtime]:
    folder.chmod(0o755)
    settings = Settings(
        environment=str(environment.python),
        data_directory=folder / "data",
        fork_start=False,
        preload=[],
        pool_size=0,
        checkpoints=0,
        log_level="ERROR",
        workflow_hold_s=0.2,
    )
    async with open_runtime(settings, takes_runs=takes_runs) as runtime:
        yield runtime


def shown(runtime: Runtime, run_id: str) -> Any:
    return workflows_of(runtime).show(run_id, "local")


async def test_a_step_that_a_stopped_server_broke_off_starts_again_from_the_variables_before_it(
    default_environment: Environment, tmp_path: Path
):
    text = workflow(code("a", "seen = ['a']"), code("b", f"{GATE}1"), code("c", "seen"))
    async with engine(default_environment, tmp_path) as runtime:
        run = await workflows_of(runtime).start(workflows_of(runtime).library.from_text(text), "local")
        session = await runtime.sessions.reach(run.record.session_id, "local")
        await until(lambda: "seen" in session.session_kernel.variables and shown(runtime, run.id).step == "b")
        await until(lambda: any(each.has_started for each in session.queue.running()))
    async with engine(default_environment, tmp_path, takes_runs=True) as runtime:
        await until(lambda: shown(runtime, run.id).state == "waiting")
        question = shown(runtime, run.id).question
        assert question.message.startswith("Step b had begun when its server ended")
        # Nothing is held for it, and the answer wakes the session from what was saved before the step.
        await until(lambda: not workflows_of(runtime).record(run.id, "local").server)
        (workspace,) = (tmp_path / "data" / "sessions").glob("*/workspace")
        (workspace / "go").touch()
        await workflows_of(runtime).answer(run.id, "local", {"choice": "again"})
        await until(lambda: shown(runtime, run.id).state == "done")
        assert shown(runtime, run.id).result == ["a", "b"]


async def test_a_question_outlives_its_server_and_a_finished_step_is_not_run_again(
    default_environment: Environment, tmp_path: Path
):
    count = "n = globals().get('n', 0) + 1\nn"
    steps = [
        code("a", count),
        loop("l", [1, 2], [code("b", count)]),
        form("ask", "Go on?"),
        code("c", f"region += '!'\n{count}"),
    ]
    text = workflow(
        *steps, code("d", "[n, region, steps['l']['result'], steps['c']['result']]"), variables={"region": "x"}
    )
    async with engine(default_environment, tmp_path) as runtime:
        run = await workflows_of(runtime).start(workflows_of(runtime).library.from_text(text), "local")
        await until(lambda: shown(runtime, run.id).state == "waiting")
    async with engine(default_environment, tmp_path) as runtime:
        assert shown(runtime, run.id).state == "waiting"
        await workflows_of(runtime).answer(run.id, "local", {})
        await until(lambda: shown(runtime, run.id).state == "done")
        info = shown(runtime, run.id)
        assert info.result == [4, "x!", [2, 3], 4]
        assert {step.step: step.attempt for step in info.steps}["a"] == 1


async def test_a_run_that_no_server_outlives_is_set_aside_and_named_until_somebody_resumes_it(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    text = workflow(code("a", "seen = []"), code("b", f"{GATE}1", repeat=True))
    async with engine(default_environment, tmp_path) as runtime:
        run = await workflows_of(runtime).start(workflows_of(runtime).library.from_text(text), "local")
        await until(lambda: shown(runtime, run.id).step == "b")
        # From here on servers end without a word, as one that hangs and is killed.
        monkeypatch.setattr(RunRecords, "release", lambda *_: None)
    for _ in range(MAX_TRIES):
        async with engine(default_environment, tmp_path, takes_runs=True) as runtime:
            await until(lambda: workflows_of(runtime).record(run.id, "local").server == runtime.name)
    monkeypatch.undo()
    async with engine(default_environment, tmp_path, takes_runs=True) as runtime:
        await until(lambda: workflows_of(runtime).record(run.id, "local").end)
        info = shown(runtime, run.id)
        assert info.state == "interrupted"
        assert info.reason == "set aside: 3 servers in a row ended soon after they went on with it"
        assert f"`belljar workflow resume {run.id}` goes on with it" in caplog.text
        (workspace,) = (tmp_path / "data" / "sessions").glob("*/workspace")
        (workspace / "go").touch()
        await workflows_of(runtime).resume(run.id, "local")
        await until(lambda: shown(runtime, run.id).state == "done")
