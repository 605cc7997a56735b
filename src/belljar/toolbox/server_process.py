"""A server that is a process: messages as lines over its pipes, its stderr in our log, nothing of it left behind.

In place of the SDK's transport, which reads lines of any length and hands our own stderr to the server. Knows
messages, not what they say.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import termios
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import (
    METHOD_NOT_FOUND,
    ErrorData,
    JSONRPCError,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)

from belljar.errors import BelljarError, UpstreamFailed
from belljar.ipc import Line, Lines, Overlong
from belljar.sandboxes.child import Child, start_child, wait_readable
from belljar.toolbox.answers import TOO_LARGE
from belljar.toolbox.direct_calls import DirectCalls, number_of, too_large
from belljar.toolbox.list_repair import told_change
from belljar.toolbox.message_memory import MessageMemory
from belljar.toolbox.pipes import PipeReader, PipeWriter
from belljar.toolbox.server_config import StdioServer

log = logging.getLogger(__name__)

_CHUNK: Final = 65_536
_GRACE_S: Final = 2.0
_DRAIN_S: Final = 1.0
_TAIL_LINES: Final = 20
_LINE_CHARACTERS: Final = 400
_STRANGE_S: Final = 10.0
_STRANGE_LINES: Final = 100_000
_PROBE: Final = "server/discover"
PROBE_S: Final = 3.0
"""In which a server that has read the newer protocol's first request answers it; else it is taken for an older one."""
_LOOK_S: Final = 0.05
_HEARD_BYTES: Final = 8 * 1024 * 1024
"""Of its stderr, in a second: whoever writes more is read more slowly."""
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]
OnEnd = Callable[[str, str], None]
"""Told how a server ended, in words, and what it had said, which is for the operator."""
Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends."""

    stdin: int
    stdout: int
    stderr: int


@dataclass(slots=True)
class LifeSigns:
    """What tells an older server from one that is slow or does not work at all."""

    has_read: Callable[[], bool] = lambda: True
    """Whether it has read anything that was sent to it: one that has not is slow, or ended by itself."""
    has_answered_late: bool = False
    """Whether it answered the newer protocol's first request after all."""


@asynccontextmanager
async def open_process(
    server: StdioServer,
    *,
    limit_bytes: int,
    memory: MessageMemory,
    shortcut: DirectCalls,
    signs: LifeSigns,
    on_end: OnEnd,
) -> AsyncGenerator[Streams]:
    """Start it, and yield the streams that the SDK's client wants; `on_end` is told how it ended by itself."""
    child, pipes = _started(server)
    inlet = PipeReader(pipes.stdout, limit_bytes, memory, shortcut.feed)
    process = _ServerProcess(server.name, child, pipes, inlet, shortcut, signs)
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.read, to_client, on_end)
            tasks.start_soon(process.write, from_client)
            tasks.start_soon(process.read_stderr)
            tasks.start_soon(process.watch, on_end)
            tasks.start_soon(process.answer_probe, to_client.clone())
            try:
                yield from_server, to_server
            finally:
                with anyio.CancelScope(shield=True):
                    await process.stop(on_end)
                tasks.cancel_scope.cancel()
    finally:
        for stream in (to_client, from_server, to_server, from_client):
            stream.close()
        process.close()


def _started(server: StdioServer) -> tuple[Child, _Pipes]:
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    ours_error, theirs_error = os.pipe()
    try:
        child = start_child(
            [server.command, *server.arguments],
            environment={**get_default_environment(), **server.environment},
            folder=server.folder or str(Path.cwd()),
            stdin=theirs_in,
            stdout=theirs_out,
            stderr=theirs_error,
            pass_fds=(),
        )
    except BelljarError as error:
        for descriptor in (ours_in, ours_out, ours_error):
            os.close(descriptor)
        # Which command it is, is not for sessions to know.
        why = error.message.rpartition(": ")[2]
        raise UpstreamFailed(
            f"MCP server {server.name} cannot be started: {why}",
            hint="Its command must be installed, or corrected",
            detail=error.message,
        ) from error
    finally:
        for descriptor in (theirs_in, theirs_out, theirs_error):
            os.close(descriptor)
    for descriptor in (ours_in, ours_out, ours_error):
        os.set_blocking(descriptor, False)
    return child, _Pipes(ours_in, ours_out, ours_error)


