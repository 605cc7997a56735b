import asyncio
import getpass
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from belljar import ipc
from belljar.engine.attachment_messages import (
    AttachedSession,
    CompletenessReply,
    ExecutionEnded,
    ExecutionOutput,
    ExecutionStarted,
    InspectionReply,
    QuestionAsked,
    SessionEnded,
    SessionEvent,
)
from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.engine.remote_attachments import open_attachment, open_served
from belljar.environments import Environment
from belljar.errors import BelljarError, EngineError, InvalidArgument, SessionNotFound
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.http.server_socket import open_reachable_runtime
from belljar.questions.models import QuestionReply
from belljar.runtime import Runtime
from belljar.servers import HTTP_SOCKET
from belljar.sessions.session import Session
from shared_environment import settings_with
from waiting import until

pytestmark = pytest.mark.anyio

AGENT = "agent"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(environment: Environment, folder: Path, **more: object) -> AsyncIterator[Runtime]:
    folder.chmod(0o711)
    spared = {"fork_start": False, "pool_size": 0, "checkpoints": 0, "hibernate": False}
    settings = settings_with(data_directory=folder, environment=str(environment.python), **spared, **more)
    async with open_reachable_runtime(settings) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def runtime(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    async with opened(default_environment, tmp_path_factory.mktemp("data")) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def session(runtime: Runtime) -> Session:
    """The agent's; shared, so a test leaves it idle."""
    session = runtime.sessions.create(AGENT)
    await _ran(session, "shared = 1")
    return session


@asynccontextmanager
async def attached_to(
    runtime: Runtime, session: Session
) -> AsyncIterator[tuple[AttachedSession, AsyncIterator[SessionEvent]]]:
    """Over the socket, as another process would; and the events it brings."""
    async with (
        asyncio.timeout(DEADLINE_S),
        open_attachment(runtime.settings.data_directory, session.id[:12]) as attached,
        aclosing(attached.events()) as events,
    ):
        yield attached, events


def _submitted(session: Session, code: str, *, allow_input: bool = False) -> Execution:
    return session.submit(make_cell(session.settings, code, allow_input=allow_input))


async def _ran(session: Session, code: str) -> Execution:
    execution = _submitted(session, code)
    while not execution.is_finished:
        await execution.wait_for_change(DEADLINE_S)
    return execution


async def _until_end(events: AsyncIterator[SessionEvent]) -> list[SessionEvent]:
    """What is told of the next cell."""
    told: list[SessionEvent] = []
    while not told or not isinstance(told[-1], ExecutionEnded):
        told.append(await anext(events))
    return told


def _outputs(told: list[SessionEvent]) -> list[tuple[str, object]]:
    return [
        (item.output, item.content.get("text") or item.content.get("data") or item.content.get("ename"))
        for item in told
        if isinstance(item, ExecutionOutput)
    ]


async def test_variables_are_shared_both_ways(runtime: Runtime, session: Session) -> None:
    await _ran(session, "shared = 20")
    async with attached_to(runtime, session) as (attached, events):
        await attached.execute("shared += 1\nprint('mine')\nshared", allow_input=False)
        told = await _until_end(events)
    assert isinstance(told[0], ExecutionStarted)
    assert told[0].is_own
    assert _outputs(told) == [("stream", "mine\n"), ("execute_result", {"text/plain": "21"})]
    assert (await _ran(session, "shared")).result().result == "21"


async def test_a_persons_cell_is_on_record_as_theirs_and_the_agent_is_told_once(
    runtime: Runtime, session: Session
) -> None:
    async with attached_to(runtime, session) as (attached, events):
        execution_id = await attached.execute("1", allow_input=False)
        await _until_end(events)
    first = next(runtime.sessions.journal.events(execution_id))
    assert first.kind == "notice"
    author = str(first.data["author"])
    assert first.text == f"[belljar: run by {author}, who shares this session]\n"
    assert runtime.sessions.executions.result(execution_id, AGENT).status == "ok"
    assert (await _ran(session, "2")).result().output[0].startswith(f"[belljar: {author} ran a cell in this session")
    assert "[belljar" not in "".join((await _ran(session, "2")).result().output)


async def test_what_the_agent_runs_is_seen_by_the_person(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        execution = _submitted(session, "print('a')\ndisplay({'text/html': '<b>'}, raw=True)\n1 / 0")
        told = await _until_end(events)
        count = attached.count
    assert told[0] == ExecutionStarted(execution_id=execution.id, code=execution.cell.code, count=count, is_own=False)
    assert _outputs(told) == [
        ("stream", "a\n"),
        ("display_data", {"text/html": "<b>"}),
        ("error", "ZeroDivisionError"),
    ]
    assert told[-1] == ExecutionEnded(
        execution_id=execution.id, status="error", count=execution.result().execution_count
    )


async def test_who_comes_while_a_cell_runs_sees_all_of_it(runtime: Runtime, session: Session) -> None:
    gate = session.folders.workspace / "gate"
    execution = _submitted(session, f"print('early', flush=True)\n{_until(gate.name)}\nprint('late')")
    while not execution.sequence:
        await execution.wait_for_change(DEADLINE_S)
    async with attached_to(runtime, session) as (_, events):
        gate.touch()
        told = await _until_end(events)
    assert "".join(str(text) for _, text in _outputs(told)) == "early\nlate\n"


async def test_a_persons_cell_waits_for_its_turn(runtime: Runtime, session: Session) -> None:
    gate = session.folders.workspace / "turn"
    async with attached_to(runtime, session) as (attached, events):
        agents = _submitted(session, f"order = ['agent']\n{_until(gate.name)}")
        own = await attached.execute("order.append('person')", allow_input=False)
        gate.touch()
        first, second = await _until_end(events), await _until_end(events)
    assert [first[0].execution_id, second[0].execution_id] == [agents.id, own]
    assert (await _ran(session, "order")).result().result == "['agent', 'person']"


async def test_names_are_completed_and_explained_between_cells_only(runtime: Runtime, session: Session) -> None:
    gate = session.folders.workspace / "names"
    await _ran(session, "elephants = 2\ndef water():\n    'Give it a little.'")
    async with attached_to(runtime, session) as (attached, events):
        found = await attached.complete("1 + eleph", 9)
        assert (found.matches, found.start, found.end) == (["elephants"], 4, 9)
        assert "Give it a little." in str((await attached.inspect("water", 3)).data["text/plain"])
        assert await attached.check("if x:") == CompletenessReply(status="incomplete", indent="    ")
        running = _submitted(session, _until(gate.name))
        assert isinstance(await anext(events), ExecutionStarted)
        assert (await attached.complete("1 + eleph", 9)).matches == []
        assert await attached.inspect("water", 3) == InspectionReply(data={})
        assert (await attached.check("if x:")).status == "unknown"
        gate.touch()
        await _until_end(events)
    assert running.result().status == "ok"


async def test_a_person_can_interrupt_the_agent(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        execution = _submitted(session, "print('on', flush=True)\nwhile True: pass")
        while not isinstance(await anext(events), ExecutionOutput):
            pass
        await attached.interrupt()
        told = await _until_end(events)
    assert isinstance(told[-1], ExecutionEnded)
    assert told[-1].status == "interrupted"
    assert execution.result().status == "interrupted"


async def test_only_questions_of_a_persons_own_cells_are_put_to_them(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        agents = _submitted(session, "input('agent? ')", allow_input=True)
        while agents.question is None:
            await agents.wait_for_change(DEADLINE_S)
        await attached.answer(agents.id, "not yours to answer", agents.question_number)
        agents.reply(QuestionReply("accept", {"answer": "yes"}))
        assert not any(isinstance(item, QuestionAsked) for item in await _until_end(events))
        own = await attached.execute("input('person? ')", allow_input=True)
        told: list[SessionEvent] = []
        while not isinstance(item := await anext(events), ExecutionEnded):
            told.append(item)
            if isinstance(item, QuestionAsked):
                await attached.answer(own, "me", item.question)
    assert agents.result().result == "'yes'"
    (record,) = [each for each in runtime.sessions.inbox.ended(None) if each.execution_id == own]
    assert (record.state, record.answered_by, record.answered_in) == ("answered", getpass.getuser(), "terminal")
    assert QuestionAsked(execution_id=own, prompt="person? ", is_password=False, question=1) in told
    assert _outputs(told)[-1] == ("execute_result", {"text/plain": "'me'"})


async def test_an_answer_to_a_question_that_is_over_is_none_to_the_next(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        own = await attached.execute("input('first? ')\ninput('second? ')", allow_input=True)
        told: list[SessionEvent] = []
        while not isinstance(item := await anext(events), ExecutionEnded):
            told.append(item)
            if isinstance(item, QuestionAsked) and item.question == 1:
                await attached.answer(own, "one", 1)
            elif isinstance(item, QuestionAsked):
                await attached.answer(own, "one", 1)
                await attached.answer(own, "two", 2)
    assert _outputs(told)[-1] == ("execute_result", {"text/plain": "'two'"})


async def test_a_question_is_declined_when_the_person_leaves(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        own = await attached.execute("input('person? ')", allow_input=True)
        while not isinstance(await anext(events), QuestionAsked):
            pass
    execution = session.queue.find(own)
    assert execution is not None
    while not execution.is_finished:
        await execution.wait_for_change(DEADLINE_S)
    assert (execution.result().error or "").startswith("EOFError")


async def test_a_cell_that_is_refused_is_an_error_and_the_hold_stays(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        with pytest.raises(InvalidArgument, match="the limit is"):
            await attached.execute("x" * 10_000_000, allow_input=False)
        await attached.execute("1", allow_input=False)
        assert (await _until_end(events))[-1].kind == "ended"


async def test_a_session_that_is_shared_does_not_expire(default_environment: Environment, tmp_path: Path) -> None:
    async with opened(default_environment, tmp_path, session_idle_s=0.001) as runtime:
        session = runtime.sessions.create(AGENT)
        await _ran(session, "1")
        async with attached_to(runtime, session):
            assert await runtime.sessions.sweep() == []
        assert await until(runtime.sessions.sweep) == [session.id]


async def test_the_end_of_a_session_ends_its_news(runtime: Runtime) -> None:
    session = runtime.sessions.create(AGENT)
    await _ran(session, "1")
    async with attached_to(runtime, session) as (attached, events):
        await runtime.sessions.clear(session.id, AGENT)
        assert [item async for item in events] == [SessionEnded()]
        with pytest.raises(EngineError, match="hung up"):
            await attached.execute("1", allow_input=False)


async def test_a_session_is_opened_on_the_server_and_ends_with_its_holder(runtime: Runtime) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        open_served(runtime.settings.data_directory) as attached,
        aclosing(attached.events()) as events,
    ):
        await attached.execute("1 + 1", allow_input=False)
        told = await _until_end(events)
        assert attached.session_id in {session.id for session in runtime.sessions.all()}
    assert _outputs(told) == [("execute_result", {"text/plain": "2"})]
    assert attached.session_id not in {session.id for session in runtime.sessions.all()}


async def test_an_unknown_session_is_refused_with_those_there_are(runtime: Runtime, session: Session) -> None:
    with pytest.raises(SessionNotFound, match="begins with zzz") as caught:
        async with open_attachment(runtime.settings.data_directory, "zzz"):
            pass
    assert session.id in caught.value.hint


async def test_without_a_server_it_is_said_where_none_was_found(tmp_path: Path) -> None:
    with pytest.raises(SessionNotFound, match="no running server"):
        async with open_attachment(tmp_path):
            pass


async def test_a_person_who_goes_while_nobody_reads_leaves_nothing_behind(runtime: Runtime, session: Session) -> None:
    async with asked_over_http(runtime) as client:
        made = (await client.post("/attachments", json={"session_id": session.id})).json()
        assert made["session_id"] == session.id
        assert session.watchers
        # Nobody opens its stream.
        await until(lambda: _is_gone(client, made["attachment_id"]))
    assert not session.watchers


async def _is_gone(client: httpx2.AsyncClient, attachment_id: str) -> bool:
    return (await client.post(f"/attachments/{attachment_id}/messages", json={"op": "comms"})).status_code == 404


@asynccontextmanager
async def asked_over_http(runtime: Runtime) -> AsyncIterator[httpx2.AsyncClient]:
    with ipc.reachable(runtime.settings.data_directory / "runs" / runtime.name / HTTP_SOCKET) as address:
        transport = httpx2.AsyncHTTPTransport(uds=address, verify=False)
        base = "http://belljar/api/v1"
        async with asyncio.timeout(DEADLINE_S), httpx2.AsyncClient(transport=transport, base_url=base) as client:
            yield client


@pytest.mark.parametrize(
    "said",
    [b"hello", b"[]", b'{"op": "nothing"}', b'{"op": "execute"}', b'{"op": "complete", "code": "", "cursor": -1}'],
)
async def test_messages_of_another_form_are_refused_and_the_attachment_goes_on(
    runtime: Runtime, session: Session, said: bytes
) -> None:
    async with asked_over_http(runtime) as client:
        refused = await client.post("/attachments", content=b'{"session_id": 5}')
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid-argument")
        attachment = (await client.post("/attachments", json={"session_id": session.id})).json()["attachment_id"]
        refused = await client.post(f"/attachments/{attachment}/messages", content=said)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid-argument")
        assert (await client.post(f"/attachments/{attachment}/messages", json={"op": "comms"})).json()[
            "kind"
        ] == "opened"
        assert (await client.delete(f"/attachments/{attachment}")).status_code == 204
    assert session in runtime.sessions.all(), "only a session that was opened for it ends with an attachment"


async def test_an_attachment_has_one_reader_and_is_nobody_elses(runtime: Runtime, session: Session) -> None:
    stranger = {"Belljar-Principal": "key:stranger"}
    async with asked_over_http(runtime) as client:
        assert (await client.post("/attachments", json={"session_id": session.id}, headers=stranger)).status_code == 404
        attachment = (await client.post("/attachments", json={"session_id": session.id})).json()["attachment_id"]
        for path, body in (
            (f"/attachments/{attachment}/messages", {"op": "interrupt"}),
            ("/attachments/0000/messages", {"op": "interrupt"}),
        ):
            assert (await client.post(path, json=body, headers=stranger)).status_code == 404
        async with client.stream("GET", f"/attachments/{attachment}/events") as first:
            assert first.status_code == 200
            assert (await client.get(f"/attachments/{attachment}/events")).status_code == 409
        await until(lambda: _is_gone(client, attachment))


def _until(name: str) -> str:
    return f"import os, time\nwhile not os.path.exists({name!r}): time.sleep(0.005)"


async def test_the_engine_attaches_here_and_over_the_socket_to_what_its_caller_may_see(
    runtime: Runtime, session: Session
) -> None:
    here = runtime.late_engine.get()
    there = servers_of(runtime.settings.data_directory)
    stranger, owner = Access("somebody else"), Access(AGENT, name="Ann")
    for engine in (here, there):
        for who, session_id in ((stranger, session.id), (owner, "unknown")):
            with pytest.raises(SessionNotFound, match="is not on this server"):
                await engine.attach(who, session_id)
        async with asyncio.timeout(DEADLINE_S):
            attached = await engine.attach(owner, session.id)
            async with aclosing(attached.events()) as events:
                await attached.execute("6 * 7", allow_input=False)
                assert ("execute_result", {"text/plain": "42"}) in _outputs(await _until_end(events))
            await attached.aclose()
            made = await engine.attach(owner)
            assert runtime.sessions.get(made.session_id, AGENT).reason == "a Jupyter kernel"
            await made.aclose()
            await engine.end(owner, made.session_id)
    with pytest.raises(BelljarError):
        await here.attach(owner, environment="none-of-that-name")
    assert [one.id for one in runtime.sessions.of(AGENT)] == [session.id]
