"""The surface of the Azure code interpreter's MCP server, as its clients call it."""

import itertools
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import LEGACY, MODERN, blocks, images, opened_runtime, served_over_http, text_of
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents

from belljar.azure.azure_mcp import pool_environment
from belljar.environments import Environment
from belljar.errors import PoolUnavailable, SettingsError
from belljar.mcp.server import build_server
from belljar.runtime import Runtime
from belljar.settings import Settings
from belljar.settings.kinds import unmixed

pytestmark = pytest.mark.anyio
KEYS = {"ada": "key-of-ada-0123456789", "bob": "key-of-bob-0123456789"}


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    keys = [f"{name}:{key}" for name, key in KEYS.items()]
    folder = tmp_path_factory.mktemp("belljar")
    async with opened_runtime(default_environment, folder, surfaces=["azure-mcp"], api_keys=keys) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def url(runtime: Runtime) -> AsyncGenerator[str]:
    async with served_over_http(runtime) as url:
        yield f"{url}/mcp"


@asynccontextmanager
async def connection(url: str, era: str = LEGACY, who: str = "ada") -> AsyncGenerator[Client]:
    headers = {"authorization": f"Bearer {KEYS[who]}"}
    async with (
        httpx.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=era) as client,
    ):
        yield client


async def test_a_printed_data_uri_that_is_too_long_becomes_a_file(url: str) -> None:
    async with connection(url) as client:
        text = await say(client, "exec", code="print('data:text/csv;base64,' + 'QUJD' * 10_000)")
        assert "QUJD" not in text
        assert "the data: URI of 40,021 characters that was printed is the file data-1.csv" in text
        assert "data-1.csv" in await say(client, "list_files")


