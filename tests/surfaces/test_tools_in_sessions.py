"""Tools of another server, called by cells: what arrives there, what comes back, and what a stop leaves."""

from ast import literal_eval
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from calls import Caller, blocks, connected, images, text_of
from mcp.types import TextContent
from tool_cells import runtime_with_tools, slow_call

from belljar.environments import Environment
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.sessions import checkpoints
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """It keeps a state before every cell, however fast they follow each other."""
    folder = tmp_path_factory.mktemp("belljar")
    chosen = {"fork_start": True, "preload": [], "pool_size": 0, "tool_result_bytes": 100_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
        async with runtime_with_tools(default_environment, folder, **chosen) as runtime:
            yield runtime


async def value(caller: Caller, session: str, code: str) -> str:
    result = await caller.execute(code, session)
    assert result.status == "ok", result.error
    return str(result.result)


# What is there


async def test_the_tree_is_in_the_working_folder_and_no_file_of_the_session(caller: Caller):
    result = await caller.execute("import os\nprint(os.listdir('servers'), open('servers/awkward/add.py').read())")
    assert "'awkward'" in result.stdout
    assert "def add(a: int, b: int) -> AddResult:" in result.stdout
    assert result.files == []
    listing = await caller.fields("list_session_files", session_id=result.session_id)
    assert listing["files"] == []


async def test_what_a_session_put_in_its_place_stays(runtime: Runtime, caller: Caller):
    session = await caller.new_session()
    code = "import os\nos.unlink('servers')\nopen('servers', 'w').write('mine')\nos._exit(1)"
    await caller.execute(code, session)
    assert await value(caller, session, "open('servers').read()") == "'mine'"
    assert await value(caller, session, "from servers.awkward import add\nadd(1, 2)") == "{'sum': 3}"


async def test_nothing_can_be_written_into_the_tree(caller: Caller, shared_session: str):
    result = await caller.execute("open('servers/awkward/add.py', 'w')", shared_session)
    assert "Read-only file system" in str(result.error)


# What arrives


async def test_arguments_arrive_under_the_names_of_the_server(caller: Caller, shared_session: str):
    code = (
        "from servers.awkward import query\n"
        "query('t', None, filter='f', page_size_2=3, page_size=4, class_='a', self='s', argument='e', cafe=1.5)"
    )
    sent = {"from": "t", "since": None, "$filter": "f", "page-size": 3, "page_size": 4, "class": "a", "self": "s"}
    assert literal_eval(await value(caller, shared_session, code)) == sent | {"": "e", "café": 1.5}


async def test_a_null_is_sent_where_it_may_be_meant_and_left_out_where_it_may_not(caller: Caller, shared_session: str):
    code = "from servers.awkward import query\nquery(from_='t', since=None, filter=None, class_=None)"
    assert await value(caller, shared_session, code) == "{'from': 't', 'since': None, 'class': None}"


async def test_names_of_the_server_work_as_well(caller: Caller, shared_session: str):
    code = "from servers.awkward import query\nquery(**{'from': 't', 'since': 'now', '$filter': 'f'})"
    assert await value(caller, shared_session, code) == "{'from': 't', 'since': 'now', '$filter': 'f'}"


async def test_twins_are_all_callable(caller: Caller, shared_session: str):
    code = (
        "from servers.awkward import getItem, getitem, get_item, get_item_2, class_, tool_2fa, list_all_of_it, print_\n"
        "[f() for f in (getItem, getitem, get_item, get_item_2, class_, tool_2fa, list_all_of_it)] + [print_('x')]"
    )
    wire = ["getItem", "getitem", "get_item", "get-item", "class", "2fa", "list.all/of-it", "print"]
    assert literal_eval(await value(caller, shared_session, code)) == wire


async def test_values_of_python_become_json(caller: Caller, shared_session: str):
    code = (
        "import datetime, numpy, pathlib\nfrom servers.awkward import query\n"
        "query(pathlib.Path('a/b'), str(datetime.date(2026, 1, 2)), page_size=numpy.int64(7))"
    )
    assert await value(caller, shared_session, code) == "{'from': 'a/b', 'since': '2026-01-02', 'page_size': 7}"


# What comes back


async def test_text_is_read_where_it_is_a_list_or_an_object(caller: Caller, shared_session: str):
    code = "from servers.awkward import records, numbers, nothing\n[records(count=1), numbers(), nothing()]"
    assert (
        await value(caller, shared_session, code)
        == "[[{'id': 0, 'name': 'n0', 'tags': ['x']}], ['42', '{not json'], None]"
    )


async def test_a_shape_that_was_seen_is_in_the_signature_of_the_next_import(
    runtime: Runtime, caller: Caller, shared_session: str
):
    await value(caller, shared_session, "from servers.awkward import records\nrecords(count=1)")
    assert runtime.toolbox is not None
    with anyio.fail_after(30):
        await runtime.toolbox.wait_until_written()
    code = "import inspect, servers.awkward\ninspect.signature(servers.awkward.records).return_annotation"
    assert await value(caller, shared_session, code) == "'list[RecordsResultItem]'"


async def test_media_are_objects_that_can_be_saved_and_shown(caller: Caller, shared_session: str):
    code = "from servers.awkward import media\nm = media()\n[p.kind for p in m[1:]], m[3].text, m[4].data"
    assert await value(caller, shared_session, code) == (
        "(['image', 'audio', 'resource', 'resource', 'link'], 'a note', b'\\x00\\x01\\x02')"
    )
    saved = await caller.execute("m[1].save('out/pixel')", shared_session)
    assert [file.name for file in saved.files] == ["out/pixel.png"]
    shown = await caller.call("execute_code", code="m[1]", session_id=shared_session)
    assert [image.mime_type for image in images(shown)] == ["image/png"]
    for cell in ("m", "from toolbox import Answer\na = Answer(sum=3)\na.media = m[1:2]\na"):
        shown = await caller.call("execute_code", code=cell, session_id=shared_session)
        assert [image.mime_type for image in images(shown)] == ["image/png"]
        assert "<image image/png, 70 bytes>" in "".join(block.text for block in blocks(shown, TextContent))


async def test_a_result_that_is_too_large_is_a_file_and_a_handle(caller: Caller, shared_session: str):
    code = "from servers.awkward import big\nb = big(size=200_000)\nprint(b.size, len(b.load()), b)"
    result = await caller.execute(code, shared_session)
    assert result.stdout.startswith("200000 200000 <result of 200,000 bytes in /mnt/data/results/awkward_big-")
    assert [(file.name.partition("-")[0], file.size) for file in result.files] == [("results/awkward_big", 200_000)]


async def test_an_error_names_the_tool_and_what_it_takes_and_can_be_caught(caller: Caller, shared_session: str):
    code = (
        "import toolbox\nfrom servers.awkward import fail\n"
        "try:\n    fail(why='so')\nexcept toolbox.ToolError as error:\n    told = error\n"
        "(told.server, told.tool, told.message, told.parameters)"
    )
    assert await value(caller, shared_session, code) == "('awkward', 'fail', 'so', ['why?: str'])"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("add(1, 2, c=2)", "awkward.add: there is no parameter 'c'\nIt takes: a: int, b: int"),
        ("fail(wy='so')", "awkward.fail: there is no parameter 'wy', did you mean 'why'?\nIt takes: why: str"),
        ("add(1, 2, 3)", "3 arguments are passed by position, 2 can be: pass the others by name"),
        ("add(1)", "missing a required argument: 'b'"),
        ("toolbox.get('awkward', 'fail')(wy='so')", "there is no parameter 'wy', did you mean 'why'?"),
        ("add(1, 'x')", "'b' is a string, not of type integer"),
        ("toolbox.get('awkward', 'add')(a=1)", "'b' is missing"),
        ("toolbox.get('awkward', 'add')(a=1, b=2, c=3)", "there is no parameter 'c'"),
        ("toolbox.get('awkward', 'nix')()", "awkward.nix: the server has no such tool: there is 'query', "),
        ("toolbox.get('nix', 'add')()", "nix.add: there is no such server: there is 'awkward'"),
        ("add(1, float('nan'))", "nothing that JSON has"),
        ("add(1, {2})", "nothing that JSON has"),
        ("add(1, '\\ud800')", "nothing that JSON has"),
        ("add(1, 'x' * 5_000_000)", "4,194,304 is the most"),
        ("toolbox.get('awkward', 'refuse')()", "the server refuses"),
    ],
)
async def test_a_call_that_cannot_be_says_why(caller: Caller, shared_session: str, call: str, told: str):
    result = await caller.execute(f"import toolbox\nfrom servers.awkward import add, fail\n{call}", shared_session)
    assert told in str(result.error)
    # Nothing of ours in between: the cell's own line, then the words.
    assert not [line for line in result.traceback if "inside/toolbox" in line]


