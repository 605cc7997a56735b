"""Two callers of one server, each with a key of their own: what is one's never reaches the other."""

import json
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import httpx2
import pytest
from calls import Caller, held, text_of
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS
from tool_cells import awkward

from belljar.environments import Environment
from serving_process import http_server, serve_over_http
from skill_clients import ask, listed

KEYS = {"ada": "a" * 40, "bob": "b" * 40}
MAX, EACH = 4, 2
CONNECTIONS = 32
SECRET = "hibiscus"


@pytest.fixture(scope="module")
def url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder: Path = tmp_path_factory.mktemp("principals")
    config = folder / "servers.json"
    config.write_text(json.dumps({"mcpServers": {"awkward": awkward()}}))
    variables = {
        "BELLJAR_API_KEYS": ",".join(f"{name}:{key}" for name, key in KEYS.items()),
        "BELLJAR_MCP_CONFIG": str(config),
        "BELLJAR_MAX_SESSIONS": str(MAX),
        "BELLJAR_POOL_SIZE": "0",
        "BELLJAR_MAX_CONNECTIONS": str(CONNECTIONS),
        "BELLJAR_WORKSPACE": "on",
    }
    with http_server(serve_over_http(default_environment), folder, **variables) as (url, _):
        yield url


@asynccontextmanager
async def _calling(url: str, name: str) -> AsyncGenerator[Caller]:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        yield Caller(client)


@pytest.fixture
async def ada(url: str) -> AsyncGenerator[Caller]:
    async with _calling(url, "ada") as caller:
        yield caller
        await _clear(caller)


@pytest.fixture
async def bob(url: str) -> AsyncGenerator[Caller]:
    async with _calling(url, "bob") as caller:
        yield caller
        await _clear(caller)


async def _clear(caller: Caller) -> None:
    for info in (await caller.fields("list_sessions"))["sessions"]:
        await caller.call("interrupt_execution", session_id=info["session_id"])
        await caller.call("clear_session", session_id=info["session_id"])


async def _states(caller: Caller) -> dict[str, str]:
    return {info["session_id"]: info["state"] for info in (await caller.fields("list_sessions"))["sessions"]}


async def test_the_shape_of_an_answer_is_known_to_its_caller_alone(ada: Caller, bob: Caller):
    learnt = await ada.execute("from servers.awkward import records\nrecords(count=1)")
    assert learnt.status == "ok", learnt
    search = {"query": "records", "limit": 1, "detail": "source"}
    looking = "import inspect, toolbox, servers.awkward\nprint(inspect.getsource(servers.awkward.records))\n"
    looking += "print(toolbox.search('records', limit=1, detail='source'))"
    assert "RecordsResultItem" in text_of(await ada.call("search_tools", **search))
    assert "RecordsResultItem" in (await ada.execute(looking, learnt.session_id)).stdout
    assert "RecordsResultItem" not in text_of(await bob.call("search_tools", **search))
    seen = await bob.execute(looking)
    assert "def records" in seen.stdout
    assert "RecordsResultItem" not in seen.stdout


async def test_what_is_anothers_answers_exactly_as_what_is_not_there(ada: Caller, bob: Caller):
    code = (
        f"open('{SECRET}.txt', 'w').write('x')\nfrom IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\n'{SECRET}'"
    )
    result = await ada.execute(code)
    foreign: list[str] = []
    answers: list[str] = []
    made_up = {result.session_id: "0" * len(result.session_id), result.execution_id: "0" * len(result.execution_id)}

    async def told(tool: str, **arguments: object) -> str:
        return text_of(await bob.call(tool, **arguments))

    for session_id, execution_id in ((result.session_id, result.execution_id), tuple(made_up.values())):
        answers = [
            await told("execute_code", code="1", session_id=session_id),
            await told("get_execution", execution_id=execution_id),
            await told("get_execution", execution_id=execution_id, since=1),
            await told("get_execution", execution_id=execution_id, offset=0),
            await told("interrupt_execution", execution_id=execution_id),
            await told("interrupt_execution", session_id=session_id),
            await told("fork_session", session_id=session_id),
            await told("rewind_session", session_id=session_id, to=1),
            await told("rename_session", session_id=session_id, reason="theirs"),
            await told("clear_session", session_id=session_id),
            await told("list_session_files", session_id=session_id),
            await told("upload_file", session_id=session_id, name="a", text="x"),
            await told("download_file", session_id=session_id, name=f"{SECRET}.txt"),
            await told("install_dependencies", session_id=session_id, packages=["humanize"]),
            await told("check_installed_packages", session_id=session_id, packages=["humanize"]),
        ]
        for uri in (
            f"kernel://{session_id}/{SECRET}.txt",
            f"session://{session_id}/notebook",
            f"execution://{execution_id}/output",
            f"execution://{execution_id}/displays/1.html",
        ):
            with pytest.raises(Exception, match=r"does not exist|no display") as refused:
                await bob.client.read_resource(uri)
            answers.append(str(refused.value))
        if session_id == result.session_id:
            foreign = answers
    for true, invented in made_up.items():
        foreign = [answer.replace(true, invented) for answer in foreign]
    assert foreign == answers
    assert await _states(bob) == {}
    assert result.session_id in await _states(ada)


