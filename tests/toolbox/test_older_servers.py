"""Servers that were built before the newer protocol, and do not bear its first request."""

import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from upstream_calls import said

from belljar.toolbox.connection import UpstreamLimits
from belljar.toolbox.server_config import HttpServer, StdioServer
from belljar.toolbox.upstreams import UpstreamConnections, open_upstreams
from registry_packages import Unreachable, node, npm_folder, python_environment
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio

OLDER = Path(__file__).with_name("older_server.py")
EARLY = Path(__file__).with_name("early_sdk_server.py")
WAYS = ("exits", "refuses", "refuses-nobody", "ignores", "garbles", "wedges")
# Each is an environment of its own: those between the oldest and the newest are for long runs.
SDKS = ("1.0.0", "1.2.0", "1.5.0", "1.9.4") if "BELLJAR_SOAK" in os.environ else ("1.0.0", "1.9.4")
# What was current then: they do not say that later ones break them.
OF_THAT_TIME = ("pydantic<2.11", "starlette<0.46", "sse-starlette<2.2", "anyio<4.8", "uvicorn<0.35")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("older")


@pytest.fixture(scope="module")
def servers(place: Path) -> dict[str, StdioServer]:
    """Every way of taking it badly, each writing down when it is started."""
    return {how: StdioServer(how, sys.executable, (str(OLDER), how, str(place / how))) for how in WAYS}


@pytest.fixture(scope="module")
async def upstreams(servers: dict[str, StdioServer], place: Path) -> AsyncGenerator[UpstreamConnections]:
    async with open_upstreams(servers, UpstreamLimits(start_s=10), place / "eras.json") as upstreams:
        await upstreams.catalogue()
        yield upstreams


@pytest.mark.parametrize("how", WAYS)
async def test_a_server_that_takes_the_newer_request_badly_is_connected_as_an_older_one(
    upstreams: UpstreamConnections, how: str
) -> None:
    assert upstreams.catalogue_nowait().servers[how].error == ""
    assert await said(upstreams, "echo", {"a": how}, server=how) == f'{{"a": "{how}"}}'


async def test_what_was_learnt_is_remembered_by_the_next_belljar(
    upstreams: UpstreamConnections, servers: dict[str, StdioServer], place: Path
) -> None:
    assert upstreams.catalogue_nowait().servers["exits"].error == ""
    before = {how: len((place / how).read_text().splitlines()) for how in WAYS}
    assert (before["exits"], before["refuses"], before["wedges"]) == (2, 1, 2)
    async with open_upstreams(servers, UpstreamLimits(start_s=10), place / "eras.json") as again:
        catalogue = await again.catalogue()
    assert {name: each.error for name, each in catalogue.servers.items() if each.error} == {}
    # Each was started once more, and met the older handshake at once.
    assert {how: len((place / how).read_text().splitlines()) - before[how] for how in WAYS} == dict.fromkeys(WAYS, 1)
    assert (place / "eras.json").stat().st_mode & 0o777 == 0o600


async def test_a_server_that_ends_before_it_reads_anything_is_not_started_twice(place: Path) -> None:
    command = f"open({str(place / 'broken')!r}, 'a').write('x'); raise SystemExit(3)"
    async with open_upstreams({"broken": StdioServer("broken", sys.executable, ("-c", command))}) as upstreams:
        error = (await upstreams.catalogue()).servers["broken"].error
    assert error == "MCP server broken ended with status 3"
    assert (place / "broken").read_text() == "x"


async def test_servers_of_early_sdks_are_connected_and_answer() -> None:
    kept = shared_settings().data_directory / "mcp-servers"
    try:
        servers: dict[str, StdioServer | HttpServer] = {}
        for version in SDKS:
            environment = python_environment(kept / f"mcp-{version}", f"mcp=={version}", *OF_THAT_TIME)
            name = f"python-{version}"
            servers[name] = StdioServer(name, str(environment / "bin/python"), (str(EARLY),))
        folder = npm_folder(kept / "node-early", "@modelcontextprotocol/server-everything@0.6.2")
        script = folder / "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
        servers["node"] = StdioServer("node", str(node()[0]), (str(script),))
    except Unreachable as error:
        pytest.skip(str(error))
    async with open_upstreams(servers) as upstreams:
        catalogue = await upstreams.catalogue()
        assert {name: each.error for name, each in catalogue.servers.items() if each.error} == {}
        for name in servers:
            argument = "message" if name == "node" else "text"
            assert "hello" in await said(upstreams, "echo", {argument: "hello"}, server=name)
