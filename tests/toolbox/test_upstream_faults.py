"""Servers that break the protocol, ask without end or flood: their calls fail, and nobody else's."""

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import IO, cast

import anyio
import pytest
from mcp_servers import awkward_http
from upstream_calls import Person, call, connected, said

from belljar.errors import UpstreamFailed
from belljar.ipc import Line, Overlong
from belljar.toolbox.direct_calls import PipeReader, PipeWriter, number_of
from belljar.toolbox.message_memory import MemoryShare, MessageMemory
from belljar.toolbox.server_config import StdioServer
from waiting import until

pytestmark = pytest.mark.anyio

MEBIBYTE = 1024 * 1024
PLAIN = Path(__file__).with_name("plain_server.py")


def plain(kind: str) -> StdioServer:
    return StdioServer("plain", sys.executable, (str(PLAIN), kind))


# Answers


async def test_an_id_that_comes_back_as_text_is_known() -> None:
    async with connected(plain("text-ids")) as upstreams:
        assert await said(upstreams, "do", server="plain") == "xxxx"


@pytest.mark.parametrize("kind", ["no-answer", "no-json"])
async def test_an_answer_that_is_none_fails_its_call_at_once(kind: str) -> None:
    async with connected(plain(kind)) as upstreams:
        with pytest.raises(UpstreamFailed, match="plain answered against the protocol"):
            await call(upstreams, "do", server="plain")


# Questions


@pytest.mark.parametrize("kind", ["asks-for-ever", "asks-for-ever-anew"])
async def test_a_server_that_asks_for_ever_is_named_and_its_call_given_up(kind: str) -> None:
    person = Person(name="Ann")
    async with connected(plain(kind), questions=3) as upstreams:
        with pytest.raises(UpstreamFailed, match="plain asked more than 3 questions; the call was given"):
            await call(upstreams, "do", server="plain", ask=person.ask)
    assert [question.message for question in person.asked] == ["Again?"] * 3


# Floods


async def test_lines_that_are_no_messages_are_borne_with() -> None:
    async with connected(plain("gibberish")) as upstreams:
        assert await said(upstreams, "do", server="plain") == "xxxx"


async def test_a_server_that_sends_little_else_than_such_lines_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(plain("flood")) as upstreams:
        with pytest.raises(UpstreamFailed, match="gave no answer: it flooded its output"):
            await call(upstreams, "do", server="plain")
    assert "plain flooded its output with lines that are no messages" in caplog.text


async def test_of_a_flood_on_stderr_the_last_lines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "belljar.toolbox")
    async with connected(plain("chatter")) as upstreams:
        assert await said(upstreams, "do", server="plain") == "xxxx"
        await until(lambda: "last words" in caplog.text)
    assert len(caplog.records) < 1_000


# Room in memory


def test_room_is_given_in_turn_and_to_nobody_who_has_gone() -> None:
    memory, granted = MessageMemory(20), list[str]()
    first = memory.reserve(8, lambda: granted.append("first"))
    second = memory.reserve(4, lambda: granted.append("second"))
    third = memory.reserve(1, lambda: granted.append("third"))
    assert (first.is_granted, second.is_granted, third.is_granted, memory.waiting) == (True, False, False, 2)
    second.release()
    assert (granted, memory.waiting) == (["third"], 0)
    fourth = memory.reserve(9, lambda: granted.append("fourth"))
    first.shrink(1)
    assert not fourth.is_granted
    first.release()
    assert (granted, memory.waiting) == (["third", "fourth"], 0)


def test_a_message_larger_than_all_room_is_not_kept_waiting_for_ever() -> None:
    assert MessageMemory(10).reserve(1_000, lambda: None).is_granted


async def test_the_rest_of_a_large_message_is_read_when_there_is_room_for_it() -> None:
    memory = MessageMemory(8 * MEBIBYTE)
    others = memory.reserve(4 * MEBIBYTE, lambda: None)
    taken: list[tuple[Line, MemoryShare | None]] = []
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    inlet = PipeReader(ours, 4 * MEBIBYTE, memory, lambda line, share: taken.append((line, share)) is None)

    def write() -> None:
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(b"x" * 3 * MEBIBYTE + b"\n")

    writing = threading.Thread(target=write)
    writing.start()
    inlet.open()
    await until(lambda: memory.waiting == 1)
    assert (taken, writing.is_alive()) == ([], True)
    others.release()
    await until(lambda: bool(taken))
    await anyio.to_thread.run_sync(writing.join)
    [(line, share)] = taken
    assert (len(line) if isinstance(line, bytes) else line) == 3 * MEBIBYTE
    assert share is not None
    assert share.size_bytes == 6 * MEBIBYTE
    inlet.close()
    os.close(ours)


