import sqlite3
from contextlib import closing

import httpx
import pytest
from calls import opened_runtime
from data_plane import KEY, NEW, OTHER_KEY, Plane, opened_plane, problem_in

from belljar.environments import Environment
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio


async def test_a_session_tells_its_times_and_its_end_can_be_asked_for_twice(plane: Plane) -> None:
    one = plane.other()
    problem_in(await one.ask("GET", "/session"), 404, "SessionNotFound")
    assert (await one.ask("DELETE", "/session")).status_code == 204
    await one.execute("kept = 1")
    session = await one.ok("GET", "/session")
    assert session["identifier"] == one.identifier
    assert session["createdAt"] <= session["lastAccessedAt"] < session["expireAt"]
    assert session["etag"]
    assert (await one.ask("DELETE", "/session")).status_code == 204
    assert (await one.ask("DELETE", "/session")).status_code == 204
    after = await one.execute("kept")
    assert "NameError" in after["result"]["stderr"]
    assert "session before" not in after["result"]["stderr"]
    assert (await one.ok("GET", "/session"))["etag"] != session["etag"]


async def test_sessions_are_listed_to_their_owner_only(plane: Plane) -> None:
    one = plane.other()
    await one.upload("x", b"1")
    listed = await one.ok("GET", "/listSessions")
    assert one.identifier in [session["identifier"] for session in listed["sessions"]]
    assert listed["nextLink"] is None
    theirs = await one.ok("GET", "/listSessions", headers={"authorization": f"Bearer {OTHER_KEY}"})
    assert one.identifier not in [session["identifier"] for session in theirs["sessions"]]
    assert (await one.ok("GET", "/listSessions", params={"skip": "1000"}))["sessions"] == []


async def test_metadata_tells_what_code_finds(plane: Plane) -> None:
    metadata = await plane.ok("GET", "/metadata")
    assert metadata["runtimes"][0]["name"] == "python"
    assert "numpy" in [package["name"] for package in metadata["preInstalledPackages"]]
    assert metadata["createdAt"].endswith("Z")


async def test_credentials_are_asked_for_in_the_envelope_and_may_come_as_a_key_header(plane: Plane) -> None:
    query = {"api-version": NEW, "identifier": plane.identifier}
    url = f"{plane.client.base_url}/executions"
    async with httpx.AsyncClient(timeout=60) as client:
        bare = await client.post(url, params=query, json={"code": "1"})
        problem_in(bare, 401, "Unauthorized")
        assert "www-authenticate" in bare.headers
        wrong = await client.post(url, params=query, json={"code": "1"}, headers={"x-ms-apikey": "no-such-key"})
        problem_in(wrong, 401, "Unauthorized")
        right = await client.post(url, params=query, json={"code": "1"}, headers={"x-ms-apikey": KEY})
        assert right.json()["status"] == "Succeeded"
        foreign = await client.post(url, params=query, headers={"x-ms-apikey": KEY, "host": "evil.example"})
        problem_in(foreign, 421, "InvalidHost")
        startup = f"{plane.client.base_url}/health/startup"

        async def has_started() -> bool:  # which takes as long as what sessions are forked from
            return (await client.get(startup)).status_code == 200

        await until(has_started)


async def test_an_identifier_outlives_its_server_with_variables_and_files(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("belljar")
    chosen = {"surfaces": ["foundry"], "api_keys": [f"ada:{KEY}"], "hibernate": True}
    async with opened_runtime(default_environment, folder, **chosen) as runtime, opened_plane(runtime) as plane:
        await plane.execute("kept = [1, 2]")
        await plane.upload("x.csv", b"1")
        begun = (await plane.ask("POST", "/executions", json={"code": "'x'"}, headers={"operation-id": "op"})).json()
    async with opened_runtime(default_environment, folder, **chosen) as runtime, opened_plane(runtime) as plane:
        assert (await plane.ask("GET", "/files/x.csv/content")).content == b"1"
        assert not runtime.sessions.all(), "a session that sleeps is not woken by reading its files"
        assert (await plane.ok("GET", "/executions/op"))["result"] == begun["result"]
        assert (await plane.execute("kept"))["result"]["executionResult"] == [1, 2]
        assert (await plane.ok("GET", "/session"))["identifier"] == plane.identifier


async def test_a_session_that_is_over_is_replaced_and_the_next_execution_says_so(
    plane: Plane, runtime: Runtime
) -> None:
    one = plane.other()
    await one.execute("kept = 1")
    session = max(runtime.sessions.all(), key=lambda each: each.lease.created_at)
    await runtime.sessions.endings.delete(session, "expired at noon")
    answer = await one.execute("1 + 1")
    assert answer["status"] == "Succeeded"
    assert "the session before this one expired at noon" in answer["result"]["stderr"]
    assert (await one.execute("1 + 1"))["result"]["stderr"] == ""


async def test_lost_variables_are_told_in_stderr(plane: Plane) -> None:
    one = plane.other()
    await one.execute("kept = 1")
    died = await one.execute("import os; os._exit(3)")
    assert died["status"] == "Failed"
    after = await one.execute("'alive'")
    assert "imports and variables are gone" in after["result"]["stderr"]
    assert "kept" in after["result"]["stderr"]


async def test_shell_commands_obey_the_policys_rules_for_the_shell(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("belljar")
    (folder / "policy.toml").write_text('[[code]]\nshell = true\nreason = "no commands here"\n')
    chosen = {"surfaces": ["foundry"], "api_keys": [f"ada:{KEY}"], "policy": str(folder / "policy.toml")}
    async with opened_runtime(default_environment, folder, **chosen) as runtime, opened_plane(runtime) as plane:
        refused = await plane.ok("POST", "/executions", json={"shellCommand": "touch made"})
        assert refused["status"] == "126"
        assert "no commands here" in refused["result"]["stderr"]
        python = await plane.execute("import os; os.path.exists('made')")
        assert python["result"]["executionResult"] is False
        rejected = await plane.execute("!touch made")
        assert (rejected["status"], rejected["error"]["error"]["code"]) == ("Failed", "CodeRejected")


async def test_a_full_pool_answers_429_with_retry_after(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chosen = {"surfaces": ["foundry"], "api_keys": [f"ada:{KEY}"], "max_sessions": 1, "pool_size": 0}
    folder = tmp_path_factory.mktemp("belljar")
    async with opened_runtime(default_environment, folder, **chosen) as runtime, opened_plane(runtime) as plane:
        await plane.upload("x", b"1")
        answer = await plane.other().ask("POST", "/executions", json={"code": "1"})
        problem_in(answer, 429, "SessionPoolExhausted")
        assert answer.headers["retry-after"] == "10"
        with closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
            assert journal.execute("SELECT count(*) FROM identifiers").fetchone() == (1,)


async def test_the_bare_address_names_both_ways_in_and_everything_else_stays_guarded(plane: Plane) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        bare = await client.get(str(plane.client.base_url))
        assert bare.text.startswith("belljar serves MCP (streamable HTTP) at /mcp of this address, with")
        assert bare.text.endswith("REST as described by /openapi.json.\n")
        problem_in(await client.post(str(plane.client.base_url)), 401, "Unauthorized")
        problem_in(await client.get(f"{plane.client.base_url}/session"), 401, "Unauthorized")
