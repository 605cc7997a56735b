"""Forks and rewinds as a client meets them: what comes along, what is undone, and what is refused."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest
from calls import ERAS, Caller, connected, held, opened_runtime, session_in, text_of, until_said

from belljar.environments import Environment
from belljar.files import disk_usage
from belljar.runtime import Runtime
from belljar.sandboxes.limits.cgroup_discovery import read_control_groups
from belljar.sessions import checkpoints
from waiting import until

pytestmark = pytest.mark.anyio

FORKING: dict[str, Any] = {"fork_start": True, "preload": [], "pool_size": 0}
NOBODY = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """An engine that keeps a state before every cell, however fast they follow each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
        folder = tmp_path_factory.mktemp("belljar")
        async with opened_runtime(default_environment, folder, **FORKING, checkpoints=4) as runtime:
            if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
                pytest.skip(f"sessions cannot be forked here: {gap}")
            assert await runtime.starter.wait_until_warm(runtime.settings.environment)
            yield runtime


@pytest.fixture
async def session_id(caller: Caller) -> AsyncGenerator[str]:
    """A session that is gone after the test, and its forks with it."""
    before = {one["session_id"] for one in (await caller.fields("list_sessions"))["sessions"]}
    yield await caller.new_session()
    for one in (await caller.fields("list_sessions"))["sessions"]:
        if one["session_id"] not in before:
            await caller.fields("clear_session", session_id=one["session_id"])


# Forks


@pytest.mark.parametrize("era", ERAS)
async def test_a_fork_has_the_same_state_and_goes_its_own_way(runtime: Runtime, session_id: str, era: str):
    async with connected(runtime, era) as caller:
        await caller.execute("import math\nx = [1]\nopen('f', 'w').write('one')", session_id)
        answer = await caller.call("fork_session", session_id=session_id)
        fork = session_in(answer)
        await caller.execute("x.append('fork')\nopen('f', 'w').write('fork')", fork)
        await caller.execute("x.append('origin')", session_id)
        told = [await caller.execute("x, open('f').read(), math.pi > 3", one) for one in (session_id, fork)]
    assert [result.result for result in told] == ["([1, 'origin'], 'one', True)", "([1, 'fork'], 'fork', True)"]
    assert fork != session_id


async def test_a_fork_is_told_in_text_and_in_fields(caller: Caller, session_id: str):
    await caller.execute("first, second = 1, 2", session_id)
    answer = await caller.call("fork_session", session_id=session_id)
    fields = answer.structured_content
    assert fields is not None
    assert fields.keys() == {
        "session_id",
        "origin",
        "variables",
        "lost",
        "session_info",
        "session_ids",
        "unmade",
    }
    assert (fields["origin"], fields["variables"], fields["lost"]) == (session_id, ["first", "second"], [])
    text = text_of(answer)
    assert text.startswith(f"session_id: {fields['session_id']}\n")
    assert session_id in text
    assert "Variables: first, second." in text
    assert fields["session_info"]["instructions"] in text
    assert "Did not come along" not in text
    # The next answer need not say it again.
    assert (await caller.execute("first", fields["session_id"])).session_info is None
    listed = (await caller.fields("list_sessions"))["sessions"]
    assert [one["reason"] for one in listed if one["session_id"] == fields["session_id"]] == [f"fork of {session_id}"]


async def test_several_forks_are_made_with_one_call_each_of_the_same_state(caller: Caller, session_id: str):
    await caller.execute("x = [1]\nopen('f', 'w').write('one')", session_id)
    answer = await caller.call("fork_session", session_id=session_id, count=5)
    told = answer.structured_content
    assert told is not None
    forks = told["session_ids"]
    assert (len({*forks, session_id}), told["session_id"], told["unmade"]) == (6, forks[0], "")
    assert text_of(answer).startswith(f"session_ids: {', '.join(forks)}\n")
    for number, fork in enumerate(forks):
        code = f"x.append({number})\nopen('f', 'a').write('{number}')\nx, open('f').read()"
        assert (await caller.execute(code, fork)).result == f"([1, {number}], 'one{number}')"
    assert (await caller.execute("x, open('f').read()", session_id)).result == "([1], 'one')"


