"""Code that speaks to the toolbox's socket itself: whatever it says changes nothing for anyone."""

from ast import literal_eval
from collections.abc import AsyncGenerator

import pytest
from calls import Caller
from tool_cells import runtime_with_tools

from belljar.environments import Environment
from belljar.runtime import Runtime
from belljar.toolbox.session_server import LINE_BYTES

pytestmark = pytest.mark.anyio

# Sends lines to the socket and tells what comes back until there is an answer, or nobody at the other end.
SPEAK = """
import json, os, socket
def speak(*lines):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.environ["BELLJAR_TOOLBOX"])
        try:
            for line in lines:
                sock.sendall(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\\n")
            answer = sock.makefile("rb").readline()
        except OSError:
            answer = b""
    return json.loads(answer) if answer else None
"""
ADD = {"id": 1, "op": "call", "server": "awkward", "tool": "add", "arguments": {"a": 1, "b": 2}}


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with runtime_with_tools(default_environment, tmp_path_factory.mktemp("belljar")) as runtime:
        yield runtime


async def spoken(caller: Caller, session: str, lines: str) -> object:
    result = await caller.execute(f"{SPEAK}\nrepr(speak({lines}))", session)
    assert result.status == "ok", result.error
    return literal_eval(literal_eval(str(result.result)))


async def calls_made(caller: Caller, session: str) -> int:
    result = await caller.execute("from servers.awkward import pid\npid()['calls']", session)
    return int(str(result.result))


async def test_a_request_in_order_is_answered(caller: Caller, shared_session: str):
    assert await spoken(caller, shared_session, repr(ADD)) == {"id": 1, "outcome": "value", "value": {"sum": 3}}


@pytest.mark.parametrize(
    "lines",
    [
        "b'\\x00\\xff\\n'",
        "b'[]\\n'",
        "b'[' * 100_000 + b'\\n'",
        repr({**ADD, "command": "touch /tmp/x"}),
        repr({**ADD, "url": "http://127.0.0.1"}),
        repr({**ADD, "op": "connect"}),
        repr({**ADD, "id": -1}),
        repr({**ADD, "id": "1"}),
        repr({**ADD, "arguments": [1]}),
        repr({**ADD, "tool": ["add"]}),
        repr({key: value for key, value in ADD.items() if key != "server"}),
        repr({"id": 1, "op": "search", "query": "x", "limit": 10**6}),
    ],
)
async def test_a_request_out_of_form_is_hung_up_on_and_reaches_nobody(caller: Caller, shared_session: str, lines: str):
    before = await calls_made(caller, shared_session)
    assert await spoken(caller, shared_session, lines) == {
        "id": 0,
        "outcome": "error",
        "kind": "form",
        "message": "the request cannot be read",
    }
    assert await calls_made(caller, shared_session) == before + 1


async def test_a_request_without_end_is_hung_up_on(caller: Caller, shared_session: str):
    assert await spoken(caller, shared_session, f"b'x' * {LINE_BYTES * 3}") is None
    assert await calls_made(caller, shared_session) > 0


async def test_a_request_of_more_values_than_anyone_means_is_answered_unread(caller: Caller, shared_session: str):
    many = 'b\'{"id": 7, "op": "call", "arguments": [\' + b"[]," * 1_300_000 + b"[]]}\\n"'
    assert await spoken(caller, shared_session, many) == {
        "id": 7,
        "outcome": "error",
        "kind": "arguments",
        "message": "the arguments have more than 100,000 values; pass fewer at once",
    }
    query = {**ADD, "tool": "query", "arguments": {"from": "x", "since": None}}
    text = f"({query!r} | {{'arguments': {{'from': '\\\\\",[' * 500_000, 'since': None}}}})"
    result = await caller.execute(f"{SPEAK}\nspeak({text})['outcome']", shared_session)
    assert result.result == "'value'", result.error


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"server": "../awkward"}, "there is no such server"),
        ({"tool": "add\n"}, "the server has no such tool"),
        ({"arguments": {"a": "\ud800", "b": 1}}, "the request cannot be read"),
        ({"arguments": {"a": 1, "b": True}}, "'b' is a boolean, not of type integer"),
    ],
)
async def test_a_name_or_value_that_is_none_is_refused(
    caller: Caller, shared_session: str, change: dict[str, object], told: str
):
    before = await calls_made(caller, shared_session)
    answer = await spoken(caller, shared_session, repr(ADD | change))
    assert isinstance(answer, dict)
    assert told in answer["message"]
    assert await calls_made(caller, shared_session) == before + 1


async def test_a_number_that_no_float_holds_is_a_number(caller: Caller, shared_session: str):
    answer = await spoken(caller, shared_session, repr(ADD | {"arguments": {"a": 10**400, "b": 0}}))
    assert answer == {"id": 1, "outcome": "value", "value": {"sum": 10**400}}


async def test_a_flood_of_connections_leaves_the_session_its_own(caller: Caller, shared_session: str):
    code = (
        f"{SPEAK}\nsocks = []\nfor _ in range(200):\n    s = socket.socket(socket.AF_UNIX)\n"
        "    s.connect(os.environ['BELLJAR_TOOLBOX'])\n    socks.append(s)\n"
        "for s in socks: s.close()\nfrom servers.awkward import add\nimport toolbox\n"
        "for _ in range(1000):\n    try:\n        told = add(1, 2)\n        break\n"
        "    except toolbox.ToolError: pass\ntold"
    )
    assert (await caller.execute(code, shared_session)).result == "{'sum': 3}"


async def test_another_session_has_another_way_out(caller: Caller, shared_session: str):
    mine = await caller.execute("import os\nos.environ['BELLJAR_TOOLBOX']", shared_session)
    theirs = await caller.execute("import os\nos.environ['BELLJAR_TOOLBOX']")
    assert mine.result != theirs.result
    reached = await caller.execute(f"import os\nos.path.exists({mine.result})", theirs.session_id)
    assert reached.result == "False"


async def test_a_flood_of_requests_is_answered_as_fast_as_it_is_read(caller: Caller, shared_session: str):
    code = (
        "import asyncio, toolbox\nfrom servers.awkward import query\n"
        "answers = await asyncio.gather(*(query.aio(str(n), 'x' * 100_000) for n in range(100)))\n"
        "[int(each['from']) for each in answers] == [*range(100)]"
    )
    assert (await caller.execute(code, shared_session)).result == "True"


async def test_who_never_reads_keeps_nobody_else_waiting(caller: Caller, shared_session: str):
    code = (
        f"{SPEAK}\nsock = socket.socket(socket.AF_UNIX)\nsock.connect(os.environ['BELLJAR_TOOLBOX'])\n"
        "ask = {'id': 1, 'op': 'call', 'server': 'awkward', 'tool': 'big', 'arguments': {'size': 3_000_000}}\n"
        "sock.sendall(json.dumps(ask).encode() + b'\\n')\nfrom servers.awkward import add\nadd(1, 2)"
    )
    held = await caller.execute(code, shared_session)
    assert held.result == "{'sum': 3}"
    other = await caller.execute("from servers.awkward import add\nadd(3, 4)")
    assert other.result == "{'sum': 7}"
    await caller.execute("sock.close()", shared_session)
