"""The host's end of the connection to a runner: one socket for messages and two pipes for the streams, read in order.

Whatever arrives was written by code that may be hostile: a frame has a size limit, its JSON is checked against
`protocol.py` before anyone sees it, and a peer that breaks the format is cut off. The runner's side of the format is
`inside/runner/channel.py`. `RunnerRequests` numbers requests and waits for their answers, and `resumed_messages` goes
on with a runner of an earlier server. Nothing here knows of processes, or of what the requests are about.
"""

import asyncio
import codecs
import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from belljar.errors import KernelDied
from belljar.kernels.protocol import (
    DoneMessage,
    InputMessage,
    Message,
    ResumedMessage,
    RunnerMessage,
    TurnChecker,
    read_message,
)
from belljar.outputs.events import Stream

MAX_FRAME_BYTES = 32 * 1024 * 1024
# While output flows, the pipes are read at this interval instead of after every write: a million printed lines wake
# the host some 300 times instead of 400,000.
COALESCE_S = 0.008
# A socket of packets is used where another server may take over. The first byte of a packet says whether a frame begins
# with it, so that a frame which a killed server left half read or half written is skipped. The size is well below what
# a socket takes at once.
PACKET_BYTES = 65_536
BEGINS, GOES_ON = b"\1", b"\0"
# How many messages are read before other tasks get a turn: some milliseconds of the event loop.
MAX_AT_ONCE = 50
GONE = "the kernel's process is gone"
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")

_M = TypeVar("_M", bound=RunnerMessage)


