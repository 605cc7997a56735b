"""What a model reads: the next call after a failure, tables, long output, and small schemas."""

import threading
from typing import Any

import pytest
from calls import Caller, text_of

from belljar.environments.packages import PackageStatus
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.surfaces import tools_list
from belljar.surfaces.content import text_of as text_of_result
from belljar.surfaces.next_calls import next_call
from belljar.surfaces.tools_list import small_schema
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