# Many at once


async def test_coroutines_call_at_the_same_time(caller: Caller, shared_session: str):
    code = (
        "import asyncio\nfrom servers.awkward import meet\nawait asyncio.gather(*(meet.aio(count=5) for _ in range(5)))"
    )
    assert await value(caller, shared_session, code) == "['met', 'met', 'met', 'met', 'met']"


async def test_a_coroutine_may_call_and_wait_while_others_are_under_way(caller: Caller, shared_session: str):
    code = (
        "import asyncio\nfrom servers.awkward import add\n"
        "others = asyncio.gather(*(add.aio(n, n) for n in range(5)))\nawait asyncio.sleep(0)\n"
        "add(1, 2)['sum'], [each['sum'] for each in await others]"
    )
    assert await value(caller, shared_session, code) == "(3, [0, 2, 4, 6, 8])"


async def test_event_loops_of_two_threads_call_at_the_same_time(caller: Caller, shared_session: str):
    code = (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\nfrom servers.awkward import meet\n"
        "with ThreadPoolExecutor(2) as pool:\n"
        "    apart = pool.submit(lambda: asyncio.run(meet.aio(count=3)))\n"
        "    waiting = pool.submit(meet, count=3)\n    told = await meet.aio(count=3)\n"
        "told, apart.result(), waiting.result()"
    )
    assert await value(caller, shared_session, code) == "('met', 'met', 'met')"


