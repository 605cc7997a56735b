"""Widgets of an agent's session: what the agent sees of them, and what people who share the session do to them."""

import asyncio
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from belljar.engine.attachment_messages import (
    AttachedSession,
    CommHeard,
    ExecutionEnded,
    ExecutionOutput,
    ExecutionStarted,
    SessionEvent,
)
from belljar.engine.attachments import MAX_WAITING_BYTES, CommViews
from belljar.engine.remote_attachments import open_attachment
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.http.server_socket import open_reachable_runtime
from belljar.kernels.ipython import IPythonKernel
from belljar.outputs.events import CommMessage
from belljar.questions.models import QuestionReply
from belljar.runtime import Runtime
from belljar.sessions import session_kernel
from belljar.sessions.endings import save_and_end
from belljar.sessions.session import Session
from shared_environment import settings_with

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed beside belljar, where these sessions run")
pytestmark = pytest.mark.anyio

AGENT = "agent"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o711)
    spared = {"fork_start": False, "pool_size": 0, "checkpoints": 0, "hibernate": False}
    async with open_reachable_runtime(
        settings_with(data_directory=folder, environment=sys.executable, **spared)
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def session(runtime: Runtime) -> Session:
    """The agent's; shared, so a test leaves it idle."""
    session = runtime.sessions.create(AGENT)
    await _ran(session, "import comm\nimport ipywidgets as widgets\nslider = widgets.IntSlider(3)")
    return session


@asynccontextmanager
async def attached_to(
    runtime: Runtime, session: Session
) -> AsyncIterator[tuple[AttachedSession, AsyncIterator[SessionEvent]]]:
    async with (
        asyncio.timeout(DEADLINE_S),
        open_attachment(runtime.settings.data_directory, session.id) as attached,
        aclosing(attached.events()) as events,
    ):
        yield attached, events


async def _ran(session: Session, code: str) -> Execution:
    execution = session.submit(make_cell(session.settings, code))
    while not execution.is_finished:
        await execution.wait_for_change(DEADLINE_S)
    return execution


async def _until(kind: type[ExecutionEnded | CommHeard], events: AsyncIterator[SessionEvent]) -> list[SessionEvent]:
    told: list[SessionEvent] = []
    while not told or not isinstance(told[-1], kind):
        told.append(await anext(events))
    return told


def _outputs(told: list[SessionEvent]) -> list[str]:
    return [item.output for item in told if isinstance(item, ExecutionOutput)]


def _moved(model: str, value: int) -> CommMessage:
    return CommMessage("comm_msg", model, {"method": "update", "state": {"value": value}, "buffer_paths": []})


async def _model(attached: AttachedSession) -> str:
    """Of the slider, which was made when nobody looked."""
    return [*await attached.comms()][2]


async def test_the_agent_sees_a_widget_as_its_text_and_nothing_of_what_it_says(session: Session) -> None:
    execution = await _ran(session, "for n in range(200):\n    slider.value = n % 2\nslider.value = 3\nslider")
    result = execution.result()
    assert (result.result, result.output) == ("IntSlider(value=3)", [])
    assert [event.kind for event in session.journal.events(execution.id)] == ["result"]


async def test_what_a_widget_clears_inside_of_it_stays_in_the_agents_result(session: Session) -> None:
    code = "print('before')\nwith (box := widgets.Output()):\n    print('in')\nbox.clear_output()\nprint('after')"
    assert (await _ran(session, code)).result().stdout == "before\nin\nafter\n"


async def test_a_widget_is_told_as_it_was_last(session: Session) -> None:
    ended = (await _ran(session, "own = widgets.IntSlider(1)\ndisplay(own)\nown.value = 9")).result()
    assert [display.plain for display in ended.displays] == ["IntSlider(value=9)"]
    # A later cell tells how it is then.
    ended = (await _ran(session, "own.value = 5")).result()
    assert [display.plain for display in ended.displays] == ["IntSlider(value=5)"]
    # One that cannot say how it is, or is closed, stays as it was.
    broken = "class Broken(widgets.IntSlider):\n    is_broken = False\n    def __repr__(self):\n"
    broken += "        return 'whole' if not self.is_broken else 1 / 0\n"
    ended = (await _ran(session, f"{broken}one = Broken()\ndisplay(one)\none.is_broken = True\nown.close()")).result()
    assert (ended.status, [display.plain for display in ended.displays]) == ("ok", ["whole"])
    assert (await _ran(session, "one.close()")).result().displays == []


async def test_a_person_moves_what_the_agent_made_and_the_agent_is_told(runtime: Runtime, session: Session) -> None:
    await _ran(session, "moves = []\nslider.observe(lambda change: (moves.append(change['new']), print('!')), 'value')")
    async with attached_to(runtime, session) as (attached, events):
        await attached.send_comm("one", _moved(await _model(attached), 7))
        told = await _until(CommHeard, events)
    assert _outputs(told) == ["comm_msg", "stream"]
    assert {item.execution_id for item in told if isinstance(item, ExecutionOutput)} == {"one"}
    after = (await _ran(session, "moves")).result()
    assert after.result == "[7]"
    assert after.output[0].endswith(" used widgets in this session since your last one]\n")
    assert (await _ran(session, "1")).result().output == []


async def test_what_one_does_all_see_between_the_cells_it_was_done_between(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (one, _), attached_to(runtime, session) as (_, events):
        await one.send_comm("two", _moved(await _model(one), 5))
        assert (await _until(CommHeard, events))[-1] == CommHeard(request_id="two")
        execution = await _ran(session, "print('a')\nslider.value = 6\nprint('b')")
        told = await _until(ExecutionEnded, events)
    assert isinstance(told[0], ExecutionStarted)
    assert told[0].execution_id == execution.id
    outputs = [item.content for item in told if isinstance(item, ExecutionOutput)]
    assert outputs.pop()["data"]["text/plain"] == "IntSlider(value=6)"
    said = [content.get("text") or content["data"]["state"] for content in outputs]
    assert said[0].endswith(" used widgets in this session since your last one]\n")
    assert said[1:3] == ["a\n", {"value": 6}]
    assert "".join(said[3:]) == "!\nb\n"


async def test_a_word_to_a_widget_waits_for_the_cell_that_runs(runtime: Runtime, session: Session) -> None:
    async with attached_to(runtime, session) as (attached, events):
        model = await _model(attached)
        running = session.submit(make_cell(session.settings, "input()", allow_input=True))
        while running.question is None:
            await running.wait_for_change(DEADLINE_S)
        await attached.send_comm("three", _moved(model, 1))
        assert await attached.comms() == {}
        running.reply(QuestionReply("accept", {"answer": "go on"}))
        told = await _until(CommHeard, events)
    assert [type(item) for item in told if not isinstance(item, ExecutionOutput)] == [
        ExecutionStarted,
        ExecutionEnded,
        CommHeard,
    ]


# For threads that outlive their cells: a test says when they may go on, and hears of their end.
PIPES = "import os, threading\nfor name in ('go', 'done'):\n    if not os.path.exists(name):\n        os.mkfifo(name)\n"


async def test_a_thread_has_a_widget_say_something_between_cells(runtime: Runtime, session: Session) -> None:
    code = f"{PIPES}def work():\n    open('go').read()\n    slider.value = 50\nthreading.Thread(target=work).start()"
    async with attached_to(runtime, session) as (_, events):
        await _ran(session, code)
        await _until(ExecutionEnded, events)
        await asyncio.to_thread((session.folders.workspace / "go").write_text, "on")
        said = await anext(events)
    assert isinstance(said, ExecutionOutput)
    assert (said.execution_id, said.content["data"]["state"]) == ("", {"value": 50})


async def test_a_thread_whose_widgets_nobody_listens_to_goes_on(session: Session) -> None:
    code = (
        f"{PIPES}def work():\n    open('go').read()\n    for n in range(5_000):\n        slider.value = n % 2\n"
        "    open('done', 'w').write('yes')\nthreading.Thread(target=work).start()"
    )
    await _ran(session, code)
    folder = session.folders.workspace
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread((folder / "go").write_text, "on")
        assert await asyncio.to_thread((folder / "done").read_text) == "yes"


async def _turning(runtime: Runtime) -> tuple[Session, str]:
    """A session that has a widget whose callback never ends."""
    session = runtime.sessions.create(AGENT)
    loop = "def turn(change):\n    print('turning', flush=True)\n    while True: pass\nslider.observe(turn, 'value')\n"
    made = await _ran(session, f"import ipywidgets\nslider = ipywidgets.IntSlider(3)\n{loop}kept = 1\nslider.model_id")
    return session, str(made.result().result).strip("'")


async def test_callbacks_that_never_end_do_not_keep_their_session_from_going_to_sleep(runtime: Runtime) -> None:
    session, model = await _turning(runtime)
    async with attached_to(runtime, session) as (attached, events):
        for value in (1, 2):  # one that runs, and one that waits behind it
            await attached.send_comm(f"turn {value}", _moved(model, value))
        while _outputs([await anext(events)]) != ["stream"]:
            pass
        report = await save_and_end(session, runtime.sessions.records, "it was time")
    assert report is not None
    assert "kept" in report.kept


async def test_a_callback_that_never_ends_does_not_cost_the_next_server_the_session(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_kernel, "CATCH_UP_S", 2.0)
    session, model = await _turning(runtime)
    async with attached_to(runtime, session) as (_, events):
        hearing = session.queue.run_aside(session.comms.deliver("turn", _moved(model, 1)))
        while _outputs([await anext(events)]) != ["stream"]:
            pass
        hearing.cancel()  # as if the server that listens were gone
        async with session.turn:
            kernel = session.session_kernel.kernel
            assert isinstance(kernel, IPythonKernel)
            await session.session_kernel.catch_up(kernel)
    after = (await _ran(session, "kept")).result()
    assert (after.status, after.result) == ("ok", "1")


async def test_a_word_that_cannot_be_sent_is_told_to_the_code_and_ends_nothing(session: Session) -> None:
    await _ran(
        session, "deep = {}\nfor _ in range(500):\n    deep = {'in': deep}\ntwice = {}\ntwice[1] = twice[2] = twice"
    )
    for words in (
        "data=deep",
        "data=twice",
        "metadata=deep",
        "metadata={'long': 'x' * 40_000_000}",
        "data={'long': 'x' * 40_000_000}",
    ):
        result = (await _ran(session, f"comm.create_comm(target_name='none', {words})")).result()
        assert (result.status, str(result.error)[:10]) == ("error", "ValueError")
    shown = (await _ran(session, "display({'application/json': deep}, raw=True)")).result()
    assert shown.status == "ok"
    assert (await _ran(session, "len(deep)")).result().result == "1"


async def test_comms_that_are_none_are_passed_over(runtime: Runtime, session: Session) -> None:
    """Code can put anything among them."""
    await _ran(
        session, "comms = comm.get_comm_manager().comms\ncomms['none'] = None\ncomms['x' * 1_000] = comms['none']"
    )
    async with attached_to(runtime, session) as (attached, _):
        assert "none" not in await attached.comms()
    await _ran(session, "class Bad:\n    @property\n    def target_name(self): raise ValueError\ncomms['bad'] = Bad()")
    async with attached_to(runtime, session) as (attached, _):
        assert await attached.comms() == {}
    removed = await _ran(session, "del comms['none'], comms['x' * 1_000], comms['bad']")
    assert removed.result().status == "ok"


async def test_a_front_end_that_does_not_keep_up_is_told_so_once() -> None:
    views = CommViews()
    large = CommMessage("comm_msg", "model", {"text": "x" * (MAX_WAITING_BYTES // 3)})
    taken = [word for _ in range(6) if (word := views.take("cell", large)) is not None]
    assert [word.output for word in taken] == [*["comm_msg"] * 3, "stream"]
    told = [views.release(word) for word in taken]
    assert told[0].content["data"] == large.data
    assert "too slow" in told[-1].content["text"]
    again = views.take("cell", large)
    assert again is not None
    assert again.output == "comm_msg"


async def test_words_that_wait_take_as_much_memory_as_is_counted() -> None:
    """Of many short ones most is not their text, and nested data takes thirty times as much as its text."""
    for data, most in (({"a": 1}, 300), ({"a": [[] for _ in range(10_000)]}, 3)):
        views, small = CommViews(), CommMessage("comm_msg", "model", data)
        CommViews().take("cell", small)  # what the first of all words makes ready is there for good
        tracemalloc.start()
        try:
            kept = [word for _ in range(most) if (word := views.take("cell", small)) is not None]
            taken_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(kept) == most
        assert taken_bytes < 2 * sum(word.size_bytes for word in kept)
