"""The generated tree: the same for the same catalogue, valid under pyright, and harmless whatever servers say."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from awkward_tools import TOOLS
from mcp_servers import awkward, node_server, python_server

from belljar.toolbox import code_generation
from belljar.toolbox.arguments import BadArguments, Parameters
from belljar.toolbox.base import Annotations, Catalogue, JsonObject, ServerCatalogue, ToolDefinition
from belljar.toolbox.code_generation import generate, parameters, signature
from belljar.toolbox.server_config import ServerConfig
from belljar.toolbox.toolbox import INSIDE, open_toolbox
from belljar.toolbox.tree import Tree, TreeDirectory
from belljar.toolbox.upstreams import open_upstreams
from shared_environment import settings_with

RECORDS: JsonObject = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "from": {"type": "string"}},
        "required": ["id"],
    },
}


def no_shape(_server: str, _tool: str) -> None:
    return None


def learnt(_server: str, tool: str) -> JsonObject | None:
    return RECORDS if tool == "records" else None


def catalogue_of(*tools: ToolDefinition, instructions: str = "") -> Catalogue:
    return Catalogue({"awk-ward": ServerCatalogue("awk-ward", tools, instructions)})


def awkward_tools() -> list[ToolDefinition]:
    return [
        ToolDefinition(
            "awk-ward", tool.name, tool.description or "", tool.title or "", tool.input_schema, tool.output_schema
        )
        for tool in TOOLS
    ]


def tool(name: str = "t", description: str = "", **properties: Any) -> ToolDefinition:
    schema = {"type": "object", "properties": properties, "required": []}
    return ToolDefinition("awk-ward", name, description, input_schema=schema)


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def check_types(folder: Path) -> None:
    """pyright in strict mode finds nothing but unused private things to say."""
    (folder / "pyrightconfig.json").write_text(
        f'{{"include": ["servers"], "typeCheckingMode": "strict", "extraPaths": ["{INSIDE}"], "pythonVersion": "3.9"}}'
    )
    told = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", str(folder)], capture_output=True, text=True, cwd=folder
    )
    assert told.returncode == 0, told.stdout


def test_a_file_reads_well():
    search = ToolDefinition(
        "git-hub",
        "search-code",
        "Search the code.\n\nUses the index.",
        input_schema={
            "type": "object",
            "properties": {
                "q": {"type": "string", "description": "What for"},
                "page-size": {"type": "integer", "default": 10},
                "sort": {"enum": ["new", "old"]},
            },
            "required": ["q"],
        },
        output_schema={
            "type": "object",
            "properties": {"total": {"type": "integer"}, "items": {"type": "array", "items": {"type": "string"}}},
            "required": ["total"],
        },
        annotations=Annotations(read_only=True),
    )
    files = generate(Catalogue({"git-hub": ServerCatalogue("git-hub", (search,))}), no_shape)
    assert files["servers/git_hub/__init__.py"] == (
        '"""git-hub"""\n# pyright: reportUnusedImport=false\n\n'
        "from .search_code import search_code  # Search the code.\n"
    )
    assert (
        files["servers/git_hub/search_code.py"]
        == '''from __future__ import annotations

from typing import Literal, TYPE_CHECKING, TypedDict

from toolbox import tool

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class SearchCodeResult(TypedDict):
    total: int
    items: NotRequired[list[str]]


@tool('git-hub', 'search-code', names={'page_size': 'page-size'})
def search_code(
    q: str,
    *,
    page_size: int = 10,
    sort: Literal['new', 'old'] | None = None,
) -> SearchCodeResult:
    """Search the code.

    Uses the index.

    q: What for
    page_size (sent as 'page-size')

    Only reads.
    """
    ...
'''
    )
    assert signature(search, None, "search_code") == (
        "search_code(q: str, page_size?: int, sort?: Literal['new', 'old']) -> {total: int, items?: [str]}"
    )


def test_the_same_catalogue_gives_the_same_bytes_in_whatever_order_a_server_lists_it():
    tools = awkward_tools()
    first = generate(catalogue_of(*tools), learnt)
    assert generate(catalogue_of(*reversed(tools)), learnt) == first


def test_every_tool_has_a_name_of_its_own_and_the_one_it_had_where_that_is_python():
    names = [path.rpartition("/")[2][:-3] for path in generate(catalogue_of(*awkward_tools()), no_shape)]
    assert len({name.lower() for name in names if name != "__init__"}) == len(TOOLS)
    assert {"getItem", "getitem_2", "get_item", "get_item_2", "class_", "tool_2fa", "list_all_of_it", "print_"} <= {
        *names
    }


@pytest.mark.parametrize(
    "text",
    [
        '"""',
        "\\",
        'ends with "',
        "ends with \\",
        '\\"""\nimport os; os.environ["AWKWARD_BROKE_OUT"] = "1"\n"""',
        "\r\nimport os\r",
        "\x0c\x00\x1b[31m\x85\u2028\u2029",
        "\ud800",
        "{0} %s {name}",
        "'" * 5 + '"' * 7,
        "\u202ereversed\u200b",
    ],
)
def test_whatever_a_server_says_is_text(text: str):
    """In every place where something of a server's may stand."""
    hostile = ToolDefinition(
        "awk-ward",
        text,
        text,
        text,
        {
            "type": "object",
            "properties": {
                text: {"enum": [text], "description": text, "default": text},
                "o": {"properties": {text: {}}},
            },
            "required": [text],
        },
        {"type": "object", "properties": {text: {"const": text, "description": text}}},
    )
    files = generate(Catalogue({text: ServerCatalogue(text, (hostile,), text, text)}), no_shape)
    for source in files.values():
        source.encode()
        body = ast.parse(source).body
        assert {type(node) for node in body} <= {
            ast.Expr,
            ast.ImportFrom,
            ast.If,
            ast.ClassDef,
            ast.Assign,
            ast.FunctionDef,
        }
        assert not [node for node in body if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)]
        assert not {"\u202e", "\u200b", "\x1b", "\r", "\x00"} & {*source}


