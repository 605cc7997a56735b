"""A tool that needs a person's answer: asked in the client's own era, whatever the era of the tool's server."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from calls import ERAS, LEGACY, MODERN, connected
from mcp.types import ElicitRequestFormParams, ElicitRequestURLParams, ElicitResult
from tool_cells import awkward, runtime_with_tools

from belljar.environments import Environment
from belljar.hooks import ToolCallFacts, Verdict
from belljar.policy.guard import Guard
from belljar.questions.schema import values_of
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    servers = {"legacy": awkward("legacy"), "modern": awkward("modern")}
    async with runtime_with_tools(
        default_environment, tmp_path_factory.mktemp("belljar"), mcp_servers=servers
    ) as runtime:
        yield runtime


class Person:
    """Answers from a list: fields, or another action than to accept."""

    def __init__(self, *answers: dict[str, Any] | str) -> None:
        self.answers = [*answers]
        self.asked: list[str] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        self.params = params
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return ElicitResult(action=answer)  # pyright: ignore[reportArgumentType]
        return ElicitResult(action="accept", content=answer)


@pytest.mark.parametrize("server", ["legacy", "modern"])
@pytest.mark.parametrize("era", ERAS)
async def test_the_person_is_asked_with_the_form_of_the_tool(
    runtime: Runtime, shared_session: str, era: str, server: str
):
    person = Person({"name": "Ada", "age": 36})
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute(f"from servers.{server} import ask_name\nask_name()", shared_session)
    assert result.result == """'accept {"name": "Ada", "age": 36}'"""
    assert person.asked == [f"{server} asks: Who are you?"]
    assert isinstance(person.params, ElicitRequestFormParams)
    assert list(person.params.requested_schema["properties"]) == ["name", "age"]


@pytest.mark.parametrize("era", ERAS)
async def test_two_questions_of_one_call_are_asked_one_after_the_other(runtime: Runtime, shared_session: str, era: str):
    person = Person({"one": "eins"}, {"two": True})
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("from servers.modern import ask_twice\nask_twice()", shared_session)
    assert result.result == "'eins and True'"
    assert [question.partition(": ")[2] for question in person.asked] == ["First?", "Second?"]


async def test_questions_of_calls_side_by_side_are_asked_one_at_a_time(runtime: Runtime, shared_session: str):
    person = Person({"name": "a", "age": 1}, {"name": "b", "age": 2})
    code = "import asyncio\nfrom servers.modern import ask_name\nawait asyncio.gather(ask_name.aio(), ask_name.aio())"
    async with connected(runtime, MODERN, elicitation_callback=person) as caller:
        result = await caller.execute(code, shared_session)
    assert '"a"' in str(result.result)
    assert '"b"' in str(result.result)


async def test_a_server_that_has_asked_is_still_called_side_by_side_by_one_cell(runtime: Runtime, shared_session: str):
    person = Person({"name": "a", "age": 1})
    code = (
        "import asyncio\nfrom servers.legacy import ask_name, meet\nask_name()\n"
        "await asyncio.gather(meet.aio(count=2), meet.aio(count=2))"
    )
    async with connected(runtime, MODERN, elicitation_callback=person) as caller:
        result = await caller.execute(code, shared_session, timeout_s=20)
    assert result.status == "ok", result.error


@pytest.mark.parametrize("era", ERAS)
async def test_a_person_may_decline(runtime: Runtime, shared_session: str, era: str):
    async with connected(runtime, era, elicitation_callback=Person("decline")) as caller:
        result = await caller.execute("from servers.modern import ask_name\nask_name()", shared_session)
    assert "decline" in str(result.result)


@pytest.mark.parametrize("era", ERAS)
async def test_an_address_is_passed_on(runtime: Runtime, shared_session: str, era: str):
    person = Person({})
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("from servers.modern import ask_url\nask_url()", shared_session)
    assert result.result == "'accept'"
    told = person.params
    address = told.url if isinstance(told, ElicitRequestURLParams) else told.message
    assert "https://example.com/in" in address


async def test_where_nobody_can_be_asked_the_tool_is_not_told_that_somebody_declined(
    runtime: Runtime, shared_session: str
):
    async with connected(runtime, MODERN) as caller:
        result = await caller.execute("from servers.legacy import ask_name\nask_name()", shared_session)
    assert "decline" not in str(result.result)
    assert result.result == "'cancel null'"


async def test_the_clock_stands_still_while_a_tool_waits_for_a_person(runtime: Runtime, shared_session: str):
    class Thinker(Person):
        async def __call__(self, context: Any, params: Any) -> ElicitResult:
            with anyio.move_on_after(0.8):
                await anyio.sleep_forever()
            return await super().__call__(context, params)

    async with connected(runtime, LEGACY, elicitation_callback=Thinker({"name": "Ada", "age": 1})) as caller:
        await caller.execute("from servers.legacy import ask_name", shared_session)
        result = await caller.execute("ask_name()", shared_session, timeout_s=0.6)
    assert result.status == "ok"


class Asking:
    """A guard that wants a person's word for everything."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    async def judge(self, call: ToolCallFacts) -> Verdict:
        return Verdict("ask", "it costs money", "tools.0")

    def asks_once(self, verdict: Verdict) -> bool:
        return False

    def wants_console(self, verdict: Verdict) -> bool:
        return False

    def record_decision(
        self, call: ToolCallFacts, verdict: Verdict, outcome: str, by: str = "", *, execution_id: str = ""
    ) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize(
    ("answer", "outcome", "told"),
    [
        ({}, "approved", "{'sum': 3}"),
        (
            "decline",
            "declined",
            "ToolRefused: modern.add: the person was asked and did not allow it. "
            "Do without it, or ask what they want instead",
        ),
    ],
)
@pytest.mark.parametrize("era", ERAS)
async def test_a_person_who_must_allow_a_call_sees_what_it_is(
    runtime: Runtime, era: str, answer: dict[str, Any] | str, outcome: str, told: str
):
    person, guard = Person(answer), Asking()
    async with connected(runtime, era, elicitation_callback=person) as caller:
        session = await caller.new_session()
        of = runtime.sessions.get(session, "local")
        assert of.tools is not None
        of.tools.attach(owner="local", guard=cast("Guard", guard), redactor=of.redactor, keep=of.write_file)
        result = await caller.execute("from servers.modern import add\nadd(1, 2)", session)
        assert told in (str(result.result), str(result.error))
        assert guard.outcomes == [outcome]
        (question,) = person.asked
        assert question.startswith("Allow modern.add with")
        assert '"b": 2' in question
        assert "it costs money" in question
        await caller.fields("clear_session", session_id=session)