async def test_half_a_message_does_not_keep_others_waiting_for_ever() -> None:
    memory = MessageMemory(8 * MEBIBYTE, max_incomplete_s=0.0)
    taken: dict[str, Line] = {}
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> IO[bytes]:
            def take(line: Line, share: MemoryShare | None) -> bool:
                taken[name] = line
                if share is not None:
                    share.release()
                return True

            ours, theirs = os.pipe()
            stack.callback(os.close, ours)
            os.set_blocking(ours, False)
            inlet = PipeReader(ours, 4 * MEBIBYTE, memory, take)
            stack.callback(inlet.close)
            inlet.open()
            return stack.enter_context(os.fdopen(theirs, "wb", buffering=0))

        half, whole = opened("half"), opened("whole")
        await anyio.to_thread.run_sync(half.write, b'{"jsonrpc": "2.0", "id": 7' + b" " * 2 * MEBIBYTE)
        await anyio.to_thread.run_sync(whole.write, b"x" * 3 * MEBIBYTE + b"\n")
        await until(lambda: "whole" in taken)
        assert len(cast("bytes", taken["whole"])) == 3 * MEBIBYTE
        await anyio.to_thread.run_sync(half.write, b"}\n")
        await until(lambda: "half" in taken)
        line = taken["half"]
        assert isinstance(line, Overlong)
        assert line.was_given_up
        assert number_of(line.head, line.tail) == 7
        await anyio.to_thread.run_sync(half.write, b"next\n")
        await until(lambda: taken["half"] == b"next")


async def test_large_answers_follow_each_other_as_they_are_passed_on() -> None:
    limits = {"message_bytes": 3 * MEBIBYTE, "memory_bytes": 6 * MEBIBYTE}
    sizes: list[int] = []

    async def ask_for_one() -> None:
        answer = await call(upstreams, "do", {"size": 2 * MEBIBYTE}, server="plain")
        sizes.append(len(answer.blocks[0].text))
        assert answer.release is not None
        answer.drop()

    async with connected(plain("text-ids"), **limits) as upstreams, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask_for_one)
    assert sizes == [2 * MEBIBYTE] * 5


async def test_large_answers_over_http_wait_for_each_other() -> None:
    limits = {"message_bytes": 3 * MEBIBYTE, "memory_bytes": 6 * MEBIBYTE}
    texts: list[str] = []

    async def ask_for_one() -> None:
        texts.append(await said(upstreams, "big", {"size": 2 * MEBIBYTE}))

    with awkward_http("both") as server:
        async with connected(server, **limits) as upstreams, anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask_for_one)
    assert [len(text) for text in texts] == [2 * MEBIBYTE] * 4


async def test_who_is_cancelled_while_the_pipe_is_full_has_not_sent_half_a_line() -> None:
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    outlet = PipeWriter(ours)
    async with anyio.create_task_group() as tasks:
        await outlet.send(b"a" * MEBIBYTE + b"\n")
        tasks.start_soon(outlet.send, b"never\n")
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    outlet.post(b"posted\n")
    reading = os.fdopen(theirs, "rb")
    first = await anyio.to_thread.run_sync(reading.readline)
    assert (len(first), await anyio.to_thread.run_sync(reading.readline)) == (MEBIBYTE + 1, b"posted\n")
    outlet.close()
    os.close(ours)
    reading.close()


# Lists


async def test_one_bad_entry_of_a_list_costs_that_entry_alone(caplog: pytest.LogCaptureFixture) -> None:
    changed = anyio.Event()
    async with connected(plain("odd-lists")) as upstreams:
        catalogue = await upstreams.catalogue()
        assert catalogue.servers["plain"].error == ""
        names = ["no-type - completed", "no-schema - completed", "odd-extras - bare", "do"]
        assert [tool.name for tool in catalogue.tools()] == names
        assert caplog.text.count("against the protocol; it alone is left out") == 4
        upstreams.on_change(changed.set)
        answer = await call(upstreams, "do", server="plain")
        assert [block.text for block in answer.blocks] == [
            "before",
            "(a block of type 'hologram' is left out: it is not as the protocol has it)",
            "(a block of type 'image' is left out: its data is not base64)",
            "(a block of type 'NoneType' is left out: it is not as the protocol has it)",
            "(a block of type 'text' is left out: it is not as the protocol has it)",
            "after",
        ]
        # That its tools have changed is heard, however it is said.
        with anyio.fail_after(20):
            await changed.wait()
        assert upstreams.catalogue_nowait().tools()[-1].name == "later"