def test_a_docstring_that_would_end_itself_runs_nothing(tmp_path: Path):
    written(tmp_path, generate(catalogue_of(*awkward_tools(), instructions='"""\nraise SystemExit(7)'), no_shape))
    code = (
        "import servers.awk_ward, os; assert 'AWKWARD_BROKE_OUT' not in os.environ; "
        "print(servers.awk_ward.breakout.__doc__)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{INSIDE}:{tmp_path}"},
    )
    assert told.returncode == 0, told.stderr
    assert 'os.environ["AWKWARD_BROKE_OUT"]' in told.stdout


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string"}, "str"),
        ({"type": ["string", "null"]}, "str | None"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "int | None"),
        ({"enum": ["a", 1, None]}, "Literal['a', 1, None]"),
        ({"enum": [1.5]}, "Any"),
        ({"const": True}, "Literal[True]"),
        ({"type": "array"}, "list[Any]"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "dict[str, float]"),
        ({"$ref": "https://example.com/schema"}, "Any"),
        ({"$ref": "#/$defs/nowhere"}, "Any"),
        ({"$ref": "#/properties/x"}, "Any"),
        ({"allOf": [{"type": "boolean"}]}, "bool"),
        ({"type": "nonsense"}, "Any"),
        (True, "Any"),
        (7, "Any"),
    ],
)
def test_a_schema_becomes_a_type(schema: Any, written: str):
    text = generate(catalogue_of(tool(x=schema)), no_shape)["servers/awk_ward/t.py"]
    shown = written if written == "Any" or written.endswith("| None") else f"{written} | None"
    assert f"def t(*, x: {shown} = None) -> Any:" in text