class _ServerProcess:
    """One server's process."""

    def __init__(
        self, name: str, child: Child, pipes: _Pipes, inlet: PipeReader, shortcut: DirectCalls, signs: LifeSigns
    ) -> None:
        self._name = name
        self._signs = signs
        signs.has_read = self._has_read
        self._child = child
        self._pipes = pipes
        self._inlet = inlet
        self._outlet = PipeWriter(pipes.stdin)
        self._shortcut = shortcut
        shortcut.open(self._outlet)
        self._has_stdin = True
        self._has_hung_up = False
        self._is_stopping = False
        self._is_told = False
        self._strange_since, self._strange_lines = 0.0, 0
        self._is_read = asyncio.Event()
        self._probe: RequestId | None = None
        """The id of the newer protocol's first request, while it is not answered."""
        self._is_probed = asyncio.Event()
        self._is_probe_over = asyncio.Event()
        self._writing = anyio.CancelScope()
        self._is_written = asyncio.Event()
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)

    async def read(self, to_client: Incoming, on_end: OnEnd) -> None:
        """Messages from its stdout, until it ends or sends one that is too long to tell whose it is."""
        try:
            async with to_client:
                while (line := await self._inlet.next()) is not None:
                    if isinstance(line, bytes) and not line.lstrip().startswith(b"{"):
                        if self._is_flooded():
                            self._tell(on_end, "flooded its output with lines that are no messages")
                            return
                        continue
                    if isinstance(line, Overlong):
                        log.warning("MCP server %s sent a message of more than %d bytes", self._name, line.limit_bytes)
                    message = self._probed(_message(line))
                    if message is None:
                        return
                    await to_client.send(message)
                self._has_hung_up = True
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client has gone: what is left to say has no reader
        finally:
            self._inlet.close()
            self._shortcut.close()
            self._is_read.set()
            self._is_probed.set()
            self._is_probe_over.set()
        # Without its stdout it is of no use, whether or not it lives on.
        if not await self._ends_within(_DRAIN_S):
            self._tell(on_end, "closed its output")

    def _is_flooded(self) -> bool:
        """Some servers log to stdout, and are borne with; one that does little else is not."""
        now = time.monotonic()
        if now > self._strange_since + _STRANGE_S:
            self._strange_since, self._strange_lines = now, 0
        self._strange_lines += 1
        return self._strange_lines >= _STRANGE_LINES

    def _probed(self, message: SessionMessage | Exception | None) -> SessionMessage | Exception | None:
        """The message; one that can only be meant for the probe, but is malformed, becomes a plain refusal of it."""
        if self._probe is None:
            return message
        said = message.message if isinstance(message, SessionMessage) else None
        is_refusal = isinstance(said, JSONRPCError) and said.id is None
        if isinstance(message, Exception) or is_refusal:
            message = _unknown(self._probe)
        elif not isinstance(said, JSONRPCResponse | JSONRPCError) or str(said.id) != str(self._probe):
            return message
        elif self._is_probe_over.is_set():
            self._signs.has_answered_late = isinstance(said, JSONRPCResponse)
        self._probe = None
        self._is_probe_over.set()
        return message

    async def answer_probe(self, to_client: Incoming) -> None:
        """Refuse the newer protocol's first request in its place where it does not: some never answer the unknown."""
        async with to_client:
            await self._is_probed.wait()
            # Nobody tells when the other end reads. A server that takes long to start has not heard of it yet.
            while not self._is_probe_over.is_set() and not self._signs.has_read():  # noqa: ASYNC110
                await anyio.sleep(_LOOK_S)
            with anyio.move_on_after(PROBE_S):
                await self._is_probe_over.wait()
                return
            self._is_probe_over.set()
            if self._probe is not None:
                log.debug("MCP server %s did not answer %s within %g s", self._name, _PROBE, PROBE_S)
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await to_client.send(_unknown(self._probe))

    async def write(self, from_client: Outgoing) -> None:
        """Messages to its stdin."""
        try:
            with self._writing, contextlib.suppress(OSError):
                async with from_client:
                    async for item in from_client:
                        message = item.message
                        if isinstance(message, JSONRPCRequest) and message.method == "tools/list":
                            self._shortcut.learn(message.params)
                        if isinstance(message, JSONRPCRequest) and message.method == _PROBE:
                            self._probe = message.id
                            self._is_probed.set()
                        line = message.model_dump_json(by_alias=True, exclude_unset=True)
                        await self._outlet.send(f"{line}\n".encode())
        finally:
            self._is_written.set()

    async def read_stderr(self) -> None:
        """What it says on stderr: the last lines are kept, for when it fails."""
        lines = Lines(_CHUNK)
        since, heard_bytes = time.monotonic(), 0
        while chunk := await _read(self._pipes.stderr):
            heard_bytes += len(chunk)
            if heard_bytes > _HEARD_BYTES:
                # The pipe is full meanwhile, and whoever floods it waits: the others have the processor.
                await anyio.sleep(max(0.0, since + 1 - time.monotonic()))
                since, heard_bytes = time.monotonic(), 0
            # Of a flood, only what would be kept is looked at.
            for line in [*lines.feed(chunk)][-_TAIL_LINES:]:
                text = (line.head if isinstance(line, Overlong) else line).decode(errors="replace")[:_LINE_CHARACTERS]
                self._said.append(text)
                log.debug("MCP server %s: %s", self._name, text)

    async def watch(self, on_end: OnEnd) -> None:
        """Tell of its end, once what it had written is read."""
        status = await self._child.wait()
        self._child.kill_group()
        with anyio.move_on_after(_DRAIN_S):
            await self._is_read.wait()
        self._tell(on_end, _in_words(status))

    def _tell(self, on_end: OnEnd, how: str) -> None:
        if not self._is_stopping and not self._is_told:
            self._is_told = True
            said = f"it said last: {' / '.join(self._said) or 'nothing'}"
            log.warning("MCP server %s %s; %s", self._name, how, said)
            self._settle_signs()
            on_end(how, said)

    def _settle_signs(self) -> None:
        """Keep what is known now: the pipe may be closed later, and its number another's."""
        has_read = self._signs.has_read()
        self._signs.has_read = lambda: has_read

    def _has_read(self) -> bool:
        """Whether some of what was sent to it is gone from its pipe."""
        waiting = array("i", [0])
        try:
            fcntl.ioctl(self._pipes.stdin, termios.FIONREAD, waiting)
        except OSError:
            return True
        return waiting[0] < self._outlet.sent_bytes

    async def stop(self, on_end: OnEnd) -> None:
        """As the protocol has it: close its stdin, give it time, then end it and whoever it started."""
        # The client may have noticed the end of its output, and given up, before we heard of its own.
        if self._has_hung_up and await self._ends_within(_DRAIN_S):
            self._tell(on_end, _in_words(await self._child.wait()))
        self._is_stopping = True
        # Nobody may wait for a descriptor that is closed: its number is another's a moment later.
        self._writing.cancel()
        await self._is_written.wait()
        self._close_stdin()
        if not await self._ends_within(_GRACE_S):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGTERM)
            await self._ends_within(_GRACE_S)
        self._child.kill_group()
        await self._child.wait()

    async def _ends_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self._child.wait()
            return True
        return False

    def close(self) -> None:
        """Let go of the pipes and of the process, which has ended."""
        self._close_stdin()
        self._inlet.close()
        os.close(self._pipes.stdout)
        os.close(self._pipes.stderr)
        self._child.release()

    def _close_stdin(self) -> None:
        if self._has_stdin:
            self._has_stdin = False
            self._settle_signs()
            self._shortcut.close()
            self._outlet.close()
            os.close(self._pipes.stdin)


def _message(line: Line) -> SessionMessage | Exception | None:
    """For the SDK. One that is too long becomes an error, so that other calls go on; None where its call is unknown."""
    if isinstance(line, Overlong):
        number = number_of(line.head, line.tail)
        error = ErrorData(code=TOO_LARGE, message=too_large(line))
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error)) if number else None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        news = told_change(line)
        return SessionMessage(news) if news else error


def _unknown(number: RequestId) -> SessionMessage:
    error = ErrorData(code=METHOD_NOT_FOUND, message=f"{_PROBE} was not answered")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error))


def _in_words(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


async def _read(descriptor: int) -> bytes:
    """The next bytes; none when whoever wrote has gone."""
    # A server that never stops writing must leave time for others.
    await anyio.lowlevel.checkpoint()
    while True:
        try:
            return os.read(descriptor, _CHUNK)
        except BlockingIOError:
            await wait_readable(descriptor)
        except OSError:
            return b""
