"""Servers of others that hang: each is named as what it is, and hides nobody else."""

import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import Caller, connected, text_of
from tool_cells import runtime_with_tools

from belljar.environments import Environment
from belljar.http.health import Operations
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio

OLDER = Path(__file__).parents[1] / "toolbox" / "older_server.py"
HANGING = ("hangs", "lists-never")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a server waits that takes long to start."""
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory, gate: Path
) -> AsyncGenerator[Runtime]:
    servers: dict[str, Any] = {
        how: {"command": sys.executable, "args": [str(OLDER), how]} for how in ("refuses", "lists-once", *HANGING)
    }
    waits = f'while [ ! -e "{gate}" ]; do sleep 0.02; done; exec "$0" "$@"'
    servers["slow"] = {"command": "/bin/sh", "args": ["-c", waits, sys.executable, str(OLDER), "refuses"]}
    servers["floods"] = {
        "command": "/bin/sh",
        "args": ["-c", 'yes "too much" >&2 & exec "$0" "$@"', sys.executable, str(OLDER), "refuses"],
    }
    chosen = {"mcp_servers": servers, "pool_size": 0, "upstream_wait_s": 3}
    # Not waited for: what a session sees at once is what this is about.
    async with runtime_with_tools(default_environment, tmp_path_factory.mktemp("belljar"), ready=False, **chosen) as it:
        yield it


async def test_a_cell_that_uses_one_server_waits_for_that_one_only(caller: Caller, shared_session: str):
    code = "from servers.refuses import echo\nfrom servers.lists_once import echo as once\necho(a=1), once(a=2)"
    assert (await caller.execute(code, shared_session)).result == "({'a': 1}, {'a': 2})"
    assert (await caller.execute("from servers.floods import echo\necho(a=3)", shared_session)).result == "{'a': 3}"


@pytest.mark.parametrize("how", HANGING)
async def test_one_that_hangs_is_said_to_be_still_connecting(caller: Caller, shared_session: str, how: str):
    package = how.replace("-", "_")
    doing = "it has not listed its tools yet" if how == "lists-never" else "it has not answered yet"
    for code in (f"from servers.{package} import echo", f"import toolbox\ntoolbox.get({how!r}, 'echo')()"):
        error = str((await caller.execute(code, shared_session)).error)
        assert "is still connecting (" in error, error
        assert f"s so far): {doing}. Go on without it" in error, error
        assert "other servers are not affected" in error


async def test_a_search_finds_the_tools_of_the_others_and_names_those_that_are_not_there_yet(
    caller: Caller, shared_session: str
):
    found = await caller.call("search_tools", query="echo says it again")
    assert found.structured_content is not None
    assert {"refuses", "lists-once"} <= {tool["server"] for tool in found.structured_content["tools"]}
    assert found.structured_content["connecting"] == ["hangs", "lists_never", "slow"]
    assert text_of(found).endswith("# still connecting: hangs, lists_never, slow")
    inside = await caller.execute(
        "import servers, toolbox\nprint(toolbox.search('echo'), servers.__doc__)", shared_session
    )
    assert "# still connecting: hangs, lists_never, slow" in inside.stdout
    assert "hangs: still connecting; importing it waits for it" in inside.stdout


async def test_servers_that_hang_are_counted_beside_those_that_are_there(runtime: Runtime):
    operations = Operations(runtime)

    async def body() -> bytes:
        response = await operations.ready(None)  # pyright: ignore[reportArgumentType]  # not looked at
        counted = b'"servers":{"connected":3,"connecting":3,"unreachable":0}'
        return bytes(response.body) if counted in bytes(response.body) else b""

    assert b"servers" not in (await until(body)).partition(b'"reasons"')[2].partition(b"]")[0]


async def test_one_that_comes_up_late_is_there_for_sessions_that_were_there_before(
    caller: Caller, shared_session: str, gate: Path
):
    code = "from servers.slow import echo\necho(a=1)"
    assert "'slow' is still connecting" in str((await caller.execute(code, shared_session)).error)
    gate.touch()
    with anyio.fail_after(30):
        while (result := await caller.execute(code, shared_session)).status != "ok":
            pass
    assert result.result == "{'a': 1}"


async def test_sessions_of_every_origin_have_the_servers_that_are_there(
    default_environment: Environment, tmp_path: Path
):
    servers = {how: {"command": sys.executable, "args": [str(OLDER), how]} for how in ("refuses", "hangs")}
    lasting: dict[str, Any] = {
        "fork_start": True,
        "pool_size": 1,
        "preload": [],
        "keep_alive": True,
        "keep_alive_s": 60,
    }
    chosen: dict[str, Any] = {
        "mcp_servers": servers,
        "upstream_wait_s": 10,
        "hibernate": True,
        "sweep_interval_s": 3600,
        **lasting,
    }
    async with (
        runtime_with_tools(default_environment, tmp_path, ready=False, **chosen) as first,
        connected(first) as caller,
    ):
        taken_over = (await caller.execute("y = 1")).session_id
    async with (
        runtime_with_tools(default_environment, tmp_path, ready=False, **chosen) as second,
        connected(second) as caller,
    ):
        started = await caller.new_session()
        pooled = await caller.new_session()
        sessions = {"taken over": taken_over, "started": started, "pooled": pooled}
        if not second.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            sessions["forked"] = (await caller.fields("fork_session", session_id=pooled))["session_id"]
        for session_id in sessions.values():
            code = "from servers.refuses import echo\nx = echo(a=1)\nx"
            result = await caller.execute(code, session_id)
            assert result.result == "{'a': 1}", result
        # The pooled one sleeps, and is woken by the next cell.
        second.sessions.get(pooled, "local").lease._idle_s = 0.0  # pyright: ignore[reportPrivateUsage]

        async def is_swept() -> bool:
            return pooled in await second.sessions.sweep()

        await until(is_swept)
        still = "import servers\nprint(servers.__doc__)\nx, echo(a=2)"
        for origin, session_id in sessions.items():
            result = await caller.execute(still, session_id)
            assert result.result == "({'a': 1}, {'a': 2})", origin
            assert "hangs: still connecting" in result.stdout, origin
        for session_id in [*sessions.values()]:
            await second.sessions.clear(session_id, "local")