async def test_threads_call_at_the_same_time(caller: Caller, shared_session: str):
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom servers.awkward import add\n"
        "with ThreadPoolExecutor(8) as pool:\n    sums = list(pool.map(lambda n: add(n, n)['sum'], range(40)))\n"
        "sums == [2 * n for n in range(40)]"
    )
    assert await value(caller, shared_session, code) == "True"


async def test_a_process_that_is_forked_has_a_connection_of_its_own(caller: Caller, shared_session: str):
    code = (
        "import os, sys\nfrom servers.awkward import add\nadd(1, 1)\nread, write = os.pipe()\n"
        "if (child := os.fork()) == 0:\n    os.write(write, str(add(2, 3)).encode())\n    os._exit(0)\n"
        "_ = os.waitpid(child, 0)\n(os.read(read, 99), add(4, 5))"
    )
    assert await value(caller, shared_session, code) == "(b\"{'sum': 5}\", {'sum': 9})"


async def test_between_two_cells_nothing_is_left_open(caller: Caller, shared_session: str):
    await value(caller, shared_session, "from servers.awkward import add\n[add(1, 1), await add.aio(1, 1)]")
    names = "[t.name for t in threading.enumerate()]"
    code = f"import threading, toolbox.connection as c\n{names}, c.host_connection()._socket"
    assert await value(caller, shared_session, code) == "(['MainThread'], None)"