async def test_an_interrupt_ends_a_cell_whose_tool_waits_for_a_person(runtime: Runtime, shared_session: str):
    async with connected(runtime, MODERN, elicitation_callback=Person()) as caller:
        code = "from servers.modern import ask_name\nkept = 1\nask_name()"
        running = await caller.execute(code, shared_session, wait_s=0)
        execution = runtime.sessions.executions.find(running.execution_id, "local")
        assert execution is not None
        with anyio.fail_after(30):
            while execution.question is None:
                await execution.wait_for_change(30)
        await caller.fields("interrupt_execution", execution_id=running.execution_id)
        result = await caller.get(running.execution_id)
        assert (result.status, result.state, execution.question) == ("interrupted", "kept", None)
        assert (await caller.execute("kept", shared_session)).result == "1"


async def test_the_python_api_answers_with_text(default_environment: Environment, tmp_path: Path):

    assert values_of({}, "yes") == {}
    assert values_of({}, "no") is None
    assert values_of({"properties": {"age": {"type": "integer"}}}, "36") == {"age": 36}
    assert values_of({"properties": {"zip": {"type": "string"}}}, "36") == {"zip": "36"}
    assert values_of({"properties": {"a": {}, "b": {}}}, '{"a": 1, "b": 2}') == {"a": 1, "b": 2}
    assert values_of({"properties": {"a": {}, "b": {}}}, "both") is None
