"""Folders of the host in sessions of every origin, and uploads from them that pass through no model."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import Caller, connected, opened_runtime, text_of
from keep_alive_servers import kept_directory

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio

LOOK = """
import os
def refused(action):
    try: action()
    except OSError as error: return error.strerror
    return 'done'
str([open('/mnt/sales/q1.csv').read(), refused(lambda: open('/mnt/sales/new', 'w')),
 refused(lambda: os.chmod('/mnt/sales/q1.csv', 0o777)),
 refused(lambda: open('/mnt/out/' + os.urandom(8).hex(), 'x').write('x')),
 refused(lambda: os.chmod(open('/mnt/out/' + os.urandom(8).hex(), 'x').name, 0o4755)),
 sorted(os.listdir('/mnt'))])
"""
SEEN = repr(
    "['a,b\\n1,2\\n', 'Read-only file system', 'Read-only file system', 'done', 'Operation not permitted', "
    "['data', 'out', 'sales']]"
)


def shown_folders(root: Path) -> dict[str, object]:
    """A folder to read and one to write, open to the users that sessions of a root's server have."""
    sales, out = root / "sales", root / "out"
    for folder, mode in ((sales, 0o755), (out, 0o777)):
        folder.mkdir()
        folder.chmod(mode)
    (sales / "q1.csv").write_text("a,b\n1,2\n")
    (sales / "link").symlink_to("/etc/shadow")
    return {"sales": str(sales), "out": {"path": str(out), "writable": True}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return shown_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str,
    default_environment: Environment,
    tmp_path_factory: pytest.TempPathFactory,
    folders: dict[str, object],
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(
        default_environment,
        tmp_path_factory.mktemp("belljar"),
        folders={**folders, "hers": {"path": folders["sales"], "owners": ["ann"]}},
        fork_start=True,
        hibernate=True,
        pool_size=1,
    ) as runtime:
        yield runtime


async def test_sessions_of_every_origin_see_the_folders(runtime: Runtime):
    async with connected(runtime) as caller:
        cold = (await caller.execute("0")).session_id
        assert (await caller.execute(LOOK, cold)).result == SEEN
        if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        await until(lambda: len(runtime.sessions.pool))
        pooled = (await caller.execute("0")).session_id
        assert (await caller.execute(LOOK, pooled)).result == SEEN
        forked = (await caller.fields("fork_session", session_id=pooled))["session_id"]
        assert (await caller.execute(LOOK, forked)).result == SEEN
        session = runtime.sessions.get(pooled, "local")
        await runtime.sessions.endings.hibernate(session, "to be woken")
        assert (await caller.execute(LOOK, pooled)).result == SEEN
        fork_of_fork = (await caller.fields("fork_session", session_id=forked))["session_id"]
        assert (await caller.execute(LOOK, fork_of_fork)).result == SEEN
        for session_id in (cold, pooled, forked, fork_of_fork):
            await caller.fields("clear_session", session_id=session_id)


async def test_the_tool_names_the_folders_that_the_caller_sees(caller: Caller):
    (described,) = [tool for tool in (await caller.client.list_tools()).tools if tool.name == "execute_code"]
    assert "/mnt/sales (read-only)" in (described.description or "")
    assert "/mnt/out (writable)" in (described.description or "")
    assert "/mnt/hers" not in (described.description or "")


async def test_another_owners_folder_is_in_no_session_of_ours(runtime: Runtime, caller: Caller):
    session = runtime.sessions.create("key:ann")
    try:
        execution = session.submit(make_cell(runtime.settings, "open('/mnt/hers/q1.csv').read()"))
        await execution.wait(60)
        assert execution.result().result == "'a,b\\n1,2\\n'"
    finally:
        await runtime.sessions.clear(session.id, "key:ann")
    refusal = await caller.refusal(
        "upload_file", session_id=await caller.new_session(), name="x", path="/mnt/hers/q1.csv"
    )
    assert refusal.startswith("file-missing: '/mnt/hers/q1.csv' is in no folder that sessions see")


async def test_a_file_of_a_folder_is_uploaded_by_its_path(caller: Caller):
    session_id = await caller.new_session()
    file = await caller.fields("upload_file", session_id=session_id, name="in/q1.csv", path="/mnt/sales/q1.csv")
    assert (file["name"], file["size"]) == ("in/q1.csv", 8)
    assert (await caller.execute("open('in/q1.csv').read()", session_id)).result == "'a,b\\n1,2\\n'"
    refusal = await caller.refusal("upload_file", session_id=session_id, name="x", path="/mnt/sales/link")
    assert "symlink" in refusal
    refusal = await caller.refusal("upload_file", session_id=session_id, name="x", path="/mnt/sales/q1.csv", text="")
    assert "exactly one of text, base64, url and path is taken, and the call has text, path" in refusal


async def test_a_folder_that_was_replaced_is_shown_as_it_is_now(default_environment: Environment, tmp_path: Path):
    folders = shown_folders(tmp_path)
    sales = Path(str(folders["sales"]))
    data = tmp_path / "belljar"
    data.mkdir()
    async with (
        opened_runtime(default_environment, data, folders=folders, pool_size=0) as runtime,
        connected(runtime) as caller,
    ):
        sales.rename(tmp_path / "old")
        answer = await caller.call("execute_code", code="1")
        assert f"folder {sales} cannot be shown: No such file or directory" in text_of(answer)
        sales.mkdir(mode=0o755)
        (sales / "q2.csv").write_text("new")
        assert (await caller.execute("open('/mnt/sales/q2.csv').read()")).result == "'new'"


async def test_a_session_outlives_its_server_only_with_folders_that_are_still_shown(
    default_environment: Environment, tmp_path: Path
):

    folders = shown_folders(tmp_path)
    data = tmp_path / "belljar"
    data.mkdir()
    directories = kept_directory(default_environment, data)
    directory = next(directories)
    with directory.server(BELLJAR_FOLDERS=json.dumps(folders), BELLJAR_FORK_START="false") as server_run:
        async with server_run.client() as client:
            session_id = (await Caller(client).execute("x = 1")).session_id
        server_run.kill()
    lasting: dict[str, object] = {"keep_alive": True, "keep_alive_s": 60, "pool_size": 0}
    async with (
        opened_runtime(default_environment, data, folders=folders, **lasting) as runtime,
        connected(runtime) as caller,
    ):
        found = await caller.execute(f"x\n{LOOK}", session_id)
        assert (found.result, found.state) == (SEEN, "kept")
    fewer = {"sales": folders["sales"]}
    async with (
        opened_runtime(default_environment, data, folders=fewer, **lasting) as runtime,
        connected(runtime) as caller,
    ):
        answer = await caller.call("execute_code", code="x", session_id=session_id)
        assert "folders that the settings do not show it any more: out" in text_of(answer)
    for _ in directories:
        pass
