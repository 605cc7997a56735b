"""Tools and tokens of sessions that outlive their server: one is killed amid a call, and the next one goes on."""

import json
from collections.abc import Generator
from dataclasses import dataclass

import anyio
import pytest
from calls import Caller, held
from keep_alive_servers import KeptDirectory, ServerRun, kept_directory
from tool_cells import awkward, slow_call

from belljar.environments import Environment
from belljar.models import ExecutionResult
from belljar.toolbox.base import CUT_OFF
from waiting import until

pytestmark = pytest.mark.anyio

POLICY = """
[[tools]]
match = "awkward.getItem"
decision = "deny"
reason = "items are ours"

[[tools]]
match = "awkward.nothing"
max_calls = 2

[privacy]
hide = ["email"]

[[privacy.reveal]]
tools = ["awkward.query"]
"""
GONE = "the host has closed the connection; whether the call was made is not known"
CALLS = "from servers.awkward import add, nothing, query, slow\nimport toolbox\n"
CATCHING = f"""{CALLS}
try:
    %s
except toolbox.ToolError as error:
    print('caught:', error)
print(add(1, 2))
"""


@dataclass
class TakenOver:
    """The second server, and what the first one was at when it was killed."""

    server_run: ServerRun
    directory: KeptDirectory
    idle: ExecutionResult
    caught: ExecutionResult
    uncaught: ExecutionResult
    later: ExecutionResult


@pytest.fixture(scope="module")
def taken_over(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[TakenOver]:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"awkward": awkward()}}))
    (folder / "policy.toml").write_text(POLICY)
    chosen = {"BELLJAR_MCP_CONFIG": str(folder / "servers.json"), "BELLJAR_POLICY": str(folder / "policy.toml")}
    directories = kept_directory(default_environment, folder)
    directory = next(directories)
    with directory.server(**chosen) as first:
        results = anyio.run(make_busy, first)
        first.kill()
    with directory.server(**chosen) as second:
        yield TakenOver(second, directory, *results)
    for _ in directories:
        pass


async def make_busy(server_run: ServerRun) -> list[ExecutionResult]:
    folder = server_run.directory.folder
    async with server_run.client() as client:
        caller = Caller(client)
        idle = await caller.execute(f"{CALLS}nothing()\ntoken = query('ann@example.com', None)['from']\ntoken")
        assert idle.result == "'[EMAIL_1]'"
        for name in ("one", "two"):
            (folder / name).mkdir()
        caught = await caller.execute(CATCHING % slow_call(folder / "one"), wait_s=0)
        uncaught = await caller.execute(f"{CALLS}add(1, 2)\n{slow_call(folder / 'two')}", wait_s=0)
        later = await caller.execute(f"{CALLS}{held()}print(add(3, 4))", wait_s=0)

        async def is_held() -> bool:
            return "held" in (await caller.get(later.execution_id, wait_s=0)).stdout

        await until(lambda: all((folder / name / "started").exists() for name in ("one", "two")))
        await until(is_held)
        return [idle, caught, uncaught, later]


async def test_a_call_that_was_under_way_ends_in_an_error_that_can_be_caught_and_the_next_one_works(
    taken_over: TakenOver,
) -> None:
    async with taken_over.server_run.client() as client:
        done = await Caller(client).ended(taken_over.caught.execution_id)
        assert (done.status, done.state) == ("ok", "kept")
        assert done.stdout == f"caught: {GONE}\n{{'sum': 3}}\n"


async def test_the_ledger_has_the_calls_of_both_servers_and_says_which_was_cut_off(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        done = await Caller(client).ended(taken_over.uncaught.execution_id)
        assert done.status == "error"
        assert GONE in str(done.error)
        told = [(call.tool, call.state, call.reason) for call in done.calls]
        assert told == [("add", "returned", ""), ("slow", "failed", CUT_OFF)]


async def test_a_cell_that_went_on_calls_tools_of_the_new_server(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        await caller.release(taken_over.later.session_id)
        done = await caller.ended(taken_over.later.execution_id)
        assert (done.status, done.stdout) == ("ok", "held\n{'sum': 7}\n")


async def test_functions_from_before_work_and_others_can_be_imported_under_the_same_policy(
    taken_over: TakenOver,
) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        session_id = taken_over.idle.session_id
        assert (await caller.execute("add(1, 2)", session_id)).result == "{'sum': 3}"
        assert (await caller.execute("from servers.awkward import numbers\nnumbers()[0]", session_id)).result == "'42'"
        refused = await caller.execute("from servers.awkward import getItem\ngetItem()", session_id)
        assert "items are ours" in str(refused.error)
        exhausted = await caller.execute("nothing()\nnothing()", session_id)
        assert "2 calls in this session are the most" in str(exhausted.error)
        assert [call.state for call in exhausted.calls] == ["returned", "refused"]


async def test_tokens_mean_what_they_meant(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        code = "told = query(token, 'ann@example.com' )\nprint(token, told, 'bob@example.com')"
        done = await caller.execute(code, taken_over.idle.session_id)
        assert done.stdout == "[EMAIL_1] {'from': '[EMAIL_1]', 'since': '[EMAIL_1]'} [EMAIL_2]\n"
        fork = await caller.fields("fork_session", session_id=taken_over.idle.session_id)
        again = await caller.execute("query(token, None)['from'], add(1, 1)", fork["session_id"])
        assert again.result == "('[EMAIL_1]', {'sum': 2})"


async def test_what_tokens_stand_for_is_on_no_disk(taken_over: TakenOver) -> None:
    files = [
        path for path in taken_over.directory.folder.rglob("*") if path.is_file() and "/workspace/" not in str(path)
    ]
    said = [path for path in files if b"ann@example.com" in path.read_bytes()]
    # The code of a cell is on record as it was sent.
    assert {path.name.partition("-")[0] for path in said} <= {"journal.sqlite"}


async def test_the_tree_is_gone_with_the_last_session(taken_over: TakenOver) -> None:
    async with taken_over.server_run.client() as client:
        caller = Caller(client)
        for listed in (await caller.fields("list_sessions"))["sessions"]:
            await caller.fields("clear_session", session_id=listed["session_id"])
    taken_over.directory.look()
    taken_over.server_run.stop()
    await taken_over.directory.until_empty()
    assert [*(taken_over.directory.folder / "toolbox" / "trees").iterdir()] == []
