"""The host's end of the runner's wire: one socket for messages, two pipes for the streams, read in order.

Whatever arrives was written by code that may be hostile: a frame has a size limit, its JSON is checked against the
models below before anyone sees it, and a peer that breaks the form is cut off. The form is `runner/channel.py`'s.
"""

import asyncio
import codecs
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError

from belljar.errors import KernelDied
from belljar.outputs.events import Stream

MAX_FRAME_BYTES = 32 * 1024 * 1024
PIPE_BYTES = 1024 * 1024
# While output flows, the pipes are looked at this often instead of at every write: a million printed lines wake the
# host some 300 times instead of 400,000.
COALESCE_S = 0.008
GONE = "the kernel's process is gone"
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


class _Message(BaseModel):
    id: JsonValue = None
    ack: bool = False


class Ready(_Message):
    """The runner has attached."""

    type: Literal["ready"]
    python: str


class Sync(_Message):
    """Nothing but the order of the streams."""

    type: Literal["sync"]


class Display(_Message):
    """A rich output or an update of one."""

    type: Literal["display"]
    data: dict[str, JsonValue]
    display_id: str | None = None
    update: bool = False


class Clear(_Message):
    """Forget the output."""

    type: Literal["clear"]
    wait: bool


class Result(_Message):
    """The last expression's value."""

    type: Literal["result"]
    data: dict[str, JsonValue]


class Error(_Message):
    """The cell raised."""

    type: Literal["error"]
    name: str
    message: str
    traceback: list[str]


class Input(_Message):
    """The cell waits for an answer."""

    type: Literal["input"]
    prompt: str
    is_password: bool


class Done(_Message):
    """The cell is over."""

    type: Literal["finished"]
    is_ok: bool
    execution_count: int
    cpu_s: float = Field(ge=0, allow_inf_nan=False)
    variables: list[str] = Field(default=[], max_length=200)


class Completed(_Message):
    """Answer to a completion request."""

    type: Literal["completion"]
    matches: list[str]
    start: int
    end: int


class Imported(_Message):
    """Answer to a request for imports."""

    type: Literal["imported"]
    loaded: list[str] = Field(max_length=2_000)
    errors: dict[str, Annotated[str, Field(max_length=2_000)]]


Message = Ready | Sync | Display | Clear | Result | Error | Input | Done | Completed | Imported
_message: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


class Wire:
    """Made on the host before the runner starts; `child_*` go to the runner and are closed here after the spawn."""

    def __init__(self) -> None:
        self._sock, self._child_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        if sys.platform == "linux":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._pipes = {"stdout": _Pipe("stdout"), "stderr": _Pipe("stderr")}
        self._buffer = bytearray()
        self._is_flowing = False
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

    def close_child_ends(self) -> None:
        """After the spawn: without this the host would never see the runner's end close."""
        self._child_sock.close()
        for pipe in self._pipes.values():
            pipe.close_write_end()

    async def send(self, message: dict[str, Any]) -> None:
        """Send one message; KernelDied when there is no peer."""
        frame = json.dumps(message).encode()
        try:
            # One at a time: an interrupt must not land in the middle of a long cell's code.
            async with self._sending:
                await asyncio.get_running_loop().sock_sendall(self._sock, _LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise KernelDied(GONE) from error

    async def receive(self) -> list[Stream | Message]:
        """The next things in order: at most one message, after everything that was written before it."""
        while True:
            message = self._take_message()
            if message is not None:
                items: list[Stream | Message] = [*self._drain(), message]
                if message.ack:
                    await self.send({"op": "ack"})
                return items
            if self._is_ended:
                if streams := self._drain():
                    return list(streams)
                raise KernelDied(GONE)
            await self._wait()
            self._fill()
            # With a message at hand the loop drains the pipes just before it; without one, output alone is news.
            if not self._has_message() and (streams := self._drain()):
                self._is_flowing = True
                return list(streams)
            self._is_flowing = False

    def drain(self) -> list[Stream]:
        """What the pipes hold now. For the last words of a process that never got ready."""
        return self._drain()

    def is_hung_up(self) -> bool:
        """Whether the runner's end of the socket is closed. For between cells, when nothing is being read."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

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
        self._woken = loop.create_future()
        if not self._is_listening:
            loop.add_reader(self._sock, self._wake)
            self._is_listening = True
        timer = loop.call_later(COALESCE_S, self._wake) if self._is_flowing else None
        pipes = [] if timer else [pipe.read_end for pipe in self._pipes.values() if not pipe.is_ended]
        for descriptor in pipes:
            loop.add_reader(descriptor, self._wake)
        try:
            await self._woken
        finally:
            for descriptor in pipes:
                loop.remove_reader(descriptor)
            if timer is not None:
                timer.cancel()
            self._woken = None

    def _wake(self) -> None:
        if self._woken is None:
            # Nobody waits: between cells a message, or the end, stays in the socket until the next one.
            self._stop_listening()
        elif not self._woken.done():
            self._woken.set_result(None)

    def _stop_listening(self) -> None:
        if self._is_listening:
            asyncio.get_running_loop().remove_reader(self._sock)
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
        try:
            return _message.validate_json(frame)
        except ValidationError as error:
            raise KernelDied(f"the kernel sent a malformed message ({error.error_count()} faults)") from error

    def _drain(self) -> list[Stream]:
        return [stream for pipe in self._pipes.values() if (stream := pipe.read()) is not None]


class _Pipe:
    """One of the streams; the reader never waits, so a slow reader slows the cell and loses nothing."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self.name: Literal["stdout", "stderr"] = name
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(OSError, AttributeError):  # past the user's pipe quota it stays at 64 kB
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
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
            os.close(self.read_end)
            self.read_end = -1
