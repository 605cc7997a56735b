"""Any connection reaches any session, on whichever of several machines it is."""

import json
from collections.abc import Generator
from typing import Any

import httpx2
import pytest
from calls import text_of
from hosts import Hosts, both, two_hosts
from mcp.types import ElicitResult
from workers import KEYS

from belljar.environments import Environment

pytestmark = pytest.mark.anyio
ERAS = ["legacy", "2026-07-28"]


@pytest.fixture(scope="module")
def hosts(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[Hosts]:
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    with two_hosts(default_environment, tmp_path_factory.mktemp("fleet"), BELLJAR_API_KEYS=keys) as pair:
        yield pair


@pytest.mark.parametrize("era", ERAS)
async def test_a_session_is_used_through_either_machine(hosts: Hosts, era: str):
    async with both(hosts, era, name="ada") as (one, two):
        session_id = await hosts.session_of(one, 1)
        for turn in range(3):
            assert (await two.execute(f"x = {turn}; x", session_id)).result == f"{turn}"
            assert (await one.execute("x + 1", session_id)).result == f"{turn + 1}"
        done = await two.execute("print('done')", session_id)
        assert await one.get(done.execution_id) == await two.get(done.execution_id)
        text = "é" * 200_000
        await two.fields("upload_file", session_id=session_id, name="large.txt", text=text)
        assert await two.read_text(f"kernel://{session_id}/large.txt") == text
        listed = [
            {info["session_id"] for info in (await caller.fields("list_sessions"))["sessions"]} for caller in (one, two)
        ]
        assert listed[0] == listed[1] >= {session_id}
        assert (await two.fields("clear_session", session_id=session_id))["success"]
        assert "session-not-found" in await one.refusal("execute_code", code="1", session_id=session_id)


@pytest.mark.parametrize("era", ERAS)
async def test_a_cell_asks_and_reports_through_another_machine(hosts: Hosts, era: str):
    reported: list[str] = []

    async def answer(_: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"answer": params.message.strip()})

    async def note(_progress: float, _total: float | None, message: str | None) -> None:
        reported.append(message or "")

    async with both(hosts, era, name="ada", elicitation_callback=answer) as (one, two):
        session_id = await hosts.session_of(one, 1)
        code = "import time\nfor i in range(4):\n    print('line', i, flush=True); time.sleep(0.4)\n"
        found = await two.client.call_tool(
            "execute_code", {"code": code + "input('one?')", "session_id": session_id}, progress_callback=note
        )
        assert "'one?'" in text_of(found)
        assert any("line 1" in message for message in reported)


@pytest.mark.parametrize("era", ERAS)
async def test_another_callers_session_answers_as_an_unknown_one_at_either_machine(hosts: Hosts, era: str):
    async with (
        hosts.client(1, era, "ada") as ada,
        hosts.client(1, era, "bob") as bob,
        hosts.client(2, era, "bob") as other,
    ):
        session_id = await hosts.session_of(ada, 1)
        done = await ada.execute("1", session_id)
        unknown = session_id[:3] + "q" * 14
        nobodys = "qqq" + session_id[3:][::-1]
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
                for each in (known, unknown, nobodys)
            }
            assert len(said) == 1, said
        assert (await other.fields("list_sessions"))["sessions"] == []
        assert (await ada.execute("2", session_id)).result == "2"


async def test_the_http_api_and_its_lists_have_the_sessions_of_all_machines(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        made = {await hosts.session_of(one, 1), await hosts.session_of(two, 2)}
    headers = {"authorization": f"Bearer {KEYS['ada']}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as client:
        for url in hosts.urls.values():
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
        for url in hosts.urls.values():
            for session_id in made:
                assert (await client.get(f"{url}/api/v1/sessions/{session_id}")).status_code == 404


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_without_a_session_runs_once_at_whichever_machine_it_comes(hosts: Hosts, era: str):
    async with both(hosts, era, name="ada") as (one, two):
        for number in range(4):
            key = {"code": "import secrets; secrets.token_hex()", "idempotency_key": f"{era}-{number}"}
            first = text_of(await one.call("execute_code", **key))
            assert first.splitlines()[0] == text_of(await two.call("execute_code", **key)).splitlines()[0]


async def test_the_command_shows_each_machine_and_its_state(hosts: Hosts):
    own, other = hosts.status(1)
    assert (own["state"], own["at"]) == ("ready", "this server")
    assert (other["state"], other["at"]) == ("ready", hosts.inner_url(2))
    assert own["tag"] != other["tag"]
    shown = hosts.command(2, "fleet", "status").stdout
    assert own["tag"] in shown
    assert hosts.inner_url(1) in shown
    refused = hosts.command(1, "fleet", "drain", "qqq")
    assert refused.returncode == 2
    assert "no server of the fleet has the tag qqq" in refused.stderr


async def test_the_internal_address_answers_nothing_without_an_assertion(hosts: Hosts):
    async with httpx2.AsyncClient() as client:
        for path in ("/fleet/about", "/fleet/has?id=x", "/fleet/drain", "/mcp", "/api/v1/sessions", "/", "/health"):
            for headers in (
                {},
                {"belljar-assertion": "x"},
                {"belljar-assertion": f"1 {'0' * 32} {'0' * 64}"},
                {"belljar-principal": "local", "belljar-operator": "1"},
                {"authorization": f"Bearer {KEYS['ada']}"},
                {"belljar-caller": json.dumps({"client_id": "key:ada"})},
            ):
                answer = await client.post(f"{hosts.inner_url(1)}{path}", headers=headers)
                assert (answer.status_code, answer.content) == (403, b""), (path, headers)
