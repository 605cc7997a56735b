"""The host's end of the runner's wire: one socket for messages, two pipes for the streams, read in order.

Whatever arrives was written by code that may be hostile: a frame has a size limit, its JSON is checked against
`messages.py` before anyone sees it, and a peer that breaks the form is cut off. The form is `runner/channel.py`'s.
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
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from belljar.errors import KernelDied
from belljar.kernels.protocol import Message, RunnerMessage, TurnChecker, read_message
from belljar.outputs.events import Stream

MAX_FRAME_BYTES = 32 * 1024 * 1024
# While output flows, the pipes are looked at this often instead of at every write: a million printed lines wake the
# host some 300 times instead of 400,000.
COALESCE_S = 0.008
# In packets a frame can be told from the rest of another one: what a server that was killed has left half read, or half
# written, is passed over. Well below what a socket takes at once.
PACKET_BYTES = 65_536
BEGINS, GOES_ON = b"\1", b"\0"
# Messages that are read before everyone else has a turn: some milliseconds of the event loop's.
MOST_AT_ONCE = 50
GONE = "the kernel's process is gone"
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")

_M = TypeVar("_M", bound=RunnerMessage)


class Wire:
    """Made on the host before the runner starts; `child_*` go to the runner and are closed here after the spawn."""

    def __init__(self, *, has_streams: bool = True, in_packets: bool = False, kept: Sequence[int] = ()) -> None:
        """`in_packets`: another server can go on with it. `kept`: what `descriptors` were, when it does."""
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
        """The runner's end of the socket."""
        return self._child_sock.fileno()

    @property
    def child_stdout(self) -> int:
        """The runner's descriptor 1."""
        return self._pipes["stdout"].write_end

    @property
    def child_stderr(self) -> int:
        """The runner's descriptor 2."""
        return self._pipes["stderr"].write_end

    @property
    def child_ends(self) -> list[int]:
        """All of the runner's descriptors: the socket, then the streams, if it has any."""
        return [self.child_socket, *(pipe.write_end for pipe in self._pipes.values())]

    @property
    def descriptors(self) -> list[int]:
        """The host's own: the socket, then the streams. For keeping the wire beyond the end of the server."""
        return [self._sock.fileno(), *(pipe.read_end for pipe in self._pipes.values())]

    def close_child_ends(self) -> None:
        """After the spawn: without this the host would never see the runner's end close."""
        if self._child_sock is not self._sock:
            self._child_sock.close()
        for pipe in self._pipes.values():
            pipe.close_write_end()

    async def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message, and descriptors with it; KernelDied when there is no peer."""
        content = json.dumps(message).encode()
        frame = _LENGTH.pack(len(content)) + content
        try:
            # One at a time: an interrupt must not land in the middle of a long cell's code.
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
        """They travel with the first byte; a zygote that is asked for many copies at once may have no room for it."""
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

    def word_of_peer(self, message: dict[str, Any]) -> bytes:
        """A message as the other end would write it, for a program that has nothing else to say."""
        content = json.dumps(message).encode()
        return BEGINS * self.in_packets + _LENGTH.pack(len(content)) + content

    async def receive(self) -> list[Stream | Message]:
        """The next things in order: at most one message, after everything that was written before it."""
        if self._read_at_once >= MOST_AT_ONCE:
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
            # With a message at hand the loop drains the pipes just before it; without one, output alone is news.
            if not self._has_message() and (streams := self._drain()):
                self._is_flowing = True
                return list(streams)
            self._is_flowing = False

    def drain(self) -> list[Stream]:
        """What the pipes hold now. For the last words of a process that never got ready."""
        return self._drain()

    async def expect(self, kind: type[_M]) -> _M:
        """The next message of this kind. For requests whose answer is all that matters."""
        while True:
            for item in await self.receive():
                if isinstance(item, kind):
                    return item

    def has_arrived(self) -> bool:
        """Whether there is something of a message to read. For between cells."""
        try:
            return bool(self._buffer or self._sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def is_hung_up(self) -> bool:
        """Whether the runner's end of the socket is closed. For between cells, when nothing is being read."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """Read what has arrived and no more; whoever holds the other end sees the host gone. May be called twice."""
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
        """A request was sent: for a moment only messages matter. A short cell is over before a pipe is looked at."""
        self._is_flowing = True

    async def _wait(self) -> None:
        """Until a message comes, or output; while output flows, only until the pipes are due to be looked at."""
        loop = asyncio.get_running_loop()
        self._read_at_once = 0
        self._woken = loop.create_future()
        if not self._is_listening:
            # By its number: asyncio puts a socket it does not know yet into words first, which takes 0.1 ms.
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
                # Closed meanwhile, its number may be somebody else's by now.
                if pipe.read_end >= 0:
                    loop.remove_reader(pipe.read_end)
            if timer is not None:
                timer.cancel()
            self._woken = None

    def _on_message(self) -> None:
        if self._woken is None:
            # Nobody waits: between cells a message, or the end, stays in the socket until the next one.
            self._stop_listening()
            return
        # Read here, or the loop would call again before whoever waits has done so.
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
                return  # the rest of what the last server had begun to read
            chunk = chunk[1:]
        self._buffer += chunk

    def _read_socket(self) -> bytes:
        if self.peer_pid or sys.platform != "linux":
            return self._sock.recv(PIPE_BYTES)
        # The kernel of the operating system vouches for the sender's pid, translated into ours across namespaces.
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


