"""What a run costs: 100 one-line steps beside the same 100 cells by `execute_code`; and how soon a long run goes on."""

import json
import statistics
import time
from typing import Any

from mcp import Client

from belljar.journal.run_records import RunRecord, RunRecords
from belljar.runtime import open_runtime
from belljar.workflows.workflows import workflows_of
from bench.figures import Figure
from bench.servers import belljar_command, new_session, open_stdio
from bench.stage import Stage

STEPS = 100
TARGET = 1.3
FINISHED = 10_000
RESUME_S = 1.0
ON = {"BELLJAR_WORKFLOWS": "on", "BELLJAR_MAX_SESSIONS": "64"}


async def measure(stage: Stage) -> list[Figure]:
    """Runs through MCP, and the resumption of a run in an engine of this process."""
    async with open_stdio(stage, belljar_command(), "modern", ON) as client:
        session_id = await new_session(client)
        cells: list[float] = []
        plain: list[float] = []
        saved: list[float] = []
        for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(60, 20)):
            cells.append(await _by_calls(client, session_id))
            plain.append(await _by_run(client, saves=False))
            saved.append(await _by_run(client, saves=True))
    peer, ours, kept = (min(samples) * 1000 for samples in (cells, plain, saved))
    note = "peer: the same cells by execute_code"
    resumed = [await _resumed(stage) for _ in range(stage.pick(3, 1))]
    return [
        Figure("workflows", f"{STEPS} one-line steps", "ms", ours, peer, TARGET, note=note),
        Figure("workflows", f"{STEPS} steps, variables saved after each", "ms", kept, peer, note=note),
        Figure(
            "workflows",
            f"resume after {FINISHED:,} steps",
            "s",
            statistics.median(resumed),
            target=RESUME_S,
            bound="value",
            note="to the first new step; the session's process is there",
        ),
    ]


def _text(*, saves: bool) -> str:
    steps = [{"name": f"s{i}", "type": "code_execution", "config": {"code": f"x = {i}"}} for i in range(STEPS)]
    return json.dumps({"name": "bench", "save": saves, "steps": steps})


async def _by_calls(client: Client, session_id: str) -> float:
    began = time.perf_counter()
    for i in range(STEPS):
        await client.call_tool("execute_code", {"code": f"x = {i}", "session_id": session_id})
    return time.perf_counter() - began


async def _by_run(client: Client, *, saves: bool) -> float:
    """The time of the steps: that of the whole run, without the start of its session, which the peer has not either."""
    answer = await client.call_tool("run_workflow", {"definition": _text(saves=saves), "wait_s": 120})
    run: dict[str, Any] = answer.structured_content or {}
    if run.get("state") != "done":
        raise RuntimeError(f"run_workflow answered {answer.content}")
    content = (await client.read_resource(f"run://{run['run']}")).contents[0]
    steps = json.loads(getattr(content, "text", "{}"))["steps"]
    # From the end of the first step to the end of the last, for one step more.
    return sum(step["duration_s"] for step in steps[1:]) * STEPS / (STEPS - 1)


async def _resumed(stage: Stage) -> float:
    """Seconds from `resume` to the first step that is not on record yet."""
    settings = stage.settings().model_copy(update={"fork_start": False})
    rounds = FINISHED // 2 + 1
    steps = [{"name": name, "type": "code_execution", "config": {"code": "item"}} for name in ("a", "b")]
    text = json.dumps(
        {
            "name": "long",
            "save": False,
            "steps": [{"name": "each", "type": "loop", "config": {"for": [*range(rounds)], "steps": steps}}],
        }
    )
    async with open_runtime(settings) as runtime:
        session = runtime.sessions.create("local")
        await session.start()
        records = RunRecords(runtime.sessions.journal, "")
        run_id = f"bench{time.time_ns():x}"[:16]
        _enter(records, run_id, text, session.id)
        _finish_steps(runtime.sessions.journal, run_id, session.id, rounds)
        began = time.perf_counter()
        run = await workflows_of(runtime).resume(run_id, "local")
        while not any(event.kind == "begin" for event in run.events):
            await run.wait_for_change(60)
        taken = time.perf_counter() - began
        if run.task is not None:
            await run.task
        if workflows_of(runtime).show(run_id, "local").state != "done":
            raise RuntimeError(workflows_of(runtime).show(run_id, "local").reason)
        return taken


def _enter(records: RunRecords, run_id: str, text: str, session_id: str) -> None:
    records.enter(
        RunRecord(
            id=run_id,
            principal="local",
            name="long",
            text=text,
            texts="{}",
            source="",
            digest="",
            variables="{}",
            session_id=session_id,
            server="",
            state="running",
            started_at=time.time(),
        )
    )


def _finish_steps(journal: Any, run_id: str, session_id: str, rounds: int) -> None:
    """Put a run on record that has come to its last round."""
    query = (
        "INSERT INTO steps (run_id, path, attempt, state, execution_id, session_id, value, began_at, ended_at) "
        "VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?)"
    )
    now = time.time()
    items = json.dumps({"items": [*range(rounds)]})
    journal.write(query, (run_id, "each", "running", "", "", items, now, None))
    for index in range(rounds - 1):
        value = json.dumps({"result": index, "stdout": "", "files": [], "status": "done", "error": "", "failure": ""})
        for name in ("a", "b"):
            path = f"each[{index}].{name}"
            journal.write(query, (run_id, path, "done", f"{index:032x}", session_id, value, now, now))
    journal.commit()
