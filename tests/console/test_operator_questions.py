"""Questions that a rule keeps for operators (`answered_in = "console"`): who can answer them, over real HTTP.

The agent's own key is tried at every place where something can be answered.
"""

from collections.abc import AsyncGenerator

import pytest
from calls import LEGACY
from consoles import Place
from operators import LOOKS, calling, opened_operators, refused, script, waiting

from belljar.engine.contract import Access
from belljar.environments import Environment

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_operators(default_environment, tmp_path_factory.mktemp("operators")) as opened:
        yield opened


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
