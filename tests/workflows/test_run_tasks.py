"""Runs of workflows as tasks of the protocol, for clients that follow them."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from calls import MODERN, Caller, connected, opened_runtime, text_of
from mcp import MCPError
from mcp.types import INVALID_PARAMS
from workflow_texts import code, form, parallel, workflow

from belljar.environments import Environment
from belljar.runtime import Runtime
from task_clients import TaskFollower, ask, create, settled
from waiting import until

pytestmark = pytest.mark.anyio
FIELDS = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    (folder / "workflows").mkdir()
    workflows = str(folder / "workflows")
    # Parallel steps run in forks.
    async with opened_runtime(default_environment, folder, fork_start=True, workflows_directory=workflows) as runtime:
        yield runtime


@pytest.fixture
async def follower(runtime: Runtime) -> AsyncGenerator[Caller]:
    """A client that follows tasks and can ask a person."""

    async def never(context: Any, params: Any) -> Any:
        raise AssertionError("questions of a task are answered by tasks/update")

    async with connected(runtime, MODERN, extensions=[TaskFollower()], elicitation_callback=never) as caller:
        yield caller


async def refused(caller: Caller, method: str, task_id: str, **params: Any) -> int:
    """The code of the error with which a request of the extension is refused."""
    with pytest.raises(MCPError) as caught:
        await ask(caller.client.session, method, task_id, **params)
    return caught.value.error.code


async def test_a_run_is_a_task_whose_questions_are_answered_one_by_one(follower: Caller):
    text = workflow(
        parallel("both", [form("left", "Left?", fields=FIELDS)], [form("right", "Right?", fields=FIELDS)]),
        code("paint", "[branch['colour'] for branch in steps['both']['result']]"),
    )
    task = await create(follower.client, "run_workflow", definition=text, wait_s=0)
    session, pending = follower.client.session, list[dict[str, Any]]()

    async def both_asked() -> bool:
        pending[:] = [(await ask(session, "tasks/get", task.task_id)).get("inputRequests", {})]
        return len(pending[0]) == 2

    await until(both_asked)
    left, right = sorted(pending[0], key=lambda key: pending[0][key]["params"]["message"])
    await ask(session, "tasks/update", task.task_id, inputResponses={left: _colour("red")})
    half = await ask(session, "tasks/get", task.task_id)
    assert (half["status"], [*half["inputRequests"]]) == ("input_required", [right])
    assert await refused(follower, "tasks/update", task.task_id, inputResponses={right: _colour(5)}) == INVALID_PARAMS
    await ask(session, "tasks/update", task.task_id, inputResponses={right: _colour("green"), left: _colour("late")})
    ended = await settled(session, task.task_id)
    assert ended["status"] == "completed"
    assert ended["result"]["structuredContent"]["result"] == ["red", "green"]


def _colour(value: Any) -> dict[str, Any]:
    return {"action": "accept", "content": {"colour": value}}


async def test_a_run_that_asks_is_a_result_for_a_client_that_cannot_ask(runtime: Runtime):
    following = TaskFollower()
    async with connected(runtime, MODERN, extensions=[following]) as caller:
        text = workflow(code("wait", "import time; time.sleep(0.3)"), form("ask", "Which colour?", fields=FIELDS))
        answer = await caller.call("run_workflow", definition=text, wait_s=0)
        assert "Asks (ask): Which colour?" in text_of(answer)
        run_id = following.created[0].task_id.partition("-")[0]
        answer = await caller.call("run_workflow", run_id=run_id, answer={"colour": "blue"}, wait_s=30)
        assert "done" in text_of(answer)


async def test_a_cancelled_task_stops_its_run(follower: Caller):
    text = workflow(code("hang", "import time\nwhile True: time.sleep(0.01)"))
    task = await create(follower.client, "run_workflow", definition=text, wait_s=0)
    await ask(follower.client.session, "tasks/cancel", task.task_id)
    ended = await settled(follower.client.session, task.task_id)
    assert ended["status"] == "cancelled"
