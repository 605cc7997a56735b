"""How connections begin and end: servers that die, hang, flood, cannot start, leave children, come back."""

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from mcp.types import ElicitRequestFormParams
from mcp_servers import awkward, awkward_http
from upstream_calls import Held, Person, call, connected, said, told

from belljar.errors import UpstreamFailed
from belljar.questions.models import Question, QuestionReply
from belljar.toolbox import connection
from belljar.toolbox.server_config import HttpServer, StdioServer
from belljar.toolbox.server_process import _read  # pyright: ignore[reportPrivateUsage]
from belljar.toolbox.upstream_questions import _question  # pyright: ignore[reportPrivateUsage]
from belljar.toolbox.upstreams import UpstreamConnections
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def upstreams() -> AsyncGenerator[UpstreamConnections]:
    """One server that works between two that do not."""
    missing = StdioServer("missing", "/nowhere/at-all")
    crashing = StdioServer("crashing", sys.executable, ("-c", "import sys; sys.exit('s3cret of its own')"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BELLJAR_API_KEYS", "s3cret")
        patch.setenv("SOME_TOKEN", "s3cret")
        working = awkward("modern", environment={"GIVEN": "1"})
        async with connected(missing, working, crashing, message_bytes=300_000) as upstreams:
            yield upstreams


async def test_nothing_is_started_before_it_is_needed(tmp_path: Path) -> None:
    async with connected(StdioServer("idle", "touch", (str(tmp_path / "ran"),))) as upstreams:
        assert upstreams.names == ["idle"]
    assert not (tmp_path / "ran").exists()


async def test_an_older_server_is_connected_although_it_refuses_the_newer_request_or_dies_of_it(tmp_path: Path) -> None:
    older = Path(__file__).with_name("older_server.py")
    ways = ("refuses", "exits")
    servers = (StdioServer(how, sys.executable, (str(older), how, str(tmp_path / how))) for how in ways)
    async with connected(*servers) as upstreams:
        catalogue = await upstreams.catalogue()
        assert {name: server.error for name, server in catalogue.servers.items()} == dict.fromkeys(ways, "")
        for how in ways:
            assert await said(upstreams, "echo", {"a": how}, server=how) == f'{{"a": "{how}"}}'
    # The one that died was started again, for the older handshake; the other took that at once.
    assert [len((tmp_path / how).read_text().splitlines()) for how in ways] == [1, 2]


async def test_a_server_that_cannot_start_is_told_and_harms_no_other(upstreams: UpstreamConnections) -> None:
    catalogue = await upstreams.catalogue()
    assert {name: server.error for name, server in catalogue.servers.items()} == {
        "missing": "MCP server missing cannot be started: No such file or directory",
        "awkward": "",
        "crashing": "MCP server crashing ended with status 1",
    }
    with pytest.raises(UpstreamFailed, match="crashing ended with status 1"):
        await call(upstreams, "x", server="crashing")
    with pytest.raises(UpstreamFailed, match="there is no MCP server nobody"):
        await call(upstreams, "x", server="nobody")


async def test_a_server_gets_none_of_our_variables_but_its_own(upstreams: UpstreamConnections) -> None:
    names = await told(upstreams, "variables")
    assert {"GIVEN", "PATH"} <= {*names}
    assert {"BELLJAR_API_KEYS", "SOME_TOKEN"}.isdisjoint(names)


async def test_an_answer_that_is_too_large_fails_alone(upstreams: UpstreamConnections, tmp_path: Path) -> None:
    held = Held(tmp_path)
    before = await told(upstreams, "pid")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said(upstreams, "slow", held.arguments))
        await held.started()
        with pytest.raises(UpstreamFailed, match="it answered with more than 300,000 bytes"):
            await call(upstreams, "big", {"size": 5_000_000})
        held.let_go()
    assert len(await said(upstreams, "big", {"size": 200_000})) == 200_000
    assert (await told(upstreams, "pid"))["pid"] == before["pid"]


async def test_what_a_server_says_on_stderr_goes_to_the_log_only(
    upstreams: UpstreamConnections, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "belljar.toolbox")
    await call(upstreams, "chatter", {"text": "key=s3cret"})
    await until(lambda: "key=s3cret" in caplog.text)
    assert [each.levelname for each in caplog.records if "s3cret" in each.getMessage()] == ["DEBUG"]
    assert "s3cret" not in "".join(capfd.readouterr())


async def test_a_server_that_dies_fails_its_call_and_is_started_again_for_the_next(
    upstreams: UpstreamConnections,
) -> None:
    first = await told(upstreams, "pid")
    with pytest.raises(UpstreamFailed, match="gave no answer: it ended with status 7") as caught:
        await call(upstreams, "die", {"code": 7})
    assert "not known" in caught.value.hint
    second = await told(upstreams, "pid")
    assert second["pid"] != first["pid"]
    assert len((await upstreams.catalogue()).tools()) > 30


async def test_a_server_that_says_nothing_is_given_up_and_ended(tmp_path: Path) -> None:
    mute = StdioServer("mute", "sh", ("-c", 'sleep 3600 & echo $! > "$0"; wait', str(tmp_path / "child")))
    async with connected(mute, start_s=0.5) as upstreams:
        catalogue = await upstreams.catalogue()
        assert catalogue.servers["mute"].error == "MCP server mute was not ready within 0.5 s: it has not answered yet"
    await until(lambda: not _lives(int((tmp_path / "child").read_text())))


async def test_children_of_a_server_end_with_it(tmp_path: Path) -> None:
    async with connected(awkward("both", "--child", str(tmp_path / "child"))) as upstreams:
        pid = (await told(upstreams, "pid"))["pid"]
        child = int((tmp_path / "child").read_text())
        assert _lives(child)
    assert not _lives(pid)
    await until(lambda: not _lives(child))


async def test_a_silent_call_is_given_up_and_a_question_stops_the_clock(tmp_path: Path) -> None:
    held = Held(tmp_path)
    async with connected(awkward("modern"), silence_s=1) as upstreams:

        async def ask(_question: Question) -> QuestionReply:
            # As long as it takes another call to be given up for its silence, which is longer than this one has left.
            with pytest.raises(UpstreamFailed, match="said nothing for 1 s; it was told"):
                await call(upstreams, "slow", held.arguments)
            await held.cancelled()
            return QuestionReply("accept", {"name": "Ann"})

        assert await said(upstreams, "ask_name", ask=ask) == 'accept {"name": "Ann"}'


async def test_a_server_that_never_stops_talking_leaves_time_for_others() -> None:
    """Like its pipe when it writes faster than we read."""
    never_empty = os.open("/dev/zero", os.O_RDONLY)

    async def listen() -> None:
        while await _read(never_empty):
            pass

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    finally:
        os.close(never_empty)


async def test_a_list_without_an_end_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(awkward("both", "--endless")) as upstreams:
        tools = (await upstreams.catalogue()).tools()
    assert [tool.name for tool in tools[:2]] == ["tool_0", "tool_1"]
    assert 2 <= len(tools) <= 2_000
    assert "lists more tools than it may" in caplog.text


async def test_a_server_that_says_too_much_of_its_tools_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "MAX_CHARACTERS", 2_000)
    async with connected(awkward()) as upstreams:
        tools = (await upstreams.catalogue()).tools()
    assert 1 <= len(tools) <= 20
    assert "lists more tools than it may" in caplog.text


