"""What cells import that is not theirs: tools of servers that are away, names that are not there, the skills."""

import os
import shlex
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from calls import Caller, connected, opened_runtime, settings_for, text_of
from tool_cells import AWKWARD, awkward, runtime_with_tools

from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.runtime import Runtime, open_runtime
from belljar.toolbox.base import Catalogue, ServerCatalogue, ToolDefinition
from belljar.toolbox.code_generation import generate
from belljar.toolbox.toolbox import INSIDE
from belljar.toolbox.tree import Tree

pytestmark = pytest.mark.anyio

AWAY = "It is tried again when cells name it; where it stays away, only the operator can mend it"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the operator's, open to the users of sessions."""
    folder = tmp_path_factory.mktemp("operator")
    for each in (folder, folder / "house skills", folder / "house skills/deep"):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    (folder / "house skills/greeting.py").write_text("def hello(name: str) -> str:\n    return f'hello {name}'\n")
    (folder / "house skills/deep/SKILL.md").write_text("# Deep\n")
    return folder


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory, place: Path
) -> AsyncGenerator[Runtime]:
    servers = {
        "awkward": awkward(),
        "missing": {"command": "/nowhere/at-all", "args": ["--key", "s3cret"]},
        "crashing": {"command": sys.executable, "args": ["-c", "import sys; sys.exit('no key s3cret')"]},
        "late": {"command": str(place / "late.sh")},
    }
    folder = tmp_path_factory.mktemp("belljar")
    chosen = {"mcp_servers": servers, "skills_directory": str(place / "house skills"), "pool_size": 0}
    async with runtime_with_tools(default_environment, folder, **chosen) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "from servers.missing import x",
            f"missing.x: the server cannot be started: No such file or directory. {AWAY}",
        ),
        ("from servers.crashing import x", f"crashing.x: the server ended with status 1. {AWAY}"),
        ("import servers.crashing.x", f"crashing.x: the server ended with status 1. {AWAY}"),
        (
            "import toolbox\ntoolbox.get('crashing', 'x')()",
            f"crashing.x: the server ended with status 1. {AWAY}",
        ),
        ("from servers.awkward import adds", "awkward.adds: the server has no such tool: did you mean 'add'?"),
        ("from servers.akward import add", "there is no server 'akward': did you mean 'awkward'?"),
        ("import servers.zzz", "there is no server 'zzz': there is 'awkward', 'crashing', 'late', 'missing'"),
    ],
)
async def test_an_import_of_what_is_not_there_says_why(caller: Caller, shared_session: str, code: str, told: str):
    result = await caller.execute(code, shared_session)
    assert str(result.error).partition(": ")[2] == told
    # Commands and what a server says of itself are the operator's.
    assert not [line for line in result.traceback if "s3cret" in line or "/nowhere" in line or "inside/toolbox" in line]


async def test_a_server_that_hangs_is_named_as_that_and_hides_no_other(
    default_environment: Environment, tmp_path: Path
):
    older = Path(__file__).parents[1] / "toolbox" / "older_server.py"
    servers = {how: {"command": sys.executable, "args": [str(older), how]} for how in ("hangs", "refuses")}
    chosen = {"mcp_servers": servers, "pool_size": 0, "upstream_wait_s": 0.2}
    async with (
        runtime_with_tools(default_environment, tmp_path, ready=False, **chosen) as runtime,
        connected(runtime) as caller,
    ):
        there = await caller.execute("from servers.refuses import echo\necho(a=1)")
        assert there.result == "{'a': 1}"
        hanging = await caller.execute("from servers.hangs import echo", there.session_id)
        assert "is still connecting (" in str(hanging.error)
        assert "other servers are not affected" in str(hanging.error)
        found = await caller.call("search_tools", query="echo says it again")
        assert text_of(found).startswith("servers.refuses.echo(")
        assert text_of(found).endswith("# still connecting: hangs")


async def test_such_an_error_is_an_import_error_and_a_tool_error(caller: Caller, shared_session: str):
    code = (
        "import toolbox, servers.missing\n"
        "kinds = []\n"
        "for kind in (ImportError, toolbox.ToolError):\n"
        "    try:\n        from servers.missing import x\n"
        "    except kind:\n        kinds.append(kind.__name__)\n"
        "kinds, hasattr(servers.missing, 'x')"
    )
    assert (await caller.execute(code, shared_session)).result == "(['ImportError', 'ToolError'], False)"


async def test_a_search_names_the_servers_whose_tools_it_cannot_know(caller: Caller, shared_session: str):
    found = await caller.call("search_tools", query="xyzzy")
    assert found.structured_content is not None
    assert {"missing", "crashing"} <= {*found.structured_content["unreachable"]}
    away = f"# not reachable now: {', '.join(found.structured_content['unreachable'])}"
    assert text_of(found).endswith(f"\n{away}")
    inside = await caller.execute("import toolbox\ntoolbox.search('xyzzy')", shared_session)
    assert str(inside.result).endswith(away)


