"""Workflows as a client runs them: steps in one session, values between them, people in the loop, what goes wrong."""

import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import pytest
from calls import ERAS, LEGACY, MODERN, Caller, connected, opened_runtime, text_of
from mcp import Client
from mcp.client import ClientRequestContext
from mcp.types import ElicitRequestParams, ElicitResult
from workflow_texts import code, condition, form, loop, parallel, tool, workflow

from belljar.environments import Environment
from belljar.errors import InvalidArgument, RunNotFound
from belljar.runtime import Runtime
from belljar.workflows.workflows import Workflows, workflows_of
from waiting import until

pytestmark = pytest.mark.anyio
LEDGER = Path(__file__).parents[1] / "ledger_server.py"
POLICY = """
[[tools]]
match = "ledger.put"
decision = "ask"
[[code]]
decision = "ask"
calls = ["os.getcwd"]
"""


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    named = folder / "workflows"
    named.mkdir()
    (named / "greet.yaml").write_text(
        workflow(code("say", "f'hello {who}'"), name="greet", description="Greets", variables={"who": "you"})
    )
    (named / "broken.yaml").write_text("name: broken\nsteps: 3")
    (folder / "policy.toml").write_text(POLICY)
    servers = {"ledger": {"command": sys.executable, "args": [str(LEDGER), str(folder / "ledger")]}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    async with opened_runtime(
        default_environment,
        folder,
        hibernate=True,
        fork_start=True,
        workflows_directory=str(named),
        workflow_hold_s=0.2,
        policy=str(folder / "policy.toml"),
        mcp_config=str(folder / "mcp.json"),
    ) as runtime:
        yield runtime


@pytest.fixture
def workflows(runtime: Runtime) -> Workflows:
    return workflows_of(runtime)


async def ran(caller: Caller, text: str, **arguments: Any) -> dict[str, Any]:
    """The fields of a run that has ended or waits."""
    answer = await caller.call("run_workflow", definition=text, wait_s=120, **arguments)
    assert answer.structured_content is not None, text_of(answer)
    return answer.structured_content


async def ended(caller: Caller, run_id: str) -> dict[str, Any]:
    answer = await caller.call("run_workflow", run_id=run_id, wait_s=120)
    assert answer.structured_content is not None
    return answer.structured_content


def results(run: dict[str, Any]) -> dict[str, Any]:
    return {step["step"]: step["result"] for step in run["steps"]}


def ledger(runtime: Runtime) -> list[str]:
    path = runtime.settings.data_directory / "ledger"
    return path.read_text().splitlines() if path.exists() else []


# Steps and values


@pytest.mark.parametrize("era", ERAS)
async def test_steps_run_in_one_session_and_values_go_from_one_to_the_next(runtime: Runtime, era: str):
    text = workflow(
        code("load", "total = 10\nprint('loaded', region)\ntotal"),
        tool("look_up", "look", text="{{ region }}.txt"),
        condition(
            "decide",
            "{{ load.result > threshold && look_up.result == 'seen north.txt' }}",
            [code("big", "total * 2")],
            [code("small", "0")],
        ),
        loop("each", "{{ [1, 2, load.result] }}", [code("add", "total += item\ntotal")]),
        code("last", "[total, steps['each']['result'], steps['load']['stdout'], steps['add']['result']]"),
        variables={"threshold": 2, "region": "north"},
    )
    async with connected(runtime, era) as caller:
        run = await ran(caller, text)
        assert run["state"] == "done", run
        assert results(run) == {
            "load": 10,
            "look_up": "seen north.txt",
            "decide": 20,
            "decide.big": 20,
            "each": [11, 13, 23],
            "each[0].add": 11,
            "each[1].add": 13,
            "each[2].add": 23,
            "last": [23, [11, 13, 23], "loaded north\n", 23],
        }
        assert run["result"] == [23, [11, 13, 23], "loaded north\n", 23]
        later = await caller.execute("total, region", run["session_id"])
        assert later.result == "(23, 'north')"
        notebook = json.loads(await caller.read_text(f"run://{run['run']}/notebook"))
        assert any("total += item" in "".join(cell["source"]) for cell in notebook["cells"])
        shown = json.loads(await caller.read_text(f"run://{run['run']}"))
        assert shown["state"] == "done"


async def test_branches_run_in_forks_whose_values_come_back_and_variables_do_not(caller: Caller):
    text = workflow(
        code("load", "n = 1"),
        parallel(
            "both",
            [code("a", "n += 10\nn"), code("b", "n += 100\nn")],
            [loop("l", [1, 2], [code("c", "n += item\nn")])],
        ),
        code("after", "[n, steps['both']['result']]"),
    )
    run = await ran(caller, text)
    assert run["state"] == "done", run
    assert run["result"] == [1, [111, [2, 4]]]


async def test_what_guardrails_hide_is_hidden_in_branches_and_what_they_cannot_do_is_told(caller: Caller):
    mail = "ann@example.com"
    text = workflow(
        code("show", f"who = '{mail}'\nwho"),
        parallel("both", [code("left", f"'left {mail}'")], [code("right", "'right ' + who")]),
        guardrails={"pii_detection": True, "rate_limiting": True},
    )
    answer = await caller.call("run_workflow", definition=text, wait_s=120)
    assert mail not in text_of(answer)
    assert '["left [EMAIL_1]", "right [EMAIL_1]"]' in text_of(answer)
    assert "Note: workflow:" in text_of(answer)
    assert "rate_limiting does nothing by itself" in text_of(answer)
    assert answer.structured_content is not None
    assert len(answer.structured_content["notes"]) == 1


async def test_where_there_are_workflows_sessions_share_what_steps_leave_in_workspace(
    default_environment: Environment, tmp_path: Path
):
    async with opened_runtime(default_environment, tmp_path, workflows="on") as runtime, connected(runtime) as caller:
        kept = await ran(caller, workflow(code("keep", "open('workspace/kept.txt', 'w').write('here')")))
        assert kept["state"] == "done", kept["reason"]
        read = await caller.call("execute_code", code="print(open('workspace/kept.txt').read())")
        assert text_of(read).startswith("here\n")


async def test_a_workflow_has_a_name_variables_and_a_place_in_the_list(caller: Caller):
    run = (await caller.call("run_workflow", name="greet", variables={"who": "Ada"}, wait_s=60)).structured_content
    assert run is not None
    assert (run["state"], run["result"]) == ("done", "hello Ada")
    listed = await caller.call("list_workflows")
    assert "greet (who): Greets" in text_of(listed)
    assert "broken: cannot be run: broken.yaml:2" in text_of(listed)
    assert f"{run['run']} greet: done" in text_of(listed)
    assert "has no variable 'woh'" in await caller.refusal("run_workflow", name="greet", variables={"woh": 1})
    assert "did you mean 'greet'" in await caller.refusal("run_workflow", name="gret")


async def test_a_sub_workflow_runs_in_the_same_session(caller: Caller):
    sub = {"name": "sub", "type": "workflow", "config": {"workflow": "greet", "variables": {"who": "{{ n }}"}}}
    run = await ran(caller, workflow(code("make", "made = 'x'\nmade"), sub, variables={"n": "Bob"}))
    assert results(run)["sub.say"] == "hello Bob"
    assert (await caller.execute("made", run["session_id"])).result == "'x'"


async def test_results_that_are_no_json_are_text_and_large_ones_are_not_kept(caller: Caller):
    text = workflow(
        code("odd", "{1, 2}"),
        code("large", "'x' * 1_000_000"),
        code("forged", 'print(\'{"value": 7}\')\nprint("Out[1]: 7")'),
        form("never", "{{ large.result }}", on_error="skip"),
        code("last", "[steps['odd']['result'], 'result' in steps['large'], steps['forged']['result']]"),
    )
    run = await ran(caller, text)
    assert run["result"] == ["{1, 2}", False, None], run
    never = next(each for each in run["steps"] if each["step"] == "never")
    assert "more than the 262,144 that are kept" in never["error"]


# Errors


async def test_a_failure_is_retried_skipped_or_leads_elsewhere(caller: Caller):
    flaky = "tries = globals().get('tries', 0) + 1\nassert tries > 2, tries\ntries"
    text = workflow(
        code("flaky", flaky, retry={"times": 3, "delay_s": 0.01}),
        code("skipped", "1 / 0", on_error="skip"),
        code("jump", "1 / 0", on_error={"goto": "there"}),
        code("between", "'between'"),
        code("there", "steps['skipped']['error']"),
    )
    run = await ran(caller, text)
    assert run["state"] == "done", run
    assert run["result"] == "ZeroDivisionError: division by zero"
    assert results(run)["flaky"] == 3
    assert "between" not in results(run)
    assert next(step["attempt"] for step in run["steps"] if step["step"] == "flaky") == 3


async def test_a_run_that_failed_says_where_and_goes_on_from_there(caller: Caller):
    text = workflow(code("a", "import os\nn = 1"), code("b", "n += 1\nassert os.path.exists('mended'), 'not yet'\nn"))
    answer = await caller.call("run_workflow", definition=text, wait_s=60)
    assert answer.is_error
    assert "step b: AssertionError: not yet" in text_of(answer)
    run = answer.structured_content
    assert run is not None
    assert "resume=true" in text_of(answer)
    await caller.execute("open('mended', 'w').close()", run["session_id"])
    await caller.call("run_workflow", run_id=run["run"], resume=True, wait_s=60)
    again = await ended(caller, run["run"])
    assert (again["state"], again["result"]) == ("done", 3)
    assert [step["attempt"] for step in again["steps"]] == [1, 2]


async def test_variables_are_back_when_a_step_kills_the_process(caller: Caller):
    crash = "import os\nif not os.path.exists('once'):\n    open('once', 'w').close()\n    os._exit(3)\nkept"
    text = workflow(code("a", "kept = [1, 2]"), code("b", crash, retry={"times": 1, "on": ["died"]}))
    run = await ran(caller, text)
    assert (run["state"], run["result"]) == ("done", [1, 2]), run


async def test_a_run_whose_session_was_cleared_says_so(caller: Caller):
    run = await ran(caller, workflow(code("a", "1"), form("ask", "Go on?"), code("b", "2")))
    await caller.call("clear_session", session_id=run["session_id"])
    await caller.call("run_workflow", run_id=run["run"], answer={}, wait_s=30)
    after = await ended(caller, run["run"])
    assert after["state"] == "failed"
    assert "was cleared" in after["reason"]


async def test_a_text_of_problems_starts_nothing(caller: Caller, workflows: Workflows):
    before = len(workflows.list("local"))
    refused = await caller.refusal("run_workflow", definition=workflow(code("a", "x ="), tool("b", "wirte")))
    assert "invalid-workflow: workflow:" in refused
    assert "did you mean 'write'?" in refused
    assert len(workflows.list("local")) == before


# A person in the loop


async def test_a_run_waits_for_a_person_without_a_process_and_its_variables_are_back(caller: Caller, runtime: Runtime):
    fields = {
        "type": "object",
        "properties": {"amount": {"type": "integer", "minimum": 1}, "to": {"type": "string"}},
        "required": ["amount", "to"],
    }
    text = workflow(
        code("a", "kept = {'x': 1}\n'north'"),
        form("ask", "How much?", schema=fields, values={"to": "{{ a.result }}", "amount": 0}),
        code("b", "[kept, steps['ask']['result']]"),
    )
    run = await ran(caller, text)
    assert run["state"] == "waiting", run
    assert list(run["question"]["fields"]["properties"]) == ["amount"]
    assert "amount: 0 is less than the minimum of 1" in run["question"]["message"]
    await until(lambda: all(session.id != run["session_id"] for session in runtime.sessions.all()))
    assert "amount is 0" in await caller.refusal("run_workflow", run_id=run["run"], answer={"amount": 0})
    assert "not asked for" in await caller.refusal("run_workflow", run_id=run["run"], answer={"amount": 1, "x": 1})
    await caller.call("run_workflow", run_id=run["run"], answer={"amount": 5}, wait_s=0)
    after = await ended(caller, run["run"])
    assert after["result"] == [{"x": 1}, {"to": "north", "amount": 5}], after


async def test_declined_expired_and_answered_twice_are_told_apart(caller: Caller, workflows: Workflows):
    text = workflow(form("ask", "Go on?"), code("b", "1"))
    declined = await ran(caller, text)
    await caller.call("run_workflow", run_id=declined["run"], answer={"action": "decline"}, wait_s=30)
    after = await ended(caller, declined["run"])
    assert (after["state"], after["reason"]) == ("stopped", "step ask was declined")
    with pytest.raises(InvalidArgument, match="it is stopped"):
        await workflows.answer(declined["run"], "local", {})

    run = await ran(caller, workflow(form("ask", "Go on?"), form("more", "And now?")))
    await caller.call("run_workflow", run_id=run["run"], answer={}, step="ask", wait_s=30)
    with pytest.raises(InvalidArgument, match="question of step ask was answered already"):
        await workflows.answer(run["run"], "local", {}, step="ask")
    await workflows.stop(run["run"], "local")
    assert workflows.show(run["run"], "local").state == "stopped"

    text = workflow(form("ask", "Quick?", expires_s=0.2, on_expiry="skip"), form("stay", "Still there?"))
    expired = await ran(caller, text)
    await until(lambda: len(workflows.show(expired["run"], "local").steps) == 2)
    with pytest.raises(InvalidArgument, match="question of step ask expired at"):
        await workflows.answer(expired["run"], "local", {}, step="ask")
    await workflows.stop(expired["run"], "local")
    stopped = await ran(caller, workflow(form("ask", "Quick?", expires_s=0.01)))
    await until(lambda: workflows.show(stopped["run"], "local").state == "stopped")
    assert workflows.show(stopped["run"], "local").reason == "step ask: nobody answered within 0.01 s"


@pytest.mark.parametrize("era", [LEGACY, MODERN])
async def test_a_client_that_can_ask_is_asked(runtime: Runtime, era: str):
    asked: list[str] = []

    async def answer(_: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"name": "Eve"} if "name" in params.message else {})

    fields = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    text = workflow(
        form("who", "Your name?", schema=fields), form("sure", "Sure?"), code("c", "steps['who']['result']")
    )
    async with connected(runtime, era, elicitation_callback=answer) as caller:
        run = await ran(caller, text)
    assert asked == ["Your name?", "Sure?"]
    assert (run["state"], run["result"]) == ("done", {"name": "Eve"})


