"""Messages that wait in line between host and runner, each with descriptors of its own."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.kernels.frames import Wire
from belljar.kernels.runner.channel import Channel

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
