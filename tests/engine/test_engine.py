"""One suite for every implementation of `Engine`: in the server's process, and over the sockets of servers."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from functools import partial

import pytest
from calls import FORKS, NAMED, Caller, connected, held, opened_runtime, until_said

from belljar.engine.contract import Access, Engine, SessionFilter
from belljar.engine.many import servers_of
from belljar.engine.models import Followed, ProgressStep, ServerEvent
from belljar.environments import Environment
from belljar.errors import (
    BelljarError,
    ExecutionNotFound,
    InvalidArgument,
    InvalidPath,
    SessionNotFound,
    VariableMissing,
)
from belljar.executions.cell import make_cell
from belljar.kernels.base import Kernel
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio

OPERATOR = Access("local", is_operator=True, name="olga")
CLIENT = Access("local", via="client")
STRANGER = Access("key:stranger")


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("engine"), **FORKS) as opened:
        yield opened


@pytest.fixture(scope="module")
async def agent(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with connected(runtime) as caller:
        yield caller


@pytest.fixture(params=["local", "remote"])
def engine(request: pytest.FixtureRequest, runtime: Runtime) -> Engine:
    return runtime.late_engine.get() if request.param == "local" else servers_of(runtime.settings.data_directory)


async def test_shows_a_session_and_its_cells(engine: Engine, agent: Caller) -> None:
    ran = await agent.execute("print('one')\nopen('f.txt', 'w').write('x')\n2")
    failed = await agent.execute("1/0", ran.session_id)
    detail = await engine.session(OPERATOR, ran.session_id)
    assert (detail.state, detail.owner, detail.executions) == ("idle", "local", 2)
    assert (detail.first_line, detail.last_line) == ("print('one')", "1/0")
    listed = (await engine.sessions(OPERATOR, SessionFilter(text=ran.session_id))).items
    assert [(one.first_line, one.last_line) for one in listed] == [("print('one')", "1/0")]
    cells = await engine.executions(OPERATOR, ran.session_id)
    assert [(cell.execution_id, cell.status) for cell in cells.items] == [
        (failed.execution_id, "error"),
        (ran.execution_id, "ok"),
    ]
    assert cells.next is None
    first = await engine.execution(OPERATOR, ran.execution_id)
    assert ([file.name for file in first.files], first.client, first.execution_count) == (["f.txt"], NAMED.name, 1)
    events, has_more = await engine.output(OPERATOR, ran.execution_id)
    assert ([event.kind for event in events], has_more) == (["stdout", "result"], False)
    assert await engine.excerpt(OPERATOR, ran.execution_id) == events
    assert (await engine.lines(OPERATOR, ran.execution_id, 1, 10)).lines == ["one"]
    assert (await engine.result(OPERATOR, ran.execution_id)).result == "2"
    assert (await engine.read_part(OPERATOR, ran.session_id, "f.txt", 0, 10)).content == b"x"
    assert b"ZeroDivisionError" in await engine.notebook(OPERATOR, ran.session_id, "ipynb")


async def test_shows_variables_rows_and_packages(engine: Engine, agent: Caller) -> None:
    ran = await agent.execute("rows = [{'n': 3, 's': 'x'}, {'n': 1}, {'n': 2, 's': None}]\ncount = 7")
    found = await engine.variables(OPERATOR, ran.session_id)
    assert (found.state, [(one.name, one.type, one.value) for one in found.items]) == (
        "live",
        [("rows", "list", None), ("count", "int", "7")],
    )
    second = await engine.variables(OPERATOR, ran.session_id, offset=1, limit=1)
    assert ([one.name for one in second.items], second.total, second.next) == (["count"], 2, None)
    table = await engine.rows(OPERATOR, ran.session_id, "rows", order="0:desc", limit=2)
    assert (table.rows, table.labels, table.next) == ([["3", "x"], ["2", None]], ["0", "2"], 2)
    part = await engine.rows(OPERATOR, ran.session_id, "rows", offset=2, first_column=1, columns=1)
    assert ([column.name for column in part.columns], part.rows) == (["s"], [[None]])
    with pytest.raises(VariableMissing):
        await engine.rows(OPERATOR, ran.session_id, "nowhere")
    for wrong in ({"order": "n"}, {"limit": 501}, {"offset": -1}, {"columns": 0}):
        with pytest.raises(InvalidArgument):
            await engine.rows(OPERATOR, ran.session_id, "rows", **wrong)
    packages = await engine.packages(OPERATOR, ran.session_id)
    assert "numpy" in [one.name for one in packages.items]
    with pytest.raises(InvalidArgument):
        await engine.queue_install(OPERATOR, ran.session_id, ["-r file"])


async def test_pages_of_cells_go_on_where_the_last_ended(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    made = [(await agent.execute(str(number), session_id)).execution_id for number in range(5)]
    first = await engine.executions(OPERATOR, session_id, limit=2)
    second = await engine.executions(OPERATOR, session_id, first.next or "", limit=2)
    third = await engine.executions(OPERATOR, session_id, second.next or "", limit=2)
    pages = [first, second, third]
    assert [cell.execution_id for page in pages for cell in page.items] == made[::-1]
    assert third.next is None
    assert await engine.blocks(OPERATOR, session_id, 2) == [first.next, second.next]


async def test_lists_by_state_and_text(engine: Engine, agent: Caller) -> None:
    older, made = await engine.create(OPERATOR), await engine.create(OPERATOR, reason="Umbrella 1")
    found = await engine.sessions(OPERATOR, SessionFilter(text="umbrella"))
    assert made.session_id in [entry.session_id for entry in found.items]
    assert (await engine.sessions(OPERATOR, SessionFilter(state="running"))).items == []
    one = await engine.sessions(OPERATOR, SessionFilter(), limit=1)
    rest = await engine.sessions(OPERATOR, SessionFilter(), one.next or "", limit=100)
    everything = await engine.sessions(OPERATOR, SessionFilter(), limit=100)
    # By their ids, because their memory may be sampled meanwhile.
    pages, whole = [*one.items, *rest.items], everything.items
    assert [entry.session_id for entry in pages] == [entry.session_id for entry in whole]
    await engine.end(OPERATOR, older.session_id)
    await engine.end(OPERATOR, made.session_id)
    assert (await engine.session(OPERATOR, made.session_id)).last_cause == "was ended by olga"


async def test_another_owner_sees_what_an_unknown_id_gives(engine: Engine, agent: Caller) -> None:
    ran = await agent.execute("1")
    for method, kind, name, known in [
        (engine.session, SessionNotFound, "session", ran.session_id),
        (engine.executions, SessionNotFound, "session", ran.session_id),
        (engine.files, SessionNotFound, "session", ran.session_id),
        (engine.variables, SessionNotFound, "session", ran.session_id),
        (engine.packages, SessionNotFound, "session", ran.session_id),
        (engine.interrupt, SessionNotFound, "session", ran.session_id),
        (engine.fork, SessionNotFound, "session", ran.session_id),
        (partial(engine.rename, reason="x"), SessionNotFound, "session", ran.session_id),
        (engine.end, SessionNotFound, "session", ran.session_id),
        (engine.execution, ExecutionNotFound, "execution", ran.execution_id),
        (engine.result, ExecutionNotFound, "execution", ran.execution_id),
        (engine.calls, ExecutionNotFound, "execution", ran.execution_id),
        (engine.wait, ExecutionNotFound, "execution", ran.execution_id),
        (partial(engine.reply, number=1, action="accept", values={}), ExecutionNotFound, "execution", ran.execution_id),
        (lambda access, one: engine.interrupt(access, execution_id=one), ExecutionNotFound, "run", ran.execution_id),
        (partial(engine.submit, code="1"), SessionNotFound, "session", ran.session_id),
        (partial(engine.rewind, to="1"), SessionNotFound, "session", ran.session_id),
        (lambda access, one: finished(engine.install(access, one, ["ipython"])), SessionNotFound, "x", ran.session_id),
    ]:
        told = [await refusal(method(STRANGER, one)) for one in (known, "0" * 32)]
        assert all(isinstance(error, kind) for error in told)
        assert told[0].message.replace(known, "") == told[1].message.replace("0" * 32, ""), name
    assert (await engine.sessions(STRANGER, SessionFilter(owner="local"))).items == []


async def finished(steps: AsyncGenerator[ProgressStep]) -> ProgressStep:
    async with aclosing(steps) as told:
        *_, last = [step async for step in told]
    assert last.kind == "done"
    return last


async def refusal(call: object) -> BelljarError:
    with pytest.raises(BelljarError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    return caught.value


async def test_no_id_reaches_more_than_what_it_names(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    await engine.write_file(OPERATOR, session_id, "kept.txt", b"kept")
    forged = ["", "..", "a?b", "#", "a\x00", "\ud800", "x" * 100_000]
    forged += [f"{session_id}/{rest}" for rest in ("files/kept.txt", "executions", "../x", "")]
    for one in forged:
        for call in (engine.session, engine.end, engine.interrupt, engine.files):
            with pytest.raises(SessionNotFound):
                await call(OPERATOR, one)
        for call in (engine.execution, engine.result, engine.calls):
            with pytest.raises(ExecutionNotFound):
                await call(OPERATOR, one)
    assert (await engine.read_part(OPERATOR, session_id, "kept.txt", 0, 9)).content == b"kept"


async def test_texts_that_are_no_unicode_and_overlong_ones_are_refused_in_words(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    for call in (
        engine.submit(OPERATOR, session_id, "'\ud800'"),
        engine.submit(OPERATOR, session_id, "1", key="a\nb"),
        engine.write_file(OPERATOR, session_id, "\udcff.txt", b""),
        engine.executions(OPERATOR, session_id, "x" * 100_000),
    ):
        with pytest.raises((InvalidArgument, InvalidPath)):
            await call
    assert (await engine.executions(OPERATOR, session_id)).items == []
    assert (await engine.files(OPERATOR, session_id)).items == []


async def test_forged_cursors_are_refused(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    for cursor in ("x", "%%%", "LTE", "MTIz" * 30):
        with pytest.raises(InvalidArgument):
            await engine.executions(OPERATOR, session_id, cursor)


async def test_follows_a_cell_and_goes_on_from_a_place(engine: Engine, agent: Caller, runtime: Runtime) -> None:
    session_id = await agent.new_session()
    running = await agent.execute("print('a', flush=True)\n" + held("go") + "print('b')", session_id, wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    texts, place = "", ""
    async with aclosing(engine.follow(OPERATOR, session_id)) as happened:
        async for item in happened:
            if item.output is not None:
                texts, place = texts + item.output.text, item.id
            if "held" in texts:
                break
    assert (await engine.execution(OPERATOR, running.execution_id)).status == "running"
    now = (await engine.session(OPERATOR, session_id)).now
    assert now is not None
    assert now.first_line == "print('a', flush=True)"
    await agent.release(session_id, "go")
    last: Followed | None = None
    async with aclosing(engine.follow(OPERATOR, session_id, place)) as happened:
        async for item in happened:
            texts += item.output.text if item.output else ""
            last = item
            if item.kind == "ended":
                break
    assert texts == "a\nheld\nb\n"
    assert last is not None
    assert last.execution is not None
    assert last.execution.status == "ok"


async def test_long_output_of_a_running_cell_is_told_by_its_end(
    engine: Engine, agent: Caller, runtime: Runtime
) -> None:
    session_id = await agent.new_session()
    code = "for n in range(20_000): print('number', n)\n" + held("go")
    running = await agent.execute(code, session_id, wait_s=0)
    chars = 0
    async with aclosing(engine.follow(OPERATOR, session_id)) as happened:
        async for item in happened:
            chars += len(item.output.text) if item.output else 0
            if item.tail is not None and "held" in item.tail.text:
                assert item.tail.lines == 20_001
                assert len(item.tail.text.split("\n")) <= 51
                break
    assert chars < 200_000
    await agent.release(session_id, "go")
    await agent.ended(running.execution_id)
    events = await engine.excerpt(OPERATOR, running.execution_id)
    text = "".join(event.text for event in events)
    assert len(text) < 21_000
    assert text.startswith("number 0\n")
    assert "characters left out here" in text
    lines = await engine.lines(OPERATOR, running.execution_id, 19_999, 2, "number 777")
    assert (lines.lines, lines.total) == (["number 19998", "number 19999"], 20_001)
    assert lines.matches[0] == 778


async def test_acts_reach_the_session(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    execution_id = (await engine.submit(OPERATOR, session_id, "while True: pass", key="k")).execution_id
    with pytest.raises(InvalidArgument):
        await engine.submit(OPERATOR, session_id, "other", key="k")
    assert await engine.interrupt(OPERATOR, session_id) == [execution_id]
    entry = await engine.execution(OPERATOR, execution_id)
    assert (entry.status, entry.author) == ("interrupted", "olga")
    assert "by olga" in (entry.cause or "")
    await engine.write_file(OPERATOR, session_id, "a.bin", b"\x00\xff")
    assert [file.name for file in (await engine.files(OPERATOR, session_id)).items] == ["a.bin"]
    part = await engine.read_part(OPERATOR, session_id, "a.bin", 1, 5)
    assert (part.content, part.size) == (b"\xff", 2)
    await engine.delete_file(OPERATOR, session_id, "a.bin")
    assert (await engine.files(OPERATOR, session_id)).items == []
    # Keys belong to their owner, so the next implementation under test needs it again.
    await engine.end(OPERATOR, session_id)


async def test_a_cell_is_submitted_once_for_a_key_and_waited_for(engine: Engine) -> None:
    made = await engine.submit(
        CLIENT, "", "x = 20\nprint('hi')\nx + 1", key="once", client="a program", filename="a.py"
    )
    ended = await engine.wait(CLIENT, made.execution_id)
    assert (ended.status, ended.question) == ("ok", None)
    assert ended.result is not None
    assert (ended.result.result, ended.result.stdout, ended.sequence) == ("21", "hi\n", ended.result.sequence)
    again = await engine.submit(CLIENT, "", "x = 20\nprint('hi')\nx + 1", key="once")
    assert again == made
    other = (await engine.create(CLIENT)).session_id
    with pytest.raises(InvalidArgument):
        await engine.submit(CLIENT, other, "x = 20\nprint('hi')\nx + 1", key="once")
    entry = await engine.execution(CLIENT, made.execution_id)
    assert (entry.client, entry.author) == ("a program", "")
    assert (await engine.read_part(CLIENT, made.session_id, "a.py", 0, 100)).content.startswith(b"x = 20")
    assert (await engine.result(CLIENT, made.execution_id, since=1)).stdout == ""
    for one in (made.session_id, other):
        await engine.end(CLIENT, one)


async def test_a_waiting_caller_hears_of_output_and_of_questions(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    asking = "print('before', flush=True)\nname = input('Who? ')\nprint('hello', name)"
    execution_id = (await engine.submit(CLIENT, session_id, asking, asks="client")).execution_id
    seen = 0
    while (now := await engine.wait(CLIENT, execution_id, since=seen, asked=0)).question is None:
        assert (now.status in ("queued", "running"), now.result) == (True, None)
        seen = now.sequence
    assert (now.question.number, now.question.message) == (1, "Who? ")
    still = await engine.wait(CLIENT, execution_id, asked=1, wait_s=0)
    assert (still.status, still.question) == ("running", now.question)
    text = next(iter(now.question.fields["properties"]))  # pyright: ignore[reportArgumentType]
    await engine.reply(CLIENT, execution_id, 7, "decline", {})  # another question than the one that waits
    await engine.reply(CLIENT, execution_id, 1, "accept", {text: "Ada"})
    ended = await engine.wait(CLIENT, execution_id)
    assert ended.result is not None
    assert ended.result.stdout.endswith("hello Ada\n")
    unasked = await engine.submit(CLIENT, session_id, "input()", asks="nobody")
    assert (await engine.wait(CLIENT, unasked.execution_id, asked=0)).status == "error"


async def test_one_execution_is_interrupted_without_waiting_for_its_end(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    first = (await engine.submit(CLIENT, session_id, "while True: pass")).execution_id
    second = (await engine.submit(CLIENT, session_id, "2")).execution_id
    assert await engine.interrupt(CLIENT, execution_id=first, why="by a test", waits=False) == [first]
    ended = await engine.wait(CLIENT, first)
    assert ended.result is not None
    assert (ended.status, "by a test" in (ended.result.cause or "")) == ("interrupted", True)
    assert (await engine.wait(CLIENT, second)).status == "ok"
    assert await engine.interrupt(CLIENT, execution_id=first) == []


async def test_an_interrupt_takes_effect_before_it_first_waits(agent: Caller, runtime: Runtime) -> None:
    engine, session_id = runtime.late_engine.get(), await agent.new_session()
    for access in (CLIENT, OPERATOR):
        execution_id = (await engine.submit(CLIENT, session_id, "while True: pass")).execution_id
        stopping = engine.interrupt(access, execution_id=execution_id, waits=False)
        with pytest.raises(StopIteration):
            stopping.send(None)
        assert (await engine.wait(CLIENT, execution_id)).status == "interrupted"


async def test_a_session_is_opened_with_its_kernel_or_not_at_all(engine: Engine, runtime: Runtime) -> None:
    opened = await finished(engine.open_session(CLIENT, reason="opened"))
    assert opened.session is not None
    assert (opened.session.state, opened.session.reason, opened.text) == ("idle", "opened", "")
    assert opened.session.session_id in [one.session_id for one in await engine.live_sessions(CLIENT)]
    await engine.end(CLIENT, opened.session.session_id)
    known = {session.id for session in runtime.sessions.all()}
    for wrong in ("nowhere", "kernel:nowhere"):
        with pytest.raises(BelljarError):
            await finished(engine.open_session(CLIENT, wrong))
    assert {session.id for session in runtime.sessions.all()} == known


async def test_an_installation_tells_what_came_of_each_package(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    done = await finished(engine.install(CLIENT, session_id, ["ipython"]))
    assert done.installation is not None
    assert [(one["name"], one["error"]) for one in done.installation.packages] == [("ipython", None)]
    with pytest.raises(InvalidArgument):
        await finished(engine.install(CLIENT, session_id, ["-r file"]))


async def test_a_state_is_named_by_a_number_and_files_are_listed_below_folders(engine: Engine, agent: Caller) -> None:
    ran = await agent.execute("import os\nos.makedirs('a/b')\nopen('a/b/c.txt', 'w').close()\nx = 1")
    await agent.execute("x = 2", ran.session_id)
    below = await engine.files(CLIENT, ran.session_id, recursive=True)
    assert ([file.name for file in below.items], below.folders, below.rest) == (["a/b/c.txt"], [], 0)
    forked = await engine.fork(CLIENT, ran.session_id, "1", reseed=True)
    assert (await agent.execute("x", forked.session_id)).result == "1"
    assert len((await engine.rewind(CLIENT, ran.session_id, "1")).undone) == 1
    assert (await agent.execute("x", ran.session_id)).result == "1"


async def test_a_session_is_renamed(engine: Engine, agent: Caller, runtime: Runtime) -> None:
    ran = await agent.execute("x = 1")
    session_id = ran.session_id
    session = runtime.sessions.find_open(session_id)
    assert session is not None
    used_at = session.lease.used_at
    listed = await engine.sessions(OPERATOR, SessionFilter(), limit=1)
    renamed = await engine.rename(OPERATOR, session_id, "Sales of Oslo")
    assert (renamed.session_id, renamed.reason, renamed.executions) == (session_id, "Sales of Oslo", 1)
    async with asyncio.timeout(60), aclosing(engine.server_events(OPERATOR, listed.after)) as happened:
        async for item in happened:
            if (item.session_id, item.state) == (session_id, "renamed"):
                break
    assert session.lease.used_at == used_at
    found = await engine.sessions(OPERATOR, SessionFilter(text="sales of oslo"))
    assert [entry.session_id for entry in found.items] == [session_id]
    fork = await engine.fork(OPERATOR, session_id)
    assert (await engine.session(OPERATOR, fork.session_id)).reason == f"fork of {session_id}"
    names = [f"number {number}" for number in range(8)]
    await asyncio.gather(*(engine.rename(OPERATOR, session_id, name) for name in names))
    assert session.reason in names
    assert (await engine.session(OPERATOR, session_id)).reason == session.reason
    assert (await engine.rename(OPERATOR, session_id, "")).reason == ""
    said = "".join((await agent.execute("x", session_id)).output)
    assert "olga removed the session's name" in said
    assert "olga renamed the session to 'number" in said
    for ended in (fork.session_id, session_id):
        await engine.end(OPERATOR, ended)
    with pytest.raises(SessionNotFound, match="was ended by olga"):
        await engine.rename(OPERATOR, session_id, "too late")
    assert (await engine.session(OPERATOR, session_id)).reason == ""


async def test_a_reason_is_one_line_of_what_can_be_seen(engine: Engine, agent: Caller) -> None:
    session_id = await agent.new_session()
    for said, kept in [
        ("  two\nlines\r\n\tand more\u2028 ", "two lines and more"),
        ("\x1b[31mred\x00\x7f", "[31mred"),
        ("a\u202eb\u2066c\u200bd\ufeff", "abcd"),
        ("<b>&amp;'\"</b>", "<b>&amp;'\"</b>"),
        ("größe 数 \U0001f4c8", "größe 数 \U0001f4c8"),
        ("\u202e \n", ""),
        ("x" * 200, "x" * 200),
    ]:
        assert (await engine.rename(OPERATOR, session_id, said)).reason == kept
    with pytest.raises(InvalidArgument):
        await engine.rename(OPERATOR, session_id, "x" * 201)
    assert (await engine.session(OPERATOR, session_id)).reason == "x" * 200
    made = await engine.create(OPERATOR, reason="one\n\u202etwo")
    assert made.reason == "one two"


async def test_tells_what_happens_to_sessions(engine: Engine, agent: Caller) -> None:
    heard: list[ServerEvent] = []

    async def listen() -> None:
        async with aclosing(engine.server_events(OPERATOR)) as happened:
            async for item in happened:
                heard.append(item)  # noqa: PERF401 - as they come, not at the end

    listening = asyncio.ensure_future(listen())

    async def is_told() -> bool:  # a reader hears of what comes after it began to listen, which takes a moment
        session_id = await agent.new_session()
        await agent.fields("clear_session", session_id=session_id)
        return {"made", "gone"} <= {item.state for item in heard}

    try:
        await until(is_told)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    health = await engine.health(OPERATOR)
    assert [server.is_answering for server in health.servers] == [True]


async def test_names_are_completed_without_waking_or_using_the_session(
    engine: Engine, agent: Caller, runtime: Runtime
) -> None:
    session_id = await agent.new_session()
    await agent.execute("umbrella = 1\numbrage = 2", session_id)
    session = runtime.sessions.find_open(session_id)
    assert session is not None
    used_at = session.lease.used_at
    found = await engine.complete(OPERATOR, session_id, "x = umbr", 8)
    assert ({"umbrella", "umbrage"} <= set(found.matches), found.start, found.end) == (True, 4, 8)
    assert session.lease.used_at == used_at
    running = await agent.execute(held("done"), session_id, wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    assert (await engine.complete(OPERATOR, session_id, "umbr", 4)).matches == []
    await agent.release(session_id, "done")
    await agent.ended(running.execution_id)
    with pytest.raises(SessionNotFound):
        await engine.complete(STRANGER, session_id, "umbr", 4)


async def test_folders_presence_and_usage(engine: Engine, agent: Caller, runtime: Runtime) -> None:
    code = (
        "import os\nos.makedirs('a/b', exist_ok=True)\nopen('a/b/c.txt', 'w').write('deep')\nopen('t.txt', 'w').close()"
    )
    ran = await agent.execute(code)
    top = await engine.files(OPERATOR, ran.session_id)
    assert ([file.name for file in top.items], top.folders) == (["t.txt"], ["a"])
    assert (await engine.files(OPERATOR, ran.session_id, "a")).folders == ["a/b"]
    assert [file.name for file in (await engine.files(OPERATOR, ran.session_id, "a/b")).items] == ["a/b/c.txt"]
    runtime.sessions.inbox._seen.clear()
    await engine.note_presence(STRANGER)
    assert [runtime.sessions.inbox.may_ask(owner) for owner in ("key:stranger", "local")] == [True, False]
    await engine.note_presence(OPERATOR)
    assert runtime.sessions.inbox.may_ask("local")
    runtime.late_engine.get()._usage.sample()  # as it does every few seconds
    usage = await engine.usage(OPERATOR)
    assert usage.gauges["idle"][-1] >= 1
    assert usage.gauges["memory_mb"][-1] > 1
    assert (await engine.usage(STRANGER)).gauges["memory_mb"][-1] == 0


async def test_what_happens_between_the_list_and_the_first_event_is_told(engine: Engine, agent: Caller) -> None:
    listed = await engine.sessions(OPERATOR, SessionFilter(), limit=1)
    session_id = await agent.new_session()  # before anybody listens
    async with asyncio.timeout(60), aclosing(engine.server_events(OPERATOR, listed.after)) as happened:
        async for item in happened:
            if (item.session_id, item.state) == (session_id, "made"):
                break


async def test_what_was_submitted_is_found_at_once(engine: Engine, agent: Caller, runtime: Runtime) -> None:
    session = runtime.sessions.get(await agent.new_session(), "local")
    execution = session.submit(make_cell(runtime.settings, "1"))
    assert (await engine.execution(OPERATOR, execution.id)).code == "1"
    await agent.ended(execution.id)


async def test_a_change_is_heard_from_the_call_on(agent: Caller, runtime: Runtime) -> None:
    running = await agent.execute(held("go"), wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    execution = runtime.sessions.executions.find(running.execution_id, "local")
    assert execution is not None
    waiting = asyncio.ensure_future(execution.wait_for_change(3600))
    execution.note_progress("before the task has made a step")
    async with asyncio.timeout(60):
        assert await waiting
    await agent.release(running.session_id, "go")
    await agent.ended(running.execution_id)
    async with asyncio.timeout(60):
        assert not await execution.wait_for_change(3600)  # of what has ended, nothing will change


async def test_a_cell_whose_kernel_starts_is_interrupted_at_once(
    engine: Engine, agent: Caller, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = runtime.sessions.get(await agent.new_session(), "local")
    begun, may_start = asyncio.Event(), asyncio.Event()
    start = session.session_kernel.ensure_started

    async def start_late() -> Kernel:
        begun.set()
        await may_start.wait()
        return await start()

    monkeypatch.setattr(session.session_kernel, "ensure_started", start_late)
    execution_id = (await engine.submit(OPERATOR, session.id, "1")).execution_id
    await begun.wait()
    assert await engine.interrupt(OPERATOR, session.id) == [execution_id]
    entry = await engine.execution(OPERATOR, execution_id)
    assert (entry.status, entry.cause) == ("interrupted", "interrupted by olga before its code began; it never ran")
    may_start.set()
    assert (await agent.execute("2", session.id)).result == "2"


async def test_finds_cells_by_words_of_code_and_output_and_none_of_another_owner(
    engine: Engine, agent: Caller, runtime: Runtime
) -> None:
    word = f"quokka{type(engine).__name__}"
    ran = await agent.execute(f"print('{word} ' + 'jumps')")
    again = await agent.execute(f"'{word}' + '!'", ran.session_id)
    first = await engine.search(OPERATOR, word.lower(), limit=1)
    assert [cell.execution_id for cell in first.items] == [again.execution_id]
    rest = await engine.search(OPERATOR, word.lower(), first.next or "")
    (cell,) = rest.items
    assert (cell.execution_id, cell.session_id, rest.next) == (ran.execution_id, ran.session_id, None)
    assert cell.session_name == f"print('{word} ' + 'jumps')"
    assert [(piece.text, piece.is_match) for piece in cell.output] == [(word, True), (" jumps\n", False)]
    assert (await engine.search(STRANGER, word)).items == []
    with pytest.raises(InvalidArgument):
        await engine.search(OPERATOR, "x" * 10_000)
    with pytest.raises(InvalidArgument):
        await engine.search(OPERATOR, word, "AAAA")
    indexes = [*(runtime.settings.data_directory / "search").glob("*.sqlite")]

    def indexed() -> int:
        query, count = "SELECT count(*) FROM cells WHERE session_id = ?", 0
        for index in indexes:
            with closing(sqlite3.connect(index)) as connection:
                count += connection.execute(query, (ran.session_id,)).fetchone()[0]
        return count

    assert indexed() == 2
    await engine.end(OPERATOR, ran.session_id)
    assert indexed() == 0
    assert (await engine.search(OPERATOR, word)).items == []
