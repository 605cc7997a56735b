"""Messages that wait in line between host and runner, each with descriptors of its own."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.errors import KernelDied
from belljar.inside.runner.channel import Channel
from belljar.kernels.protocol import ClearMessage, CommMessageIn, RehearsedMessage, SyncMessage
from belljar.kernels.wire import MAX_AT_ONCE, MAX_EARLY_BYTES, PIECE_BYTES, RunnerRequests, Wire
from belljar.outputs.events import Stream

pytestmark = pytest.mark.anyio


@pytest.fixture
async def wire() -> Iterator[Wire]:
    wire = Wire(has_streams=False)
    yield wire
    wire.close()


@pytest.fixture
def channel(wire: Wire) -> Iterator[Channel]:
    channel = Channel(socket.socket(fileno=os.dup(wire.child_socket)))
    yield channel
    channel.close()


async def send(wire: Wire, folder: Path, number: int) -> None:
    """A message and four files that say whose they are."""
    paths = [folder / f"{number}-{place}" for place in range(4)]
    for path in paths:
        path.write_text(path.name)
    files = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        await wire.send({"number": number, "filling": "x" * 1_000}, files)
    finally:
        for file in files:
            os.close(file)


def received(channel: Channel) -> tuple[int, list[str]]:
    number = channel.receive()["number"]
    texts: list[str] = []
    for descriptor in channel.take_descriptors(4):
        with os.fdopen(descriptor) as file:
            texts.append(file.read())
    return number, texts


def expected(number: int) -> tuple[int, list[str]]:
    return number, [f"{number}-{place}" for place in range(4)]


async def test_a_message_has_its_own_descriptors_and_not_the_next_ones(
    wire: Wire, channel: Channel, tmp_path: Path
) -> None:
    for number in range(5):
        await send(wire, tmp_path, number)
    assert [received(channel) for _ in range(5)] == [expected(number) for number in range(5)]


async def test_descriptors_wait_for_room_when_the_reader_is_slow(wire: Wire, channel: Channel, tmp_path: Path) -> None:
    count = 400  # several times what a socket holds
    sending = asyncio.gather(*(send(wire, tmp_path, number) for number in range(count)))
    found = await asyncio.to_thread(lambda: [received(channel) for _ in range(count)])
    await sending
    assert found == [expected(number) for number in range(count)]


async def test_a_descriptor_beyond_the_first_thousand_can_be_looked_at(wire: Wire) -> None:
    import fcntl

    high = fcntl.fcntl(wire.child_socket, fcntl.F_DUPFD_CLOEXEC, 1_030)
    channel = Channel(socket.socket(fileno=high))
    assert not channel.has_message()
    await wire.send({"op": "x"})
    assert channel.has_message()
    channel.close()


class _Interrupted(socket.socket):
    """In the middle of whose first packet a finaliser runs."""

    def finalise(self) -> None:
        """Replaced by the test."""

    def sendall(self, packet: bytes) -> None:  # type: ignore[override]
        half = len(packet) // 2
        super().sendall(packet[:half])
        finalise, self.finalise = self.finalise, lambda: None  # type: ignore[method-assign]
        finalise()
        super().sendall(packet[half:])


async def test_what_a_finaliser_says_follows_the_message_it_ran_in_the_middle_of(wire: Wire) -> None:
    sock = _Interrupted(fileno=os.dup(wire.child_socket))
    channel = Channel(sock)
    may_wait: list[bool] = []

    def finalise() -> None:
        may_wait.append(channel.is_owner())
        channel.send({"type": "clear", "wait": True})

    sock.finalise = finalise  # type: ignore[method-assign]
    channel.send({"type": "sync"}, {"type": "rehearsed"})
    said = [item for _ in range(3) for item in await wire.receive()]
    assert said == [SyncMessage(type="sync"), RehearsedMessage(type="rehearsed"), ClearMessage(type="clear", wait=True)]
    assert (may_wait, channel.is_owner()) == ([False], True)
    channel.close()


COMM = {"type": "comm", "kind": "comm_msg", "comm_id": "id", "data": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "comm_info"},
        {"comm_id": "x" * 1_000},
        {"data": []},
        {"buffers": ["not base64"]},
        {"buffers": ["QQ=="] * 2_000},
        {"metadata": 1},
    ],
)
async def test_a_widgets_word_that_has_not_its_form_is_refused(
    wire: Wire, channel: Channel, wrong: dict[str, object]
) -> None:
    channel.send(COMM, {**COMM, **wrong})
    assert await wire.receive() == [CommMessageIn(type="comm", kind="comm_msg", comm_id="id", data={})]
    with pytest.raises(KernelDied, match="malformed"):
        await wire.receive()


async def test_a_flood_of_messages_leaves_others_their_turn(wire: Wire, channel: Channel) -> None:
    flood, turns = 2_000, 0
    channel.send(*[{"type": "sync"}] * flood)

    async def read() -> None:
        for _ in range(flood):
            await wire.receive()

    reading = asyncio.create_task(read())
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= flood // MAX_AT_ONCE


async def test_of_output_between_cells_the_beginning_waits_however_small_its_pieces_are(wire: Wire) -> None:
    exchange = RunnerRequests(wire)
    for _ in range(MAX_EARLY_BYTES // 10):
        exchange.keep_early(Stream("stdout", "x"))
    assert 0 < len(exchange.take_early()) <= MAX_EARLY_BYTES // PIECE_BYTES
    exchange.keep_early(Stream("stdout", "again"))
    assert exchange.take_early() == [Stream("stdout", "again")]
