"""What holds for every server, whichever era it speaks and however it is reached."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from awkward_server import PIXEL, SOUND
from awkward_tools import TOOLS
from mcp_servers import awkward, awkward_http
from upstream_calls import Held, Person, call, connected, said, told

from belljar.errors import UpstreamFailed
from belljar.questions.models import Question, QuestionReply
from belljar.toolbox.base import Block
from belljar.toolbox.server_config import ServerConfig
from belljar.toolbox.upstreams import UpstreamConnections
from waiting import until

pytestmark = pytest.mark.anyio
WAYS = ["legacy-stdio", "modern-stdio", "legacy-http", "modern-http"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=WAYS)
async def upstreams(request: pytest.FixtureRequest) -> AsyncGenerator[UpstreamConnections]:
    era, _, way = request.param.partition("-")
    with ExitStack() as stack:
        server: ServerConfig = awkward(era) if way == "stdio" else stack.enter_context(awkward_http(era))
        async with connected(server) as upstreams:
            yield upstreams


async def test_every_page_of_tools_is_read_in_the_servers_order(upstreams: UpstreamConnections) -> None:
    catalogue = await upstreams.catalogue()
    server = catalogue.servers["awkward"]
    assert [tool.name for tool in server.tools] == [tool.name for tool in TOOLS]
    assert (server.instructions, server.error) == ("Handle with care.", "")
    add = catalogue.find("awkward", "add")
    assert add is not None
    assert (add.title, add.annotations.read_only, add.annotations.idempotent) == ("Add two numbers", True, True)
    assert add.output_schema is not None


async def test_parameters_reach_the_server_under_their_own_names_and_nulls_are_sent(
    upstreams: UpstreamConnections,
) -> None:
    arguments = {
        "from": "t",
        "since": None,
        "$filter": "x gt 1",
        "page-size": 3,
        "class": "a",
        "self": "me",
        "café": 1.5,
    }
    assert await told(upstreams, "query", arguments) == arguments


@pytest.mark.parametrize("name", ["getItem", "getitem", "get-item", "get_item", "class", "2fa", "list.all/of-it"])
async def test_twins_and_odd_names_are_each_called_as_they_are(upstreams: UpstreamConnections, name: str) -> None:
    assert await said(upstreams, name) == name


async def test_a_declared_result_comes_as_it_is(upstreams: UpstreamConnections) -> None:
    assert (await call(upstreams, "add", {"a": 1, "b": 2})).structured == {"sum": 3}


@pytest.mark.parametrize(("tool", "words"), [("fail", "it failed"), ("refuse", "the server refuses")])
async def test_a_tools_error_is_an_answer_and_so_is_a_refusal(
    upstreams: UpstreamConnections, tool: str, words: str
) -> None:
    answer = await call(upstreams, tool)
    assert (answer.is_error, answer.blocks) == (True, (Block("text", text=words),))


async def test_a_result_that_breaks_its_schema_is_a_failure_that_does_not_quote_it(
    upstreams: UpstreamConnections,
) -> None:
    with pytest.raises(UpstreamFailed, match="than its output schema says") as caught:
        await call(upstreams, "wrong_output")
    assert "many" not in str(caught.value)


async def test_media_come_as_bytes_with_their_types(upstreams: UpstreamConnections) -> None:
    answer = await call(upstreams, "media")
    assert answer.blocks[1:] == (
        Block("image", data=PIXEL, mime="image/png"),
        Block("audio", data=SOUND, mime="audio/wav"),
        Block("resource", text="a note", mime="text/plain", uri="memo://note"),
        Block("resource", data=b"\x00\x01\x02", mime="application/octet-stream", uri="memo://raw.bin"),
        Block("link", mime="text/csv", uri="memo://linked", name="linked"),
    )


async def test_a_question_reaches_the_person_and_the_reply_reaches_the_server(upstreams: UpstreamConnections) -> None:
    person = Person(name="Ann", age=7)
    assert await said(upstreams, "ask_name", ask=person.ask) == 'accept {"name": "Ann", "age": 7}'
    (question,) = person.asked
    assert question.message == "Who are you?"
    assert question.schema["required"] == ["name"]


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_person_may_say_no(upstreams: UpstreamConnections, action: str) -> None:
    assert await said(upstreams, "ask_name", ask=Person(action).ask) == f"{action} null"


async def test_two_questions_of_one_call_are_asked_one_after_the_other(upstreams: UpstreamConnections) -> None:
    person = Person(one="first", two=True)
    assert await said(upstreams, "ask_twice", ask=person.ask) == "first and True"
    assert [question.message for question in person.asked] == ["First?", "Second?"]


async def test_an_address_to_open_is_passed_on(upstreams: UpstreamConnections) -> None:
    person = Person()
    assert await said(upstreams, "ask_url", ask=person.ask) == "accept"
    assert person.asked == [Question("Sign in", url="https://example.com/in")]


async def test_calls_run_at_once_on_one_connection(upstreams: UpstreamConnections) -> None:
    answers: list[str] = []

    async def meet() -> None:
        answers.append(await said(upstreams, "meet", {"count": 10}))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(meet)
    assert answers == ["met"] * 10


async def test_progress_is_told_while_a_call_runs(upstreams: UpstreamConnections, tmp_path: Path) -> None:
    held = Held(tmp_path)
    progress: list[tuple[float, float | None, str]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: call(upstreams, "slow", held.arguments, progress=progress))
        await held.started()
        await until(lambda: bool(progress))
        assert progress == [(1, 2, "half way")]
        held.let_go()
    assert progress[0] == (1, 2, "half way")


async def test_what_two_people_are_asked_stays_apart(upstreams: UpstreamConnections) -> None:
    people: dict[str, Any] = {name: Person(name=name) for name in ("Ann", "Bob", "Cid")}
    answers: dict[str, str] = {}

    async def ask(name: str) -> None:
        answers[name] = await said(upstreams, "ask_name", ask=people[name].ask)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            # The first alone: a server of the older kind has to be seen asking before its calls take turns.
            await ask("Ann")
            for name in ("Bob", "Cid"):
                tasks.start_soon(ask, name)
    assert answers == {name: f'accept {{"name": "{name}"}}' for name in people}


async def test_a_cancelled_call_is_cancelled_at_the_server(upstreams: UpstreamConnections, tmp_path: Path) -> None:
    held = Held(tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: call(upstreams, "slow", held.arguments))
        await held.started()
        tasks.cancel_scope.cancel()
    await held.cancelled()
    assert await said(upstreams, "class") == "class"


async def test_a_question_of_a_call_that_was_cancelled_is_withdrawn(upstreams: UpstreamConnections) -> None:
    is_asked, is_withdrawn = anyio.Event(), anyio.Event()

    async def ask(_question: Question) -> QuestionReply:
        is_asked.set()
        try:
            await anyio.sleep_forever()
        finally:
            is_withdrawn.set()
        return QuestionReply("cancel")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call(upstreams, "ask_name", ask=ask))
            await is_asked.wait()
            tasks.cancel_scope.cancel()
        await is_withdrawn.wait()


async def test_a_change_of_the_tools_is_noticed_and_told(upstreams: UpstreamConnections) -> None:
    await upstreams.catalogue()
    for tool, is_there in (("grow", True), ("shrink", False)):
        changed = anyio.Event()
        upstreams.on_change(changed.set)
        await call(upstreams, tool, {"name": "late"})
        with anyio.fail_after(20):
            await changed.wait()
        assert ((await upstreams.catalogue()).find("awkward", "late") is not None) is is_there
