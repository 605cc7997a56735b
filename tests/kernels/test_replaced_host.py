"""A runner whose host is replaced, at whatever point of the talk: the next host goes on, and nothing is mistaken."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from belljar.inside.runner.channel import Channel
from belljar.kernels.forked_process import ForkedProcess
from belljar.kernels.handover_note import NoteFile
from belljar.kernels.ipython import IPythonKernel
from belljar.kernels.launch import runner_command
from belljar.kernels.protocol import ReadyMessage
from belljar.kernels.wire import BEGINS, GOES_ON, Wire
from belljar.outputs.events import Event, ExecuteResult, Finished, InputRequest, Stream
from belljar.sandboxes.base import SandboxSpec
from belljar.sandboxes.process import ProcessProvider
from waiting import until

pytestmark = pytest.mark.anyio

BIG = "x" * 300_000


@pytest.fixture
async def wire() -> AsyncGenerator[Wire]:
    wire = Wire(has_streams=False, in_packets=True)
    yield wire
    wire.close()


@pytest.fixture
async def channel(wire: Wire) -> AsyncGenerator[Channel]:
    channel = Channel(socket.socket(fileno=os.dup(wire.child_socket)))
    yield channel
    channel.close()


def framed(message: dict[str, object]) -> bytes:
    content = json.dumps(message).encode()
    return struct.pack("!I", len(content)) + content


async def test_a_message_of_many_packets_arrives_whole_in_both_directions(wire: Wire, channel: Channel) -> None:
    sending = asyncio.create_task(wire.send({"op": "big", "text": BIG}))
    assert (await asyncio.to_thread(channel.receive))["text"] == BIG
    await sending
    answer = {"type": "error", "name": "E", "message": BIG, "traceback": []}
    sent = asyncio.create_task(asyncio.to_thread(channel.send, answer))
    (item,) = await wire.receive()
    await sent
    assert getattr(item, "message", "") == BIG


async def test_what_a_host_had_half_written_is_passed_over(wire: Wire, channel: Channel) -> None:
    reading, writing = os.pipe()
    sock = wire._sock  # pyright: ignore
    socket.send_fds(sock, [BEGINS + framed({"op": "lost", "text": BIG})[:60_000]], [writing])
    os.close(writing)
    await wire.send({"op": "next"})
    assert (await asyncio.to_thread(channel.receive))["op"] == "next"
    assert channel.take_descriptors() == []
    assert os.read(reading, 1) == b""  # the descriptor that came with it is closed as well
    os.close(reading)


async def test_what_a_host_had_half_read_is_passed_over(wire: Wire, channel: Channel) -> None:
    theirs = socket.socket(fileno=os.dup(wire.child_socket))
    with theirs:
        theirs.send(GOES_ON + b"the rest of a message that the last one has begun to read")
        channel.send({"type": "sync", "id": 1})
        (item,) = await wire.receive()
        assert (getattr(item, "type", ""), getattr(item, "id", 0)) == ("sync", 1)


# A real runner, without a sandbox


class HostedRunner:
    """A runner, and one host after the other."""

    def __init__(self, wire: Wire, kernel: IPythonKernel, folder: Path) -> None:
        self.folder = folder
        self.wire = wire
        self.kernel = kernel
        self.note = NoteFile()
        kernel.use_note_file(self.note)

    async def hand_on(self, listening: "asyncio.Task[object] | None" = None) -> IPythonKernel:
        """A new host gets copies of what the last one had, which is then gone."""
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        next_wire = Wire(in_packets=True, kept=[os.dup(descriptor) for descriptor in self.wire.descriptors])
        next_wire.peer_pid = self.wire.peer_pid
        kept = ForkedProcess()
        kept.take_over(next_wire.peer_pid, os.pidfd_open(next_wire.peer_pid), -1)
        kernel = IPythonKernel(next_wire, self.kernel.sandbox, kept, self.kernel.environment)
        self.note = NoteFile(os.dup(self.note.descriptor))
        kernel.use_note_file(self.note)
        self.kernel.detach()
        self.wire, self.kernel = next_wire, kernel
        return kernel


@pytest.fixture
async def hosted(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[HostedRunner]:
    parts = [tmp_path / name for name in ("workspace", "scratch", "home")]
    for part in parts:
        part.mkdir()
    sandbox = await ProcessProvider().open(SandboxSpec("s", *parts))
    wire = Wire(in_packets=True)
    process = await sandbox.spawn(
        runner_command(default_environment, "runner", str(wire.child_socket)),
        environment={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        stdout=wire.child_stdout,
        stderr=wire.child_stderr,
        pass_fds=[wire.child_socket],
    )
    wire.close_child_ends()
    await wire.expect(ReadyMessage)
    hosted = HostedRunner(wire, IPythonKernel(wire, sandbox, process, default_environment), tmp_path / "workspace")
    try:
        yield hosted
    finally:
        await hosted.kernel.aclose()


def listen(kernel: IPythonKernel, code: str, heard: list[Event]) -> "asyncio.Task[object]":
    async def consume() -> None:
        async for event in kernel.execute(code, allow_input=True):
            heard.append(event)  # noqa: PERF401 - looked at meanwhile

    return asyncio.create_task(consume())


async def until_heard(heard: list[Event], text: str) -> None:
    await until(lambda: text in said(heard))


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Stream))


async def run(kernel: IPythonKernel, code: str) -> list[Event]:
    return [event async for event in kernel.execute(code, allow_input=False)]


SPEAKS = """
import os, threading, time
def speak():
    while not os.path.exists('speak'): time.sleep(0.005)
    print('between', flush=True)
    open('spoken', 'w')