@pytest.mark.parametrize("count", [0, -1, 257, 10_000, 10**30])
async def test_a_count_that_cannot_be_is_refused_and_makes_nothing(caller: Caller, session_id: str, count: int):
    await caller.execute("x = 1", session_id)
    before = len((await caller.fields("list_sessions"))["sessions"])
    refusal = await caller.refusal("fork_session", session_id=session_id, count=count)
    assert refusal.startswith(f"invalid-argument: count is {count}")
    assert "from 1 to 256" in refusal
    assert len((await caller.fields("list_sessions"))["sessions"]) == before


async def test_a_fork_that_has_no_room_for_the_packages_is_refused_and_nothing_of_it_stays(
    runtime: Runtime, caller: Caller, session_id: str, monkeypatch: pytest.MonkeyPatch
):
    await caller.execute("x = 1", session_id)
    layer = runtime.sessions.get(session_id, "local").folders.layer
    layer.mkdir(exist_ok=True)
    for number in range(20):
        (layer / f"package{number}.py").touch()
    monkeypatch.setattr(disk_usage, "_FEWEST_FILES", 10)
    monkeypatch.setattr(disk_usage, "_FILES_PER_MB", 0)
    # A sandbox for the next session is made meanwhile, and has a folder there.
    await until(lambda: runtime.sessions.pool.is_full)
    before = sorted(path.name for path in layer.parents[1].iterdir())

    refused = await caller.refusal("fork_session", session_id=session_id)

    assert refused.startswith("too-large: disk_full: the files and packages of the session")
    assert "disk_mb = 2048 has room for 2,048 MB in 10" in refused
    assert sorted(path.name for path in layer.parents[1].iterdir()) == before
    monkeypatch.undo()
    fork = session_in(await caller.call("fork_session", session_id=session_id))
    assert len([*runtime.sessions.get(fork, "local").folders.layer.iterdir()]) == 20
    assert (await caller.execute("x", fork)).result == "1"


async def test_a_fork_can_go_back_to_before_an_execution(caller: Caller, session_id: str):
    await caller.execute("x = 'early'\nopen('f', 'w').write('early')", session_id)
    late = await caller.execute("x = 'late'\nopen('f', 'w').write('late')\nopen('g', 'w').close()", session_id)
    answer = await caller.call("fork_session", session_id=session_id, at=late.execution_id)
    assert f"before execution {late.execution_id}" in text_of(answer)
    look = "import os\nx, open('f').read(), sorted(os.listdir())"
    assert (await caller.execute(look, session_in(answer))).result == "('early', 'early', ['f'])"
    assert (await caller.execute(look, session_id)).result == "('late', 'late', ['f', 'g'])"
    answer = await caller.call("fork_session", session_id=session_id, at=2)  # the look above was the last
    assert "as it was 2 executions ago" in text_of(answer)
    assert (await caller.execute(look, session_in(answer))).result == "('early', 'early', ['f'])"
    assert "cannot be taken back" in await caller.refusal("fork_session", session_id=session_id, at=99)


async def test_random_numbers_go_on_alike_unless_others_are_asked_for(caller: Caller, session_id: str):
    await caller.execute("import random\nrandom.seed(7)", session_id)
    same = await caller.fields("fork_session", session_id=session_id)
    other = await caller.fields("fork_session", session_id=session_id, reseed=True)
    ids = (session_id, same["session_id"], other["session_id"])
    drawn = [(await caller.execute("random.random()", one)).result for one in ids]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_what_cannot_come_along_is_named(caller: Caller, session_id: str):
    await caller.execute(
        "import socket, subprocess, threading\n"
        "worker = threading.Thread(target=threading.Event().wait, name='beside', daemon=True)\n"
        "worker.start()\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pair = socket.socketpair()",
        session_id,
    )
    answer = await caller.call("fork_session", session_id=session_id)
    assert answer.structured_content is not None
    lost = answer.structured_content["lost"]
    assert "thread beside" in lost
    assert any(name.startswith("process sleep (") for name in lost)
    assert "2 open sockets" in lost
    assert f"Did not come along: {', '.join(lost)}." in text_of(answer)
    still = await caller.execute("worker.is_alive(), child.poll() is None, pair[0].send(b'x')", session_id)
    assert still.result == "(True, True, 1)"