# The pipes that a runner's streams come through, read without waiting for them. They hold what the session wrote.

PIPE_BYTES = 1024 * 1024


class StreamPipe:
    """One of the streams; the reader never waits, so a slow reader slows the cell and loses nothing."""

    def __init__(self, name: Literal["stdout", "stderr"], kept: int = -1) -> None:
        self.name: Literal["stdout", "stderr"] = name
        self.read_end, self.write_end = (kept, -1) if kept >= 0 else os.pipe()
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(OSError, AttributeError):  # past the user's pipe quota it stays at 64 kB
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_ended = False

    def read(self) -> Stream | None:
        """All it holds now, up to its capacity: a writer that never stops cannot keep us here."""
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
        """Once the runner has it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close_read_end(self) -> None:
        """At the end."""
        self.is_ended = True
        if self.read_end >= 0:
            with contextlib.suppress(RuntimeError):  # outside a loop nobody listens
                asyncio.get_running_loop().remove_reader(self.read_end)
            os.close(self.read_end)
            self.read_end = -1


# Requests to a runner, numbered, and the answers to them. Between cells nothing else is read from it.
# Knows nothing of processes, nor of what the requests are about.

Answer = TypeVar("Answer", bound=Message)

MOST_EARLY_BYTES = 4_000_000
# What the shortest piece takes in memory.
PIECE_BYTES = 100
_MOST_NUMBERS = 2**53 - 1


class RunnerRequests:
    """One kernel's, over its wire."""

    def __init__(self, wire: Wire) -> None:
        self.last_id = 0
        """The number of the latest request."""
        self.protocol = TurnChecker()
        self._wire = wire
        self._early: list[Stream] = []
        self._early_bytes = 0

    def number(self) -> int:
        """For a request that is about to be made. Random: code of an earlier cell cannot leave an answer to it."""
        self.last_id = 1 + secrets.randbelow(_MOST_NUMBERS)
        return self.last_id

    async def send(self, request: Mapping[str, object], answer: type[Message]) -> None:
        """Make a request, to which there is an answer of this kind."""
        request_id = self.number()
        self.protocol.begin_question(request_id, answer)
        await self._wire.send({**request, "id": request_id})

    async def answer(self, kind: type[Answer], *, keeps_output: bool = True) -> Answer:
        """The answer to the last request; output that comes meanwhile is the next cell's, or nobody's."""
        while True:
            for item in await self._wire.receive():
                if isinstance(item, Stream):
                    if keeps_output:
                        self.keep_early(item)
                    continue
                self.protocol.check(item)
                if isinstance(item, kind) and item.id == self.last_id:
                    return item

    # Output that came too early

    def keep_early(self, stream: Stream) -> None:
        """It waits for the next cell; of a flood only the beginning does."""
        if self._early_bytes < MOST_EARLY_BYTES:
            self._early.append(stream)
            self._early_bytes += len(stream.text) + PIECE_BYTES

    def take_early(self) -> list[Stream]:
        """What waited for the cell that begins now."""
        early, self._early, self._early_bytes = self._early, [], 0
        return early
