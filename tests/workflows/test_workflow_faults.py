"""The server is killed at any moment of a run, and what was promised holds: nothing twice, nothing lost.

A model of runs beside a real server process. Workflows with loops, branches, forks, retries and waits are generated,
the server is killed at points of their steps that are hard to hit by chance, and the next one goes on. Few examples by
default; `BELLJAR_SOAK=1` with `-m soak` takes many.
"""

import json
import os
import sqlite3
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from served import Served
from workflow_texts import code, condition, form, loop, parallel, tool, workflow

from belljar.environments import Environment
from waiting import until, until_blocking

LEDGER = Path(__file__).parents[1] / "ledger_server.py"
MAX_RUNS = 2
END_S = 300.0

# The moments of a step at which the server is killed: a query that is true then, of the latest run.
POINTS = {
    "begun": "SELECT 1 FROM steps WHERE run_id = :run AND state = 'running' AND execution_id = '' AND session_id <> ''",
    "running": "SELECT 1 FROM executions WHERE key LIKE :key AND started_at IS NOT NULL AND result IS NULL",
    "ended": "SELECT 1 FROM executions JOIN steps ON steps.execution_id = executions.id WHERE run_id = :run AND "
    "result IS NOT NULL AND state = 'running'",
    "done": "SELECT 1 FROM steps WHERE run_id = :run AND state = 'done' AND number > :number",
    "forked": "SELECT 1 FROM steps WHERE run_id = :run AND path LIKE '%[_]' AND session_id <> '' AND state = 'running'",
    "failed": "SELECT 1 FROM steps WHERE run_id = :run AND state = 'failed'",
    "waiting": "SELECT 1 FROM steps WHERE run_id = :run AND state = 'waiting'",
    "answered": "SELECT 1 FROM steps WHERE run_id = :run AND state = 'answered'",
}
POINT_S = 4.0

# Steps, each with what it adds to the variable `seen` of the session.


@st.composite
def leaf(draw: st.DrawFn, name: str) -> dict[str, Any]:
    kind = draw(st.sampled_from(["code", "code", "write", "look", "flaky", "skipped", "form"]))
    match kind:
        case "code":
            return code(name, f"seen.append({name!r})\nseen[:]", repeat=draw(st.booleans()))
        case "write":
            return tool(name, "write", text=f"{{{{ mark }}}}.{name}")
        case "look":
            return tool(name, "look", text=f"{{{{ mark }}}}.{name}")
        case "flaky":
            source = (
                f"t_{name} = globals().get('t_{name}', 0) + 1\nassert t_{name} > 1\nseen.append({name!r})\nt_{name}"
            )
            return code(name, source, retry={"times": 2, "delay_s": 0.05})
        case "skipped":
            return code(name, f"seen.append({name!r})\n1 / 0", on_error="skip")
        case _:
            return form(name, f"Go on with {name}?")