threading.Thread(target=speak).start()
x = 1
"""


async def test_a_host_that_comes_between_two_cells_hears_what_was_said_since(hosted: HostedRunner) -> None:
    await run(hosted.kernel, SPEAKS)
    (hosted.folder / "speak").touch()
    await until((hosted.folder / "spoken").exists)
    kernel = await hosted.hand_on()
    await kernel.catch_up()
    events = await run(kernel, "x")
    assert said(events) == "between\n"
    assert [event.data for event in events if isinstance(event, ExecuteResult)] == [{"text/plain": "1"}]


async def test_a_cell_that_waits_for_an_answer_that_its_host_never_gave_goes_on(hosted: HostedRunner) -> None:
    wire = hosted.wire
    # As the host does it, up to the moment when it has read the question and is killed.
    hosted.note.note_execution("e", 0)
    hosted.note.send(1)
    await wire.send({"op": "execute", "id": 1, "code": "print(1)\ndisplay(2)\nprint(3)", "allow_input": False})
    sock = wire._sock  # pyright: ignore
    asked = b""
    async with asyncio.timeout(60):
        while b'"ack": true' not in asked:
            asked = await asyncio.get_running_loop().sock_recv(sock, 100_000)
    kernel = await hosted.hand_on()
    events = [event async for event in kernel.resume()]
    assert said(events) == "1\n3\n"
    assert isinstance(events[-1], Finished)
    assert (events[-1].is_ok, events[-1].execution_count) == (True, 1)


async def test_a_cell_whose_end_was_read_by_a_host_that_kept_it_to_itself_has_ended_all_the_same(
    hosted: HostedRunner,
) -> None:
    hosted.note.note_execution("e", 0)
    hosted.note.send(7)
    await hosted.wire.send({"op": "execute", "id": 7, "code": "x = 5", "allow_input": False})
    async with asyncio.timeout(60):
        while b'"finished"' not in await asyncio.get_running_loop().sock_recv(hosted.wire._sock, 100_000):  # pyright: ignore
            pass
    kernel = await hosted.hand_on()
    (finished,) = [event async for event in kernel.resume()]
    assert isinstance(finished, Finished)
    assert finished.variables == ("x",)


async def test_a_cell_that_never_reached_the_runner_has_no_end(hosted: HostedRunner) -> None:
    await run(hosted.kernel, "x = 1")
    hosted.note.note_execution("e", 0)
    hosted.note.send(2)
    frame = framed({"op": "execute", "id": 2, "code": f"x = {BIG!r}", "allow_input": False})
    hosted.wire._sock.send(BEGINS + frame[:65_536])  # pyright: ignore
    kernel = await hosted.hand_on()
    assert [event async for event in kernel.resume()] == []
    events = await run(kernel, "x")
    assert [event.data for event in events if isinstance(event, ExecuteResult)] == [{"text/plain": "1"}]


FORM: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("asked", "form", "reply"),
    [
        ("input('Which? ')", None, "this one"),
        (f"get_ipython().ask_form('Which? ', {FORM!r})['a']", FORM, '{"a": "this one"}'),
    ],
)
async def test_a_question_is_asked_again(hosted: HostedRunner, asked: str, form: Any, reply: str) -> None:
    heard: list[Event] = []
    listening = listen(hosted.kernel, f"print('asks')\nanswer = {asked}\nprint(answer)", heard)
    await until(lambda: any(isinstance(event, InputRequest) for event in heard))
    kernel = await hosted.hand_on(listening)
    events: list[Event] = []
    async for event in kernel.resume():
        events.append(event)
        if isinstance(event, InputRequest):
            await kernel.reply_input(reply)
    assert [event for event in events if isinstance(event, InputRequest)] == [InputRequest("Which? ", form=form)]
    assert said(events) == "this one\n"
    assert isinstance(events[-1], Finished)


async def test_a_question_that_no_host_has_read_is_asked_once(hosted: HostedRunner) -> None:
    hosted.note.note_execution("e", 0)
    hosted.note.send(1, allow_input=True)
    code = "open('begun', 'w').close()\nkept, deleted = input('Keep? '), input('Delete? ')\nprint(kept, deleted)"
    await hosted.wire.send({"op": "execute", "id": 1, "code": code, "allow_input": True})
    await until((hosted.folder / "begun").exists)
    kernel = await hosted.hand_on()
    events: list[Event] = []
    async for event in kernel.resume():
        events.append(event)
        if isinstance(event, InputRequest):
            await kernel.reply_input(f"answer to {event.prompt}")
    asked = [event.prompt for event in events if isinstance(event, InputRequest)]
    assert asked == ["Keep? ", "Delete? "]
    assert said(events) == "answer to Keep?  answer to Delete? \n"


async def test_a_cell_that_runs_can_be_interrupted_by_the_next_host(hosted: HostedRunner) -> None:
    heard: list[Event] = []
    listening = listen(hosted.kernel, "import time\nx = 1\nprint('runs', flush=True)\ntime.sleep(600)", heard)
    await until_heard(heard, "runs")
    kernel = await hosted.hand_on(listening)
    resumed = kernel.resume()
    following = asyncio.ensure_future(anext(aiter(resumed)))
    await asyncio.sleep(0)
    await kernel.interrupt()
    events = [await following, *[event async for event in resumed]]
    assert isinstance(events[-1], Finished)
    assert (events[-1].is_ok, events[-1].variables) == (False, ("time", "x"))
