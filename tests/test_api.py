"""Sessions as Python code holds them: the same tests for an engine in this process and for a running server."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.environments import Environment
from belljar.errors import (
    Busy,
    ExecutionNotFound,
    FileMissing,
    InvalidArgument,
    InvalidPath,
    NoCheckpoint,
    SessionNotFound,
    SettingsError,
    UsageError,
)
from belljar.sandboxes.namespace.provider import NamespaceProvider
from live_server import live_server

pytestmark = pytest.mark.anyio

GRACE_S = 2
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
FIGURE = f"display({{'image/png': {PIXEL!r}}}, raw=True)"
OTHER_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGPgZGD4DwABKAEJrIecZgAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def url(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    chosen = {"BELLJAR_INTERRUPT_GRACE_S": GRACE_S, "BELLJAR_FORK_START": "true", "BELLJAR_PRELOAD": "json"}
    with live_server(tmp_path_factory.mktemp("server"), default_environment.python, **chosen) as url:
        yield url


@pytest.fixture(scope="module", params=["local", "remote"])
async def place(
    request: pytest.FixtureRequest,
    anyio_backend: str,
    default_environment: Environment,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator["belljar.Engine | belljar.RemoteServer"]:
    """Where sessions are opened: an engine of ours, or a connection to a server."""
    if request.param == "local":
        folder = tmp_path_factory.mktemp("engine")
        environment = str(default_environment.python)
        async with belljar.open_engine(
            data_directory=folder, environment=environment, interrupt_grace_s=GRACE_S, preload=[]
        ) as engine:
            yield engine
    else:
        async with belljar.connect(request.getfixturevalue("url")) as server:
            yield server


@pytest.fixture
async def session(place: "belljar.Engine | belljar.RemoteServer") -> AsyncGenerator[belljar.SessionHandle]:
    async with place.open_session() as session:
        yield session


# Cells


async def test_a_result_has_its_streams_and_value_apart_and_variables_stay(session: belljar.SessionHandle) -> None:
    first = await session.execute("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
    assert (first.status, first.stdout, first.stderr, first.result) == ("ok", "out\n", "err\n", "21")
    assert first.session_id == session.id
    assert (await session.execute("x * 2")).result == "40"


async def test_code_that_raises_is_a_result_and_not_an_exception(session: belljar.SessionHandle) -> None:
    result = await session.execute("x = 1\n1 / 0")
    assert (result.success, result.status, result.error) == (False, "error", "ZeroDivisionError: division by zero")
    assert result.traceback[-1] == "ZeroDivisionError: division by zero"
    assert (await session.execute("x")).result == "1"


async def test_a_markdown_fence_around_the_code_is_taken_off(session: belljar.SessionHandle) -> None:
    assert (await session.execute("```python\n6 * 7\n```")).result == "42"


async def test_a_cell_that_outlasts_every_single_call_still_gives_its_result(session: belljar.SessionHandle) -> None:
    result = await session.execute("import time\ntime.sleep(2.5)\n'done'")
    assert (result.status, result.result) == ("ok", "'done'")


async def test_a_timeout_interrupts_the_cell_and_keeps_variables(session: belljar.SessionHandle) -> None:
    result = await session.execute("x = 7\nimport time\ntime.sleep(60)", timeout_s=0.3)
    assert (result.status, result.state) == ("timeout", "kept")
    assert (await session.execute("x")).result == "7"


async def test_two_cells_at_once_take_turns(session: belljar.SessionHandle) -> None:
    await session.execute("seen = []")
    first = "import time\nseen.append(1)\ntime.sleep(0.2)\nseen.append(2)"
    await asyncio.gather(session.execute(first), session.execute("seen += [3, 4]"))
    assert (await session.execute("seen")).result in ("[1, 2, 3, 4]", "[3, 4, 1, 2]")


@pytest.mark.parametrize("code", ["", "  \n"])
async def test_a_cell_without_code_is_a_success(session: belljar.SessionHandle, code: str) -> None:
    result = await session.execute(code)
    assert (result.status, result.output, result.result, result.error) == ("ok", [], None, None)
    assert [event async for event in session.stream(code)] == []


@pytest.mark.parametrize(("code", "timeout_s"), [("lone \ud800", None), ("1", 0), ("1", -1)])
async def test_a_cell_that_cannot_be_run_is_refused(
    session: belljar.SessionHandle, code: str, timeout_s: float | None
) -> None:
    with pytest.raises(InvalidArgument):
        await session.execute(code, timeout_s=timeout_s)
    with pytest.raises(InvalidArgument):
        [event async for event in session.stream(code, timeout_s=timeout_s)]


# Streams


async def test_a_stream_gives_the_events_in_order_and_then_the_result(session: belljar.SessionHandle) -> None:
    stream = session.stream("import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')\ndisplay('d')\n1 / 0")
    events = [event async for event in stream]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [(event.kind, event.text) for event in events] == [
        ("stdout", "a\n"),
        ("stderr", "b\n"),
        ("stdout", "c\n"),
        ("display", "'d'"),
        ("error", "ZeroDivisionError: division by zero"),
    ]
    assert (stream.result.status, stream.result.stderr) == ("error", "b\n")


async def test_a_stream_is_ahead_of_the_end_of_its_cell(session: belljar.SessionHandle) -> None:
    stream = session.stream("import os, time\nprint('early')\nwhile not os.path.exists('go'): time.sleep(0.01)")
    async for event in stream:
        assert event.text == "early\n"
        # The cell ends only because its first words have arrived.
        await session.upload("go", b"")
    assert stream.result.status == "ok"


async def test_a_stream_that_has_not_ended_has_no_result(session: belljar.SessionHandle) -> None:
    with pytest.raises(UsageError):
        _ = session.stream("1").result


async def test_large_output_streams_whole_to_a_reader_that_dawdles(session: belljar.SessionHandle) -> None:
    stream = session.stream("for i in range(100_000): print(i)")
    parts: list[str] = []
    async for event in stream:
        parts.append(event.text)
        await asyncio.sleep(0)
    assert "".join(parts) == "".join(f"{i}\n" for i in range(100_000))
    assert stream.result.truncated is not None, "the result itself stays within its budget"


async def test_a_stream_that_is_left_early_leaves_its_cell_running(session: belljar.SessionHandle) -> None:
    async with aclosing(session.stream("print('first')\nimport time\ntime.sleep(0.2)\nx = 'ran'")) as stream:
        async for _ in stream:
            break
    assert (await session.execute("x")).result == "'ran'"


# Questions


async def test_input_asks_the_callback(session: belljar.SessionHandle) -> None:
    asked: list[str] = []

    async def answer(prompt: str) -> str:
        asked.append(prompt.strip())
        return f"answer {len(asked)}"

    # More questions than an MCP client answers in one call unless told otherwise.
    code = "[input(f'question {i}? ') for i in range(1, 13)]"
    result = await session.execute(code, on_input=answer)
    assert asked == [f"question {i}?" for i in range(1, 13)]
    assert result.result is not None
    assert eval(result.result) == [f"answer {i}" for i in range(1, 13)]


async def test_a_stream_asks_too(session: belljar.SessionHandle) -> None:
    async def answer(prompt: str) -> str:
        return "Ann"

    stream = session.stream("print('hello', input('name? '))", on_input=answer)
    assert [(event.kind, event.text) async for event in stream] == [("input", "name? "), ("stdout", "hello Ann\n")]


async def test_without_a_callback_input_fails_at_once(session: belljar.SessionHandle) -> None:
    result = await session.execute("input()")
    assert (result.error or "").startswith("EOFError: ")


async def test_a_question_that_is_declined_raises_in_the_cell(session: belljar.SessionHandle) -> None:
    async def decline(prompt: str) -> None:
        return None

    assert ((await session.execute("input()", on_input=decline)).error or "").startswith("EOFError: ")


async def test_a_callback_that_breaks_is_heard_and_its_cell_goes_on(session: belljar.SessionHandle) -> None:
    async def broken(prompt: str) -> str:
        raise LookupError(prompt)

    with pytest.raises(LookupError):
        await session.execute("try:\n    input('who?')\nexcept EOFError:\n    x = 'went on'", on_input=broken)
    assert (await session.execute("x")).result == "'went on'"


# Interrupts


async def test_an_interrupt_stops_the_cell_and_keeps_variables(session: belljar.SessionHandle) -> None:
    stream = session.stream("x = 3\nprint('started')\nimport time\ntime.sleep(60)")
    interrupted: list[str] = []
    async for event in stream:
        if event.text == "started\n" and not interrupted:
            interrupted = await session.interrupt()
    assert stream.result.status == "interrupted"
    assert interrupted == [stream.result.execution_id]
    assert (await session.execute("x")).result == "3"
    assert await session.interrupt() == []


async def test_an_interrupt_takes_a_question_back(session: belljar.SessionHandle) -> None:
    is_asked = asyncio.Event()

    async def never(prompt: str) -> str:
        is_asked.set()
        return await asyncio.Future()

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        execution = tasks.create_task(session.execute("input()", on_input=never))
        await is_asked.wait()
        await session.interrupt()
    assert execution.result().status == "interrupted"


async def test_an_interrupted_cell_asks_nobody_any_more(session: belljar.SessionHandle) -> None:
    asked: list[str] = []
    is_asked = asyncio.Event()

    async def never(prompt: str) -> str:
        asked.append(prompt)
        is_asked.set()
        return await asyncio.Future()

    stubborn = "while True:\n    try:\n        input('again?')\n    except KeyboardInterrupt:\n        pass"
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        execution = tasks.create_task(session.execute(stubborn, on_input=never))
        await is_asked.wait()
        await session.interrupt()
    assert (execution.result().status, asked) == ("interrupted", ["again?"])


# Files, displays, packages


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "héllo\r\n"),
        ("sub/folder/b.bin", bytes(range(256))),
        ("latin.csv", b"caf\xe9;1\r\n"),
        ("empty", b""),
        ("100%25 ü?#.txt", b"odd name"),
    ],
)
async def test_a_file_comes_back_as_it_went(session: belljar.SessionHandle, name: str, content: bytes | str) -> None:
    whole = content.encode() if isinstance(content, str) else content
    reference = await session.upload(name, content)
    assert (reference.name, reference.size) == (name, len(whole))
    assert await session.download(name) == whole
    assert [file.model_dump() for file in await session.files()] == [reference.model_dump()]
    assert (await session.execute(f"len(open({name!r}, 'rb').read())")).result == str(len(whole))


async def test_files_of_a_cell_are_in_its_result_and_can_be_downloaded(session: belljar.SessionHandle) -> None:
    result = await session.execute("open('made.txt', 'w').write('made')")
    assert [(file.name, file.change) for file in result.files] == [("made.txt", "created")]
    assert await session.download("made.txt") == b"made"


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b"])
async def test_a_name_that_leaves_the_folder_is_refused(session: belljar.SessionHandle, name: str) -> None:
    with pytest.raises(InvalidPath):
        await session.download(name)
    with pytest.raises(InvalidPath):
        await session.upload(name, b"")


async def test_a_file_that_is_not_there_is_missing(session: belljar.SessionHandle) -> None:
    with pytest.raises(FileMissing, match=r"nope\.txt"):
        await session.download("nope.txt")


async def test_a_figure_is_a_display_that_can_be_read(session: belljar.SessionHandle) -> None:
    result = await session.execute(FIGURE)
    (figure,) = result.displays
    assert figure.mime == "image/png"
    picture = await session.display(figure.uri or "")
    assert (picture[:8], len(picture)) == (b"\x89PNG\r\n\x1a\n", figure.size)


@pytest.mark.parametrize("uri", [f"execution://{'0' * 32}/displays/1.png", "nonsense"])
async def test_a_display_that_is_not_there_is_refused(session: belljar.SessionHandle, uri: str) -> None:
    with pytest.raises((ExecutionNotFound, InvalidArgument)):
        await session.display(uri)


async def test_what_is_no_package_is_refused_before_anything_is_fetched(session: belljar.SessionHandle) -> None:
    with pytest.raises(InvalidArgument, match="--index-url"):
        await session.install(["--index-url=http://elsewhere"])
    # One name alone is one package, not a list of its letters.
    with pytest.raises(InvalidArgument, match=r"\./folder"):
        await session.install("./folder")


async def test_a_package_that_is_there_is_told_with_its_version(session: belljar.SessionHandle) -> None:
    (outcome,) = await session.install(["ipython"])
    assert (outcome.name, outcome.error) == ("ipython", None)
    assert outcome.installed_version is not None


# Other states


@pytest.fixture(scope="module")
def forking() -> None:
    if gap := NamespaceProvider().no_nesting_reason():
        pytest.skip(f"sessions cannot be forked here: {gap}")


@pytest.mark.usefixtures("forking")
async def test_a_fork_goes_its_own_way_and_says_what_came_along(session: belljar.SessionHandle) -> None:
    await session.execute("x = [1]\nopen('f', 'w').write('one')")
    fork = await session.fork()
    await fork.execute("x.append(2)\nopen('f', 'w').write('two')")
    assert [(await one.execute("x, open('f').read()")).result for one in (session, fork)] == [
        "([1], 'one')",
        "([1, 2], 'two')",
    ]
    assert fork.id != session.id
    assert session.forked is None
    assert fork.forked is not None
    assert (fork.forked.origin, fork.forked.variables, fork.forked.lost) == (session.id, ["x"], [])
    assert await fork.download("f") == b"two"
    await fork.aclose()
    await fork.aclose()
    with pytest.raises(SessionNotFound, match=fork.id):
        await fork.execute("x")
    assert (await session.execute("x")).result == "[1]"


@pytest.mark.usefixtures("forking")
async def test_several_forks_are_made_at_once_in_order(session: belljar.SessionHandle) -> None:
    await session.execute("x = [1]")
    forks = await session.fork(count=3)
    assert [fork.id for fork in forks] == (forks[0].forked and forks[0].forked.session_ids)
    for number, fork in enumerate(forks):
        assert (await fork.execute(f"x.append({number})\nx")).result == f"[1, {number}]"
    (only,) = await session.fork(count=1)
    assert (await only.execute("x")).result == "[1]"
    with pytest.raises(InvalidArgument):
        await session.fork(count=0)


@pytest.mark.usefixtures("forking")
async def test_each_code_of_a_map_runs_in_a_fork_of_its_own(session: belljar.SessionHandle) -> None:
    await session.execute("x = [1]")
    codes = ["x.append(2); x", "1 / 0", "x"]
    told = [result async for result in session.map(codes, in_order=True, at_once=2)]
    assert [(one.index, one.status, one.result) for one in told] == [
        (0, "ok", "[1, 2]"),
        (1, "error", None),
        (2, "ok", "[1]"),
    ]
    assert [result async for result in session.map([])] == []
    with pytest.raises(InvalidArgument, match="2 keys for 1 codes"):
        await anext(session.map(["1"], keys=["a", "b"]))
    with pytest.raises(InvalidArgument, match="one string"):
        await anext(session.map("1 + 1"))


async def test_each_code_of_a_map_without_a_session_has_a_new_one(
    place: "belljar.Engine | belljar.RemoteServer",
) -> None:
    told = [result async for result in place.map(["x = 1; x", "'x' in globals()"], in_order=True)]
    assert [result.result for result in told] == ["1", "False"]


def test_maps_without_async_are_left_as_they_are_entered(url: str) -> None:
    assert [result.result for result in belljar.map(["6 * 7"] * 3, server=url)] == ["42"] * 3
    with belljar.session(server=url) as session:
        session.execute("x = 1")
        assert next(session.map(["x"] * 3, at_once=1)).result == "1"
        assert session.execute("x").result == "1"


@pytest.mark.usefixtures("forking")
async def test_forks_end_with_the_block_of_the_first_one(place: "belljar.Engine | belljar.RemoteServer") -> None:
    async with place.open_session() as session:
        ran = await session.execute("x = 1\nimport random\nrandom.seed(1)")
        child = await session.fork(reseed=True)
        before = await child.fork(at="")
        await session.aclose()
        assert (await before.execute("x")).result == "1"
        with pytest.raises(NoCheckpoint, match=ran.execution_id):
            await child.fork(at=ran.execution_id)
    for one in (session, child, before):
        with pytest.raises(SessionNotFound, match=one.id):
            await one.files()


async def test_a_rewind_undoes_and_says_what(session: belljar.SessionHandle) -> None:
    first = await session.execute("x = 1\nopen('f', 'w').close()")
    rewinding = await session.rewind(1)
    assert (rewinding.session_id, rewinding.to) == (session.id, first.execution_id)
    assert (rewinding.undone, rewinding.lost) == ([first.execution_id], [])
    assert await session.files() == []
    assert ((await session.execute("x")).error or "").startswith("NameError")


@pytest.mark.parametrize("to", [0, -1, 7, "", "nonsense"])
async def test_a_rewind_to_nowhere_is_refused(session: belljar.SessionHandle, to: str | int) -> None:
    await session.execute("x = 1")
    with pytest.raises(NoCheckpoint):
        await session.rewind(to)
    assert (await session.execute("x")).result == "1"


async def test_a_session_with_a_running_cell_is_neither_forked_nor_rewound(session: belljar.SessionHandle) -> None:
    stream = session.stream("print('on')\nimport time\ntime.sleep(60)")
    assert (await anext(stream)).text == "on\n"
    with pytest.raises(Busy, match="unfinished"):
        await session.rewind(1)
    with pytest.raises(Busy, match="unfinished"):
        await session.fork()
    await session.interrupt()
    await stream.aclose()


# Sessions


async def test_a_session_is_gone_when_its_block_ends(place: "belljar.Engine | belljar.RemoteServer") -> None:
    async with place.open_session() as session:
        pass
    with pytest.raises(SessionNotFound, match=session.id):
        await session.execute("1")
    with pytest.raises(SessionNotFound, match=session.id):
        await session.files()
    with pytest.raises(SessionNotFound, match=session.id):
        [event async for event in session.stream("1")]


async def test_sessions_share_nothing(place: "belljar.Engine | belljar.RemoteServer") -> None:
    async with place.open_session() as one, place.open_session() as two:
        await one.execute("x = 1; open('mine', 'w').close()")
        assert ((await two.execute("x")).error or "").startswith("NameError")
        assert await two.files() == []


async def test_an_error_in_the_block_arrives_as_it_was_raised(place: "belljar.Engine | belljar.RemoteServer") -> None:
    with pytest.raises(LookupError, match="mine"):
        async with place.open_session():
            raise LookupError("mine")


async def test_an_environment_that_is_unknown_is_refused(place: "belljar.Engine | belljar.RemoteServer") -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        async with place.open_session(environment="nowhere"):
            pass


# The short way


async def test_open_session_brings_its_own_engine_and_leaves_nothing(
    default_environment: Environment, tmp_path: Path
) -> None:
    chosen: dict[str, Any] = {"data_directory": tmp_path, "fork_start": False}
    async with belljar.open_session(str(default_environment.python), **chosen) as session:
        assert (await session.execute("6 * 7")).result == "42"
    assert list((tmp_path / "runs").iterdir()) == []


async def test_settings_may_be_given_whole_and_flags_win_over_them(
    default_environment: Environment, tmp_path: Path
) -> None:
    settings = belljar.Settings(
        data_directory=tmp_path,
        environment=str(default_environment.python),
        execution_timeout_s=60,
        fork_start=False,
    )
    async with belljar.open_session(settings=settings, execution_timeout_s=0.2) as session:
        assert (await session.execute("import time; time.sleep(60)")).status == "timeout"


async def test_a_flag_that_is_no_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="sandbag"):
        async with belljar.open_session(sandbag="process"):
            pass


# Executions by their ids


async def test_a_submitted_cell_is_waited_for_followed_and_found_again(
    place: "belljar.Engine | belljar.RemoteServer", session: belljar.SessionHandle
) -> None:
    waiting = "import os, time\nprint('one')\nwhile not os.path.exists('go'): time.sleep(0.01)\n7"
    submitted = await session.submit(waiting)
    assert (await submitted.wait(0)).status == "running"
    found = place.execution(submitted.id)
    first = await anext(aiter(found.events()))
    assert (first.kind, first.text) == ("stdout", "one\n")
    reached = await place.session(session.id)
    await reached.upload("go", "")
    assert (await found.wait()).result == "7"
    assert [event.kind async for event in found.events(since=first.sequence)] == ["result"]


async def test_a_submitted_cell_can_be_stopped(session: belljar.SessionHandle) -> None:
    submitted = await session.submit("import time\ntime.sleep(60)")
    await submitted.interrupt()
    assert (await submitted.wait()).status == "interrupted"


async def test_an_idempotency_key_runs_a_cell_once(session: belljar.SessionHandle) -> None:
    await session.execute("n = 0")
    first = await session.execute("n += 1\nn", idempotency_key="only-once", filename="kept.py")
    again = await session.execute("n += 1\nn", idempotency_key="only-once")
    assert (first.result, again.result, again.execution_id) == ("1", "1", first.execution_id)
    assert await session.download("kept.py") == b"n += 1\nn"


async def test_an_execution_that_nobody_knows_is_an_error(place: "belljar.Engine | belljar.RemoteServer") -> None:
    with pytest.raises(ExecutionNotFound):
        await place.execution("0" * 32).wait()
    with pytest.raises(SessionNotFound):
        await place.session("0" * 32)


async def test_sessions_are_listed_with_their_states(
    place: "belljar.Engine | belljar.RemoteServer", session: belljar.SessionHandle
) -> None:
    assert session.id in [info.session_id for info in await place.sessions()]


async def test_a_session_is_renamed(
    place: "belljar.Engine | belljar.RemoteServer", session: belljar.SessionHandle
) -> None:
    await session.rename("Sales of Oslo")
    assert {info.session_id: info.reason for info in await place.sessions()}[session.id] == "Sales of Oslo"
    with pytest.raises(InvalidArgument):
        await session.rename("x" * 201)
    await session.rename("")
    assert {info.session_id: info.reason for info in await place.sessions()}[session.id] == ""


async def test_figures_are_bytes_and_images_and_a_table_is_a_frame(session: belljar.SessionHandle) -> None:
    shown = await session.execute(f"{FIGURE}\n{FIGURE.replace(PIXEL, OTHER_PIXEL)}")
    assert [figure[:4] for figure in await session.figures(shown)] == [b"\x89PNG"] * 2
    pytest.importorskip("PIL")
    assert [image.format for image in await session.images(shown)] == ["PNG"] * 2


FRAMES = """
import sys
sys.path.append(sys.argv[1])  # the packages of the session's environment, which has pandas
import pandas, pytest, belljar
with belljar.session(server=sys.argv[2]) as session:
    session.execute("import pandas\\ndf = pandas.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
    frame = session.frame("df")
    assert frame.to_dict("list") == {"a": [1, 2], "b": ["x", "y"]}, frame
    assert list(map(str, frame.index)) == ["0", "1"]
    assert session.files() == []
    with pytest.raises(belljar.UsageError, match="NameError"):
        session.frame("nothing_of_that_name")
    with pytest.raises(belljar.InvalidArgument):
        session.frame("1; 2")
print("fine")
"""


def test_a_frame_comes_out_as_data_and_leaves_nothing_behind(url: str, default_environment: Environment) -> None:
    packages = next(default_environment.python.parent.parent.glob("lib/python3*/site-packages"))
    command = [sys.executable, "-c", FRAMES, str(packages), url]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert told.stdout == "fine\n", told.stderr


# Without async


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_program_without_async_has_the_same_session(
    kind: str, url: str, default_environment: Environment, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"data_directory": tmp_path, "fork_start": False}
    settings["environment"] = str(default_environment.python)
    with belljar.session(server=url) if kind == "remote" else belljar.session(**settings) as session:
        session.rename("without async")
        session.upload("a.txt", "hello")
        assert session.execute("x = open('a.txt').read()\nx").result == "'hello'"
        assert session.execute("input('name? ')", on_input=lambda prompt: prompt.upper()).result == "'NAME? '"
        stream = session.stream("for i in range(3): print(i)\nx")
        assert "".join(event.text for event in stream if event.kind == "stdout") == "0\n1\n2\n"
        assert stream.result.result == "'hello'"
        submitted = session.submit("print('later')")
        assert submitted.wait().stdout == "later\n"
        assert [event.text for event in submitted.events()] == ["later\n"]
        assert session.download("a.txt") == b"hello"
        assert [file.name for file in session.files()] == ["a.txt"]
        with pytest.raises(belljar.FileMissing):
            session.download("b.txt")


def test_settings_of_ours_and_a_server_are_not_mixed() -> None:
    with pytest.raises(TypeError, match="the server's own"), belljar.session(server="http://x", memory_mb=5):
        pass
    with pytest.raises(TypeError, match="URL"), belljar.session(api_key="k"):
        pass


# The package


def test_the_public_names_are_these() -> None:
    assert belljar.__all__ == [
        "BelljarError",
        "Busy",
        "CodeRejected",
        "Display",
        "Engine",
        "EngineError",
        "ExecutionHandle",
        "ExecutionNotFound",
        "ExecutionResult",
        "FileMissing",
        "FileReference",
        "InstallOutcome",
        "InvalidArgument",
        "KernelDied",
        "LimitError",
        "MappedResult",
        "NoCheckpoint",
        "OutputEvent",
        "OutputStream",
        "RemoteServer",
        "Rewinding",
        "SessionFork",
        "SessionHandle",
        "SessionInfo",
        "SessionNotFound",
        "Settings",
        "SyncExecution",
        "SyncSession",
        "SyncStream",
        "TooLarge",
        "Unauthorized",
        "UsageError",
        "connect",
        "map",
        "open_engine",
        "open_session",
        "session",
    ]
    assert all(getattr(belljar, name).__name__ == name for name in belljar.__all__)
    assert set(belljar.__all__) <= set(dir(belljar))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nope'"):
        _ = belljar.nope


def test_importing_belljar_imports_nothing_heavy() -> None:
    probe = "import sys, belljar; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in modules if name.startswith("belljar")] == ["belljar.import_path", "belljar"]
    assert {"asyncio", "anyio", "pydantic", "mcp"} & set(modules) == set()