def test_references_that_lead_to_each_other_are_not_followed_by_the_million():
    loop: JsonObject = {"anyOf": [{"$ref": "#/properties/loop"}] * 8}
    own: JsonObject = {"type": "object", "properties": {f"f{n}": {"$ref": "#/properties/own"} for n in range(100)}}
    long: JsonObject = {"$ref": "#/" + "a/" * 50_000}
    hostile = tool(loop=loop, own=own, long=long)
    assert parameters(hostile)[0] == "loop?: Any"
    assert "loop: Any = None" in generate(catalogue_of(hostile), no_shape)["servers/awk_ward/t.py"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_default_that_python_has_no_word_for_is_not_written(number: float):
    text = generate(catalogue_of(tool(x={"type": "number", "default": number})), no_shape)["servers/awk_ward/t.py"]
    assert "def t(*, x: float | None = None) -> Any:" in text


def test_a_schema_without_end_costs_no_more_than_one_that_ends():
    deep: JsonObject = {"type": "string"}
    for _ in range(500):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
    wide = {
        "type": "object",
        "properties": {f"f{n}": {"type": "object", "properties": {"x": {}}} for n in range(5_000)},
    }
    text = generate(catalogue_of(tool(deep=deep, wide=wide)), no_shape)["servers/awk_ward/t.py"]
    assert len(text) < 20_000


def test_the_link_leads_to_the_newest_version_and_the_one_before_stays(tmp_path: Path):
    tree = Tree(tmp_path)
    versions: list[Path] = []
    for name in ("one", "two", "three"):
        assert tree.write(generate(catalogue_of(tool(name)), no_shape))
        versions.append(tree.importable.resolve())
        assert (tree.servers / "awk_ward" / f"{name}.py").exists()
        assert f'CATALOGUE = "{versions[-1].name}"' in (tree.servers / "__init__.py").read_text()
    assert not tree.write(generate(catalogue_of(tool("three")), no_shape))
    assert [version.exists() for version in versions] == [False, True, True]


def test_a_link_in_a_session_folder_is_made_again_but_never_in_place_of_something_else(tmp_path: Path):
    tree, workspace = Tree(tmp_path / "tree"), tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "servers").symlink_to("/an/older/run/current/servers")
    tree.show_in(workspace, None)
    assert (workspace / "servers").readlink() == tree.servers
    (workspace / "servers").unlink()
    (workspace / "servers").symlink_to("/etc")
    tree.show_in(workspace, None)
    assert (workspace / "servers").readlink() == Path("/etc")


def test_a_folder_of_the_operators_keeps_its_files_and_its_mode(tmp_path: Path):
    mine = tmp_path / "servers"
    (mine / "github").mkdir(parents=True)
    (mine / "github" / "mine.py").write_text("x = 1")
    mine.chmod(0o711)
    server = {"command": sys.executable, "args": ["-c", ""]}
    settings = settings_with(data_directory=tmp_path / "data", servers_directory=str(mine), mcp_servers={"s": server})

    async def opened() -> None:
        for _ in range(2):
            async with open_toolbox(settings, TreeDirectory("run", {"run"})) as toolbox:
                assert toolbox is not None
                assert toolbox.tree.servers.is_relative_to(mine)
                assert (toolbox.tree.servers / "__init__.py").exists()

    anyio.run(opened)
    assert (mine / "github" / "mine.py").read_text() == "x = 1"
    assert mine.stat().st_mode & 0o777 == 0o711


def test_what_runs_in_sessions_is_python_3_9(tmp_path: Path):
    written(tmp_path, generate(catalogue_of(*awkward_tools()), learnt))
    for path in (*INSIDE.rglob("*.py"), *tmp_path.rglob("*.py")):
        ast.parse(path.read_text(), feature_version=(3, 9))


# Real servers


async def _catalogue(servers: dict[str, ServerConfig]) -> Catalogue:
    async with open_upstreams(servers) as upstreams:
        return await upstreams.catalogue()