async def test_temporary_files_do_not_come_along_and_that_is_said(caller: Caller, session_id: str):
    await caller.execute("open('/tmp/mine', 'w').close()", session_id)
    fork = await caller.fields("fork_session", session_id=session_id)
    assert fork["lost"] == ["files in /tmp"]
    look = "import os\nos.path.exists('/tmp/mine')"
    assert [(await caller.execute(look, one)).result for one in (session_id, fork["session_id"])] == ["True", "False"]


async def test_files_in_home_do_not_come_along_and_that_is_said_but_of_caches(caller: Caller, session_id: str):
    await caller.execute("from pathlib import Path; Path('~/.cache/pip').expanduser().mkdir(parents=True)", session_id)
    assert (await caller.fields("fork_session", session_id=session_id))["lost"] == []
    home = (await caller.execute("Path('~/notes').expanduser().touch(); print(Path.home())", session_id)).stdout.strip()
    assert (await caller.fields("fork_session", session_id=session_id))["lost"] == [f"files in {home}"]


async def test_a_home_that_a_session_chose_in_its_own_folder_is_not_called_lost(caller: Caller, session_id: str):
    code = "import os; os.environ['HOME'] = os.environ['TMPDIR'] = os.getcwd(); open('mine', 'w').close()"
    await caller.execute(code, session_id)
    assert (await caller.fields("fork_session", session_id=session_id))["lost"] == []
    # Longer than a runner may tell.
    code = "deep = os.path.join(os.getcwd(), *['x' * 200] * 3); os.makedirs(deep); open(f'{deep}/mine', 'w').close()"
    await caller.execute(f"{code}; os.environ['HOME'] = deep", session_id)
    assert (await caller.fields("fork_session", session_id=session_id))["lost"] == []


async def test_a_fork_lives_on_without_its_origin_and_can_be_forked(caller: Caller, session_id: str):
    await caller.execute("x = 1", session_id)
    child = (await caller.fields("fork_session", session_id=session_id))["session_id"]
    await caller.fields("clear_session", session_id=session_id)
    await caller.execute("x += 1", child)
    grandchild = (await caller.fields("fork_session", session_id=child))["session_id"]
    await caller.fields("clear_session", session_id=child)
    assert (await caller.execute("x", grandchild)).result == "2"


async def test_forks_of_forks_end_somewhere_with_a_clear_word_and_the_last_one_works(caller: Caller, session_id: str):
    await caller.execute("x = 1", session_id)
    chain = [session_id]
    answer = await caller.call("fork_session", session_id=chain[-1])
    while not answer.is_error:
        chain.append(session_in(answer))
        assert len(chain) < 40
        answer = await caller.call("fork_session", session_id=chain[-1])
    assert text_of(answer).startswith("copy-refused: this session cannot be forked: ")
    assert "Fork an earlier one" in text_of(answer)
    assert len(chain) > 10
    assert (await caller.execute("x", chain[-1])).result == "1"


