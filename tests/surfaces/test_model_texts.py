"""What a model reads: the next call after a failure, tables, long output, and small schemas."""

import threading
from pathlib import Path
from typing import Any

import pytest
from calls import Caller, connected, opened_runtime, text_of

from belljar.environments import Environment
from belljar.environments.installed_check import PackageStatus
from belljar.mcp import tools_list
from belljar.mcp.content import next_call
from belljar.mcp.content import text_of as text_of_result
from belljar.mcp.tools_list import small_schema
from belljar.models import ExecutionResult, FileReference
from belljar.runtime import Runtime
from belljar.sandboxes.base import WORKSPACE
from waiting import until

anyio = pytest.mark.anyio


def result(error: str | None = None, **fields: Any) -> ExecutionResult:
    given: dict[str, Any] = {"status": "error" if error else "ok", "success": error is None, "error": error, **fields}
    base = {"execution_id": "e", "session_id": "s", "execution_count": 4, "output": [], "stdout": "", "stderr": ""}
    return ExecutionResult.model_validate({**base, **given})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ModuleNotFoundError: No module named 'sklearn.svm'", 'packages=["scikit-learn"], session_id="s")'),
        ("ModuleNotFoundError: No module named 'my_pkg'", 'install_dependencies(packages=["my-pkg"]'),
        ("ModuleNotFoundError: No module named 'skills.tidy'", "Next: os.listdir('skills') names those there are"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'", 'list_session_files(session_id="s")'),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/home/me/a.csv'", "/mnt/sales"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'C:\\\\a.csv'", "upload_file("),
        ("gaierror: [Errno -2] Name or service not known", "Sessions have no network"),
        ("ConnectionError: HTTPSConnectionPool(): Failed to resolve 'example.com'", 'url="https://…"'),
        ("ImportError: `Import tabulate` failed.  Use pip to install the tabulate package.", 'packages=["tabulate"]'),
        ("ImportError: Missing optional dependency 'pytables'.  Use pip", 'packages=["tables"]'),
        ("AttributeError: The '.style' accessor requires jinja2", 'packages=["jinja2"]'),
        ("ImportError: Unable to find a usable engine\n - `Import pyarrow` failed.", 'packages=["pyarrow"]'),
        ("ImportError: pyarrow>=16.0.0 is required for ArrowDtype", 'packages=["pyarrow"]'),
        ("ImportError: cannot import name 'a' from 'requires '", ""),
        ("OSError: [Errno 30] Read-only file system: '/a.csv'", "Next: write to /mnt/data, the session's own folder."),
        ("OSError: Cannot save file into a non-existent directory: '/home/me'", "Next: write to /mnt/data,"),
        ("OSError: Cannot save file into a non-existent directory: 'plots'", ""),
        ("PermissionError: [Errno 13] Permission denied: '/a.csv'", "Next: write to /mnt/data,"),
        ("PermissionError: [Errno 13] Permission denied: 'a.csv'", ""),
        ("KeyError: 'No module named'", ""),
        ("ValueError: FileNotFoundError", ""),
    ],
)
def test_a_fault_of_the_surroundings_ends_with_the_call_that_helps(error: str, words: str):
    said = next_call(result(error), hosts=(), isolates=True, folders=("/mnt/sales",))
    assert words in said
    assert bool(said) == bool(words)
    assert "\n" not in said


def test_the_next_call_says_what_is_true_here():
    failed = result("gaierror: [Errno -2] Name or service not known")
    assert "Sessions reach only example.com;" in next_call(failed, hosts=("example.com",), isolates=True, folders=())
    assert next_call(failed, hosts=(), isolates=False, folders=()) == ""
    assert next_call(result(), hosts=(), isolates=True, folders=()) == ""


@pytest.mark.parametrize(
    ("code", "is_told"),
    [
        ("frame.to_csv('/tmp/a.csv')", True),
        ("path = '/tmp/a.png'\nfigure.savefig(path)", True),
        ("with open('/tmp/a.txt', 'w') as file: file.write('')", True),
        ("image.save('/tmp/a.png')\nshutil.copy('/tmp/a.png', 'kept.csv')", True),
        ("frame.to_csv('/tmp/kept.csv')\nshutil.copy('/tmp/kept.csv', '.')", False),
        ("pandas.read_csv('/tmp/a.csv')", False),
        ("open('/tmp/a.txt').read()", False),
        ("frame.to_csv('a.csv')", False),
    ],
)
def test_whoever_saves_in_tmp_is_told_that_it_cannot_be_downloaded_from_there(code: str, is_told: bool):
    kept = FileReference(uri="", name="out/kept.csv", mime_type="text/csv", size=1)
    said = next_call(result(files=[kept]), hosts=(), isolates=True, folders=(), code=code)
    told = "Next: files in /tmp are not downloadable from there; save to /mnt/data what somebody is to get."
    assert said == (told if is_told else "")


