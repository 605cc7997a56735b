"""The extension for tasks: long calls become tasks for clients that follow them, and for nobody else."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from calls import ERAS, MODERN, Caller, connected, held, opened_runtime, served_over_http, text_of, until_said
from mcp import Client, MCPError
from mcp.types import HEADER_MISMATCH, INVALID_PARAMS, METHOD_NOT_FOUND, ElicitResult, Request

from belljar.environments import Environment
from belljar.executions.cell import Cell
from belljar.runtime import Runtime
from task_clients import ANY, TASKS, TaskFollower, ask, create, settled
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), fork_start=True) as runtime:
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


# Executions


async def test_a_long_call_is_one_result_for_a_client_that_follows_tasks(runtime: Runtime):
    following = TaskFollower()
    async with connected(runtime, MODERN, extensions=[following]) as caller:
        session_id = await caller.new_session()
        answer = await caller.call("execute_code", code="print('one')\n6 * 7", session_id=session_id)
        assert following.created == []  # short calls are answered as ever
        answer = await caller.call("execute_code", code="import time; time.sleep(0.3); 6 * 7", wait_s=0)
        (task,) = following.created
        assert "Out[1]: 42" in text_of(answer)
        assert answer.structured_content is not None
        assert answer.structured_content["execution_id"] == task.task_id
        assert not answer.is_error


async def test_a_task_tells_its_last_words_and_then_what_get_execution_tells(follower: Caller, runtime: Runtime):
    session_id = await follower.new_session()
    task = await create(follower.client, "execute_code", code=f"{held()}\n1 / 0", session_id=session_id, wait_s=0)
    await until_said(runtime, task.task_id, "held")
    working = await ask(follower.client.session, "tasks/get", task.task_id)
    assert working["resultType"] == "complete"
    assert (working["status"], working["statusMessage"], working["pollIntervalMs"]) == ("working", "held", 500)
    assert working["ttlMs"] == 7 * 24 * 60 * 60 * 1000
    assert working["createdAt"] <= working["lastUpdatedAt"]
    await follower.release(session_id)
    ended = await settled(follower.client.session, task.task_id)
    assert ended["status"] == "completed"  # it failed as a cell does, which is a result
    assert ended["result"]["isError"] is True
    told = await follower.client.call_tool("get_execution", {"execution_id": task.task_id})
    assert ended["result"] == told.model_dump(by_alias=True, mode="json", exclude_none=True, exclude={"meta"})


async def test_a_cancelled_task_interrupts_its_cell_and_keeps_the_variables(follower: Caller, runtime: Runtime):
    session_id = await follower.new_session()
    task = await create(follower.client, "execute_code", code=f"x = 5\n{held()}", session_id=session_id, wait_s=0)
    await until_said(runtime, task.task_id, "held")
    session = follower.client.session
    assert "status" not in await ask(session, "tasks/cancel", task.task_id)
    ended = await settled(session, task.task_id)
    assert ended["status"] == "cancelled"
    assert "cancelled the task" in ended["statusMessage"]
    await ask(session, "tasks/cancel", task.task_id)  # once more changes nothing
    assert (await follower.execute("x", session_id)).result == "5"


async def test_an_interrupt_by_someone_else_is_a_result_and_no_cancelled_task(follower: Caller):
    session_id = await follower.new_session()
    task = await create(follower.client, "execute_code", code=held("never"), session_id=session_id, wait_s=0)
    await follower.fields("interrupt_execution", execution_id=task.task_id)
    ended = await settled(follower.client.session, task.task_id)
    assert ended["status"] == "completed"
    assert "interrupted" in ended["result"]["content"][0]["text"]


async def test_questions_of_a_task_have_keys_of_their_own_and_old_answers_are_ignored(follower: Caller):
    source = "first = input('one? ')\nsecond = input('two? ')\nfirst, second"
    task = await create(follower.client, "execute_code", code=source, wait_s=0)
    session = follower.client.session
    asked: list[tuple[str, str]] = []

    async def answer(key: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append((key, request["params"]["message"].strip()))
        if len(asked) == 2:  # the answer to the first question, once more
            old = {
                asked[0][0]: {"action": "accept", "content": {"answer": "wrong"}},
                "question-99": {"action": "cancel"},
            }
            await ask(session, "tasks/update", task.task_id, inputResponses=old)
        return {"action": "accept", "content": {"answer": f"to {key}"}}

    ended = await settled(session, task.task_id, answer)
    assert asked == [("question-1", "one?"), ("question-2", "two?")]
    assert "('to question-1', 'to question-2')" in ended["result"]["content"][0]["text"]


async def test_a_question_at_once_is_asked_by_the_call_itself(runtime: Runtime):
    answers = iter(["yes"])

    async def person(context: Any, params: Any) -> Any:
        return ElicitResult(action="accept", content={"answer": next(answers)})

    following = TaskFollower()
    async with connected(runtime, MODERN, extensions=[following], elicitation_callback=person) as caller:
        session_id = await caller.new_session()
        answer = await caller.call("execute_code", code="input('Go on? ')", session_id=session_id, wait_s=30)
    assert "'yes'" in text_of(answer)
    assert following.created == []


# Who sees what


@pytest.mark.parametrize("era", ERAS)
async def test_clients_that_do_not_follow_tasks_see_no_difference(runtime: Runtime, follower: Caller, era: str):
    async with connected(runtime, era) as caller:
        session_id = await caller.new_session()
        running = await caller.execute(held(), session_id, wait_s=0)
        assert running.status == "running"
        with pytest.raises(MCPError) as caught:
            await ask(caller.client.session, "tasks/get", running.execution_id)
        assert caught.value.error.code == (-32021 if era == MODERN else METHOD_NOT_FOUND)
        await caller.release(session_id)
        theirs = (await caller.client.list_tools()).tools
    assert theirs == (await follower.client.list_tools()).tools


async def test_unknown_foreign_and_cleared_tasks_are_refused_in_the_same_words(follower: Caller, runtime: Runtime):
    foreign = runtime.sessions.create("key:bob")
    theirs = foreign.submit(Cell("1", timeout_s=60))
    session_id = await follower.new_session()
    own = await create(follower.client, "execute_code", code=held(), session_id=session_id, wait_s=0)
    await follower.release(session_id)
    await settled(follower.client.session, own.task_id)
    await follower.fields("clear_session", session_id=session_id)
    refusals: set[tuple[int, str]] = set()
    names = [theirs.id, own.task_id, "0" * 32, "", "\u200b", "0123456789abcdef-1234567890123", "x" * 200]
    for name in names:
        for method, params in [("tasks/get", {}), ("tasks/cancel", {}), ("tasks/update", {"inputResponses": {}})]:
            with pytest.raises(MCPError) as caught:
                await ask(follower.client.session, method, name, **params)
            refusals.add((caught.value.error.code, caught.value.error.message))
    assert len(refusals) == 1
    assert {code for code, _ in refusals} == {INVALID_PARAMS}
    await until(lambda: theirs.is_finished)
    assert theirs.result().status == "ok"  # nobody stopped it
    await runtime.sessions.clear(foreign.id, "key:bob")


async def test_wrong_parameters_are_refused_and_change_nothing(follower: Caller):
    task = await create(follower.client, "execute_code", code="input('? ')", wait_s=0)
    session = follower.client.session
    await until(lambda: _has_status(session, task.task_id, "input_required"))
    for wrong in ({"question-1": 5}, {"question-1": {"action": "shout"}}, {f"q{n}": {} for n in range(101)}):
        assert await refused(follower, "tasks/update", task.task_id, inputResponses=wrong) == INVALID_PARAMS
    assert await refused(follower, "tasks/update", task.task_id) == INVALID_PARAMS
    assert await _has_status(session, task.task_id, "input_required")
    await ask(session, "tasks/cancel", task.task_id)
    await until(lambda: _has_status(session, task.task_id, "cancelled"))


async def _has_status(session: Any, task_id: str, status: str) -> bool:
    return (await ask(session, "tasks/get", task_id))["status"] == status


async def test_over_http_the_header_has_to_name_the_task(runtime: Runtime):
    async with (
        served_over_http(runtime) as url,
        Client(f"{url}/mcp", extensions=[TaskFollower()]) as client,
    ):
        assert TASKS in (client.server_capabilities.extensions or {})
        task = await create(client, "execute_code", code="import time; time.sleep(0.2); 'done'", wait_s=0)
        nameless = Request[dict[str, Any], str](method="tasks/get", params={"taskId": task.task_id})
        with pytest.raises(MCPError) as caught:
            await client.session.send_request(nameless, ANY)
        assert caught.value.error.code == HEADER_MISMATCH
        ended = await settled(client.session, task.task_id)
        assert "'done'" in ended["result"]["content"][0]["text"]


# The journal


async def test_the_next_server_answers_for_the_tasks_of_the_last_one(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, hibernate=True) as first,
        connected(first, extensions=[TaskFollower()]) as caller,
    ):
        session, session_id = caller.client.session, await caller.new_session()

        async def started(source: str) -> str:
            return (await create(caller.client, "execute_code", code=source, session_id=session_id, wait_s=0)).task_id

        done = await started("print('kept'); 1")
        before = await settled(session, done)
        stopped = await started(held("never"))
        await until_said(first, stopped, "held")
        await ask(session, "tasks/cancel", stopped)
        await settled(session, stopped)
        lost = await started(held("never"))
        await until_said(first, lost, "held")
    async with (
        opened_runtime(default_environment, tmp_path, hibernate=True) as second,
        connected(second, extensions=[TaskFollower()]) as caller,
    ):
        session = caller.client.session
        after = await ask(session, "tasks/get", done)
        assert {**after, "pollIntervalMs": 0} == {**before, "pollIntervalMs": 0}
        assert (await ask(session, "tasks/get", stopped))["status"] == "cancelled"
        ended = await ask(session, "tasks/get", lost)
        assert (ended["status"], ended["result"]["isError"]) == ("completed", True)
        assert "[interrupted | " in ended["result"]["content"][0]["text"]
        await ask(session, "tasks/cancel", lost)