# Rewinds


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("form", ["number", "text", "id"])
async def test_a_rewind_brings_variables_and_files_back(runtime: Runtime, session_id: str, era: str, form: str):
    async with connected(runtime, era) as caller:
        await caller.execute("x = [1]\nopen('f', 'w').write('good')", session_id)
        spoiler = await caller.execute("x.clear()\nopen('f', 'w').write('spoiled')\ny = 2", session_id)
        to = {"number": 1, "text": "1", "id": spoiler.execution_id}[form]
        fields = await caller.fields("rewind_session", session_id=session_id, to=to)
        after = await caller.execute("x, open('f').read(), 'y' in globals()", session_id)
    assert fields == {
        "session_id": session_id,
        "to": spoiler.execution_id,
        "undone": [spoiler.execution_id],
        "lost": [],
    }
    assert after.result == "([1], 'good', False)"


async def test_several_executions_are_undone_at_once_and_named(caller: Caller, session_id: str):
    ran = [await caller.execute(f"x = {number}", session_id) for number in range(3)]
    answer = await caller.call("rewind_session", session_id=session_id, to=2)
    text = text_of(answer)
    undone = [ran[1].execution_id, ran[2].execution_id]
    assert answer.structured_content is not None
    assert (answer.structured_content["to"], answer.structured_content["undone"]) == (undone[0], undone)
    assert f"as it was before execution {undone[0]}" in text
    assert f"2 executions undone: {', '.join(undone)}." in text
    assert (await caller.execute("x", session_id)).result == "0"
    again = await caller.refusal("rewind_session", session_id=session_id, to=undone[1])
    assert again.startswith("no-checkpoint: ")
    assert "or was taken back" in again


async def test_a_cell_that_killed_the_session_can_be_undone_and_its_answer_says_how(caller: Caller, session_id: str):
    await caller.execute("precious = 42", session_id)
    answer = await caller.call("execute_code", code="import os\nos._exit(1)", session_id=session_id)
    assert answer.structured_content is not None
    died = answer.structured_content["execution_id"]
    assert f'rewind_session(session_id="{session_id}", to="{died}")' in text_of(answer)
    await caller.fields("rewind_session", session_id=session_id, to=died)
    after = await caller.execute("precious", session_id)
    assert (after.result, after.state, after.lost) == ("42", "kept", [])


async def test_sandboxes_that_were_kept_for_earlier_states_go_with_them(caller: Caller, session_id: str):
    if os.geteuid() != 0:
        pytest.skip("the namespaces of sandboxes are for root to see")

    def sandboxes() -> int:
        found: set[str] = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"/{session_id}/workspace" in (process / "mountinfo").read_text():
                    found.add(str((process / "ns/mnt").readlink()))
        return len(found)

    await caller.execute("x = 1", session_id)
    usual = sandboxes()
    died = await caller.execute("import os\nos._exit(1)", session_id)
    await caller.execute("y = 1", session_id)
    assert (usual, sandboxes()) == (1, 2), "one is kept for what can still be rewound to"
    await caller.fields("rewind_session", session_id=session_id, to=died.execution_id)
    assert sandboxes() == usual, "that of the states that were undone is gone"
    await caller.execute("import os\nos._exit(1)", session_id)
    for number in range(6):
        await caller.execute(f"z = {number}", session_id)
    assert sandboxes() == usual, "that of the states that were too many is gone"
    await caller.fields("clear_session", session_id=session_id)
    assert sandboxes() == 0


async def test_a_session_that_lost_nothing_is_not_told_of_rewinds(caller: Caller, session_id: str):
    answer = await caller.call("execute_code", code="import os\nos._exit(1)", session_id=session_id)
    assert "rewind_session" not in text_of(answer)
    raised = await caller.call("execute_code", code="1 / 0", session_id=session_id)
    assert "rewind_session" not in text_of(raised)