@pytest.mark.parametrize(
    ("action", "state", "reason"), [("decline", "stopped", "step ask was declined"), ("cancel", "waiting", "")]
)
async def test_a_person_who_says_no_in_the_client_declines_and_one_who_closes_the_question_does_not(
    runtime: Runtime, action: Literal["decline", "cancel"], state: str, reason: str
):
    async def answer(_: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        return ElicitResult(action=action)

    async with connected(runtime, LEGACY, elicitation_callback=answer) as caller:
        run = await ran(caller, workflow(form("ask", "Go on?")))
    assert (run["state"], run.get("reason", "")) == (state, reason), run


async def test_what_the_policy_asks_waits_for_a_person_and_happens_once(caller: Caller, runtime: Runtime):
    before = ledger(runtime)
    text = workflow(tool("put", "put", key="k", value=3), code("where", "import os\nos.getcwd() != ''"))
    run = await ran(caller, text)
    assert run["state"] == "waiting", run
    assert run["question"]["message"].startswith("Allow ledger.put with")
    assert ledger(runtime) == before
    await caller.call("run_workflow", run_id=run["run"], answer={}, wait_s=60)
    run = await ended(caller, run["run"])
    assert run["question"]["message"].startswith("May this code run?"), run
    await caller.call("run_workflow", run_id=run["run"], answer={}, wait_s=60)
    run = await ended(caller, run["run"])
    assert (run["state"], run["result"]) == ("done", True), run
    assert ledger(runtime) == [*before, "put k"]


async def test_a_cell_that_asks_in_the_middle_is_answered_the_same_way(caller: Caller, workflows: Workflows):
    run = await ran(caller, workflow(code("a", "name = input('Who? ')\nname")))
    assert run["state"] == "waiting", run
    await caller.call("run_workflow", run_id=run["run"], answer={"answer": "Kim"}, wait_s=60)
    assert (await ended(caller, run["run"]))["result"] == "Kim"


# Others


async def test_another_owners_run_is_answered_as_an_unknown_one(caller: Caller, workflows: Workflows):
    run = await ran(caller, workflow(form("ask", "Go on?")))
    for call in (workflows.show, workflows.record, workflows.questions, workflows.live):
        with pytest.raises(RunNotFound) as known:
            call(run["run"], "key:other")
        with pytest.raises(RunNotFound) as unknown:
            call("0" * 16, "key:other")
        assert str(known.value).replace(run["run"], "") == str(unknown.value).replace("0" * 16, "")
    with pytest.raises(RunNotFound):
        await workflows.answer(run["run"], "key:other", {})
    with pytest.raises(RunNotFound):
        await workflows.stop(run["run"], "key:other")
    await workflows.stop(run["run"], "local")


async def test_a_run_is_stopped_while_a_step_runs(caller: Caller, workflows: Workflows):
    text = workflow(code("a", "import time\nwhile True: time.sleep(0.01)"), code("b", "1"))
    answer = await caller.call("run_workflow", definition=text, wait_s=0)
    assert "It goes on in the background" in text_of(answer)
    run_id = (answer.structured_content or {})["run"]
    await until(lambda: workflows.show(run_id, "local").step == "a")
    began = time.monotonic()
    await workflows.stop(run_id, "local")
    assert workflows.show(run_id, "local").state == "stopped"
    assert time.monotonic() - began < 30
    assert [step.step for step in workflows.show(run_id, "local").steps] == ["a"]


async def test_progress_is_told(runtime: Runtime):
    told: list[str] = []

    async def note(_progress: float, _total: float | None, message: str | None) -> None:
        told.append(message or "")

    from calls import built_server

    async with Client(built_server(runtime), mode=MODERN) as client:
        text = workflow(code("a", "1"), loop("each", [1, 2], [code("b", "item")]))
        await client.call_tool("run_workflow", {"definition": text, "wait_s": 60}, progress_callback=note)
    assert any("each" in line or "a:" in line for line in told), told


async def test_the_tools_cost_few_tokens(caller: Caller):
    tools = {tool.name: tool for tool in (await caller.client.list_tools()).tools}
    ours = [tools["run_workflow"], tools["list_workflows"]]
    assert all(len(each.description or "") < 500 for each in ours)
    assert len(json.dumps([each.model_dump(mode="json", exclude_none=True) for each in ours])) < 3_000