@pytest.fixture(scope="module")
def real_catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    folder = tmp_path_factory.mktemp("real")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    servers: dict[str, ServerConfig] = {
        "everything": node_server("everything"),
        "filesystem": node_server("filesystem", str(folder)),
        "memory": node_server("memory"),
        "sequential-thinking": node_server("sequential-thinking"),
        "time": python_server("time"),
        "git": python_server("git", "--repository", str(folder)),
        "sqlite": python_server("sqlite", "--db-path", str(folder / "db")),
        "fetch": python_server("fetch"),
        "awkward": awkward(),
    }
    return anyio.run(_catalogue, servers)


@pytest.mark.timeout(300)
def test_the_tree_of_every_server_used_here_is_valid_under_pyright(real_catalogue: Catalogue, tmp_path: Path):
    assert {server.server: server.error for server in real_catalogue.servers.values() if server.error} == {}
    written(tmp_path, generate(real_catalogue, learnt))
    check_types(tmp_path)


def test_calls_are_checked_against_the_generated_types(tmp_path: Path):
    written(tmp_path, generate(catalogue_of(*awkward_tools()), learnt))
    calls = {
        "add(1, 2)['sum'] + 1": True,
        "add('1', 2)": False,
        "add(1)": False,
        "add(1, 2)['total']": False,
        "records(count=1)[0]['id'] + 1": True,
    }
    lines = ["import asyncio", "from servers.awk_ward import add, records", *calls, "asyncio.run(add.aio(1, 2))['sum']"]
    (tmp_path / "calls.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"include": ["calls.py"], "extraPaths": ["{INSIDE}"], "reportUnusedExpression": false}}'
    )
    told = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    wrong = {int(line.split(":")[1]) for line in told.stdout.splitlines() if " - error" in line}
    assert wrong == {number for number, is_right in enumerate(calls.values(), 3) if not is_right}, told.stdout


def test_what_is_required_and_has_a_default_need_not_be_passed_and_is_sent() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "depth": {"type": "integer", "default": 2}, "how": {"$ref": "#/x"}},
        "required": ["path", "depth", "how"],
        "x": {"type": "object", "default": {"fast": True}},
    }
    tool = ToolDefinition("s", "walk", input_schema=schema)
    assert "def walk(path: str, *, depth: int = 2, how: dict[str, Any] | None = None)" in code_generation.source(
        tool, None, "walk"
    )
    assert Parameters(tool).checked({"path": "a"}) == {"path": "a", "depth": 2, "how": {"fast": True}}
    assert Parameters(tool).checked({"path": "a", "depth": None}) == {"path": "a", "depth": 2, "how": {"fast": True}}
    assert Parameters(tool).checked({"path": "a", "depth": 5, "how": {}}) == {"path": "a", "depth": 5, "how": {}}
    with pytest.raises(BadArguments, match="'path' is missing"):
        Parameters(tool).checked({"depth": 1})


@pytest.mark.anyio
async def test_a_tree_that_outlives_its_server_shows_the_next_ones_callers_nothing_learnt(tmp_path: Path):
    """As with `keep_alive`: first the tree is ada's alone, then bob has a key too."""
    keys = ["ada:" + "a" * 40, "bob:" + "b" * 40]
    left = TreeDirectory("run", {"run"}, hand_over=lambda _: None, is_left=lambda: True)

    def seen() -> str:
        return "".join(file.read_text() for file in (tmp_path / "toolbox" / "trees").rglob("*.py"))

    server = {"command": sys.executable, "args": [str(Path(__file__).with_name("awkward_server.py"))]}
    chosen: dict[str, Any] = {"data_directory": tmp_path, "mcp_servers": {"awkward": server}}
    async with open_toolbox(settings_with(**chosen, api_keys=keys[:1]), left) as toolbox:
        assert toolbox is not None
        await toolbox.wait_until_ready()
        tool = (await toolbox.catalogue("awkward", "records")).find("awkward", "records")
        assert tool is not None
        toolbox.learn("key:ada", tool, {"hibiscus": 1})
        await toolbox.wait_until_written()
        assert "hibiscus" in seen()
    async with open_toolbox(settings_with(**chosen, api_keys=keys), left):
        assert "hibiscus" not in seen()