async def test_only_so_many_states_are_kept_and_the_refusal_names_them(caller: Caller, session_id: str):
    ran = [(await caller.execute(f"x = {number}", session_id)).execution_id for number in range(6)]
    refusal = await caller.refusal("rewind_session", session_id=session_id, to=ran[0])
    assert refusal.startswith("no-checkpoint: ")
    kept = [one for one in ran if one in refusal.partition("States are kept from before: ")[2]]
    assert kept == ran[-len(kept) :]
    assert len(kept) in (3, 4), "the state as it is now may be one of the four"
    info = next(one for one in (await caller.fields("list_sessions"))["sessions"] if one["session_id"] == session_id)
    assert info["checkpoints"] in (3, 4)
    assert (await caller.execute("x", session_id)).result == "5"
    far = await caller.refusal("rewind_session", session_id=session_id, to=6)
    places = far.partition("States are kept from before: ")[2].split(", ")
    assert '"' not in far, "there is none before it"
    for place in reversed(places):
        assert (await caller.fields("rewind_session", session_id=session_id, to=place))["to"] == place
    none = await caller.refusal("rewind_session", session_id=session_id, to=1)
    assert none.endswith("None is kept yet"), "what was undone is no place to go back to"


async def test_a_rewind_that_nobody_waits_for_is_finished_all_the_same(
    runtime: Runtime, caller: Caller, session_id: str
):
    await caller.execute("x = 1\nopen('f', 'w').write('1')", session_id)
    await caller.execute("x = 2\nopen('f', 'w').write('2')", session_id)
    rewinding = asyncio.create_task(runtime.sessions.get(session_id, "local").rewind(1))
    await anyio.lowlevel.checkpoint()
    rewinding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rewinding
    assert (await caller.execute("x, open('f').read()", session_id)).result == "(1, '1')"


