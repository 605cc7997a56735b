"""`workspace/`: what one session keeps, the owner's others find."""

import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.executions.shared_workspace import SharedWorkspace, WorkspaceFolders
from belljar.files.workspace import Workspace, scan_folder
from belljar.models import ExecutionResult
from belljar.runtime import Runtime, open_runtime
from belljar.sessions.session import Session
from shared_environment import settings_with

pytestmark = pytest.mark.anyio

ROOM = 10_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    settings = settings_with(
        data_directory=tmp_path_factory.mktemp("sharing"),
        environment=str(default_environment.python),
        workspace="on",
        workspace_mb=1,
        pool_size=1,
        preload=[],
    )
    async with open_runtime(settings) as runtime:
        yield runtime


async def run(session: Session, code: str) -> ExecutionResult:
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(60)
    return execution.result()


async def said(session: Session, code: str) -> str:
    result = await run(session, code)
    assert result.status == "ok", result.error
    return "".join(result.output)


# In sessions


async def test_what_one_session_keeps_a_later_one_finds(runtime: Runtime) -> None:
    first = runtime.sessions.create("ann")
    code = """
from workspace_state import *
save('state.json', {'page': 3, 'é': [1, None]})
save('rows.csv', [{'a': 1, 'b': 'x,y'}, {'a': 2, 'b': 'ü'}])
save('runs/notes.txt', 'grüße')
save('raw.bin', bytes(range(256)))
open('workspace/plain.txt', 'w').write('by hand')
"""
    result = await run(first, code)
    assert [file.name for file in result.files] == [
        f"workspace/{name}" for name in ("plain.txt", "raw.bin", "rows.csv", "runs/notes.txt", "state.json")
    ]
    await runtime.sessions.clear(first.id, "ann")
    second = runtime.sessions.create("ann")
    code = """
from workspace_state import *
print(names())
print(load('state.json'), load('rows.csv'), load('runs/notes.txt'), load('raw.bin') == bytes(range(256)))
print(open('workspace/plain.txt').read(), load('missing.json', default=7))
"""
    result = await run(second, code)
    assert (result.error, result.stdout) == (
        None,
        "['plain.txt', 'raw.bin', 'rows.csv', 'runs/notes.txt', 'state.json']\n"
        "{'page': 3, 'é': [1, None]} [{'a': '1', 'b': 'x,y'}, {'a': '2', 'b': 'ü'}] grüße True\n"
        "by hand 7\n",
    )
    # It came from elsewhere, so it is not this cell's doing.
    assert result.files == []


async def test_sessions_that_run_at_once_see_what_the_other_did_last(runtime: Runtime) -> None:
    one, two = runtime.sessions.create("bob"), runtime.sessions.create("bob")
    await said(one, "open('workspace/a', 'w').write('1'); open('workspace/b', 'w').write('1')")
    assert await said(two, "print(open('workspace/a').read())\nopen('workspace/a', 'w').write('22')") == "1\n"
    assert await said(one, "print(open('workspace/a').read())\nimport os; os.remove('workspace/b')") == "22\n"
    assert await said(two, "import os; print(sorted(os.listdir('workspace')))") == "['a']\n"


async def test_another_owner_finds_nothing_of_it(runtime: Runtime) -> None:
    await said(runtime.sessions.create("carl"), "open('workspace/mine', 'w').write('1')")
    assert await said(runtime.sessions.create("carl2"), "import os; print(os.listdir('workspace'))") == "[]\n"


async def test_what_is_too_much_stays_in_its_session_and_is_told(runtime: Runtime) -> None:
    session = runtime.sessions.create("dora")
    told = await said(
        session, "open('workspace/big', 'wb').write(bytes(2 << 20)); open('workspace/small', 'w').write('1')"
    )
    assert "not kept for other sessions: 'big' (2,097,152 bytes, and" in told
    assert await said(runtime.sessions.create("dora"), "import os; print(os.listdir('workspace'))") == "['small']\n"


async def test_links_and_devices_are_not_followed_or_kept(runtime: Runtime, tmp_path: Path) -> None:
    session = runtime.sessions.create("emil")
    code = """
import os
os.symlink('/etc/passwd', 'workspace/passwd'); os.mkfifo('workspace/pipe')
open('workspace/real', 'w').write('1')
"""
    assert await said(session, code) == ""
    other = runtime.sessions.create("emil")
    assert await said(other, "import os; print(os.listdir('workspace'))") == "['real']\n"
    # A folder that is a link now is left alone, and what was kept stays.
    assert await said(session, "import shutil\nshutil.move('workspace', 'away'); os.symlink('away', 'workspace')") == ""
    assert await said(other, "print(os.listdir('workspace'))") == "['real']\n"


async def test_a_rewind_does_not_take_back_what_was_kept(runtime: Runtime) -> None:
    session = runtime.sessions.create("fay")
    await said(session, "open('workspace/n', 'w').write('1')")
    await session.session_kernel.take_checkpoint()
    await run(session, "x = 1")
    result = await run(session, "open('workspace/n', 'w').write('22'); y = 2")
    if (
        not session.session_kernel.checkpoints.holds(result.execution_id)
        and not session.session_kernel.checkpoints.count
    ):
        pytest.skip(f"no earlier state is kept here: {session.session_kernel.checkpoints.refusal}")
    await session.rewind(3)
    assert await said(session, "print(open('workspace/n').read())") == "22\n"


async def test_a_process_that_dies_has_kept_what_it_wrote(runtime: Runtime) -> None:
    session = runtime.sessions.create("gil")
    result = await run(session, "import os\nwith open('workspace/n', 'w') as f: f.write('1')\nos._exit(1)")
    assert result.status == "died"
    assert await said(runtime.sessions.create("gil"), "print(open('workspace/n').read())") == "1\n"