@anyio
async def test_a_session_is_told_of_the_folder_that_it_has(default_environment: Environment, tmp_path: Path):
    cells = {
        "import os\nos.mkdir('/usr/made')": "Next: write to {}, the session's own folder.",
        "open('/tmp/a.txt', 'w').close()": "not downloadable from there; save to {} what somebody is to get.",
    }
    async with (
        opened_runtime(default_environment, tmp_path) as runtime,
        connected(runtime) as caller,
        opened_runtime(default_environment, tmp_path, sandbox="process") as other,
        connected(other) as bare,
    ):
        for code, words in cells.items():
            answer = await caller.call("execute_code", code=code)
            assert words.format("/mnt/data") in text_of(answer)
            # Clients that show their model the fields in place of the text show the advice, too.
            assert answer.structured_content is not None
            assert words.format("/mnt/data") in answer.structured_content["hint"]
        plain = await caller.call("execute_code", code="1")
        assert "hint" not in (plain.structured_content or {})
        session_id = (await bare.execute("1")).session_id
        seen = WORKSPACE if other.shows_workspace else str(other.sessions.get(session_id, "local").folders.workspace)
        answer = await bare.call("execute_code", code=[*cells][1], session_id=session_id)
        assert [*cells.values()][1].format(seen) in text_of(answer)


def test_a_table_starts_on_a_line_of_its_own_and_numbers_fill_theirs():
    assert text_of_result(result(result="   a  b\n0  1  2")).startswith("Out[4]:\n   a  b\n0  1  2\n")
    assert text_of_result(result(result="[0,\n 1,\n 2,\n 3]")).startswith("Out[4]: [0, 1, 2, 3]\n")
    kept = "[['a'],\n ['b'],\n ['c'],\n ['d']]"
    assert text_of_result(result(result=kept)).startswith(f"Out[4]:\n{kept}\n"), "what has a shape keeps it"


def test_schemas_say_what_a_call_needs_and_no_more():
    schema = {
        "title": "toolArguments",
        "type": "object",
        "required": ["title"],
        "properties": {
            "title": {"title": "Title", "type": "string", "maxLength": 5},
            "wait": {"title": "Wait", "type": "number", "default": 45, "minimum": 0, "maximum": 300.0},
            "at": {"title": "At", "anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "to": {"title": "To", "anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 64}]},
            "flag": {"title": "Flag", "type": "boolean", "default": False},
            "since": {"title": "Since", "type": "integer", "default": 0},
        },
    }
    assert small_schema(schema) == {
        "type": "object",
        "required": ["title"],
        "properties": {
            "title": {"type": "string"},
            "wait": {"type": "number", "default": 45, "maximum": 300},
            "at": {"type": "string"},
            "to": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "flag": {"type": "boolean"},
            "since": {"type": "integer", "default": 0},
        },
    }


@anyio
async def test_long_output_is_read_by_a_call_page_by_page(caller: Caller, shared_session: str):
    code = "for i in range(5_000): print('line', i)"
    answer = await caller.call("execute_code", code=code, session_id=shared_session)
    assert answer.structured_content is not None
    execution_id = answer.structured_content["execution_id"]
    assert f'get_execution(execution_id="{execution_id}", offset=0)' in text_of(answer)
    pages, offset = "", 0
    while offset is not None:
        page = await caller.call("get_execution", execution_id=execution_id, offset=offset)
        assert page.structured_content is not None
        pages += page.structured_content["text"]
        offset = page.structured_content["next_offset"]
        assert text_of(page).endswith("[the end]" if offset is None else f"offset={offset}) goes on]")
    assert pages == "".join(f"line {i}\n" for i in range(5_000))
    assert "does not exist" in await caller.refusal("get_execution", execution_id="nobodys", offset=0)


@anyio
async def test_nobody_is_told_to_restart_a_kernel(caller: Caller, shared_session: str):
    answer = await caller.call("execute_code", code="%pip --version", session_id=shared_session)
    assert "restart" not in text_of(answer)


@anyio
async def test_the_description_says_where_code_runs(caller: Caller):
    async def described() -> str:
        (tool,) = [tool for tool in (await caller.client.list_tools()).tools if tool.name == "execute_code"]
        assert (tool.description or "").endswith("No network.")
        return tool.description or ""

    async def is_complete() -> bool:
        return "Installed: pandas, numpy" in await described()

    # Which packages there are is told as soon as it is known; a list does not wait longer than a second for it.
    await until(is_complete)


@anyio
async def test_a_look_at_the_packages_that_takes_long_is_not_begun_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
):
    looks, done = list[str](), threading.Event()

    def slow_look(*_: object) -> list[PackageStatus]:
        looks.append("begun")
        assert done.wait(60)
        return [PackageStatus(name="pandas", installed=True)]

    monkeypatch.setattr(tools_list, "check_installed", slow_look)
    monkeypatch.setattr(tools_list, "_TIMEOUT_S", 0.01)
    surroundings = tools_list.Surroundings(runtime)
    assert "Installed" not in await surroundings.text("local")
    assert "Installed" not in await surroundings.text("local")
    done.set()

    async def is_told() -> bool:
        return "Installed: pandas and more" in await surroundings.text("local")

    await until(is_told)
    assert looks == ["begun"]