async def test_other_imports_that_fail_are_as_ever(caller: Caller, shared_session: str):
    result = await caller.execute("import toolbox, zzz_not_there", shared_session)
    assert result.error == "ModuleNotFoundError: No module named 'zzz_not_there'"


async def test_a_server_that_comes_back_is_found_by_a_later_cell(caller: Caller, shared_session: str, place: Path):
    cell = "from servers.late import add\nadd(1, 2)"
    assert "late.add: the server cannot be started" in str((await caller.execute(cell, shared_session)).error)
    script = place / "late.sh.new"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(AWKWARD)])}\n")
    script.chmod(0o755)
    script.rename(place / "late.sh")
    with anyio.fail_after(60):
        while (result := await caller.execute(cell, shared_session)).status != "ok":
            assert "late.add: the server cannot be started" in str(result.error)
    assert result.result == "{'sum': 3}"


@pytest.mark.parametrize("error", ["", "MCP server awk-ward cannot be started"])
async def test_a_tool_that_comes_while_a_cell_runs_is_no_module_there(tmp_path: Path, error: str):
    tree = Tree(tmp_path)
    tools = (ToolDefinition("awk-ward", "old"), ToolDefinition("awk-ward", "t"))
    before = ServerCatalogue("awk-ward", () if error else tools[:1], error=error)
    tree.write(_generated(before))
    code = (
        "import servers.awk_ward\nprint('loaded', flush=True)\ninput()\n"
        "try:\n    from servers.awk_ward import t\nexcept ImportError as error:\n    print(error)\nelse:\n    print(t)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{INSIDE}:{tree.importable}"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        tree.write(_generated(ServerCatalogue("awk-ward", tools)))
        printed, _ = process.communicate("\n")
    assert ("the server cannot be started" if error else "the server has no such tool") in printed


async def test_a_package_of_the_sessions_own_of_that_name_is_imported_as_ever(tmp_path: Path):
    (package := tmp_path / "servers" / "own").mkdir(parents=True)
    (tmp_path / "servers" / "__init__.py").touch()
    lazy = "import importlib\ndef __getattr__(name): return importlib.import_module(f'servers.own.{name}')\n"
    (package / "__init__.py").write_text(lazy)
    (package / "part.py").write_text("value = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import toolbox, servers.own.part; print(servers.own.part.value)"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{INSIDE}"},
    )
    assert done.stdout == "1\n", done.stderr


def _generated(server: ServerCatalogue) -> dict[str, str]:
    return generate(Catalogue({server.server: server}), lambda _server, _tool: None)


async def test_errors_of_kept_state_end_at_the_cell(caller: Caller, shared_session: str):
    result = await caller.execute("from workspace_state import load, save\nsave('../x.json', 1)", shared_session)
    assert str(result.error).startswith("ValueError: '../x.json' is no name for kept state")
    assert not [line for line in result.traceback if "workspace_state.py" in line]


# Skills


async def test_the_skills_of_the_operator_are_read_and_imported_and_not_changed(caller: Caller, shared_session: str):
    code = "import os\nfrom skills.greeting import hello\nhello('ann'), sorted(os.listdir('skills'))"
    result = await caller.execute(code, shared_session)
    assert result.result == "('hello ann', ['deep', 'greeting.py'])"
    assert result.files == []
    written = await caller.execute("open('skills/mine.py', 'w')", shared_session)
    assert "Read-only file system" in str(written.error)


async def test_what_a_session_keeps_under_the_name_is_its_own(caller: Caller):
    session = await caller.new_session()
    code = "import os\nos.unlink('skills')\nos.mkdir('skills')\nopen('skills/mine.py', 'w').write('x = 1')\nos._exit(1)"
    await caller.execute(code, session)
    result = await caller.execute("from skills import greeting, mine\nmine.x, greeting.hello('b')", session)
    assert result.result == "(1, 'hello b')"
    await caller.fields("clear_session", session_id=session)


async def test_skills_need_no_servers_and_reach_sessions_that_are_forked(
    default_environment: Environment, tmp_path: Path, place: Path
):
    chosen = {"skills_directory": str(place / "house skills"), "fork_start": True, "preload": [], "pool_size": 0}
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime, connected(runtime) as caller:
        result = await caller.execute("import skills.greeting as greeting\ngreeting.hello('c')")
        assert result.result == "'hello c'"


@pytest.mark.parametrize(("folder", "told"), [("nowhere", "is no folder"), (".", "holds the data directory")])
async def test_a_folder_that_cannot_be_shown_stops_the_server(
    default_environment: Environment, tmp_path: Path, folder: str, told: str
):
    settings = settings_for(default_environment, tmp_path, skills_directory=str(tmp_path / folder))
    with pytest.raises(SettingsError, match=told):
        async with open_runtime(settings):
            pass