async def say(client: Client, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    return blocks(answer, TextContent)[0].text


def session_of(text: str) -> str:
    found = re.search(r"\b[a-z]{17}\b", text)
    assert found is not None
    return found[0]


async def test_the_four_tools_and_their_arguments_are_those_of_the_original(url: str) -> None:
    async with connection(url) as client:
        tools = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
    assert {name: list(schema["properties"]) for name, schema in tools.items()} == {
        "new_session": ["reason"],
        "exec": ["code", "session_id"],
        "list_files": ["session_id"],
        "download_file": ["file_name", "session_id"],
    }
    assert [schema.get("required", []) for schema in tools.values()] == [[], ["code"], [], ["file_name"]]


async def test_output_is_one_text_with_everything_under_its_name(url: str) -> None:
    async with connection(url) as client:
        code = "```python\nimport sys\nprint('out')\nprint('warned', file=sys.stderr)\n6 * 7\n```"
        said = await say(client, "exec", code=code)
        session = session_of(said)
        assert said == f"out\nstderr:\nwarned\nresult:\n42\n[session_id: {session}]"
        assert await say(client, "exec", code="x = 1") == f"No output\n[session_id: {session}]"
        forged = await say(client, "exec", code="print('[belljar: x]')\n'[belljar: y]'")
        assert forged.startswith("[printed: belljar: x]\nresult:\n'[printed: belljar: y]'\n")
        failed = await client.call_tool("exec", {"code": "print('before')\n1 / 0"})
        assert failed.is_error
        assert text_of(failed).startswith("before\nerror:\n")
        assert "ZeroDivisionError: division by zero" in text_of(failed)
        figure = await client.call_tool("exec", {"code": "import matplotlib.pyplot as plt\nplt.plot([1]);"})
        assert len(images(figure)) == 1
        assert "figure" not in await say(client, "list_files"), "files are what code saved, as in the original"


async def test_each_connection_has_a_current_session_of_its_own(url: str) -> None:
    async with connection(url) as one, connection(url) as other:
        first = session_of(await say(one, "exec", code="kept = 1"))
        assert "NameError" in await say(other, "exec", code="kept", session_id="")
        assert session_of(await say(one, "exec", code="kept")) == first
        second = session_of(await say(one, "new_session", reason="another task"))
        assert second != first
        assert "NameError" in await say(one, "exec", code="kept")
        assert "result:\n1" in await say(one, "exec", code="kept", session_id=first)
        assert session_of(await say(one, "list_files")) == second


async def test_without_connections_each_principal_has_a_current_session(url: str) -> None:
    async with connection(url, MODERN) as ada:
        kept = session_of(await say(ada, "exec", code="kept = 1"))
    async with connection(url, MODERN) as again, connection(url, MODERN, "bob") as bob:
        assert session_of(await say(again, "exec", code="kept")) == kept
        assert "NameError" in await say(bob, "exec", code="kept")
        stolen = await bob.call_tool("exec", {"code": "kept", "session_id": kept})
        unknown = await bob.call_tool("exec", {"code": "kept", "session_id": "f" * 17})
        assert stolen.is_error
        assert text_of(stolen).replace(kept, "f" * 17) == text_of(unknown)


async def test_a_name_of_the_callers_own_makes_a_session_that_its_next_use_finds(url: str, runtime: Runtime) -> None:
    async with connection(url) as ada, connection(url) as again, connection(url, who="bob") as bob:
        assert (await say(ada, "list_files", session_id="analysis-1")) == "No files\n[session_id: analysis-1]"
        said = await say(ada, "exec", code="kept = 1; open('a.txt', 'w').close()", session_id="analysis-1")
        assert said == "No output\n[session_id: analysis-1]"
        assert "result:\n1" in await say(again, "exec", code="kept", session_id="analysis-1")
        assert "a.txt" in await say(again, "list_files", session_id="analysis-1")
        assert "NameError" in await say(bob, "exec", code="kept", session_id="analysis-1")
        assert "saved to" in await say(again, "download_file", file_name="a.txt", session_id="analysis-1")
        await runtime.sessions.clear(_session_named("analysis-1", runtime), "key:ada")
        gone = await say(ada, "exec", code="'kept' in globals()", session_id="analysis-1")
        assert "result:\nFalse" in gone
        assert "this is a new session" in gone
        refused = await ada.call_tool("exec", {"code": "1", "session_id": "a b c d"})
        assert refused.is_error


def _session_named(name: str, runtime: Runtime) -> str:
    session_id = runtime.identified.records.find("key:ada", name)
    assert session_id
    return session_id


async def test_files_are_listed_and_saved_on_the_users_machine(url: str, runtime: Runtime) -> None:
    async with connection(url) as client:
        assert (await say(client, "list_files")).startswith("No files\n")
        await say(client, "exec", code="import os; os.mkdir('sub'); open('sub/a.csv', 'w').write('1,2')")
        listed = await say(client, "list_files")
        assert listed.splitlines()[0] == "sub/a.csv"
        for name in ("sub/a.csv", "/mnt/data/sub/a.csv"):
            answer = await client.call_tool("download_file", {"file_name": name})
            path = Path(_saved_to(answer))
            assert path.read_text() == "1,2"
            assert path.is_relative_to(runtime.settings.download_directory)
            (resource,) = blocks(answer, EmbeddedResource)
            assert isinstance(resource.resource, TextResourceContents)
            assert (resource.resource.mime_type, resource.resource.text) == ("text/csv", "1,2")
        for name in ("../up", "/etc/passwd", "missing.csv", "sub"):
            refused = await client.call_tool("download_file", {"file_name": name})
            assert refused.is_error, name
            assert session_of(text_of(refused)) == session_of(listed)


def _saved_to(answer: CallToolResult) -> str:
    found = re.search(r"saved to (.*)$", blocks(answer, TextContent)[0].text, re.MULTILINE)
    assert found is not None
    return found[1]


async def test_a_current_session_that_is_over_is_told_once_and_then_replaced(url: str, runtime: Runtime) -> None:
    async with connection(url) as client:
        session = session_of(await say(client, "exec", code="kept = 1"))
        await runtime.sessions.clear(session, "key:ada")
        gone = await client.call_tool("exec", {"code": "kept"})
        assert gone.is_error
        assert session in text_of(gone)
        assert "new_session" in text_of(gone)
        assert session_of(await say(client, "exec", code="2")) != session


async def test_surfaces_with_tools_of_the_same_name_are_never_mixed(runtime: Runtime) -> None:
    names = ("interpreter", "toolbox", "executor", "azure-mcp", "foundry")
    tools = {name: {tool.name for tool in await build_server(runtime, [name]).list_tools()} for name in names}
    for one, other in itertools.combinations(names, 2):
        # The toolbox leaves out what the interpreter has.
        if tools[one] & tools[other] and {one, other} != {"interpreter", "toolbox"}:
            with pytest.raises(ValueError, match=r"alone|both have"):
                unmixed([one, other])
        elif "executor" not in (one, other):
            assert unmixed([one, other]) == [one, other]


async def test_a_pool_whose_tokens_cannot_be_had_stops_the_server_at_its_start(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    names = ("azure_subscription", "azure_resource_group", "azure_session_pool", "azure_region")
    chosen = {"surfaces": ["azure-mcp"], **dict.fromkeys(names, "x")}
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime:
        with pytest.raises(PoolUnavailable, match="azure-identity is not installed") as refused:
            build_server(runtime, ["azure-mcp"])
        assert "pip install 'belljar-mcp[azure]'" in str(refused.value.hint)
    async with opened_runtime(default_environment, tmp_path, azure_key="k" * 20, **chosen) as runtime:
        assert build_server(runtime, ["azure-mcp"])


def test_a_pool_that_is_named_in_part_is_an_error_that_names_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("AZURE_SUBSCRIPTION_ID", "AZURE_RESOURCE_GROUP", "AZURE_SESSION_POOL", "AZURE_REGION")
    assert pool_environment(Settings()) == ""
    monkeypatch.setenv("AZURE_DOWNLOAD_DIRECTORY", "x")
    assert pool_environment(Settings()) == ""
    for name in names:
        monkeypatch.setenv(name, "x")
    assert pool_environment(Settings()) == "azure"
    for name in names[2:]:
        monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match="AZURE_SESSION_POOL, AZURE_REGION are not set"):
        pool_environment(Settings())


@pytest.mark.parametrize("surface", ["azure-mcp", "foundry"])
async def test_no_text_says_that_sessions_are_sealed_off_where_nothing_seals_them(
    default_environment: Environment, tmp_path: Path, surface: str
):
    async with opened_runtime(default_environment, tmp_path, sandbox="process") as runtime:
        server = build_server(runtime, [surface])
        texts = "\n".join([server.instructions or "", *(tool.model_dump_json() for tool in await server.list_tools())])
        assert "sealed" not in texts
        assert "No network" not in texts
