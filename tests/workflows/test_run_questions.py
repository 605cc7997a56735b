"""Questions of runs: in the inbox beside those of cells, and those that a rule keeps for operators."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from calls import FORKS, LEGACY, Caller, connected, opened_runtime, text_of
from workflow_texts import code, form, workflow

from belljar.environments import Environment
from belljar.errors import InvalidArgument, QuestionClosed
from belljar.questions.models import InboxQuestion
from belljar.runtime import Runtime
from task_clients import TaskFollower, ask
from waiting import until

sys.path.append(str(Path(__file__).parents[1] / "console"))
from consoles import Place
from operators import LOOKS, calling, opened_operators, refused, waiting

pytestmark = pytest.mark.anyio
POLICY = """
[[code]]
decision = "ask"
calls = ["os.getcwd"]
answered_in = "console"
"""
FIELDS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    (folder / "policy.toml").write_text(POLICY)
    async with opened_runtime(
        default_environment,
        folder,
        ask_in_console="present",
        workflows="on",
        policy=str(folder / "policy.toml"),
        **FORKS,
    ) as runtime:
        yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    """A client that cannot ask, while somebody looks at the inbox."""
    runtime.sessions.inbox.note_presence(None)
    async with connected(runtime) as caller:
        yield caller


async def asked(runtime: Runtime, execution_id: str = "") -> InboxQuestion:
    """The question that waits."""
    inbox = runtime.sessions.inbox

    def found() -> list[InboxQuestion]:
        return [each for each in inbox.waiting(None) if execution_id in (each.execution_id, "")]

    (question,) = await until(found)
    return question


async def answer(runtime: Runtime, question_id: str, **values: Any) -> None:
    await runtime.sessions.inbox.answer(question_id, None, action="accept", values=values, by="ada", where="terminal")


async def test_an_agent_is_told_that_a_question_of_a_run_is_answered_at_the_server(runtime: Runtime, caller: Caller):
    definition = workflow(code("look", "import os; os.getcwd()"))
    answered = await caller.call("run_workflow", definition=definition, wait_s=30)
    text = text_of(answered)
    assert "A person has to decide at the server, in `belljar console` or with `belljar inbox`: tell them." in text
    assert "answer=" not in text
    (question,) = [each for each in runtime.sessions.inbox.waiting(None) if each.kind == "workflow"]
    await answer(runtime, question.id)


async def test_nobody_changes_the_code_of_a_run_which_would_run_as_the_workflow_has_it(
    runtime: Runtime, caller: Caller
):
    definition = workflow(code("look", "import os; result = os.getcwd() and 'as it was'"))
    run = await caller.fields("run_workflow", definition=definition, wait_s=30)
    (question,) = [each for each in runtime.sessions.inbox.waiting(None) if each.kind == "workflow"]
    assert question.about is not None
    assert question.about.code
    assert not question.about.editable
    yes = {"action": "accept", "by": "ada", "where": "console"}
    with pytest.raises(InvalidArgument, match="cannot be changed"):
        await runtime.sessions.inbox.answer(question.id, None, edited="1", **yes)
    await answer(runtime, question.id)
    assert (await caller.fields("run_workflow", run_id=run["run"], wait_s=30))["state"] == "done"


async def test_a_question_of_a_run_waits_on_while_answers_lack_a_required_field(runtime: Runtime, caller: Caller):
    run = await caller.fields("run_workflow", definition=workflow(form("ask", "How many?", fields=FIELDS)), wait_s=30)
    question = await asked(runtime)
    with pytest.raises(InvalidArgument, match="the answer lacks n"):
        await answer(runtime, question.id)
    refused = text_of(await caller.call("run_workflow", run_id=run["run"], answer={}))
    assert "the answer lacks n" in refused
    assert [each.id for each in runtime.sessions.inbox.waiting(None)] == [question.id]

    async def person(number: int) -> str:
        try:
            await answer(runtime, question.id, n=number)
        except (InvalidArgument, QuestionClosed):
            return ""
        return str(number)

    said = [each for each in await asyncio.gather(*map(person, range(1, 11))) if each]
    ended = await caller.fields("run_workflow", run_id=run["run"], wait_s=30)
    assert [ended["result"]] == [{"n": int(each)} for each in said]


async def test_waits_of_workflows_are_in_the_same_list(runtime: Runtime, caller: Caller):
    run = await caller.fields("run_workflow", definition=workflow(form("ask", "How many?", fields=FIELDS)), wait_s=30)
    question = await asked(runtime)
    assert (question.kind, question.id) == ("workflow", f"{run['run']}:ask")
    assert "How many?" in question.message
    await answer(runtime, question.id, n=3)
    ended = await caller.fields("run_workflow", run_id=run["run"], wait_s=30)
    assert ended["result"] == {"n": 3}
    with pytest.raises(QuestionClosed, match="already by ada"):
        await answer(runtime, question.id, n=4)


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("operators")
    async with opened_operators(default_environment, folder, workflows="on", workflow_hold_s=0.2) as opened:
        yield opened


@pytest.mark.parametrize(
    "source", [LOOKS, "from servers.book import publish\nprint('begun')\npublish(text='x')"], ids=["code", "call"]
)
async def test_a_clients_every_way_to_answer_a_run_leaves_the_operators_question_waiting(
    place: Place, source: str
) -> None:
    async with calling(place, "agent", extensions=[TaskFollower()]) as agent:
        run = await agent.fields("run_workflow", definition=workflow(code("step", source)), wait_s=10)
        question = await waiting(place, id=f"{run['run']}:step")
        await refused(place, question, "agent", 403)
        for answer in ({}, {"action": "decline"}):
            refusal = await agent.refusal("run_workflow", run_id=run["run"], answer=answer)
            assert "operator-needed" in refusal
        session, yes = agent.client.session, {"action": "accept", "content": {}}
        asked_ms = int(datetime.fromisoformat(question.put_at).timestamp() * 1000)
        sent = {f"question-step@{ms}": yes for ms in range(asked_ms - 1, asked_ms + 2)}
        await ask(session, "tasks/update", f"{run['run']}-{asked_ms}", inputResponses=sent)
        # The cell of a step is an execution like any other, and its id is no secret to the client.
        if place.runtime.sessions.executions.find(question.execution_id, "key:agent") is not None:
            await ask(session, "tasks/update", question.execution_id, inputResponses={"question-1": yes})
            async with calling(place, "agent", LEGACY) as asker:
                assert (await asker.get(question.execution_id, wait_s=0)).status == "running"
        assert place.runtime.sessions.inbox.find(question.id, None).state == "waiting"
        async with place.operator() as browser:
            await browser.post(f"/console/inbox/{question.id}", data={"action": "accept"})
        ended = await agent.fields("run_workflow", run_id=run["run"], wait_s=60)
        assert ended["state"] == "done", ended
