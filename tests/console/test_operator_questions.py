"""Questions that a rule keeps for operators (`answered_in = "console"`): who can answer them, over real HTTP.

The agent's own key is tried at every place where something can be answered.
"""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from calls import LEGACY, MODERN, Caller
from consoles import Place, opened_place
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import ElicitResult

from belljar.engine.contract import Access
from belljar.environments import Environment
from belljar.questions.models import InboxQuestion
from task_clients import TaskFollower, ask
from waiting import until
from workflow_texts import code, workflow

pytestmark = pytest.mark.anyio

KEYS = {"agent": "a" * 40, "bob": "b" * 40, "olga": "o" * 40}
BOOK = Path(__file__).parents[1] / "privacy" / "address_book.py"
POLICY = """
[[code]]
decision = "ask"
calls = ["os.getcwd"]
answered_in = "console"

[[tools]]
match = "book.publish"
decision = "ask"
answered_in = "console"
"""
LOOKS = "import os\nbool(os.getcwd())"


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("operators")
    (folder / "policy.toml").write_text(POLICY)
    async with opened_place(
        default_environment,
        folder,
        policy=str(folder / "policy.toml"),
        api_keys=[f"{name}:{key}" for name, key in KEYS.items()],
        console_operators=["key:olga"],
        ask_in_console="always",
        workflows="on",
        workflow_hold_s=0.2,
        mcp_servers={"book": {"command": sys.executable, "args": [str(BOOK), str(folder / "notes")]}},
    ) as opened:
        yield opened


async def _never(context: Any, params: Any) -> ElicitResult:
    raise AssertionError("it was put to the client")


@asynccontextmanager
async def calling(place: Place, name: str, era: str = MODERN, **options: Any) -> AsyncGenerator[Caller]:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(
            streamable_http_client(f"{place.url}/mcp", http_client=http),
            mode=era,
            elicitation_callback=_never,
            **options,
        ) as client,
    ):
        yield Caller(client)


def script(place: Place, name: str) -> httpx.AsyncClient:
    """A program that sends its key with each request."""
    return httpx.AsyncClient(base_url=place.url, headers={"authorization": f"Bearer {KEYS[name]}"}, timeout=30)


async def waiting(place: Place, **wanted: str) -> InboxQuestion:
    inbox = place.runtime.sessions.inbox

    def found() -> list[InboxQuestion]:
        return [
            each for each in inbox.waiting(None) if all(getattr(each, name) == text for name, text in wanted.items())
        ]

    (question,) = await until(found)
    assert question.in_console
    return question


async def refused(place: Place, question: InboxQuestion, name: str, status: int) -> None:
    """A key answers nothing: not with a request, nor signed in at the console with it."""
    path, answer = f"/api/v1/questions/{question.id}", {"action": "accept", "values": {}}
    async with script(place, name) as program, place.person(KEYS[name]) as browser:
        refusal = await program.post(path, json=answer)
        assert refusal.status_code == status, refusal.text
        if status == 403:
            told = refusal.json()["error"]
            assert told["code"] == "operator-needed"
            assert "kept for an operator" in told["message"]
            assert "belljar inbox" in told["hint"]
            assert "console_operators" in told["hint"]
            page = (await browser.get(f"/console/inbox/{question.id}")).text
            assert "keeps this question for an operator" in page
            assert f'action="/console/inbox/{question.id}"' not in page
        assert (await program.post(path, json={"action": "decline", "values": {}})).status_code == status
        assert (await browser.post(path, json=answer)).status_code == status
        assert (await browser.post(f"/console/inbox/{question.id}", data={"action": "accept"})).status_code == status
    assert place.runtime.sessions.inbox.find(question.id, None).state == "waiting"


async def test_the_agents_key_and_other_principals_answer_nothing_that_is_kept_for_an_operator(place: Place) -> None:
    async with calling(place, "agent", LEGACY) as agent:
        running = await agent.execute(LOOKS, wait_s=0)
        question = await waiting(place, execution_id=running.execution_id)
        await refused(place, question, "agent", 403)
        await refused(place, question, "bob", 404)
        async with script(place, "olga") as operator:
            answer = await operator.post(f"/api/v1/questions/{question.id}", json={"action": "accept", "values": {}})
            assert answer.status_code == 200, answer.text
        assert (await agent.ended(running.execution_id)).result == "True"
        running = await agent.execute(LOOKS, running.session_id, wait_s=0)
        question = await waiting(place, execution_id=running.execution_id)
        async with place.operator() as browser:
            assert f'action="/console/inbox/{question.id}"' in (await browser.get("/console/inbox")).text
            answer = await browser.post(f"/console/inbox/{question.id}", data={"action": "accept"})
            assert answer.status_code == 303
        assert (await agent.ended(running.execution_id)).result == "True"


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


async def test_only_an_operator_who_looks_counts_as_somebody_to_ask(place: Place) -> None:
    engine, inbox = place.runtime.late_engine.get(), place.runtime.sessions.inbox
    inbox._rule = "present"
    try:
        await engine.note_presence(Access("key:agent", name="agent"))
        assert inbox.may_ask("key:agent")
        async with calling(place, "agent") as agent:
            looked = await agent.execute(LOOKS)
            assert looked.status == "rejected"
            assert "nobody could be asked" in str(looked.error)
        await engine.note_presence(Access("key:olga", is_operator=True, name="olga"))
        assert inbox.may_ask("key:agent", in_console=True)
    finally:
        inbox._rule = "always"
