"""The toolbox surface: a few tools, whatever number there is behind them."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from calls import Caller, session_in, text_of
from mcp import Client
from tool_cells import runtime_with_tools

from belljar.environments import Environment
from belljar.mcp.server import build_server
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio

# Of the definitions as clients put them into a prompt; a token has about four characters.
MAX_CHARACTERS = 1_800


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with runtime_with_tools(default_environment, tmp_path_factory.mktemp("belljar")) as runtime:
        yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with Client(build_server(runtime, ["toolbox"])) as client:
        yield Caller(client)


def shown(tools: list[Any]) -> str:
    return json.dumps([{"name": one.name, "description": one.description, "schema": one.input_schema} for one in tools])


async def test_it_costs_the_model_a_few_hundred_tokens(caller: Caller):
    tools = (await caller.client.list_tools()).tools
    assert [tool.name for tool in tools] == ["execute_code", "get_execution", "search_tools"]
    assert len(shown(tools)) < MAX_CHARACTERS


@pytest.mark.parametrize("surfaces", [["interpreter"], ["interpreter", "toolbox"]])
async def test_the_interpreter_has_the_search_where_there_are_tools(runtime: Runtime, surfaces: list[str]):
    async with Client(build_server(runtime, surfaces)) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert "search_tools" in (client.instructions or "")
    assert names[-3:] == ["search_tools", "search_skills", "save_skill"]
    assert len(names) == len(set(names))


async def test_a_tool_is_found_imported_and_called(caller: Caller):
    found = await caller.call("search_tools", query="add two numbers", limit=1)
    assert text_of(found) == "servers.awkward.add(a: int, b: int) -> {sum: int}  # Adds."
    assert found.structured_content == {
        "tools": [
            {
                "server": "awkward",
                "tool": "add",
                "import": "from servers.awkward import add",
                "signature": "add(a: int, b: int) -> {sum: int}",
                "description": "Adds.",
            }
        ],
        "connecting": [],
        "unreachable": [],
    }
    answer = await caller.call("execute_code", code="from servers.awkward import add\nadd(1, 2)")
    assert "Out[1]: {'sum': 3}" in text_of(answer)
    again = await caller.call("execute_code", code="add(3, 4)", session_id=session_in(answer))
    assert "{'sum': 7}" in text_of(again)


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ("names", "servers.awkward.tree: Gives a tree back."),
        ("signatures", "servers.awkward.tree(root: {label: str, children?: [{label: str, children?: […]}]}) -> {root:"),
        ("source", "# from servers.awkward import tree\nfrom __future__ import annotations\n"),
    ],
)
async def test_there_are_three_levels_of_detail(caller: Caller, detail: str, told: str):
    found = await caller.call("search_tools", query="tree", detail=detail, limit=1)
    assert text_of(found).startswith(told)
    # Some clients show a model the fields alone.
    (fields,) = (found.structured_content or {})["tools"]
    more = {"names": {"description"}, "signatures": {"description", "signature"}, "source": {"source"}}[detail]
    assert fields.keys() == {"server", "tool", "import", *more}
    assert all(str(fields[name]) in text_of(found) for name in more)


async def test_inside_there_is_the_same_search(caller: Caller):
    outside = await caller.call("search_tools", query="picture", limit=3)
    code = "import toolbox\nfound = toolbox.search('picture', limit=3)\nprint(found)\nfound[0]['import']"
    inside = text_of(await caller.call("execute_code", code=code))
    assert inside.startswith(text_of(outside))
    assert "'from servers.awkward import media'" in inside


async def test_nothing_found_says_where_to_look(caller: Caller):
    assert text_of(await caller.call("search_tools", query="xyzzy")).startswith("No tool fits.")


async def test_a_cell_that_takes_long_can_be_waited_for(runtime: Runtime, caller: Caller):
    session = runtime.sessions.create("local")
    answer = await caller.call("execute_code", code="print('early')", session_id=session.id)
    assert answer.structured_content is not None
    execution = answer.structured_content["execution_id"]
    assert "early" in text_of(await caller.call("get_execution", execution_id=execution))


async def test_without_servers_it_says_so(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bare")
    from calls import opened_runtime

    async with opened_runtime(default_environment, folder) as bare, Client(build_server(bare, ["toolbox"])) as client:
        assert bare.toolbox is None
        refused = await client.call_tool("search_tools", {"query": "x"})
        assert "no MCP servers are configured" in text_of(refused)
        assert not (folder / "toolbox").exists()
        async with Client(build_server(bare, ["interpreter"])) as client:
            assert "search_tools" not in {tool.name for tool in (await client.list_tools()).tools}