def test_a_form_has_nothing_in_it_that_a_person_does_not_see() -> None:
    field = {"type": "string", "title": "Na\u202eme", "description": "your\u200b name", "enum": ["a\u200b"]}
    question = _question(ElicitRequestFormParams(message="?", requested_schema={"properties": {"title": field}}))
    assert question is not None
    assert question.schema["properties"]["title"] == {**field, "title": "Name", "description": "your name"}


async def test_a_question_that_could_be_two_peoples_waits_until_it_is_clear_whose_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held, asking, other = Held(tmp_path), Person(name="Ann"), Person(name="Bob")
    caplog.set_level(logging.INFO, "belljar.toolbox")
    async with connected(awkward("legacy")) as upstreams:
        await upstreams.catalogue()
        answers: list[str] = []

        async def ask_name() -> None:
            answers.append(await said(upstreams, "ask_name", ask=asking.ask))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: said(upstreams, "slow", held.arguments, ask=other.ask))
            await held.started()
            tasks.start_soon(ask_name)
            await until(lambda: "held" in caplog.text)
            assert other.asked == asking.asked == []
            held.let_go()
        assert answers == ['accept {"name": "Ann"}']
        assert other.asked == []


async def test_a_server_over_http_gets_its_headers_and_is_found_again_after_a_restart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with awkward_http("legacy", port=port, headers={"X-Key": "s3cret"}) as server:
        async with connected(server) as upstreams:
            assert (await told(upstreams, "headers"))["x-key"] == "s3cret"
            # The same address, and another server that knows nothing of our session.
            with pytest.raises(UpstreamFailed, match="gave no answer: "):
                await call(upstreams, "die")
            with pytest.raises(UpstreamFailed, match="cannot be reached"):
                await call(upstreams, "class")
            with awkward_http("legacy", port=port):
                assert await said(upstreams, "class") == "class"


async def test_a_status_is_told_and_a_body_without_an_end_is_cut() -> None:
    with _web(401, b"no") as url:
        async with connected(HttpServer("web", url, {"Authorization": "Bearer s3cret"})) as upstreams:
            error = (await upstreams.catalogue()).servers["web"].error
    assert "MCP server web answered with HTTP 401 Unauthorized" in error
    assert "s3cret" not in error
    with _web(200, b"[" + b" " * 3_000_000) as url:
        async with connected(HttpServer("web", url), message_bytes=1_000_000) as upstreams:
            error = (await upstreams.catalogue()).servers["web"].error
    assert "it answered with more than 1,000,000 bytes" in error


@contextmanager
def _web(status: int, body: bytes) -> Generator[str]:
    """A server that answers everything in one way, and does not say how long it will be."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-type", "application/json" if status == 200 else "text/plain")
            self.end_headers()
            with contextlib.suppress(OSError):  # nobody reads that much
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
        server.shutdown()
        thread.join()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
