"""Any connection reaches any session, whichever of a machine's servers it comes to."""

import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from calls import Caller, held, text_of
from mcp.types import ElicitResult
from resumed_streams import begin, broken_and_resumed
from workers import KEYS, Workers

from belljar.control import ask_sessions
from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.request_headers import FLEET_HEADERS
from waiting import until

pytestmark = pytest.mark.anyio
ERAS = ["legacy", "2026-07-28"]


@asynccontextmanager
async def both(workers: Workers, era: str = "auto", **options: Any) -> AsyncGenerator[tuple[Caller, Caller]]:
    async with workers.client(1, era, **options) as one, workers.client(2, era, **options) as two:
        yield one, two


async def made_here(caller: Caller, number: int, workers: Workers) -> str:
    """A session of the server with this number, whichever had room."""
    while True:
        session_id = await caller.new_session()
        if (workers.data_directory(number) / "sessions" / session_id).exists():
            return session_id


@pytest.mark.parametrize("era", ERAS)
async def test_a_session_is_used_through_either_server(workers: Workers, era: str):
    async with both(workers, era) as (one, two):
        session_id = await made_here(one, 1, workers)
        await one.execute("x = 1", session_id)
        for turn in range(3):
            assert (await two.execute("x += 1; x", session_id)).result == f"{2 * turn + 2}"
            assert (await one.execute("x += 1; x", session_id)).result == f"{2 * turn + 3}"
        done = await two.execute("print('done')", session_id)
        assert await one.get(done.execution_id) == await two.get(done.execution_id)
        listed = [
            {info["session_id"] for info in (await caller.fields("list_sessions"))["sessions"]} for caller in (one, two)
        ]
        assert listed[0] == listed[1] >= {session_id}
        assert (await two.fields("clear_session", session_id=session_id))["success"]
        assert "session-not-found" in await one.refusal("execute_code", code="1", session_id=session_id)


@pytest.mark.parametrize("era", ERAS)
async def test_a_cell_asks_and_reports_through_another_server(workers: Workers, era: str):
    asked: list[str] = []
    reported: list[str] = []

    async def answer(_: Any, params: Any) -> ElicitResult:
        asked.append(params.message.strip())
        return ElicitResult(action="accept", content={"answer": f"{len(asked)}"})

    async def note(_progress: float, _total: float | None, message: str | None) -> None:
        reported.append(message or "")

    async with both(workers, era, elicitation_callback=answer) as (one, two):
        session_id = await made_here(one, 1, workers)
        code = "import time\nfor i in range(4):\n    print('line', i, flush=True); time.sleep(0.4)\n"
        found = await two.client.call_tool(
            "execute_code",
            {"code": code + "[input('one?'), input('two?')]", "session_id": session_id},
            progress_callback=note,
        )
        assert "['1', '2']" in text_of(found)
        assert asked == ["one?", "two?"]
        assert any("line 1" in message for message in reported)


async def test_a_call_that_is_cancelled_at_one_server_stops_at_the_other(workers: Workers):
    async with both(workers, "legacy") as (one, two):
        session_id = await made_here(one, 1, workers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: two.call("execute_code", code=held("never"), session_id=session_id))

            async def is_running() -> bool:
                sessions = (await one.fields("list_sessions"))["sessions"]
                return any(info["session_id"] == session_id and info["state"] == "running" for info in sessions)

            await until(is_running)
            tasks.cancel_scope.cancel()

        async def is_idle() -> bool:
            return not await is_running()

        await until(is_idle)
        assert (await one.execute("1 + 1", session_id)).result == "2"


@pytest.mark.parametrize("era", ERAS)
async def test_files_and_outputs_are_read_through_either_server(workers: Workers, era: str):
    async with both(workers, era) as (one, two):
        session_id = await made_here(one, 1, workers)
        text = "é" * 200_000
        await two.fields("upload_file", session_id=session_id, name="large.txt", text=text)
        assert (await one.execute("len(open('large.txt').read())", session_id)).result == "200000"
        assert await two.read_text(f"kernel://{session_id}/large.txt") == text
        done = await one.execute("print('said')", session_id)
        assert "said" in await two.read_text(f"execution://{done.execution_id}/output")
        assert "said" in await two.read_text(f"session://{session_id}/notebook")


async def test_a_stream_that_breaks_at_one_server_is_gone_on_with_at_the_other(workers: Workers):
    async with workers.client(1) as one, httpx2.AsyncClient(timeout=30) as http:
        session_id = await made_here(one, 1, workers)
        headers = await begin(http, workers.urls[1])
        urls = (workers.urls[1], workers.urls[2])
        for turn, order in enumerate((urls, urls[::-1])):
            answer = await broken_and_resumed(http, order, headers, session_id, one, turn)
            assert f"'go-{turn}'" in answer["content"][0]["text"]