# Stopped


def calls_of(result: ExecutionResult) -> list[tuple[str, str]]:
    return [(call.tool, call.state) for call in result.calls]


async def test_an_interrupt_cancels_the_calls_of_the_cell(caller: Caller, tmp_path: Path):
    code = f"from servers.awkward import add, slow\nkept = add(1, 2)\n{slow_call(tmp_path)}"
    running = await caller.execute(code, wait_s=0)
    await until((tmp_path / "started").exists)
    await caller.fields("interrupt_execution", execution_id=running.execution_id)
    result = await caller.get(running.execution_id)
    assert (result.status, result.state) == ("interrupted", "kept")
    assert not [line for line in result.traceback if "inside/toolbox" in line]
    assert calls_of(result) == [("add", "returned"), ("slow", "cancelled")]
    await until((tmp_path / "cancelled").exists)
    assert await value(caller, running.session_id, "kept, add(3, 4)") == "({'sum': 3}, {'sum': 7})"


async def test_an_interrupt_that_comes_after_the_cancelled_call_has_raised_shows_no_frames_of_the_toolbox(
    caller: Caller, shared_session: str
):
    """The answer to a call that is cancelled may overtake the interrupt."""
    code = "from servers.awkward import fail\ntry: fail()\nfinally: raise KeyboardInterrupt"
    result = await caller.execute(code, shared_session)
    assert [line for line in result.traceback if line.startswith(("ToolError", "KeyboardInterrupt"))] != []
    assert any("During handling of the above exception" in line for line in result.traceback)
    assert not [line for line in result.traceback if "inside/toolbox" in line]


async def test_a_time_out_cancels_the_calls_and_tells_what_was_called(caller: Caller, tmp_path: Path):
    code = (
        "import asyncio\nfrom servers.awkward import add, slow, fail\nimport toolbox\nadd(1, 2); add(1, 2)\n"
        "try: fail()\nexcept toolbox.ToolError: pass\n"
        f"await asyncio.gather({slow_call(tmp_path).replace('slow(', 'slow.aio(')})"
    )
    answer = await caller.call("execute_code", code=code, timeout_s=1.5)
    assert "Calls made: returned: awkward.add ×2; failed: awkward.fail; unfinished: awkward.slow" in text_of(answer)
    assert "[timeout | " in text_of(answer)
    await until((tmp_path / "cancelled").exists)


async def test_a_cell_that_dies_lists_its_calls(caller: Caller, tmp_path: Path):
    code = (
        "import os, threading, time\nfrom servers.awkward import add, slow\nadd(1, 2)\n"
        f"threading.Thread(target=lambda: {slow_call(tmp_path)}).start()\n"
        f"while not os.path.exists('go'): time.sleep(0.005)\nos._exit(3)"
    )
    running = await caller.execute(code, wait_s=0)
    await until((tmp_path / "started").exists)
    await caller.release(running.session_id)
    result = await caller.ended(running.execution_id)
    assert result.status == "died"
    assert result.calls[0].state == "returned"
    assert calls_of(result)[1][1] in ("started", "cancelled")
    await until((tmp_path / "cancelled").exists)


async def test_a_cell_that_ends_well_lists_no_calls(caller: Caller, shared_session: str):
    result = await caller.execute("from servers.awkward import add\nadd(1, 2)", shared_session)
    assert (result.status, result.calls) == ("ok", [])


async def test_a_task_that_is_cancelled_cancels_its_call(caller: Caller, shared_session: str, tmp_path: Path):
    code = (
        "import asyncio, os\nfrom servers.awkward import slow\n"
        f"task = asyncio.ensure_future({slow_call(tmp_path).replace('slow(', 'slow.aio(')})\n"
        "while not os.path.exists('go'): await asyncio.sleep(0.005)\n"
        "task.cancel()\nawait asyncio.gather(task, return_exceptions=True)"
    )
    running = await caller.execute(code, shared_session, wait_s=0)
    await until((tmp_path / "started").exists)
    await caller.release(shared_session)
    assert (await caller.ended(running.execution_id)).result == "[asyncio.exceptions.CancelledError('')]"
    await until((tmp_path / "cancelled").exists)


