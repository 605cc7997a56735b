"""What only a client of a running server meets: other ways to connect, credentials, servers that are not there."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import anyio
import pytest
from mcp import StdioServerParameters

import belljar
from belljar.environments import Environment
from belljar.errors import BelljarError, EngineError, InvalidArgument, SessionNotFound, Unauthorized
from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from belljar.settings import load_settings
from live_server import READY, clean_environment, live_server

pytestmark = pytest.mark.anyio

KEY = "a-key-of-more-than-enough-characters"


def _settings(folder: Path, environment: Environment, **chosen: str) -> dict[str, object]:
    """Of a server without a warm process, which single cells do not need."""
    return {"data_directory": folder, "environment": str(environment.python), "fork_start": False, **chosen}


def _variables(folder: Path, environment: Environment) -> dict[str, str]:
    settings = _settings(folder, environment)
    return clean_environment(**{f"BELLJAR_{name.upper()}": value for name, value in settings.items()})


@pytest.fixture(scope="module")
def guarded_url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A server that demands a key."""
    folder = tmp_path_factory.mktemp("guarded")
    with live_server(folder, default_environment.python, BELLJAR_API_KEYS=f"ann:{KEY}") as url:
        yield url


async def test_a_key_opens_a_server_that_demands_one(guarded_url: str) -> None:
    async with belljar.connect(guarded_url, api_key=KEY) as server, server.open_session() as session:
        assert (await session.execute("6 * 7")).result == "42"


@pytest.mark.parametrize("key", [None, "a-key-that-nobody-has-been-given-yet"])
async def test_without_the_right_key_a_server_stays_closed(guarded_url: str, key: str | None) -> None:
    with pytest.raises(Unauthorized, match="401") as refusal:
        async with belljar.connect(guarded_url, api_key=key):
            pass
    assert "api_key" in refusal.value.hint
    assert KEY not in str(refusal.value)


async def test_no_server_at_the_address_is_one_clear_error() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/mcp") as failure:
        async with belljar.connect("http://127.0.0.1:9/mcp"):
            pass
    assert "belljar serve" in failure.value.hint


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'localhost'"):
        async with belljar.connect("localhost"):
            pass


async def test_a_path_that_is_not_the_servers_is_told_apart_from_no_server(guarded_url: str) -> None:
    with pytest.raises(EngineError, match="/elsewhere") as failure:
        async with belljar.connect(guarded_url.replace("/mcp", "/elsewhere"), api_key=KEY):
            pass
    assert "/mcp" in failure.value.hint


async def test_an_error_in_the_block_arrives_as_it_was_raised(guarded_url: str) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with belljar.connect(guarded_url, api_key=KEY):
            raise LookupError("mine")


async def test_a_block_that_is_cancelled_still_clears_its_session(guarded_url: str) -> None:
    async with belljar.connect(guarded_url, api_key=KEY) as server:
        with anyio.CancelScope() as scope:
            async with server.open_session() as session:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        with pytest.raises(SessionNotFound, match="was cleared"):
            await session.files()


async def test_a_server_that_dies_is_noticed_by_the_call_that_waits_for_it(
    default_environment: Environment, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "belljar", "serve", "--http", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        env=_variables(tmp_path, default_environment),
    ) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if line.startswith(READY)).removeprefix(READY).strip()
        async with belljar.connect(url) as server, server.open_session() as session:
            async for event in session.stream("print('on')\nimport time\ntime.sleep(60)"):
                assert event.text == "on\n"
                break
            waiting = asyncio.create_task(session.execute("1"))
            # Some call of the session is under way or about to be when the process is gone.
            process.send_signal(signal.SIGKILL)
            with pytest.raises(BelljarError):
                await waiting
            with pytest.raises(EngineError, match="no answer from the server"):
                await session.files()


async def test_a_server_can_be_started_over_stdio(default_environment: Environment, tmp_path: Path) -> None:
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "belljar", "serve"],
        env=_variables(tmp_path, default_environment),
    )

    async def answer(prompt: str) -> str:
        return "Ann"

    async with belljar.connect(command) as server, server.open_session() as session:
        stream = session.stream("print('hello', input())", on_input=answer)
        assert [event.text async for event in stream] == ["", "hello Ann\n"]


async def test_a_server_in_this_process_can_be_used(default_environment: Environment, tmp_path: Path) -> None:
    settings = load_settings(_settings(tmp_path, default_environment))
    async with open_runtime(settings) as runtime:
        server = build_server(runtime, settings.surfaces)
        async with belljar.connect(server) as connection, connection.open_session() as session:
            assert (await session.execute("6 * 7")).result == "42"


@pytest.mark.parametrize("structured", ["auto", "never"])
async def test_every_field_arrives_whatever_the_server_sends_to_others(
    default_environment: Environment, tmp_path: Path, structured: str
) -> None:
    settings = load_settings(_settings(tmp_path, default_environment, structured=structured))
    async with (
        open_runtime(settings) as runtime,
        belljar.connect(build_server(runtime, settings.surfaces)) as server,
        server.open_session() as session,
    ):
        result = await session.execute("display({'image/png': 'iVBORw0KGgo='}, raw=True)\n'shown'")
        assert (len(result.displays), result.result) == (1, "'shown'")
        with pytest.raises(InvalidArgument, match="lone surrogate"):
            await session.execute("'\ud800'")
        assert (await session.execute("")).success