async def test_a_session_may_be_rewound_by_itself_when_it_dies(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
    chosen = {**FORKING, "on_death": "rewind", "memory_mb": 300}
    async with (
        opened_runtime(default_environment, tmp_path, **chosen) as runtime,
        connected(runtime) as caller,
    ):
        # The copies of a session that started cold end with it.
        assert await runtime.starter.wait_until_warm(runtime.settings.environment)
        session_id = (await caller.execute("x = 1\nopen('f', 'w').write('1')")).session_id
        for deadly in ("os._exit(1)", "os.kill(os.getpid(), 9)"):
            code = f"import os\nx = 2\nopen('f', 'w').write('2')\n{deadly}"
            answer = await caller.call("execute_code", code=code, session_id=session_id)
            assert answer.structured_content is not None
            assert (answer.structured_content["status"], answer.structured_content["state"]) == ("died", "rewound")
            assert "variables and files are as they were before this cell" in text_of(answer)
            assert "lost" not in text_of(answer)
            after = await caller.execute("x, open('f').read()", session_id)
            assert (after.result, after.state) == ("(1, '1')", "kept")
        cells = json.loads(await caller.read_text(f"session://{session_id}/notebook"))["cells"]
        assert [bool(cell["metadata"]["belljar"].get("undone")) for cell in cells] == [False, True, False, True, False]
        if "memory" in read_control_groups().usable():
            # Linux may end the checkpoints first; then nothing is left to rewind to. What ended it is known anyway.
            late = await caller.execute("y = bytearray(10**9)", session_id)
            assert late.status == "out_of_memory"
            assert late.state in ("lost", "rewound")


# The notebook


async def test_the_notebook_marks_what_was_undone(caller: Caller, session_id: str):
    await caller.execute("x = 1", session_id)
    await caller.execute("x = 2", session_id)
    await caller.execute("%%capture\nx = 3", session_id)
    await caller.fields("rewind_session", session_id=session_id, to=2)
    await caller.execute("x", session_id)
    cells = json.loads(await caller.read_text(f"session://{session_id}/notebook"))["cells"]
    kept, plain, magic, last = cells
    assert [cell["metadata"].get("tags") for cell in cells] == [None, *[["undone", "skip-execution"]] * 2, None]
    assert [cell["metadata"]["belljar"].get("undone") for cell in cells] == [None, True, True, None]
    comment = "# Undone: the session was rewound to before this cell."
    assert "".join(plain["source"]) == f"{comment}\nx = 2"
    assert "".join(magic["source"]) == f"%%capture\n{comment}\nx = 3", "a magic must stay the first line"
    assert ("".join(kept["source"]), "".join(last["source"])) == ("x = 1", "x")


# Refusals


async def test_a_session_of_somebody_else_is_as_unknown(runtime: Runtime, caller: Caller):
    theirs = runtime.sessions.create("somebody else").id
    for tool, more in (("fork_session", {}), ("rewind_session", {"to": 1})):
        refusals = [await caller.refusal(tool, session_id=one, **more) for one in (theirs, NOBODY)]
        assert refusals[0].replace(theirs, NOBODY) == refusals[1]
    assert [session.id for session in runtime.sessions.of("somebody else")] == [theirs]
    await runtime.sessions.clear(theirs, "somebody else")


@pytest.mark.parametrize("to", [0, -1, 2, 10**30, "0", "2", "9" * 64, "", " 1", "-1", "1.0", "last", NOBODY, "٢", "²"])
async def test_a_rewind_to_nowhere_is_refused_and_changes_nothing(caller: Caller, session_id: str, to: str | int):
    ran = await caller.execute("x = 1", session_id)
    refusal = await caller.refusal("rewind_session", session_id=session_id, to=to)
    assert refusal.startswith("no-checkpoint: ")
    assert refusal.endswith(f"States are kept from before: {ran.execution_id}"), "it says what to pass instead"
    assert (await caller.execute("x", session_id)).result == "1"


@pytest.mark.parametrize("at", ["nonsense", NOBODY, "1"])
async def test_a_fork_of_a_state_that_was_not_kept_is_refused(caller: Caller, session_id: str, at: str):
    before = len((await caller.fields("list_sessions"))["sessions"])
    assert "no-checkpoint" in await caller.refusal("fork_session", session_id=session_id, at=at)
    assert len((await caller.fields("list_sessions"))["sessions"]) == before


async def test_a_busy_session_is_neither_forked_nor_rewound(runtime: Runtime, caller: Caller, session_id: str):
    running = await caller.execute(held(), session_id, wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    for tool, more in (("fork_session", {}), ("rewind_session", {"to": 1})):
        refusal = await caller.refusal(tool, session_id=session_id, **more)
        assert refusal.startswith("busy: ")
        assert "interrupt_execution" in refusal
    await caller.release(session_id)
    assert (await caller.ended(running.execution_id)).status == "ok"
    await caller.fields("fork_session", session_id=session_id)


async def test_a_jupyter_session_is_refused_with_the_reason(caller: Caller, session_id: str):
    session_id = (await caller.fields("new_session", environment="kernel:python3"))["session_id"]
    await caller.execute("x = 1", session_id)
    refusal = await caller.refusal("fork_session", session_id=session_id)
    assert refusal.startswith("copy-refused: sessions of kernel:python3 cannot be forked")
    refusal = await caller.refusal("rewind_session", session_id=session_id, to=1)
    assert refusal.startswith("no-checkpoint: ")
    assert "cannot be copied" in refusal
    assert (await caller.execute("x", session_id)).result == "1"


async def test_where_it_is_turned_off_it_is_refused_with_the_reason(default_environment: Environment, tmp_path: Path):
    off = {"fork_start": False, "checkpoints": 0, "max_sessions": 2, "pool_size": 0}
    async with (
        opened_runtime(default_environment, tmp_path, **off) as runtime,
        connected(runtime) as caller,
    ):
        session_id = (await caller.execute("x = 1")).session_id
        busy = await caller.execute(held(), wait_s=0)
        assert "max_sessions" in await caller.refusal("fork_session", session_id=session_id)
        await caller.fields("clear_session", session_id=busy.session_id)
        refusal = await caller.refusal("rewind_session", session_id=session_id, to=1)
        assert "checkpoints is 0" in refusal
        refusal = await caller.refusal("fork_session", session_id=session_id)
        assert refusal.startswith("copy-refused: ")
        assert "fork_start" in refusal
        assert (await caller.execute("x", session_id)).result == "1"
