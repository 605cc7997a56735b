"""Questions that are answered outside the client: at the inbox, through the server's socket and `belljar inbox`."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import FORKS, LEGACY, MODERN, Caller, connected, opened_runtime, text_of
from mcp.types import ElicitResult

from belljar.cli import inbox as command
from belljar.environments import Environment
from belljar.errors import InvalidArgument, QuestionClosed, QuestionNotFound
from belljar.questions.models import InboxQuestion
from belljar.runtime import Runtime
from task_clients import TaskFollower, ask
from waiting import until

pytestmark = pytest.mark.anyio
POLICY = """
[[code]]
decision = "ask"
calls = ["os.getcwd"]
reason = "it looks around"
answered_in = "console"
[[code]]
decision = "ask"
calls = ["os.getpid"]
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


async def test_a_client_that_cannot_ask_is_told_where_to_answer_and_the_cell_goes_on(
    runtime: Runtime, caller: Caller, shared_session: str
):
    code = "name = input('Your name? ')\nname"
    answered = await caller.call("execute_code", code=code, session_id=shared_session, wait_s=0)
    execution_id = answered.structured_content["execution_id"]  # pyright: ignore[reportOptionalSubscript]
    question = await asked(runtime, execution_id)
    assert (question.message.strip(), question.state, question.owner) == ("Your name?", "waiting", "local")
    text = text_of(await caller.call("get_execution", execution_id=execution_id))
    assert "It waits for a person: 'Your name?'" in text
    assert f"belljar inbox answer {question.id}" in text
    await answer(runtime, question.id, answer="Ada")
    result = await caller.ended(execution_id)
    assert result.result == "'Ada'"
    assert "ada answered its question at the server's inbox" in "".join(result.output)
    (record,) = [each for each in runtime.sessions.inbox.ended("local") if each.id == question.id]
    assert (record.state, record.answered_by, record.answered_in) == ("answered", "ada", "terminal")
    with pytest.raises(QuestionClosed, match="was answered already by ada in the terminal"):
        await answer(runtime, question.id, answer="Bob")


async def test_nobody_at_the_inbox_means_nobody_to_ask(runtime: Runtime, shared_session: str):
    runtime.sessions.inbox._seen.clear()
    async with connected(runtime) as caller:
        result = await caller.execute("input('?')", shared_session)
        assert str(result.error).startswith("EOFError: input() has nobody to ask here")
        refused = await caller.execute("import os; os.getcwd()", shared_session)
        assert refused.status == "rejected"
        assert "nobody could be asked" in str(refused.error)


async def test_a_rule_for_the_console_is_never_put_to_the_client(runtime: Runtime, caller: Caller, shared_session: str):
    async def never(context: Any, params: Any) -> ElicitResult:
        raise AssertionError("it was put to the client")

    async with connected(runtime, LEGACY, elicitation_callback=never) as asker:
        running = await asker.execute("import os; bool(os.getcwd())", shared_session, wait_s=0)
        question = await asked(runtime, running.execution_id)
        assert question.in_console
        assert "May this code run?" in question.message
        assert (await asker.get(running.execution_id)).status == "running"
        await answer(runtime, question.id)
        assert (await asker.ended(running.execution_id)).result == "True"
        declined = await asker.execute("import os; os.getcwd()", shared_session, wait_s=0)
        question = await asked(runtime, declined.execution_id)
        await runtime.sessions.inbox.answer(question.id, None, action="decline", by="ada", where="terminal")
        assert (await asker.ended(declined.execution_id)).status == "rejected"
    log = (runtime.settings.data_directory / "decisions.jsonl").read_text().splitlines()
    told = [(line["outcome"], line["by"]) for line in map(json.loads, log) if "by" in line]
    assert told == [("approved", "ada"), ("declined", "ada")]


async def test_a_client_cannot_answer_for_the_console_by_naming_a_question_that_it_was_not_asked(
    runtime: Runtime, caller: Caller, shared_session: str
):
    """As the input of a task, for example: the ids are no secret to it."""

    async def never(context: Any, params: Any) -> ElicitResult:
        raise AssertionError("it was put to the client")

    async with connected(runtime, MODERN, extensions=[TaskFollower()], elicitation_callback=never) as asker:
        code = "import os; bool(os.getcwd())"
        running = await caller.execute(code, shared_session, wait_s=0)
        question = await asked(runtime, running.execution_id)
        session = asker.client.session
        sent = {"question-1": {"action": "accept", "content": {}}}
        await ask(session, "tasks/update", running.execution_id, inputResponses=sent)
        assert runtime.sessions.inbox.find(question.id, None).state == "waiting"
        await runtime.sessions.inbox.answer(question.id, None, action="decline", by="ada", where="terminal")
        assert (await caller.ended(running.execution_id)).status == "rejected"