async def test_an_mcp_session_and_its_streams_stay_with_the_server_that_has_them(workers: Workers):
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
    }
    accept = {"accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=accept, timeout=30) as client:
        begun = await client.post(f"{workers.urls[1]}/mcp", json=body)
        own = {"mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await client.post(f"{workers.urls[2]}/mcp", json=note, headers=own)).status_code == 202
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        listed = await client.post(f"{workers.urls[2]}/mcp", json=call, headers=own)
        assert "execute_code" in listed.text
        events = [line[4:] for line in listed.text.splitlines() if line.startswith("id: ")]
        again = {**own, "last-event-id": events[0]}
        async with client.stream("GET", f"{workers.urls[2]}/mcp", headers=again) as resumed:
            assert resumed.status_code == 200
            assert "execute_code" in (await resumed.aread()).decode()
        assert (await client.delete(f"{workers.urls[2]}/mcp", headers=own)).status_code == 200
        for url in workers.urls.values():
            assert (await client.post(f"{url}/mcp", json=call, headers=own)).status_code == 404


async def test_a_call_of_an_mcp_session_whose_server_is_killed_is_answered_at_the_other(workers: Workers):
    accept = {"accept": "application/json, text/event-stream"}
    client_of = {"clientInfo": {"name": "raw", "version": "1"}, "protocolVersion": "2025-11-25", "capabilities": {}}
    async with httpx2.AsyncClient(headers=accept, timeout=60) as client:
        body: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client_of}
        begun = await client.post(f"{workers.urls[1]}/mcp", json=body)
        own = {"mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
        arguments = {"code": "import time; print('begun', flush=True); time.sleep(600)"}
        call = {"name": "execute_code", "arguments": arguments, "_meta": {"progressToken": 7}}
        body = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
        async with client.stream("POST", f"{workers.urls[2]}/mcp", json=body, headers=own) as answer:
            said = ""
            async for text in answer.aiter_text():
                said += text
                if "begun" in said and workers.pids[1]:
                    _kill(workers.pids[1])
                    workers.pids[1] = 0
    assert "session-lost" in said
    assert "may have run" in said
    await anyio.to_thread.run_sync(workers.stop, 1)
    await anyio.to_thread.run_sync(workers.start, 1)


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_without_a_session_runs_once_at_whichever_server_it_comes(workers: Workers, era: str):
    async with both(workers, era) as (one, two):
        for number in range(4):
            key = {"code": "import secrets; secrets.token_hex()", "idempotency_key": f"{era}-{number}"}
            first = text_of(await one.call("execute_code", **key))
            again = text_of(await two.call("execute_code", **key))
            assert first.splitlines()[0] == again.splitlines()[0]


async def test_new_sessions_are_shared_out(workers: Workers):
    async with workers.client(1) as one:
        before = await one.fields("list_sessions")
        for info in before["sessions"]:
            await one.call("clear_session", session_id=info["session_id"])
        for _ in range(8):
            await one.new_session()
    counts = [len([*(workers.data_directory(number) / "sessions").glob("*")]) for number in (1, 2)]
    assert min(counts) >= 2


async def test_what_a_server_says_of_a_caller_is_refused_from_everybody_else(workers: Workers):
    async with httpx2.AsyncClient() as client:
        for path in ("/mcp", "/api/v1/sessions", "/fleet/about", "/fleet/has?id=x"):
            for header in FLEET_HEADERS:
                answer = await client.get(f"{workers.urls[1]}{path}", headers={header: "1"})
                assert answer.status_code == 400, (path, header)
                assert answer.json()["error"]["code"] == "forged-speaker"
        assert (await client.get(f"{workers.urls[1]}/fleet/about")).status_code == 404


@pytest.mark.parametrize("era", ERAS)
async def test_another_callers_session_answers_as_an_unknown_one_at_either_server(keyed_workers: Workers, era: str):
    workers = keyed_workers
    async with (
        workers.client(1, era, "ada") as ada,
        workers.client(1, era, "bob") as bob,
        workers.client(2, era, "bob") as other,
    ):
        session_id = await made_here(ada, 1, workers)
        done = await ada.execute("1", session_id)
        unknown = "qqq" + session_id[3:][::-1]
        for tool, argument, known in (
            ("execute_code", "session_id", session_id),
            ("get_execution", "execution_id", done.execution_id),
            ("list_files", "session_id", session_id),
            ("interrupt_execution", "session_id", session_id),
        ):
            more = {"code": "1"} if tool == "execute_code" else {}
            said = {
                (await caller.refusal(tool, **{argument: each}, **more)).replace(each, "ID")
                for caller in (bob, other)
                for each in (known, unknown)
            }
            assert len(said) == 1, said
        assert (await other.fields("list_sessions"))["sessions"] == []
        async with workers.client(2, era, "ada") as elsewhere:
            assert (await elsewhere.execute("2", session_id)).result == "2"
            assert session_id in json.dumps(await elsewhere.fields("list_sessions"))


async def test_the_http_api_of_either_server_has_the_sessions_of_both(keyed_workers: Workers):
    workers = keyed_workers
    headers = {"authorization": f"Bearer {KEYS['ada']}"}
    async with workers.client(1, name="ada") as one, workers.client(2, name="ada") as two:
        made = {await made_here(one, 1, workers), await made_here(two, 2, workers)}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as client:
        for url in workers.urls.values():
            listed = (await client.get(f"{url}/api/v1/sessions")).json()["items"]
            assert made <= {entry["session_id"] for entry in listed}
            for session_id in made:
                address = f"{url}/api/v1/sessions/{session_id}"
                queued = await client.post(f"{address}/executions", json={"code": "6 * 7"})
                assert queued.status_code == 202, queued.text
                assert (await client.put(f"{address}/files/data.bin", content=b"x" * 3_000_000)).status_code == 204
                assert len((await client.get(f"{address}/files/data.bin")).content) == 3_000_000
    other = {"authorization": f"Bearer {KEYS['bob']}"}
    async with httpx2.AsyncClient(headers=other) as client:
        for url in workers.urls.values():
            for session_id in made:
                assert (await client.get(f"{url}/api/v1/sessions/{session_id}")).status_code == 404


def _kill(pid: int) -> None:
    import os

    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_of_a_server_that_is_killed_ends_and_the_next_one_waits_for_it(workers: Workers, era: str):
    async with workers.client(2, era) as two:
        session_id = await made_here(two, 1, workers)
        await two.fields("upload_file", session_id=session_id, name="kept.txt", text="kept")
        answers: list[str] = []

        async def call() -> None:
            answers.append(await two.refusal("execute_code", code=held("never"), session_id=session_id))

        async def is_running() -> bool:
            sessions = (await two.fields("list_sessions"))["sessions"]
            return any(info["session_id"] == session_id and info["state"] == "running" for info in sessions)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(is_running)
            _kill(workers.pids[1])
        assert "session-lost" in answers[0]
        assert "may have run" in answers[0]
        assert (await two.execute("1 + 1")).result == "2"
        await anyio.to_thread.run_sync(workers.stop, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, workers.start, 1)
            await anyio.sleep(0)
            found = await two.execute("open('kept.txt').read()", session_id)
        assert found.result == "'kept'"


async def test_a_person_who_is_signed_in_at_one_server_is_so_at_the_other(workers: Workers):
    async with workers.client(1) as one:
        session_id = await made_here(one, 2, workers)
    link = (
        await servers_of(workers.data_directory(2)).console_link(Access("local", is_operator=True, via="terminal"))
    ).link
    token = link.partition("#")[2]
    async with httpx2.AsyncClient(timeout=30) as browser:
        same_site = {"sec-fetch-site": "same-origin"}
        page = f"{workers.urls[1]}/console"
        assert (await browser.get(page)).status_code == 303
        entered = await browser.post(f"{page}/enter", data={"token": token}, headers=same_site)
        assert entered.status_code == 303, entered.text
        # A browser sends its cookie to one address, behind which are both servers.
        cookie = {"cookie": entered.headers["set-cookie"].partition(";")[0].replace(port(workers, 2), port(workers, 1))}
        for number, url in workers.urls.items():
            own = {"cookie": cookie["cookie"].replace(port(workers, 1), port(workers, number))}
            shown = await browser.get(f"{url}/console", headers=own)
            assert shown.status_code == 200
            assert session_id in shown.text
            assert session_id in (await browser.get(f"{url}/console/sessions/{session_id}", headers=own)).text
            assert (await browser.get(f"{url}/api/v1/sessions/{session_id}", headers=own)).status_code == 200
        left = await browser.post(f"{workers.urls[1]}/console/leave", headers={**cookie, **same_site})
        assert left.status_code == 303
        assert (await browser.get(page, headers=cookie)).status_code == 303


def port(workers: Workers, number: int) -> str:
    return workers.urls[number].rpartition(":")[2]


async def test_commands_see_the_sessions_of_all_servers_of_a_machine(workers: Workers):
    async with workers.client(1) as one:
        made = {await made_here(one, number, workers) for number in (1, 2)}
    found, silent = await ask_sessions(workers.folder)
    assert not silent
    assert {pid for pid, _, info in found if info.session_id in made} == {*workers.pids.values()}
    access = Access("local", is_operator=True)
    assert made <= {one.session_id for one in await servers_of(workers.folder).live_sessions(access)}