async def test_an_idempotency_key_is_its_callers_own(ada: Caller, bob: Caller):
    hers = await ada.execute(f"'{SECRET}'", idempotency_key="same")
    his = await bob.execute("'other'", idempotency_key="same")
    assert (hers.result, his.result) == (f"'{SECRET}'", "'other'")


async def test_the_shared_folder_of_one_is_not_the_others(ada: Caller, bob: Caller):
    await ada.execute(f"open('workspace/{SECRET}', 'w').write('x')")
    listing = "import os; os.listdir('workspace')"
    assert SECRET in str((await ada.execute(listing)).result)
    assert SECRET not in str((await bob.execute(listing)).result)


async def test_what_operators_read_over_http_names_nobody_and_nothing_of_theirs(ada: Caller, url: str):
    result = await ada.execute(f"raise ValueError('{SECRET}')", filename=f"{SECRET}.py")
    await ada.call("execute_code", code="1", session_id=SECRET)
    await ada.client.call_tool(SECRET, {})
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEYS['bob']}"}) as client:
        for path in ("/health", "/ready", "/metrics"):
            body = (await client.get(f"{url}{path}")).text
            assert not [name for name in (SECRET, "ada", result.session_id, result.execution_id) if name in body]


async def test_at_its_share_an_owner_gives_up_its_longest_idle_session(ada: Caller, bob: Caller):
    first = await ada.execute("x = 42")
    second = await ada.execute("y = 1")
    third = await ada.execute("z = 1")
    assert third.status == "ok", third
    states = await _states(ada)
    assert (states[first.session_id], states[second.session_id]) == ("asleep", "idle")
    # It wakes with the next call, and now the second one is the longest idle.
    woken = await ada.execute("x", first.session_id)
    assert woken.result == "42"
    assert (await _states(ada))[second.session_id] == "asleep"
    fork = await ada.call("new_session")
    assert not fork.is_error
    assert [*(await _states(ada)).values()].count("asleep") == 2
    assert [(await bob.execute("1")).status for _ in range(EACH)] == ["ok"] * EACH


async def test_an_owner_whose_sessions_all_run_is_told_so_and_others_have_their_room(ada: Caller, bob: Caller):
    running = [await ada.execute(held(), wait_s=0) for _ in range(EACH)]
    refused = await ada.execute("1")
    assert refused.status == "rejected"
    assert refused.error is not None
    assert refused.error.startswith(f"busy: {EACH} of your sessions are open and none of them can be put to sleep")
    assert "interrupt_execution" in refused.error
    assert [(await bob.execute("1")).status for _ in range(EACH)] == ["ok"] * EACH
    for each in running:
        await ada.release(each.session_id)
    with anyio.fail_after(30):
        assert [(await ada.ended(each.execution_id)).status for each in running] == ["ok"] * EACH


async def test_streams_that_one_caller_leaves_open_take_half_of_the_connections_at_most(bob: Caller, url: str):
    headers = {"authorization": f"Bearer {KEYS['ada']}", "accept": "application/json, text/event-stream"}
    asked = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": asked}
    statuses: list[int] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=30))
        opened = [(await client.post(f"{url}/mcp", json=hello)).headers["mcp-session-id"] for _ in range(CONNECTIONS)]
        for session_id in opened:
            stream = client.stream("GET", f"{url}/mcp", headers={"mcp-session-id": session_id})
            answer = await stack.enter_async_context(stream)
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                assert b"requests of yours are under way" in await answer.aread()
        assert (await bob.execute("1 + 1")).result == "2"
    assert statuses == [200] * (CONNECTIONS // 2) + [429] * (CONNECTIONS // 2)


async def test_what_one_saves_as_a_skill_the_other_never_sees(ada: Caller, bob: Caller):
    saved = {"name": "hibiscus-care", "description": f"Keeps the {SECRET}.", "code": f"x = '{SECRET}'\n"}
    assert (await ada.fields("save_skill", **saved))["state"] == "approved"
    assert [skill["name"] for skill in (await ada.fields("search_skills", query=SECRET))["skills"]] == ["hibiscus-care"]
    assert [entry["uri"] for entry in await listed(ada.client)] == ["skill://hibiscus-care/SKILL.md"]
    assert (await bob.fields("search_skills", query=SECRET))["skills"] == []
    assert await listed(bob.client) == []
    assert (await bob.client.list_prompts()).prompts == []
    assert "No module named 'skills.hibiscus_care'" in str((await bob.execute("import skills.hibiscus_care")).error)
    assert SECRET not in (await bob.execute("!ls -Ra skills/ $BELLJAR_SKILLS")).stdout
    for uri in ("skill://hibiscus-care/SKILL.md", "skill://never-was/SKILL.md"):
        with pytest.raises(MCPError) as caught:
            await ask(bob.client, "skills/get", uri=uri)
        assert (caught.value.error.code, caught.value.error.message) == (INVALID_PARAMS, f"No skill is served at {uri}")
    bobs = {**saved, "description": "Mine.", "code": "x = 2\n"}
    assert (await bob.fields("save_skill", **bobs))["state"] == "approved"
    assert (await ada.execute("from skills.hibiscus_care import x\nx")).result == f"'{SECRET}'"
