"""Input that no one should send: each is a clear error, nothing is lost, and the server lives."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import ERAS, Caller, connected, opened_runtime, text_of
from mcp import MCPError
from mcp.types import CallToolResult

from belljar.environments import Environment
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def everything_is_as_before(caller: Caller, shared_session: str) -> AsyncGenerator[None]:
    """After each of these the session still has its variable and the server answers."""
    await caller.execute("precious = 'kept'", shared_session)
    count = len((await caller.fields("list_sessions"))["sessions"])
    yield
    assert (await caller.execute("precious", shared_session)).result == "'kept'"
    assert len((await caller.fields("list_sessions"))["sessions"]) == count


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("code", ["", " ", "\n\n", "# nothing", "```python\n```", "```\n\n```"])
async def test_code_that_does_nothing_is_a_success(runtime: Runtime, shared_session: str, era: str, code: str):
    async with connected(runtime, era) as caller:
        result = await caller.execute(code, shared_session)
    assert (result.status, result.session_id) == ("ok", shared_session)
    assert (result.output, result.result, result.error) == ([], None, None)


@pytest.mark.parametrize("era", ERAS)
async def test_ten_megabytes_of_code_are_refused(runtime: Runtime, shared_session: str, era: str):
    async with connected(runtime, era) as caller:
        result = await caller.execute("x" * 10_000_000, shared_session)
    assert result.status == "rejected"
    assert result.error is not None
    assert result.error.startswith("invalid-argument: code has 10,000,000 bytes, the limit is 1,048,576")
    assert "Upload data as a file" in result.error


async def test_a_megabyte_of_code_runs(caller: Caller, shared_session: str):
    result = await caller.execute("x = '" + "y" * 1_000_000 + "'\nlen(x)", shared_session)
    assert result.result == "1000000"


@pytest.mark.parametrize("since", [10**6, 2**63, 10**30])
async def test_whoever_asks_beyond_the_end_is_given_nothing_new(caller: Caller, shared_session: str, since: int):
    ended = await caller.execute("print('said'); 7", shared_session)
    asked = await caller.get(ended.execution_id, since=since)
    assert (asked.status, asked.result, asked.output, asked.sequence) == ("ok", "7", [], ended.sequence)


@pytest.mark.parametrize(
    "code",
    [
        "\ud800",
        "print('\ud800')",
        "\0",
        "x = 1\0",
        "\N{ZERO WIDTH SPACE}print(1)",
        "(" * 5_000,
        "[" * 100_000 + "]" * 100_000,
        "-" * 60_000 + "1",
        "x = " + "+".join(["1"] * 30_000),
        "%nosuchmagic",
        "%%nosuchcell\nx",
        "!exit 7",
        "\\",
        "'''",
        "exec('exec(\\'1/0\\')')",
        "\ufeffprint(1)",
        "a\rb",
        "raise BaseException('base')",
        "raise SystemExit('why')",
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import sys; sys.stdout = None; sys.stderr = 3",
        "import builtins; builtins.print = None",
        "get_ipython().run_cell = None",
        "del get_ipython",
        "import os; os.close(1); os.close(2)",
        "import os; os.chdir('/')",
        "import sys; sys.setrecursionlimit(50)",
        "raise type('E' * 100_000, (Exception,), {})('m' * 100_000)",
        "__builtins__.__dict__.clear()",
    ],
    ids=range(29),
)
async def test_strange_code_is_a_result_and_breaks_nothing_else(caller: Caller, code: str):
    first = await caller.execute("1")
    result = await caller.execute(code, first.session_id)
    assert result.status in ("ok", "error", "died", "rejected")
    if result.status in ("error", "rejected"):
        assert result.error
    after = await caller.execute("40 + 2", first.session_id)
    assert after.status in ("ok", "error", "died")
    assert (await caller.fields("clear_session", session_id=first.session_id))["success"] is True


@pytest.mark.parametrize(
    "session_id",
    ["no such session", "x" * 100_000, "../../etc", "\0", "\ud800", "None", "1", " ", "AB" * 16, "%s{0}"],
    ids=range(10),
)
async def test_a_session_that_is_none_is_refused_everywhere(caller: Caller, session_id: str):
    result = await caller.execute("1", session_id)
    assert result.status == "rejected"
    assert result.error is not None
    # A control character or a lone surrogate is shown by its escape.
    shown = session_id[:64] if session_id.isprintable() else repr(session_id)
    expired = f"SessionExpiredError: Session {shown} not found or has expired. session-not-found: "
    assert result.error.startswith(expired)
    for tool, arguments in (
        ("rename_session", {"reason": "x"}),
        ("clear_session", {}),
        ("fork_session", {}),
        ("rewind_session", {"to": 1}),
        ("list_session_files", {}),
        ("upload_file", {"name": "a", "text": "x"}),
        ("download_file", {"name": "a"}),
        ("interrupt_execution", {}),
        ("install_dependencies", {"packages": ["six"]}),
    ):
        said = await caller.refusal(tool, session_id=session_id, **arguments)
        assert said.startswith("session-not-found: "), tool
        assert len(said) < 500


@pytest.mark.parametrize("execution_id", ["", "x" * 100_000, "\0", "\ud800", "' OR 1=1 --", "AB" * 16], ids=range(6))
async def test_an_execution_that_is_none_is_refused(caller: Caller, execution_id: str):
    said = await caller.refusal("get_execution", execution_id=execution_id)
    assert said.startswith("execution-not-found: ")
    assert len(said) < 500


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("execute_code", {}),
        ("execute_code", {"code": None}),
        ("execute_code", {"code": 5}),
        ("execute_code", {"code": ["print(1)"]}),
        ("execute_code", {"code": "1", "session_id": 7}),
        ("execute_code", {"code": "1", "timeout_s": "soon"}),
        ("execute_code", {"code": "1", "timeout_s": 0}),
        ("execute_code", {"code": "1", "timeout_s": -1}),
        ("execute_code", {"code": "1", "wait_s": -1}),
        ("execute_code", {"code": "1", "wait_s": 1e9}),
        ("execute_code", {"code": "1", "wait_s": {}}),
        ("execute_code", {"code": "1", "filename": 3}),
        ("get_execution", {"execution_id": "a", "since": -1}),
        ("get_execution", {"execution_id": "a", "since": "x"}),
        ("get_execution", {"execution_id": "a", "since": 10**30}),
        ("upload_file", {"session_id": "a"}),
        ("upload_file", {"session_id": "a", "name": "b", "text": 3}),
        ("new_session", {"reason": "r" * 201}),
        ("new_session", {"environment": 3}),
        ("new_session", {"environment": "/usr"}),
        ("new_session", {"environment": "no-such-environment"}),
        ("new_session", {"environment": "kernel:no-such-kernel"}),
        ("new_session", {"environment": "kernel:../../x"}),
        ("new_session", {"environment": "\0"}),
        ("install_dependencies", {"packages": "numpy"}),
        ("install_dependencies", {"packages": [3]}),
        ("install_dependencies", {"packages": ["x"] * 101}),
        ("check_installed_packages", {"packages": []}),
        ("check_installed_packages", {}),
        ("rename_session", {"session_id": "a"}),
        ("rename_session", {"session_id": "a", "reason": 3}),
        ("rename_session", {"session_id": "a", "reason": "x" * 201}),
        ("clear_session", {}),
        ("fork_session", {}),
        ("fork_session", {"session_id": "a", "at": 3}),
        ("fork_session", {"session_id": "a", "at": "x" * 100_000}),
        ("fork_session", {"session_id": "a", "reseed": "perhaps"}),
        ("rewind_session", {"session_id": "a"}),
        ("rewind_session", {"session_id": "a", "to": None}),
        ("rewind_session", {"session_id": "a", "to": True}),
        ("rewind_session", {"session_id": "a", "to": 1.5}),
        ("rewind_session", {"session_id": "a", "to": [1]}),
        ("rewind_session", {"session_id": "a", "to": "x" * 100_000}),
        ("interrupt_execution", {"execution_id": []}),
    ],
    ids=str,
)
async def test_wrong_types_are_clear_errors(runtime: Runtime, era: str, tool: str, arguments: dict[str, Any]):
    async with connected(runtime, era) as caller:
        said = await caller.refusal(tool, **arguments)
    assert 10 < len(said) < 3_000
    assert "Traceback" not in said
    assert "pydantic" not in said


async def test_wrong_arguments_are_told_with_their_names_their_values_and_what_they_must_be(caller: Caller):
    assert await caller.refusal("rewind_session", session_id="a") == (
        "invalid-argument: rewind_session needs the argument `to`. `to` must be an integer or a string of at most "
        "64 characters (How many of the last to undo, or execution_id of the first)"
    )
    said = await caller.refusal("execute_code", code="1", wait_s=-1, timeout_s="soon")
    assert said.startswith('invalid-argument: execute_code cannot take timeout_s="soon", wait_s=-1. ')
    assert "`wait_s` must be a number from 0 to 300 (" in said
    said = await caller.refusal("install_dependencies", session_id="a", packages=[3])
    assert "`packages` must be a list of 1 to 100 items, each a string (" in said


@pytest.mark.parametrize("era", ERAS)
async def test_an_unknown_tool_is_a_clear_error(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        try:
            said = await caller.refusal("no_such_tool")
        except MCPError as refused:
            said = refused.error.message
    assert "no_such_tool" in said


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    "uri",
    [
        "kernel://",
        "kernel:///",
        "kernel://x",
        "nonsense",
        "",
        "file:///etc/passwd",
        "execution://../output",
        "execution://" + "a" * 32 + "/displays/..%2f..%2fjournal.sqlite",
        "execution://" + "a" * 32 + "/output?offset=x",
        "session://" + "x" * 100_000 + "/notebook",
    ],
    ids=range(10),
)
async def test_a_resource_that_is_none_is_a_clear_error(runtime: Runtime, era: str, uri: str):
    async with connected(runtime, era) as caller:
        with pytest.raises(MCPError):
            await caller.read(uri)


@pytest.mark.parametrize(
    ("query", "text"),
    [("offset=-5", "text\n"), ("limit=-1", "text\n"), ("offset=0&limit=0", "text\n"), ("offset=9", "")],
)
async def test_odd_ranges_of_an_output_are_taken_for_what_they_can_mean(
    caller: Caller, shared_session: str, query: str, text: str
):
    result = await caller.execute("print('text')", shared_session)
    assert await caller.read_text(f"execution://{result.execution_id}/output?{query}") == text


@pytest.mark.parametrize("query", [f"offset={10**30}", f"limit={10**30}", "limit=1e3", "offset=x"])
async def test_a_range_that_is_none_is_refused_or_empty(caller: Caller, shared_session: str, query: str):
    result = await caller.execute("print('text')", shared_session)
    with suppress(MCPError):
        assert await caller.read_text(f"execution://{result.execution_id}/output?{query}") in ("", "text\n")


# Floods


@pytest.mark.parametrize("era", ERAS)
async def test_five_hundred_calls_at_once_are_all_answered(runtime: Runtime, shared_session: str, era: str):
    answers: list[CallToolResult] = []
    async with connected(runtime, era) as caller:
        await caller.execute("count = 0", shared_session)

        async def call(number: int) -> None:
            arguments = {"code": f"count += 1\n{number}", "session_id": shared_session}
            answers.append(await caller.client.call_tool("execute_code", arguments))

        async with anyio.create_task_group() as tasks:
            for number in range(500):
                tasks.start_soon(call, number)
        statuses = Counter(answer.structured_content["status"] for answer in answers if answer.structured_content)
        assert statuses.total() == 500
        assert statuses.keys() <= {"ok", "rejected"}
        assert statuses["ok"] >= 32
        refused = [text_of(answer) for answer in answers if answer.is_error]
        assert all("busy: " in text for text in refused)
        assert (await caller.execute("count", shared_session)).result == str(statuses["ok"])


async def test_a_flood_of_new_sessions_is_held_back(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, max_sessions=3) as runtime,
        connected(runtime) as caller,
    ):
        results: list[str] = []

        async def call() -> None:
            results.append((await caller.execute("1")).status)

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(call)
        assert Counter(results) == {"ok": 3, "rejected": 197}
        assert len((await caller.fields("list_sessions"))["sessions"]) == 3


async def test_looking_while_cells_speak_breaks_nothing(runtime: Runtime, caller: Caller, shared_session: str):
    running = await caller.execute(
        "import sys\nfor i in range(20_000): print(i); print(i, file=sys.stderr)", shared_session, wait_s=0
    )

    async def look() -> None:
        for _ in range(30):
            await caller.fields("list_sessions")
            await caller.get(running.execution_id)
            await caller.read(f"execution://{running.execution_id}/output?limit=10")

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(look)
    assert (await caller.ended(running.execution_id)).status == "ok"


async def test_a_listing_of_thousands_of_files_fits_into_a_message(caller: Caller):
    result = await caller.execute("for i in range(6_000): open(f'{i:05}' + 'n' * 60, 'w').close()")
    answer = await caller.call("list_session_files", session_id=result.session_id)
    assert len(answer.model_dump_json()) < 1024 * 1024
    assert "more: pass after=" in text_of(answer)
    await caller.fields("clear_session", session_id=result.session_id)
