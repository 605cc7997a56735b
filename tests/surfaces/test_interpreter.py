"""The interpreter surface as a whole: what a client finds, sessions and their ends, notebooks, packages."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import nbformat
import pytest
from calls import ERAS, Caller, connected, held, opened_runtime, text_of, until_said
from mcp import MCPError
from mcp.types import TextResourceContents

from belljar.environments import Environment
from belljar.executions.cell import Cell
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio
TOOLS = {
    "execute_code": ["code", "session_id", "filename", "timeout_s", "wait_s", "idempotency_key"],
    "get_execution": ["execution_id", "since", "wait_s", "offset"],
    "interrupt_execution": ["execution_id", "session_id"],
    "new_session": ["environment", "reason"],
    "list_sessions": [],
    "rename_session": ["session_id", "reason"],
    "clear_session": ["session_id"],
    "fork_session": ["session_id", "at", "reseed", "count"],
    "rewind_session": ["session_id", "to"],
    "list_session_files": ["session_id", "path", "after"],
    "upload_file": ["session_id", "name", "text", "base64", "url", "path"],
    "download_file": ["session_id", "name", "save"],
    "install_dependencies": ["packages", "session_id"],
    "check_installed_packages": ["packages", "session_id"],
}


# What a client finds


@pytest.mark.parametrize("era", ERAS)
async def test_the_tools_have_the_arguments_of_the_contract(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        tools = (await caller.client.list_tools()).tools
    assert {tool.name: list(tool.input_schema.get("properties", {})) for tool in tools} == TOOLS
    assert all(tool.description and len(tool.description) < 500 and "    " not in tool.description for tool in tools)
    assert all(tool.output_schema is None for tool in tools)
    assert all(tool.annotations is not None for tool in tools)


async def test_the_defaults_are_those_of_the_contract(caller: Caller):
    tools = {tool.name: tool.input_schema for tool in (await caller.client.list_tools()).tools}
    execute = {name: entry.get("default") for name, entry in tools["execute_code"]["properties"].items()}
    chosen = {"session_id": None, "filename": None, "timeout_s": None, "wait_s": 45, "idempotency_key": None}
    assert execute == {"code": None, **chosen}
    assert tools["execute_code"]["required"] == ["code"]
    look = {name: entry.get("default") for name, entry in tools["get_execution"]["properties"].items()}
    assert look == {"execution_id": None, "since": 0, "wait_s": 0, "offset": None}


@pytest.mark.parametrize("era", ERAS)
async def test_artifacts_are_in_templates_and_never_listed(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        await caller.execute("open('listed.txt', 'w').write('x')")
        assert (await caller.client.list_resources()).resources == []
        templates = (await caller.client.list_resource_templates()).resource_templates
    assert [template.uri_template for template in templates] == [
        "kernel://{session_id}/{+path}",
        "execution://{execution_id}/displays/{name}",
        "execution://{execution_id}/output{?offset,limit}",
        "session://{session_id}/notebook",
    ]


async def test_the_tool_list_is_cheap(caller: Caller):
    tools = (await caller.client.list_tools()).tools
    assert len(json.dumps([tool.model_dump(mode="json", exclude_none=True) for tool in tools])) < 7_000


# Sessions


@pytest.mark.parametrize("era", ERAS)
async def test_variables_imports_and_files_stay_between_calls(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        first = await caller.execute("import math\nkept = [1]\nopen('note', 'w').write('n')")
        second = await caller.execute("kept.append(math.floor(2.5))\nkept, open('note').read()", first.session_id)
    assert second.result == "([1, 2], 'n')"
    assert second.session_id == first.session_id
    assert (first.execution_count, second.execution_count) == (1, 2)


@pytest.mark.parametrize("empty", ["", "0"])
async def test_an_empty_session_id_starts_a_new_session(caller: Caller, empty: str):
    first = await caller.execute("mine = 1", empty)
    second = await caller.execute("'mine' in globals()", empty)
    assert first.session_id != second.session_id
    assert len(first.session_id) == 17
    assert second.result == "False"
    assert second.session_info is not None


async def test_session_info_is_told_once(caller: Caller):
    first = await caller.execute("1")
    second = await caller.execute("2", first.session_id)
    looked = await caller.get(first.execution_id)
    assert first.session_info is not None
    assert first.session_info.session_id == first.session_id
    assert "30 idle minutes" in first.session_info.instructions
    assert (second.session_info, looked.session_info) == (None, None)


async def test_new_session_starts_a_kernel_and_tells_all_about_it(caller: Caller):
    info = await caller.fields("new_session", reason="for the test")
    assert info.keys() == {
        "session_id",
        "environment",
        "kernel",
        "sandbox",
        "state",
        "created_at",
        "last_used_at",
        "expires_at",
        "age_s",
        "memory_mb",
        "gpus",
        "gpu_memory_mb",
        "executions",
        "files",
        "checkpoints",
        "reason",
        "last_status",
        "last_cause",
    }
    assert (info["kernel"], info["sandbox"], info["state"]) == ("ipython", "namespace", "idle")
    assert (info["executions"], info["files"], info["reason"]) == (0, 0, "for the test")
    assert info["memory_mb"] > 5
    result = await caller.execute("1", info["session_id"])
    assert result.session_info is None


async def test_list_sessions_tells_state_age_memory_and_expiry(runtime: Runtime, caller: Caller):
    idle = await caller.execute("open('f', 'w').write('x')\n1/0")
    busy = await caller.execute(held(), wait_s=0)
    await until_said(runtime, busy.execution_id, "held")
    made_at = time.time() - 90
    runtime.sessions.get(idle.session_id, "local").lease.created_at = made_at
    listed = {info["session_id"]: info for info in (await caller.fields("list_sessions"))["sessions"]}
    assert (listed[idle.session_id]["state"], listed[busy.session_id]["state"]) == ("idle", "running")
    assert (listed[idle.session_id]["last_status"], listed[busy.session_id]["last_status"]) == ("error", "running")
    assert (listed[idle.session_id]["executions"], listed[idle.session_id]["files"]) == (1, 1)
    assert listed[idle.session_id]["memory_mb"] > 5
    assert 90 <= listed[idle.session_id]["age_s"] <= round(time.time() - made_at, 1)
    assert listed[busy.session_id]["age_s"] < 90
    assert listed[idle.session_id]["expires_at"] > listed[idle.session_id]["created_at"]
    await caller.release(busy.session_id)
    assert (await caller.ended(busy.execution_id)).status == "ok"


async def test_no_session_is_told_in_words(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path) as runtime, connected(runtime) as caller:
        answer = await caller.call("list_sessions")
    assert text_of(answer) == "No session is open."
    assert answer.structured_content == {"sessions": []}


async def test_a_cleared_session_is_gone_with_all_it_had(runtime: Runtime, caller: Caller):
    result = await caller.execute("print('secret')\nopen('f', 'w').write('x')")
    session_id = result.session_id
    folder = runtime.sessions.get(session_id, "local").folders.root
    cleared = await caller.fields("clear_session", session_id=session_id)
    assert cleared["success"] is True
    assert session_id in cleared["message"]
    assert not folder.exists()
    said = await caller.refusal("list_session_files", session_id=session_id)
    assert said.startswith(f"session-not-found: session '{session_id}' was cleared")
    assert "execution-not-found" in await caller.refusal("get_execution", execution_id=result.execution_id)
    again = await caller.call("clear_session", session_id=session_id)
    assert "session-not-found" in text_of(again)
    expired = f"SessionExpiredError: Session {session_id} not found or has expired. session-not-found: "
    assert again.structured_content is not None
    assert again.structured_content["success"] is False
    assert again.structured_content["message"].startswith(expired)
    listed = await caller.call("list_session_files", session_id=session_id)
    assert listed.structured_content is not None
    assert (listed.structured_content["session_id"], listed.structured_content["files"]) == (session_id, [])
    assert listed.structured_content["error"].startswith(expired)


async def test_clearing_a_session_ends_what_runs_in_it(runtime: Runtime, caller: Caller):
    running = await caller.execute(held(), wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    assert (await caller.fields("clear_session", session_id=running.session_id))["success"] is True
    listed = (await caller.fields("list_sessions"))["sessions"]
    assert running.session_id not in [info["session_id"] for info in listed]


@pytest.mark.parametrize("era", ERAS)
async def test_an_unknown_session_is_a_clear_error_with_every_field(runtime: Runtime, era: str):
    unknown = "ab" * 16
    async with connected(runtime, era) as caller:
        result = await caller.execute("1", unknown)
        assert unknown not in [session.id for session in runtime.sessions.all()]
    assert (result.status, result.success, result.session_id) == ("rejected", False, unknown)
    assert result.error is not None
    expired = f"SessionExpiredError: Session {unknown} not found or has expired. "
    assert result.error.startswith(f"{expired}session-not-found: session '{unknown}' does not exist")
    assert "execute_code with an empty session_id" in result.error


# Expiry


async def test_an_idle_session_is_swept_and_says_so_afterwards(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, session_idle_s=0.001, sweep_interval_s=3600) as runtime,
        connected(runtime) as caller,
    ):
        result = await caller.execute("1")
        folder = runtime.sessions.get(result.session_id, "local").folders.root
        runtime.sessions.get(result.session_id, "local")
        while not (swept := await runtime.sessions.sweep()):
            pass
        assert swept == [result.session_id]
        assert not folder.exists()
        again = await caller.execute("1", result.session_id)
        assert again.status == "rejected"
        assert again.error is not None
        assert f"session '{result.session_id}' expired at " in again.error
        assert (await caller.fields("list_sessions"))["sessions"] == []


async def test_what_runs_is_never_swept(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, session_idle_s=0.001, sweep_interval_s=3600) as runtime,
        connected(runtime) as caller,
    ):
        running = await caller.execute(held(), wait_s=0)
        await until_said(runtime, running.execution_id, "held")
        assert await runtime.sessions.sweep() == []
        await caller.release(running.session_id)
        assert (await caller.ended(running.execution_id)).status == "ok"


async def test_the_sweep_runs_by_itself(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path, session_idle_s=0.001, sweep_interval_s=0.01) as runtime:
        session = runtime.sessions.create("local")
        await until(lambda: not session.folders.root.exists())
        assert runtime.sessions.all() == []


async def test_a_session_that_gets_busy_while_others_are_swept_stays(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, session_idle_s=0.001, sweep_interval_s=3600) as runtime,
        connected(runtime) as caller,
    ):
        idle = runtime.sessions.get(await caller.new_session(), "local")
        used = runtime.sessions.get(await caller.new_session(), "local")
        while max(idle.lease.expires_at, used.lease.expires_at) > time.time():
            await anyio.lowlevel.checkpoint()
        sweeping = asyncio.get_running_loop().create_task(runtime.sessions.sweep())
        # One turn of the loop later the sweep waits for the end of the first session.
        await anyio.lowlevel.checkpoint()
        execution = used.submit(Cell(held(), timeout_s=60))
        assert await sweeping == [idle.id]
        used.workspace.write("go", b"")
        await execution.wait(60)
        assert execution.result().status == "ok"


# The notebook


async def test_the_notebook_of_a_session_has_everything_that_ran(caller: Caller):
    first = await caller.execute("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    session_id = first.session_id
    await caller.execute("1 / 0", session_id)
    await caller.execute("from IPython.display import HTML\ndisplay(HTML('<b>x</b>'))", session_id)
    await caller.execute("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", session_id)
    content = await caller.read(f"session://{session_id}/notebook")
    assert isinstance(content, TextResourceContents)
    assert content.mime_type == "application/x-ipynb+json"
    library: Any = nbformat
    notebook: Any = library.reads(content.text, as_version=4)
    library.validate(notebook)
    assert [cell.source.splitlines()[0] for cell in notebook.cells] == [
        "import sys",
        "1 / 0",
        "from IPython.display import HTML",
        "import matplotlib.pyplot as plt",
    ]
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3, 4]
    outputs = [[(output.output_type, output.get("name")) for output in cell.outputs] for cell in notebook.cells]
    assert outputs == [
        [("stream", "stdout"), ("stream", "stderr"), ("execute_result", None)],
        [("error", None)],
        [("display_data", None)],
        [("display_data", None)],
    ]
    assert notebook.cells[1].outputs[0].ename == "ZeroDivisionError"
    assert notebook.cells[2].outputs[0].data["text/html"] == "<b>x</b>"
    assert notebook.cells[3].outputs[0].data["image/png"].startswith("iVBOR")


@pytest.mark.parametrize("era", ERAS)
async def test_resources_of_an_unknown_session_or_execution_are_clear_errors(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        for uri in (
            f"session://{'ab' * 16}/notebook",
            f"kernel://{'ab' * 16}/f.txt",
            f"execution://{'ab' * 16}/output",
            f"execution://{'ab' * 16}/displays/1.png",
        ):
            with pytest.raises(MCPError) as refused:
                await caller.read(uri)
            assert "not-found: " in refused.value.error.message
            assert "ab" * 16 in refused.value.error.message


# Code


@pytest.mark.parametrize(
    "code",
    [
        "```python\n6 * 7\n```",
        "```\n6 * 7\n```",
        "\n```py\n6 * 7```\n",
        "~~~python\n6 * 7\n~~~",
        "6 * 7",
        "\n\n6 * 7\n",
    ],
)
async def test_markdown_fences_are_stripped(caller: Caller, shared_session: str, code: str):
    assert (await caller.execute(code, shared_session)).result == "42"


async def test_fences_inside_the_code_are_kept(caller: Caller, shared_session: str):
    code = "text = '''\n```python\n1\n```\n'''\ntext.count('`')"
    assert (await caller.execute(code, shared_session)).result == "6"


async def test_filename_keeps_the_code_in_the_session_folder(caller: Caller):
    result = await caller.execute("```python\nprint(open('job/a.py').read())\n```", filename="job/a.py")
    assert result.stdout == "print(open('job/a.py').read())\n"
    assert await caller.read_text(f"kernel://{result.session_id}/job/a.py") == "print(open('job/a.py').read())"


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("!echo $((40 + 2))", None),
        ("import asyncio\nasyncio.run(asyncio.sleep(0, 42))", "42"),
        ("%pwd", None),
        ("%%capture said\nprint('x')", None),
        ("x = !echo hi\nx[0]", "'hi'"),
        ("import sys; sys.exit(0)", None),
    ],
)
async def test_ipython_is_all_there(caller: Caller, shared_session: str, code: str, result: str | None):
    answer = await caller.execute(code, shared_session)
    assert answer.status == "ok", answer
    if result is not None:
        assert answer.result == result


async def test_the_working_directory_is_the_session_folder_and_mnt_data(caller: Caller):
    code = "import os\nopen('here', 'w').write('x')\nos.path.samefile('here', '/mnt/data/here')"
    result = await caller.execute(code)
    assert result.result == "True"
    assert [file.name for file in result.files] == ["here"]


# Packages


async def test_check_installed_packages_knows_distribution_and_import_names(caller: Caller):
    report = await caller.fields("check_installed_packages", packages=["scikit-learn", "sklearn", "no-such-package"])
    assert report["session_id"] is None
    by_name = {package["name"]: package for package in report["packages"]}
    assert [by_name[name]["installed"] for name in ("scikit-learn", "sklearn", "no-such-package")] == [
        True,
        True,
        False,
    ]
    assert by_name["scikit-learn"]["version"] == by_name["sklearn"]["version"]
    assert by_name["scikit-learn"]["location"]
    assert by_name["no-such-package"]["version"] is None


async def test_a_package_that_cannot_be_installed_is_told_in_the_resolvers_words(caller: Caller):
    answer = await caller.call("install_dependencies", packages=["this-package-is-not-there-5c0e"])
    assert answer.is_error
    assert "this-package-is-not-there-5c0e" in text_of(answer)
    assert "session_id: " in text_of(answer)
    assert answer.structured_content is not None
    assert answer.structured_content["packages"][0]["error"]


@pytest.mark.parametrize("packages", [["--index-url=http://evil"], ["; rm -rf /"], ["a b"], [""], []])
async def test_a_package_name_that_is_none_is_refused(caller: Caller, packages: list[str]):
    before = (await caller.fields("list_sessions"))["sessions"]
    assert (await caller.call("install_dependencies", packages=packages)).is_error
    after = (await caller.fields("list_sessions"))["sessions"]
    assert len(after) == len(before)


async def test_libraries_that_count_processors_find_an_ordinary_machine(caller: Caller):
    code = (
        "import os, pwd, socket, subprocess, warnings\n"
        "warnings.simplefilter('error')\n"
        "from joblib.externals.loky import cpu_count\n"
        "cores = cpu_count(only_physical_cores=True)\n"
        "web = socket.getaddrinfo('127.0.0.1', 'http', type=socket.SOCK_STREAM)[0][4][1]\n"
        "pwd.getpwuid(0).pw_name, web, 1 <= cores <= os.cpu_count(), subprocess.call('lscpu >/dev/null', shell=True)"
    )
    result = await caller.execute(code)
    assert (result.result, result.output) == ("('root', 80, True, 0)", [])


async def test_scikit_learn_and_joblib_work_in_parallel_without_warnings(caller: Caller):
    code = (
        "import warnings\nwarnings.simplefilter('error')\n"
        "from joblib import Parallel, delayed\n"
        "from sklearn.datasets import make_blobs\n"
        "from sklearn.cluster import KMeans\n"
        "from sklearn.ensemble import RandomForestClassifier\n"
        "x, y = make_blobs(60, centers=2, cluster_std=0.1, random_state=0)\n"
        "forest = RandomForestClassifier(8, n_jobs=2, random_state=0).fit(x, y)\n"
        "groups = KMeans(2, n_init=1, random_state=0).fit(x)\n"
        "forest.score(x, y), len({*groups.labels_}), Parallel(n_jobs=2)(delayed(abs)(-n) for n in range(3))"
    )
    result = await caller.execute(code)
    assert (result.result, result.output) == ("(1.0, 2, [0, 1, 2])", [])