async def test_a_fork_goes_on_with_the_same_files(runtime: Runtime) -> None:
    session = runtime.sessions.create("hal")
    await said(session, "open('workspace/n', 'w').write('1')")
    fork, _ = await runtime.sessions.fork(session.id, "hal")
    await said(session, "open('workspace/n', 'w').write('22')")
    assert await said(fork, "print(open('workspace/n').read())") == "22\n"


# Its parts


class Place:
    """A session folder without a session."""

    def __init__(self, folder: Path, shared_workspaces: WorkspaceFolders, name: str, owner: str = "ann") -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.workspace = Workspace(self.folder)
        self.memory = folder / f"{name}.json"
        self._folder = shared_workspaces.of(owner)
        self.sharing = SharedWorkspace(self._folder, self.workspace, self.memory)

    async def bring_in(self, room: int = ROOM) -> list[str]:
        return await self.sharing.bring_in(room)

    async def take_out(self) -> list[str]:
        return await self.sharing.take_out(scan_folder(self.workspace))

    async def write(self, name: str, text: str) -> None:
        await self.bring_in()
        (self.folder / "workspace" / name).write_text(text)
        assert await self.take_out() == []

    async def read(self) -> dict[str, str]:
        await self.bring_in()
        return {path.name: path.read_text() for path in sorted((self.folder / "workspace").iterdir())}

    def wake(self) -> None:
        self.sharing = SharedWorkspace(self._folder, self.workspace, self.memory)


@pytest.fixture
def shared_workspaces(tmp_path: Path) -> WorkspaceFolders:
    return WorkspaceFolders(tmp_path / "shared_workspaces", limit_mb=1)


async def test_a_change_here_is_not_overwritten_by_an_older_one_from_there(
    tmp_path: Path, shared_workspaces: WorkspaceFolders
) -> None:
    one, two = Place(tmp_path, shared_workspaces, "one"), Place(tmp_path, shared_workspaces, "two")
    await one.write("n", "1")
    await two.bring_in()
    # By something that goes on between two cells.
    (two.folder / "workspace" / "n").write_text("two's own")
    await one.write("n", "one's later")
    assert await two.read() == {"n": "two's own"}
    await two.take_out()
    assert await one.read() == {"n": "two's own"}


async def test_a_session_that_slept_through_a_change_gets_it(
    tmp_path: Path, shared_workspaces: WorkspaceFolders
) -> None:
    one, two = Place(tmp_path, shared_workspaces, "one"), Place(tmp_path, shared_workspaces, "two")
    await one.write("n", "1")
    await one.write("gone", "1")
    assert await two.read() == {"gone": "1", "n": "1"}
    two.wake()
    await one.write("n", "22")
    (one.folder / "workspace" / "gone").unlink()
    await one.take_out()
    assert await two.read() == {"n": "22"}


async def test_what_was_written_before_the_server_went_down_is_taken_out_by_the_next(
    tmp_path: Path, shared_workspaces: WorkspaceFolders
) -> None:
    one = Place(tmp_path, shared_workspaces, "one")
    await one.write("n", "1")
    (one.folder / "workspace" / "n").write_text("unsaved")
    one.wake()
    assert await one.read() == {"n": "unsaved"}
    await one.take_out()
    assert await Place(tmp_path, shared_workspaces, "two").read() == {"n": "unsaved"}


async def test_what_does_not_fit_into_a_session_is_left_where_it_is_and_told(
    tmp_path: Path, shared_workspaces: WorkspaceFolders
) -> None:
    await Place(tmp_path, shared_workspaces, "one").write("n", "x" * 100)
    two = Place(tmp_path, shared_workspaces, "two")
    told = await two.bring_in(room=50)
    assert told == ["workspace/: not brought in: 'n' (no room for its 100 bytes in the session)"]
    assert await two.take_out() == []
    assert await Place(tmp_path, shared_workspaces, "three").read() == {"n": "x" * 100}


async def test_a_folder_that_goes_as_a_whole_comes_back(tmp_path: Path, shared_workspaces: WorkspaceFolders) -> None:
    one = Place(tmp_path, shared_workspaces, "one")
    await one.write("n", "1")
    (one.folder / "workspace").rename(one.folder / "elsewhere")
    assert await one.take_out() == []
    assert await one.read() == {"n": "1"}


async def test_something_else_of_that_name_is_in_the_way_and_told(
    tmp_path: Path, shared_workspaces: WorkspaceFolders
) -> None:
    one = Place(tmp_path, shared_workspaces, "one")
    (one.folder / "workspace").symlink_to("/etc")
    told = await one.bring_in()
    assert len(told) == 1
    assert "is a symlink, not a directory" in told[0]
    assert await one.take_out() == []


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux alone")
async def test_a_name_that_is_no_text_is_told_and_left(tmp_path: Path, shared_workspaces: WorkspaceFolders) -> None:
    one = Place(tmp_path, shared_workspaces, "one")
    await one.bring_in()
    (one.folder / "workspace" / os.fsdecode(b"\xff")).write_text("1")
    (one.folder / "workspace" / "n").write_text("1")
    told = await one.take_out()
    assert len(told) == 1
    assert "is not valid Unicode" in told[0]
    assert await Place(tmp_path, shared_workspaces, "two").read() == {"n": "1"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"n": 1}', '{"n": [[1], [2]]}'])
async def test_a_memory_that_cannot_be_read_is_none(
    tmp_path: Path, shared_workspaces: WorkspaceFolders, content: str
) -> None:
    await Place(tmp_path, shared_workspaces, "one").write("n", "1")
    two = Place(tmp_path, shared_workspaces, "two")
    two.memory.write_text(content)
    two.wake()
    assert await two.read() == {"n": "1"}