async def test_progress_of_a_call_is_progress_of_the_execution(runtime: Runtime, tmp_path: Path):
    said: list[str] = []

    async def note(done: float, total: float | None, message: str | None) -> None:
        said.append(message or "")
        (tmp_path / "until").touch()

    async with connected(runtime) as caller:
        code = f"from servers.awkward import slow\n{slow_call(tmp_path)}"
        answer = await caller.client.call_tool("execute_code", {"code": code}, progress_callback=note)
    assert "'done'" in text_of(answer)
    assert "awkward.slow: 1/2 half way" in said


# Other states


async def test_a_fork_and_a_rewound_session_go_on_calling_and_lack_nothing(runtime: Runtime, caller: Caller):
    if not await runtime.starter.wait_until_warm(runtime.settings.environment):
        pytest.skip("sessions cannot be forked here")
    first = await caller.execute("from servers.awkward import add\na = add(1, 2)")
    second = await caller.execute("a = add(5, 5)", first.session_id)
    forked = await caller.fields("fork_session", session_id=first.session_id)
    assert forked["lost"] == []
    assert await value(caller, forked["session_id"], "a, add(3, 4)") == "({'sum': 10}, {'sum': 7})"
    rewound = await caller.fields("rewind_session", session_id=first.session_id, to=second.execution_id)
    assert rewound["lost"] == []
    assert await value(caller, first.session_id, "a, add(5, 6)") == "({'sum': 3}, {'sum': 11})"
    assert await value(caller, first.session_id, "import os; os.path.isdir('servers/awkward')") == "True"


async def test_a_live_session_sees_tools_that_come_and_go(runtime: Runtime, caller: Caller):
    session = await caller.new_session()
    await value(caller, session, "from servers.awkward import add, grow, shrink\nadd(1, 2)\ngrow('later')")
    assert runtime.toolbox is not None
    tree = runtime.toolbox.tree.servers / "awkward"
    await until((tree / "later.py").exists)
    assert await value(caller, session, "from servers.awkward import later\nlater()") == "'later'"
    await value(caller, session, "shrink('later')")
    await until(lambda: not (tree / "later.py").exists())
    gone = await caller.execute("from servers.awkward import later", session)
    assert "awkward.later: the server has no such tool" in str(gone.error)
    # Who has it still is told so.
    assert "awkward.later: the server has no such tool" in str((await caller.execute("later()", session)).error)


async def test_a_fork_that_slept_finds_its_own_way_out(default_environment: Environment, tmp_path: Path):
    chosen = {"fork_start": True, "preload": [], "pool_size": 0, "hibernate": True, "session_idle_s": 0.001}
    async with (
        runtime_with_tools(default_environment, tmp_path, sweep_interval_s=3600, **chosen) as runtime,
        connected(runtime) as caller,
    ):
        if not await runtime.starter.wait_until_warm(runtime.settings.environment):
            pytest.skip("sessions cannot be forked here")
        made = await caller.execute("from servers.awkward import add\ntools = [add]")
        fork = (await caller.fields("fork_session", session_id=made.session_id))["session_id"]
        await caller.execute("own = 1", fork)  # one that has run nothing would be ended
        with anyio.fail_after(30):
            while runtime.sessions.all():
                await runtime.sessions.sweep()
        for session in (made.session_id, fork):
            woken = await caller.execute("tools[0](1, 2), add(3, 4)", session)
            assert woken.status == "ok", woken.error
            assert (woken.result, woken.lost) == ("({'sum': 3}, {'sum': 7})", [])