class Wire:
    """The connection to one runner, made on the host before the runner starts.

    The descriptors `child_*` are passed to the runner and closed here after the spawn.
    """

    def __init__(self, *, has_streams: bool = True, in_packets: bool = False, kept: Sequence[int] = ()) -> None:
        """Open a new connection, or go on with one of an earlier server.

        `in_packets` makes it one that another server can take over. `kept` are the `descriptors` of the earlier server.
        """
        self.in_packets = in_packets
        if kept:
            self._sock = self._child_sock = socket.socket(fileno=kept[0])
        else:
            kind = socket.SOCK_SEQPACKET if in_packets else socket.SOCK_STREAM
            self._sock, self._child_sock = socket.socketpair(socket.AF_UNIX, kind)
        self._sock.setblocking(False)
        if sys.platform == "linux":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ends = kept[1:] or (-1, -1)
        self._pipes = (
            {"stdout": StreamPipe("stdout", ends[0]), "stderr": StreamPipe("stderr", ends[1])} if has_streams else {}
        )
        self._buffer = bytearray()
        self._is_flowing = False
        self._read_at_once = 0
        self._is_ended = False
        self._sending = asyncio.Lock()
        self._woken: asyncio.Future[None] | None = None
        self._is_listening = False
        self.peer_pid = 0

    @property
    def child_socket(self) -> int:
        """Return the runner's end of the socket."""
        return self._child_sock.fileno()

    @property
    def child_stdout(self) -> int:
        """Return what the runner gets as descriptor 1."""
        return self._pipes["stdout"].write_end

    @property
    def child_stderr(self) -> int:
        """Return what the runner gets as descriptor 2."""
        return self._pipes["stderr"].write_end

    @property
    def child_ends(self) -> list[int]:
        """Return all of the runner's descriptors: the socket, then the streams, if it has any."""
        return [self.child_socket, *(pipe.write_end for pipe in self._pipes.values())]

    @property
    def descriptors(self) -> list[int]:
        """Return the host's descriptors: the socket, then the streams. A supervisor keeps them for the next server."""
        return [self._sock.fileno(), *(pipe.read_end for pipe in self._pipes.values())]

    def close_child_ends(self) -> None:
        """Close the runner's ends here, after the spawn, or the host would never see the runner close its own."""
        if self._child_sock is not self._sock:
            self._child_sock.close()
        for pipe in self._pipes.values():
            pipe.close_write_end()

    async def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message, and descriptors with it; KernelDied when the runner is gone."""
        content = json.dumps(message).encode()
        frame = _LENGTH.pack(len(content)) + content
        try:
            # Send one message at a time, because an interrupt must not land in the middle of a long cell's code.
            async with self._sending:
                if self.in_packets:
                    await self._send_packets(frame, descriptors)
                    return
                if descriptors:
                    await self._send_descriptors(frame[:1], descriptors)
                    frame = frame[1:]
                await asyncio.get_running_loop().sock_sendall(self._sock, frame)
        except OSError as error:
            raise KernelDied(GONE) from error

    async def _send_packets(self, frame: bytes, descriptors: Sequence[int]) -> None:
        for start in range(0, len(frame), PACKET_BYTES):
            packet = (GOES_ON if start else BEGINS) + frame[start : start + PACKET_BYTES]
            if descriptors and not start:
                await self._send_descriptors(packet, descriptors)
            else:
                await asyncio.get_running_loop().sock_sendall(self._sock, packet)

    async def _send_descriptors(self, first: bytes, descriptors: Sequence[int]) -> None:
        """Send descriptors with the first bytes of a message.

        Waits for room, because the socket of a zygote that is asked for many forks at once may be full.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                socket.send_fds(self._sock, [first], descriptors)
            except BlockingIOError:
                has_room = loop.create_future()
                loop.add_writer(self._sock, lambda future=has_room: future.done() or future.set_result(None))
                try:
                    await has_room
                finally:
                    loop.remove_writer(self._sock)
            else:
                return

    def encode_as_peer(self, message: dict[str, Any]) -> bytes:
        """Return a message as the runner would write it, for `holder.py`, which cannot encode one itself."""
        content = json.dumps(message).encode()
        return BEGINS * self.in_packets + _LENGTH.pack(len(content)) + content

    async def receive(self) -> list[Stream | Message]:
        """Return what comes next, in order: at most one message, after all output that was written before it."""
        if self._read_at_once >= MAX_AT_ONCE:
            self._read_at_once = 0
            await asyncio.sleep(0)
        while True:
            message = self._take_message()
            if message is not None:
                items: list[Stream | Message] = [*self._drain(), message]
                if message.ack:
                    await self.send({"op": "ack"})
                self._read_at_once += 1
                return items
            if self._is_ended:
                if streams := self._drain():
                    return list(streams)
                raise KernelDied(GONE)
            await self._wait()
            # If a message has arrived, the next round of the loop drains the pipes before it. Otherwise output alone
            # is returned.
            if not self._has_message() and (streams := self._drain()):
                self._is_flowing = True
                return list(streams)
            self._is_flowing = False

    def drain(self) -> list[Stream]:
        """Return the output that the pipes hold now."""
        return self._drain()

    async def expect(self, kind: type[_M]) -> _M:
        """Return the next message of this kind and drop what comes before it."""
        while True:
            for item in await self.receive():
                if isinstance(item, kind):
                    return item

    def has_arrived(self) -> bool:
        """Return whether there is any part of a message to read. Used between cells."""
        try:
            return bool(self._buffer or self._sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def is_hung_up(self) -> bool:
        """Return whether the runner's end of the socket is closed. Used between cells, when nothing is being read."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """Shut the socket down; may be called twice.

        What has arrived can still be read, and whoever holds the other end sees that the host is gone.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release every descriptor; may be called twice."""
        self._stop_listening()
        self._sock.close()
        self.close_child_ends()
        for pipe in self._pipes.values():
            pipe.close_read_end()

    def expect_answer(self) -> None:
        """Watch only the socket for `COALESCE_S` after a request, because a short cell ends within that time."""
        self._is_flowing = True

    async def _wait(self) -> None:
        """Wait for a message or for output; while output flows, for a message or `COALESCE_S`."""
        loop = asyncio.get_running_loop()
        self._read_at_once = 0
        self._woken = loop.create_future()
        if not self._is_listening:
            # Pass the number, because for a socket object that asyncio does not know yet it first computes the repr,
            # which takes 0.1 ms.
            loop.add_reader(self._sock.fileno(), self._on_message)
            self._is_listening = True
        timer = loop.call_later(COALESCE_S, self._wake) if self._is_flowing else None
        pipes = [] if timer else [pipe for pipe in self._pipes.values() if not pipe.is_ended]
        for pipe in pipes:
            loop.add_reader(pipe.read_end, self._wake)
        try:
            await self._woken
        finally:
            for pipe in pipes:
                # A pipe that was closed meanwhile may have had its number reused.
                if pipe.read_end >= 0:
                    loop.remove_reader(pipe.read_end)
            if timer is not None:
                timer.cancel()
            self._woken = None

    def _on_message(self) -> None:
        if self._woken is None:
            # Nobody waits for a message between cells: leave it, or the end, in the socket until the next cell.
            self._stop_listening()
            return
        # Read here, or the loop would call this again before the task that waits has read.
        self._fill()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _stop_listening(self) -> None:
        if self._is_listening:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._is_listening = False

    def _fill(self) -> None:
        try:
            chunk = self._read_socket()
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._is_ended = True
        elif self.in_packets:
            if chunk[:1] == BEGINS:
                self._buffer.clear()
            elif not self._buffer:
                return  # the rest of a frame that the last server had begun to read
            chunk = chunk[1:]
        self._buffer += chunk

    def _read_socket(self) -> bytes:
        if self.peer_pid or sys.platform != "linux":
            return self._sock.recv(PIPE_BYTES)
        # Linux vouches for the sender's pid, translated from its pid namespace into ours.
        chunk, ancillary, _, _ = self._sock.recvmsg(PIPE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.peer_pid = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
        return chunk

    def _has_message(self) -> bool:
        if len(self._buffer) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._buffer)
        return length > MAX_FRAME_BYTES or len(self._buffer) >= _LENGTH.size + length

    def _take_message(self) -> Message | None:
        if not self._has_message():
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise KernelDied(f"the kernel sent a message of {length:,} bytes, over the limit of {MAX_FRAME_BYTES:,}")
        frame = bytes(memoryview(self._buffer)[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        return read_message(frame)

    def _drain(self) -> list[Stream]:
        return [stream for pipe in self._pipes.values() if (stream := pipe.read()) is not None]


# The pipes of a runner's stdout and stderr

PIPE_BYTES = 1024 * 1024


class StreamPipe:
    """The pipe of one stream, read without blocking. A slow reader slows the cell down, and no output is lost."""

    def __init__(self, name: Literal["stdout", "stderr"], kept: int = -1) -> None:
        self.name: Literal["stdout", "stderr"] = name
        self.read_end, self.write_end = (kept, -1) if kept >= 0 else os.pipe()
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(OSError, AttributeError):  # past the user's pipe quota it stays at 64 kB
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_ended = False

    def read(self) -> Stream | None:
        """Return what the pipe holds now, up to its capacity, so that a writer who never stops cannot keep us here."""
        if self.is_ended:
            return None
        try:
            chunk = os.read(self.read_end, PIPE_BYTES)
        except BlockingIOError:
            return None
        self.is_ended = not chunk
        text = self._decoder.decode(chunk, final=not chunk)
        return Stream(self.name, text) if text else None

    def close_write_end(self) -> None:
        """Close our copy of the write end, once the runner has it; may be called twice."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close_read_end(self) -> None:
        """Close the read end; may be called twice."""
        self.is_ended = True
        if self.read_end >= 0:
            with contextlib.suppress(RuntimeError):  # outside an event loop there is no reader to remove
                asyncio.get_running_loop().remove_reader(self.read_end)
            os.close(self.read_end)
            self.read_end = -1


# Requests to a runner and the answers to them

Answer = TypeVar("Answer", bound=Message)

MAX_EARLY_BYTES = 4_000_000
# What the shortest piece of output takes in memory.
PIECE_BYTES = 100
_MAX_NUMBERS = 2**53 - 1


class RunnerRequests:
    """The numbered requests to one runner, and the output that comes before the cell it is shown in."""

    def __init__(self, wire: Wire) -> None:
        self.last_id = 0
        """The number of the latest request."""
        self.protocol = TurnChecker()
        self._wire = wire
        self._early: list[Stream] = []
        self._early_bytes = 0

    def number(self) -> int:
        """Return a number for the next request, random so that code of an earlier cell cannot forge an answer."""
        self.last_id = 1 + secrets.randbelow(_MAX_NUMBERS)
        return self.last_id

    async def send(self, request: Mapping[str, object], answer: type[Message]) -> None:
        """Send a request that will be answered by a message of this kind."""
        request_id = self.number()
        self.protocol.begin_question(request_id, answer)
        await self._wire.send({**request, "id": request_id})

    async def answer(self, kind: type[Answer], *, keeps_output: bool = True) -> Answer:
        """Return the answer to the last request; output that comes meanwhile is kept for the next cell, or dropped."""
        while True:
            for item in await self._wire.receive():
                if isinstance(item, Stream):
                    if keeps_output:
                        self.keep_early(item)
                    continue
                self.protocol.check(item)
                if isinstance(item, kind) and item.id == self.last_id:
                    return item

    # Output that came between cells

    def keep_early(self, stream: Stream) -> None:
        """Keep output for the next cell; of a flood only the beginning is kept."""
        if self._early_bytes < MAX_EARLY_BYTES:
            self._early.append(stream)
            self._early_bytes += len(stream.text) + PIECE_BYTES

    def take_early(self) -> list[Stream]:
        """Return the output that was kept for the cell that begins now."""
        early, self._early, self._early_bytes = self._early, [], 0
        return early


async def resumed_messages(wire: Wire, request: int) -> AsyncIterator[Stream | Message]:
    """Yield what a runner of an earlier server sends until it is between two cells.

    The runner is asked for its state. It answers at once when it waits, for the host or for the next cell, and after
    its cell when it is busy. The wire has skipped by then what the killed server read or wrote only in part. The last
    message is the end of the last cell, which may have been yielded before.
    """
    nonce = secrets.token_hex(8)
    has_acknowledged = has_asked = is_attended = False
    await wire.send({"op": "attend", "id": nonce})
    while True:
        for item in await wire.receive():
            if not isinstance(item, ResumedMessage):
                yield item
                if isinstance(item, Stream):
                    continue
                has_acknowledged = has_acknowledged or item.ack
                has_asked = has_asked or isinstance(item, InputMessage)
                if is_attended and isinstance(item, DoneMessage):
                    return
            elif item.id == nonce:
                is_attended = True
                # If nothing was acknowledged just now, the earlier server read the message but never acknowledged it.
                if item.awaits == "ack" and not has_acknowledged:
                    await wire.send({"op": "ack"})
                # A question that came just now is the one that the runner waits with; asked twice, it would be answered
                # twice, and the second answer would be that to the cell's next question.
                elif item.awaits == "input" and not has_asked:
                    yield InputMessage(
                        type="input",
                        id=request,
                        prompt=item.prompt,
                        is_password=item.is_password,
                        form=item.form,
                    )
                elif not item.awaits:
                    if item.last is not None:
                        yield item.last
                    return
