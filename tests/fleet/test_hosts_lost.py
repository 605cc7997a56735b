"""Machines that are killed, frozen, given up and come back: what is lost is told before anything runs in its place."""

from collections.abc import Generator
from pathlib import Path

import anyio
import httpx2
import pytest
from calls import Caller, held
from hosts import Hosts, both, in_thread, two_hosts
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from workers import KEYS

from belljar.environments import Environment
from waiting import until, until_blocking

pytestmark = pytest.mark.anyio
KEYED = ",".join(f"{name}:{key}" for name, key in KEYS.items())


@pytest.fixture
def hosts(default_environment: Environment, tmp_path: Path) -> Generator[Hosts]:
    with two_hosts(default_environment, tmp_path, BELLJAR_API_KEYS=KEYED) as pair:
        yield pair


def is_seen_as(hosts: Hosts, state: str) -> None:
    """Wait until the first machine sees the second one so."""
    until_blocking(lambda: hosts.states(1).get(hosts.inner_url(2)) == state)


@pytest.mark.parametrize("era", ["legacy", "2026-07-28"])
async def test_a_machine_that_is_killed_and_listed_as_gone_is_told_once_and_comes_back(hosts: Hosts, era: str):
    async with hosts.client(1, era, "ada") as one, hosts.client(1, era, "bob") as bob:
        async with hosts.client(2, era, "ada") as two:
            session_id = await hosts.session_of(two, 2)
            await two.fields("upload_file", session_id=session_id, name="kept.txt", text="kept")
        answers: list[str] = []

        async def call() -> None:
            answers.append(await one.refusal("execute_code", code=held("never"), session_id=session_id))

        async def is_running() -> bool:
            sessions = (await one.fields("list_sessions"))["sessions"]
            return any(info["session_id"] == session_id and info["state"] == "running" for info in sessions)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(is_running)
            hosts.kill(2)
        assert "session-lost" in answers[0]
        assert "may have run" in answers[0]
        await in_thread(is_seen_as, hosts, "away")
        assert "busy" in await one.refusal("execute_code", code="1", session_id=session_id)
        hosts.write_list(hosts.inner_url(1), f"{hosts.inner_url(2)} gone")
        await in_thread(is_seen_as, hosts, "lost")
        told = await one.refusal("execute_code", code="1", session_id=session_id)
        assert "session-lost" in told
        assert "is lost: it was last heard of at" in told
        assert "Nothing was run now" in told
        assert "session-not-found" in await one.refusal("execute_code", code="1", session_id=session_id)
        # Others learn nothing of it: an id that never was is answered in the same way.
        unknown = session_id[:3] + "q" * 14
        for _ in range(2):
            said = [
                (await bob.refusal("execute_code", code="1", session_id=each)).replace(each, "ID")
                for each in (session_id, unknown)
            ]
            assert said[0] == said[1]
        assert (await one.execute("6 * 7")).result == "42"
        hosts.stop(2)
        await in_thread(hosts.start, 2)
        hosts.write_list()
        await in_thread(is_seen_as, hosts, "ready")
        assert (await one.execute("open('kept.txt').read()", session_id)).result == "'kept'"


async def test_a_machine_that_is_frozen_is_waited_for_and_keeps_its_sessions(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        session_id = await hosts.session_of(two, 2)
        await one.execute("kept = 42", session_id)
        hosts.freeze(2)
        try:
            await in_thread(is_seen_as, hosts, "away")
            refused = await one.refusal("execute_code", code="kept", session_id=session_id)
            assert "busy" in refused
            assert (await one.execute("6 * 7")).result == "42"
            listed = (await one.fields("list_sessions"))["sessions"]
            assert session_id not in {info["session_id"] for info in listed}
        finally:
            hosts.thaw(2)
        await in_thread(is_seen_as, hosts, "ready")
        assert (await one.execute("kept", session_id)).result == "42"


async def test_a_call_waits_for_a_machine_that_starts_again(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        session_id = await hosts.session_of(two, 2)
        await one.fields("upload_file", session_id=session_id, name="kept.txt", text="kept")
    await in_thread(hosts.stop, 2)
    async with hosts.client(1, name="ada") as one, anyio.create_task_group() as tasks:
        tasks.start_soon(in_thread, hosts.start, 2)
        assert (await one.execute("open('kept.txt').read()", session_id)).result == "'kept'"


async def test_a_key_without_a_session_waits_while_its_machine_is_away(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        made: dict[str, str] = {}
        for number in range(6):
            arguments = {"code": "import secrets; secrets.token_hex()", "idempotency_key": f"key-{number}"}
            made[arguments["idempotency_key"]] = (await one.execute(**arguments)).session_id
        of_two = {key for key, session in made.items() if (hosts.data_directory(2) / "sessions" / session).exists()}
        assert of_two
        hosts.freeze(2)
        try:
            await in_thread(is_seen_as, hosts, "away")
            key = next(iter(of_two))
            assert "busy" in await one.refusal("execute_code", code="1", idempotency_key=key)
        finally:
            hosts.thaw(2)
        await in_thread(is_seen_as, hosts, "ready")
        again = await two.execute("import secrets; secrets.token_hex()", idempotency_key=key)
        assert again.session_id == made[key]


async def test_a_machine_that_drains_takes_no_new_sessions_and_keeps_its_own(hosts: Hosts):
    async with both(hosts, name="ada") as (one, two):
        kept = await hosts.session_of(two, 2)
        await two.execute("x = 42", kept)
        tag = hosts.status(2)[0]["tag"]
        drained = await in_thread(hosts.command, 1, "fleet", "drain", tag)
        assert (drained.returncode, drained.stdout) == (0, f"{tag} is draining\n")
        await in_thread(is_seen_as, hosts, "draining")
        for _ in range(3):
            made = await two.new_session()
            assert (hosts.data_directory(1) / "sessions" / made).exists()
        assert (await one.execute("x", kept)).result == "42"


async def test_a_full_machine_has_others_make_new_sessions(default_environment: Environment, tmp_path: Path):
    hosts = Hosts(default_environment, tmp_path, BELLJAR_POOL_SIZE="0")
    try:
        hosts.start(1, BELLJAR_MAX_SESSIONS="1")
        hosts.start(2)
        hosts.see_each_other(1, 2)
        async with hosts.client(1) as one:
            made = [await one.new_session() for _ in range(3)]
            where = [(hosts.data_directory(1) / "sessions" / session).exists() for session in made]
            assert where == [True, False, False]
            assert (await one.execute("6 * 7", made[2])).result == "42"
    finally:
        hosts.close()


async def test_names_that_one_machine_allows_are_checked_at_its_own_door_only(
    default_environment: Environment, tmp_path: Path
):
    hosts = Hosts(default_environment, tmp_path)
    named = {"host": "here.example"}
    try:
        hosts.start(1, BELLJAR_ALLOWED_HOSTS="here.example")
        hosts.start(2)
        hosts.see_each_other(1, 2)
        async with hosts.client(2) as two, httpx2.AsyncClient(headers=named, timeout=60) as http:
            theirs = await hosts.session_of(two, 2)
            async with Client(streamable_http_client(f"{hosts.urls[1]}/mcp", http_client=http)) as client:
                assert (await Caller(client).execute("6 * 7", theirs)).result == "42"
            assert (await http.get(f"{hosts.urls[2]}/mcp")).status_code == 421
            foreign = await http.get(f"{hosts.urls[1]}/mcp", headers={"host": "evil.example"})
            assert foreign.status_code == 421
    finally:
        hosts.close()