@st.composite
def texts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The steps of a workflow: six or so, some of them inside others."""
    steps = [code("begin", "seen = ['begin']\nimport time\ntime.sleep(0.02)")]
    for index in range(draw(st.integers(2, 4))):
        name = f"s{index}"
        kind = draw(st.sampled_from(["leaf", "leaf", "loop", "condition", "parallel"]))
        inner = [draw(leaf(f"{name}a")), draw(leaf(f"{name}b"))]
        match kind:
            case "leaf":
                steps.append(draw(leaf(name)))
            case "loop":
                steps.append(loop(name, [1, 2], inner, variable=f"i{index}"))
            case "condition":
                steps.append(
                    condition(name, f"{{{{ flag == {draw(st.sampled_from([1, 2]))} }}}}", inner[:1], inner[1:])
                )
            case _:
                steps.append(parallel(name, inner[:1], inner[1:]))
    return [*steps, code("end", "seen")]


# The model: what an undisturbed run gives


@dataclass
class Modelled:
    """A run as it should be."""

    steps: list[dict[str, Any]]
    mark: str
    asked_again: Counter[str] = field(default_factory=Counter[str])
    """How often a person said that a step of unknown fate should run again."""
    may_repeat: set[str] = field(default_factory=set[str])

    def expected(self) -> tuple[Any, dict[str, Any], list[str]]:
        """Return the result, the results of steps by path, and the paths of steps that write."""
        results: dict[str, Any] = {}
        writes: list[str] = []
        seen: list[str] = []
        result = self._block(self.steps, "", seen, results, writes)
        return result, results, writes

    def _block(
        self, steps: list[dict[str, Any]], prefix: str, seen: list[str], results: dict[str, Any], writes: list[str]
    ) -> Any:
        last: Any = None
        for step in steps:
            path, config = f"{prefix}{step['name']}", step["config"]
            name = step["name"]
            match step["type"]:
                case "loop":
                    last = [
                        self._block(config["steps"], f"{path}[{index}].", seen, results, writes)
                        for index in range(len(config["for"]))
                    ]
                case "condition":
                    block = config["then"] if "flag == 1" in config["if"] else config["else"]
                    last = self._block(block, f"{path}.", seen, results, writes)
                case "parallel":
                    last = [
                        self._block(block, f"{path}[{index}].", [*seen], results, writes)
                        for index, block in enumerate(config["branches"])
                    ]
                case "form":
                    last = {}
                case "tool_call":
                    last = f"{'written' if config['tool'] == 'write' else 'seen'} {self.mark}.{name}"
                    writes += [path] if config["tool"] == "write" else []
                case _ if step.get("on_error") == "skip":
                    seen.append(name)
                    continue  # its result is not the list's
                case _ if "retry" in step:
                    seen.append(name)
                    # The second round of a loop does not fail, because the counter goes on.
                    last = 2 + sum(known.rpartition(".")[2] == name for known in results)
                case _:
                    seen += [] if name in ("begin", "end") else [name]
                    seen[:] = ["begin"] if name == "begin" else seen
                    last = None if name == "begin" else [*seen]
            results[path] = last
        return last


class RunFaults(RuleBasedStateMachine):
    """Rules are what clients do, and where the server is killed."""

    environment: Environment

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="belljar-runs-")
        self.place = Path(self.folder.name)
        self.place.chmod(0o755)
        servers = {"ledger": {"command": sys.executable, "args": [str(LEDGER), str(self.place / "ledger")]}}
        (self.place / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        self.served = Served(
            self.environment,
            self.place,
            BELLJAR_WORKFLOWS="on",
            BELLJAR_LOG_LEVEL="ERROR",
            BELLJAR_MCP_CONFIG=str(self.place / "mcp.json"),
            BELLJAR_WORKFLOW_HOLD_S="0.5",
            BELLJAR_CHECKPOINTS="0",
        )
        self.served.start()
        self._portal = start_blocking_portal()
        self.portal = self._portal.__enter__()
        self.runs: dict[str, Modelled] = {}
        self.kills = 0

    @initialize(steps=texts())
    def the_first_run(self, steps: list[dict[str, Any]]) -> None:
        self.a_run_begins(steps)

    @rule(steps=texts())
    @precondition(lambda self: len(self.runs) < MAX_RUNS)
    def a_run_begins(self, steps: list[dict[str, Any]]) -> None:
        mark = f"r{len(self.runs)}"
        text = workflow(*steps, variables={"flag": 1, "mark": mark})
        run = self.portal.call(self._call, {"definition": text, "wait_s": 0})
        assert run["state"] in ("running", "waiting", "done"), run
        self.runs[run["run"]] = Modelled(steps, mark)

    @rule(point=st.sampled_from([*POINTS]))
    @precondition(lambda self: self.runs)
    def the_server_is_killed(self, point: str) -> None:
        self._reach(point)
        self.portal.call(self.served.kill)
        self.kills += 1
        self.served.start()

    @rule()
    @precondition(lambda self: self.runs)
    def the_server_is_stopped(self) -> None:
        self.portal.call(self.served.stop)
        self.served.start()

    @rule()
    @precondition(lambda self: self.runs)
    def somebody_answers(self) -> None:
        for run_id in self.runs:
            self._answer(run_id)

    def teardown(self) -> None:
        try:
            for run_id, model in self.runs.items():
                self._finish(run_id)
                self._check(run_id, model)
            self.portal.call(self.served.stop)
            assert self.served.leftovers() == []
        except BaseException:
            # hypothesis makes the example again to tell it, and an accident may not come again: tell it now.
            traceback.print_exc()
            print(
                *((run_id, json.dumps(model.steps)) for run_id, model in self.runs.items()), sep="\n", file=sys.stderr
            )
            raise
        finally:
            self.portal.call(self.served.aclose)
            self._portal.__exit__(None, None, None)
            self.folder.cleanup()

    # Getting there

    def _reach(self, point: str) -> None:
        """Wait for the moment, as far as it comes; then the server is killed wherever it is."""
        run_id = [*self.runs][-1]
        query, values = POINTS[point], {"run": run_id, "key": f"{run_id}/%"}
        with closing(self._reader()) as reader:
            number = reader.execute("SELECT coalesce(max(number), 0) FROM steps").fetchone()[0]
            ended = "SELECT 1 FROM runs WHERE id = :run AND state NOT IN ('running', 'waiting')"
            looks = [partial(reader.execute, text, {**values, "number": number}) for text in (query, ended)]
            with suppress(AssertionError):  # this run has no such moment any more
                until_blocking(lambda: any(look().fetchone() for look in looks), limit_s=POINT_S)

    def _reader(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.place / 'journal.sqlite'}?mode=ro", uri=True, isolation_level=None)

    def _answer(self, run_id: str) -> bool:
        """Answer what a run asks: yes to forms, again to steps of unknown fate. Return whether it has ended."""
        run = self.portal.call(self._call, {"run_id": run_id, "wait_s": 5})
        for question in run["questions"]:
            is_fate = "choice" in question["fields"].get("properties", {})
            if is_fate:
                self.runs[run_id].asked_again[question["step"]] += 1
            answer = {"choice": "again"} if is_fate else {}
            self.portal.call(self._call, {"run_id": run_id, "answer": answer, "step": question["step"], "wait_s": 0})
        return run["state"] == "done"

    def _finish(self, run_id: str) -> None:
        until_blocking(lambda: self._answer(run_id), limit_s=END_S)

    async def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        async with self.served.client() as caller:
            answer = await caller.call("run_workflow", **arguments)
        assert answer.structured_content is not None, answer
        assert "run" in answer.structured_content, answer
        return answer.structured_content

    # What must hold

    def _check(self, run_id: str, model: Modelled) -> None:
        result, results, writes = model.expected()
        with closing(self._reader()) as reader:
            (value,) = reader.execute("SELECT value FROM runs WHERE id = ?", (run_id,)).fetchone()
            rows = reader.execute(
                "SELECT path, attempt, state, value FROM steps WHERE run_id = ? ORDER BY path, attempt", (run_id,)
            ).fetchall()
            begun = reader.execute(
                "SELECT key, result FROM executions WHERE key LIKE ? AND started_at IS NOT NULL", (f"{run_id}/%",)
            ).fetchall()
        assert json.loads(value) == result, (model.steps, rows)
        self._check_values(results, rows)
        self._check_attempts(run_id, model, rows, begun)
        self._check_ledger(model, writes, rows)

    def _check_values(self, results: dict[str, Any], rows: list[Any]) -> None:
        """The value of every step is that of an undisturbed run."""
        found = {path: json.loads(text or "{}").get("result") for path, _, state, text in rows if state == "done"}
        for path, expected in results.items():
            assert found.get(path) == expected, (path, rows)

    def _check_attempts(self, run_id: str, model: Modelled, rows: list[Any], begun: list[Any]) -> None:
        """No finished step has run again, and no attempt was made twice."""
        done = Counter(path for path, _, state, _ in rows if state == "done")
        assert all(count == 1 for count in done.values()), rows
        finished = Counter[str]()
        for key, result in begun:
            path = key.removeprefix(f"{run_id}/").rpartition("/")[0]
            finished[path] += json.loads(result or "{}").get("status") == "ok"
        names = {step["name"]: step for step in _all_steps(model.steps)}
        for path, count in finished.items():
            is_repeatable = names[path.rpartition(".")[2].partition("[")[0]].get("repeat")
            allowed = 1 + model.asked_again[path] + (self.kills + 10 if is_repeatable else 0)
            is_look = names[path.rpartition(".")[2]]["config"].get("tool") == "look"
            assert count <= allowed or is_look, (path, count, rows)

    def _check_ledger(self, model: Modelled, writes: list[str], rows: list[Any]) -> None:
        """A tool that may write was called once, and once more for each time that a person said so."""
        ledger = self.place / "ledger"
        lines = Counter(ledger.read_text().splitlines() if ledger.exists() else [])
        expected, again = Counter[str](), Counter[str]()
        for path in writes:
            line = f"write {model.mark}.{path.rpartition('.')[2]}"
            expected[line] += 1
            again[line] += model.asked_again[path]
        for line, count in expected.items():
            assert count <= lines[line] <= count + again[line], (line, lines, rows)


def _all_steps(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in steps:
        config = step["config"]
        inner = [config.get("steps", []), config.get("then", []), config.get("else", []), *config.get("branches", [])]
        found += [step, *(each for block in inner for each in _all_steps(block))]
    return found


def _run(environment: Environment, *, examples: int, steps: int, derandomize: bool) -> None:
    RunFaults.environment = environment
    run_state_machine_as_test(
        RunFaults,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=derandomize,
            # A shorter way to the same failure would take hours of starting servers.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(400)
def test_nothing_of_a_run_happens_twice_or_is_lost_through_a_few_kills(default_environment: Environment) -> None:
    _run(default_environment, examples=2, steps=5, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif("BELLJAR_SOAK" not in os.environ, reason="takes minutes: set BELLJAR_SOAK=1 to run it")
def test_nothing_of_a_run_happens_twice_or_is_lost_through_many_kills(default_environment: Environment) -> None:
    _run(default_environment, examples=int(os.environ.get("BELLJAR_SOAK_EXAMPLES", "30")), steps=8, derandomize=False)


@pytest.mark.anyio
async def test_a_step_goes_on_through_a_kill_where_sessions_outlive_their_server(
    default_environment: Environment, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    served = Served(
        default_environment, tmp_path, BELLJAR_WORKFLOWS="on", BELLJAR_KEEP_ALIVE="true", BELLJAR_KEEP_ALIVE_S="30"
    )
    served.start()
    gate = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nnext(numbers)"
    text = workflow(code("a", "numbers = iter([7, 8, 9])\nnext(numbers)"), code("b", gate), code("c", "[*numbers]"))
    try:
        async with served.client() as caller:
            run = await caller.fields("run_workflow", definition=text, wait_s=0)
        query = "SELECT 1 FROM steps JOIN executions ON execution_id = id WHERE path = 'b' AND started_at IS NOT NULL"
        with closing(sqlite3.connect(f"file:{tmp_path / 'journal.sqlite'}?mode=ro", uri=True)) as reader:
            await until(lambda: reader.execute(query).fetchone())
        assert served.process is not None
        served.process.kill()
        await to_thread.run_sync(served.process.wait)
        (tmp_path / "sessions" / run["session_id"] / "workspace" / "go").touch()
        served.start()
        async with served.client() as caller:

            async def is_done() -> bool:
                return (await caller.fields("run_workflow", run_id=run["run"], wait_s=10))["state"] == "done"

            await until(is_done)
            ended = await caller.fields("run_workflow", run_id=run["run"])
            await caller.fields("clear_session", session_id=run["session_id"])
        assert ended["result"] == [9]
        assert [(step["step"], step["attempt"]) for step in ended["steps"]] == [("a", 1), ("b", 1), ("c", 1)]
    finally:
        await served.aclose()
