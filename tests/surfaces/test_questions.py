"""`input()` in a cell: the person is asked through the client, once, in the form of the client's protocol."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from calls import ERAS, LEGACY, MODERN, Caller, connected, until_said
from mcp.types import CallToolResult, ElicitRequestFormParams, ElicitResult, InputRequiredResult, InputResponses

from belljar.executions.cell import Cell
from belljar.models import ExecutionResult
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio


class Person:
    """Answers questions from a list; None declines."""

    def __init__(self, answers: Sequence[str | None] = ()) -> None:
        self.answers = [*answers]
        self.asked: list[str] = []
        self.schemas: list[dict[str, Any]] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        assert isinstance(params, ElicitRequestFormParams)
        self.asked.append(params.message.strip())
        self.schemas.append(params.requested_schema)
        answer = self.answers.pop(0)
        if answer is None:
            return ElicitResult(action="decline")
        return ElicitResult(action="accept", content={"answer": answer})


@pytest.mark.parametrize("era", ERAS)
async def test_input_asks_the_person_exactly_once(runtime: Runtime, era: str):
    person = Person(["Ada"])
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("print('before')\nname = input('Your name? ')\nprint('hello', name)\nname")
    assert (result.status, result.result) == ("ok", "'Ada'")
    assert person.asked == ["Your name?"]
    assert list(person.schemas[0]["properties"]) == ["answer"]
    assert result.stdout.startswith("before\n")
    assert result.stdout.endswith("hello Ada\n")
    assert result.execution_count == 1
    assert result.session_info is not None


@pytest.mark.parametrize("era", ERAS)
async def test_several_questions_are_asked_in_order(runtime: Runtime, era: str):
    person = Person(["1", "2", "3"])
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("[int(input(f'number {i}')) for i in range(3)]")
    assert result.result == "[1, 2, 3]"
    assert person.asked == ["number 0", "number 1", "number 2"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_question_without_words_has_some(runtime: Runtime, shared_session: str, era: str):
    person = Person([""])
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("input()", shared_session)
    assert result.result == "''"
    assert person.asked == ["The code asks for input"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_declined_question_raises_in_the_cell_which_may_go_on(runtime: Runtime, era: str):
    person = Person([None, None])
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("kept = 1\ninput('?')")
        assert (result.status, result.state) == ("error", "kept")
        assert result.error is not None
        assert result.error.startswith("EOFError: ")
        assert "declined" in result.error
        code = "try:\n  input('?')\nexcept EOFError:\n  kept += 1\nkept"
        assert (await caller.execute(code, result.session_id)).result == "2"
    assert len(person.asked) == 2


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_cannot_ask_gets_a_clear_error_at_once(runtime: Runtime, shared_session: str, era: str):
    async with connected(runtime, era) as caller:
        result = await caller.execute("input('Your name? ')", shared_session)
    assert (result.status, result.state) == ("error", "kept")
    assert result.error is not None
    assert result.error.startswith("EOFError: input() has nobody to ask here")
    assert "Put the value into the code" in result.error


@pytest.mark.parametrize("era", ERAS)
async def test_a_password_is_asked_for_and_not_shown(runtime: Runtime, shared_session: str, era: str):
    person = Person(["s3cret"])
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("from getpass import getpass\nlen(getpass('Password: '))", shared_session)
    assert result.result == "6"
    assert "s3cret" not in result.model_dump_json()
    assert person.asked == ["Password:"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_question_of_a_cell_left_running_is_asked_by_the_next_look(runtime: Runtime, era: str):
    person = Person(["yes"])
    async with connected(runtime, era, elicitation_callback=person) as caller:
        running = await caller.execute("print('asking', flush=True)\ninput('Go on? ')", wait_s=0)
        await until_said(runtime, running.execution_id, "asking")
        await until_asking(runtime, running.execution_id)
        assert person.asked == []
        result = await caller.get(running.execution_id, wait_s=60)
    assert (result.status, result.result) == ("ok", "'yes'")
    assert person.asked == ["Go on?"]


@pytest.mark.parametrize("era", ERAS)
async def test_two_looks_at_one_question_never_answer_the_next_one_with_it(runtime: Runtime, era: str):
    asked: list[str] = []
    both = anyio.Event()

    async def person(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message.strip())
        # The modern protocol hands the question to everyone who looks: let both be asked before either answers.
        if era == LEGACY or len(asked) == 2:
            both.set()
        await both.wait()
        return ElicitResult(action="accept", content={"answer": f"to {params.message}"})

    results: list[ExecutionResult] = []
    async with connected(runtime, era, elicitation_callback=person) as caller:
        running = await caller.execute("first = input('one')\nsecond = input('two')\nfirst, second", wait_s=0)
        await until_asking(runtime, running.execution_id)

        async def look() -> None:
            results.append(await caller.get(running.execution_id, wait_s=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            tasks.start_soon(look)
    assert [result.result for result in results] == ["('to one', 'to two')"] * 2
    if era == LEGACY:
        assert asked == ["one", "two"]


async def test_an_answer_sent_again_does_not_answer_the_next_question(runtime: Runtime):
    async with connected(runtime, MODERN, elicitation_callback=Person()) as caller:
        arguments = {"code": "first = input('one?')\nsecond = input('two?')\nfirst, second"}

        async def call(state: str | None = None, answer: str | None = None) -> CallToolResult | InputRequiredResult:
            responses: InputResponses = {}
            if answer is not None:
                responses["input"] = ElicitResult(action="accept", content={"answer": answer})
            return await caller.client.session.call_tool(
                "execute_code",
                arguments,
                input_responses=responses or None,
                request_state=state,
                allow_input_required=True,
            )

        first = await call()
        assert isinstance(first, InputRequiredResult)
        second = await call(first.request_state, "A")
        assert isinstance(second, InputRequiredResult)
        repeated = await call(first.request_state, "A")
        assert isinstance(repeated, InputRequiredResult)
        last = await call(second.request_state, "B")
        assert isinstance(last, CallToolResult)
        assert last.structured_content is not None
        assert last.structured_content["result"] == "('A', 'B')"


async def test_an_answer_that_comes_after_its_session_ended_runs_nothing(runtime: Runtime):
    async with connected(runtime, MODERN, elicitation_callback=Person()) as caller:
        before = {session.id for session in runtime.sessions.all()}
        arguments = {"code": "input('?')"}
        question = await caller.client.session.call_tool("execute_code", arguments, allow_input_required=True)
        assert isinstance(question, InputRequiredResult)
        (session,) = [session for session in runtime.sessions.all() if session.id not in before]
        await caller.fields("clear_session", session_id=session.id)
        late = await caller.client.session.call_tool(
            "execute_code",
            arguments,
            input_responses={"input": ElicitResult(action="accept", content={"answer": "x"})},
            request_state=question.request_state,
            allow_input_required=True,
        )
        assert isinstance(late, CallToolResult)
        assert late.is_error
        assert {session.id for session in runtime.sessions.all()} == before


@pytest.mark.parametrize("era", ERAS)
async def test_an_interrupt_ends_a_cell_that_waits_for_an_answer(runtime: Runtime, era: str):
    async with connected(runtime, era, elicitation_callback=Person()) as caller:
        running = await caller.execute("kept = 1\ninput('never answered')", wait_s=0)
        await until_asking(runtime, running.execution_id)
        await caller.fields("interrupt_execution", execution_id=running.execution_id)
        result = await caller.get(running.execution_id)
        assert (result.status, result.state) == ("interrupted", "kept")
        assert (await caller.execute("kept", running.session_id)).result == "1"


async def test_an_interrupt_that_crosses_a_question_ends_the_cell(runtime: Runtime):
    async with connected(runtime, MODERN, elicitation_callback=Person()) as caller:
        session_id = await caller.new_session()
        for turns in range(0, 60, 3):
            running = await caller.execute("input('never answered')", session_id, wait_s=0)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            await caller.fields("interrupt_execution", execution_id=running.execution_id)
            result = await caller.get(running.execution_id)
            assert (turns, result.status, result.state) == (turns, "interrupted", "kept")


async def test_the_clock_stands_still_while_a_person_thinks(runtime: Runtime, shared_session: str):
    class Thinker(Person):
        async def __call__(self, context: Any, params: Any) -> ElicitResult:
            with anyio.move_on_after(0.6):
                await anyio.sleep_forever()
            return await super().__call__(context, params)

    async with connected(runtime, LEGACY, elicitation_callback=Thinker(["late"])) as caller:
        result = await caller.execute("input('?')", shared_session, timeout_s=0.4)
    assert (result.status, result.result) == ("ok", "'late'")


async def until_asking(runtime: Runtime, execution_id: str) -> None:
    execution = runtime.sessions.executions.find(execution_id, "local")
    assert execution is not None
    with anyio.fail_after(60):
        while execution.question is None:
            assert not execution.is_finished, execution.result()
            await execution.wait_for_change(60)


async def test_another_session_is_not_kept_waiting_by_a_question(runtime: Runtime, caller: Caller):
    async with connected(runtime, MODERN, elicitation_callback=Person()) as asker:
        running = await asker.execute("input('?')", wait_s=0)
        await until_asking(runtime, running.execution_id)
        assert (await caller.execute("1")).status == "ok"
        looked = await caller.get(running.execution_id)
        assert looked.status == "running"
        await caller.fields("clear_session", session_id=running.session_id)


async def test_a_kernel_that_dies_while_its_question_waits_is_noticed(runtime: Runtime):
    code = (
        "import os, threading, time\n"
        "def die():\n"
        "    while not os.path.exists('now'): time.sleep(0.005)\n"
        "    os._exit(7)\n"
        "threading.Thread(target=die).start()\n"
        "input('never answered')"
    )
    session = runtime.sessions.create("local")
    execution = session.submit(Cell(code, timeout_s=60, allow_input=True))
    with anyio.fail_after(60):
        await execution.wait(60)
        assert execution.question is not None
        session.workspace.write("now", b"")
        while not execution.is_finished:
            await execution.wait_for_change(60)
    result = execution.result()
    assert (result.status, result.state) == ("died", "lost")
    assert "exit status 7" in str(result.error)