@pytest.mark.parametrize("era", [LEGACY, "2026-07-28"])
async def test_the_first_answer_wins_from_wherever_it_comes(
    runtime: Runtime, caller: Caller, shared_session: str, era: str
):
    is_asked, goes_on = anyio.Event(), anyio.Event()

    async def person(context: Any, params: Any) -> ElicitResult:
        is_asked.set()
        await goes_on.wait()
        return ElicitResult(action="accept", content={"answer": "from the client"})

    results: list[Any] = []
    async with connected(runtime, era, elicitation_callback=person) as asker, anyio.create_task_group() as tasks:

        async def call() -> None:
            results.append(await asker.execute("input('Who is first? ')", shared_session))

        tasks.start_soon(call)
        await is_asked.wait()
        question = await asked(runtime)
        await answer(runtime, question.id, answer="from the inbox")
        goes_on.set()
    assert results[0].result == "'from the inbox'"
    async with connected(runtime, era, elicitation_callback=_answering) as asker:
        assert (await asker.execute("input('? ')", shared_session)).result == "'quick'"
    record = runtime.sessions.inbox.ended("local")[0]
    assert (record.state, record.answered_in) == ("answered", "client")


async def _answering(context: Any, params: Any) -> ElicitResult:
    return ElicitResult(action="accept", content={"answer": "quick"})


async def test_interrupted_and_foreign_questions_and_wrong_answers_are_told_apart(
    runtime: Runtime, caller: Caller, shared_session: str
):
    code = f"import forms\nforms.ask({FIELDS!r}, message='How many?')"
    running = await caller.execute(code, shared_session, wait_s=0)
    question = await asked(runtime, running.execution_id)
    inbox = runtime.sessions.inbox
    for wrong in ({}, {"n": 0}, {"n": "x"}, {"m": 1}, {"n": 1, "more": "x" * 70_000}):
        with pytest.raises(InvalidArgument):
            await answer(runtime, question.id, **wrong)
    with pytest.raises(QuestionNotFound) as foreign:
        await inbox.answer(question.id, "key:bob", action="accept", by="bob", where="console")
    with pytest.raises(QuestionNotFound) as unknown:
        await inbox.answer("0" * 32 + "-1", "key:bob", action="accept", by="bob", where="console")
    assert foreign.value.message.replace(question.id, "") == unknown.value.message.replace("0" * 32 + "-1", "")
    assert inbox.waiting("key:bob") == []
    await caller.fields("interrupt_execution", execution_id=running.execution_id)
    with pytest.raises(QuestionClosed, match="is not asked any more"):
        await answer(runtime, question.id, n=1)
    assert inbox.find(question.id, "local").state == "withdrawn"


async def test_a_cell_may_wait_for_somebody_who_is_not_there_yet_but_not_for_ever(
    default_environment: Environment, tmp_path: Path
):
    async with (
        opened_runtime(default_environment, tmp_path, ask_in_console="always", ask_timeout_s=1) as runtime,
        connected(runtime) as caller,
    ):
        result = await caller.execute("input('Anybody? ')")
        assert "EOFError" in str(result.error)
        (question,) = runtime.sessions.inbox.ended(None)
        assert (question.state, question.message.strip()) == ("expired", "Anybody?")


async def test_of_many_who_answer_at_once_one_is_first_and_the_others_are_told_who(
    runtime: Runtime, caller: Caller, shared_session: str
):
    running = await caller.execute("input('Who? ')", shared_session, wait_s=0)
    question = await asked(runtime, running.execution_id)
    inbox = runtime.sessions.inbox

    async def person(number: int) -> str:
        given = {"answer": str(number)}
        try:
            await inbox.answer(question.id, None, action="accept", values=given, by=f"p{number}", where="terminal")
        except QuestionClosed as error:
            return error.message
        return str(number)

    said = await asyncio.gather(*(person(number) for number in range(20)))
    (first,) = [each for each in said if each.isdecimal()]
    assert (await caller.ended(running.execution_id)).result == f"'{first}'"
    assert all(f"was answered already by p{first} in the terminal" in each for each in said if each != first)
    found = inbox.find(question.id, None)
    assert (found.state, found.answered_by, found.answered_in) == ("answered", f"p{first}", "terminal")
    assert found.ended_at is not None


async def test_the_command_lists_shows_and_answers_over_the_socket(
    runtime: Runtime, caller: Caller, shared_session: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    folder = runtime.settings.data_directory
    monkeypatch.setattr(command, "_folder", lambda: folder)
    running = await caller.execute("input('A \\u202e or B? ')", shared_session, wait_s=0)
    question = await asked(runtime, running.execution_id)
    await asyncio.to_thread(command.list_command)
    assert question.id in capsys.readouterr().out
    await asyncio.to_thread(command.show_command, question.id[:8])
    shown = capsys.readouterr().out
    assert "A \N{REPLACEMENT CHARACTER} or B?" in shown
    assert f"belljar inbox answer {question.id} answer=…" in shown
    with pytest.raises(InvalidArgument):
        await asyncio.to_thread(command.answer_command, question.id, ["other=B"])
    await asyncio.to_thread(command.answer_command, question.id, ["answer=B"])
    assert (await caller.ended(running.execution_id)).result == "'B'"
    with pytest.raises(QuestionClosed, match="was answered already by"):
        await asyncio.to_thread(command.answer_command, question.id, ["answer=A"])
    with pytest.raises(QuestionNotFound):
        await asyncio.to_thread(command.show_command, "ffff")
