"""Runs an MCP server as a process: messages as lines over its pipes, its stderr in our log, all its processes killed.

It replaces the SDK's transport, which reads lines of any length and passes our own stderr to the server. It knows
messages, and of their content only the newer protocol's first request.
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
from belljar.json_values import MAX_VALUES, has_too_many_values
from belljar.sandboxes.child import Child, start_child, wait_readable
from belljar.toolbox.answers import TOO_LARGE
from belljar.toolbox.direct_calls import TAIL_BYTES, DirectCalls, PipeReader, PipeWriter, number_of, too_large
from belljar.toolbox.list_repair import change_notification
from belljar.toolbox.message_memory import MessageMemory
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
"""How long a server that has read the newer protocol's first request may take to answer; else it counts as older."""
_LOOK_S: Final = 0.05
_HEARD_BYTES: Final = 8 * 1024 * 1024
"""The most that is read of a server's stderr in a second; a server that writes more is slowed down."""
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]
OnEnd = Callable[[str, str], None]
"""Called with how a server ended, in words, and with its last lines on stderr, which are for the operator."""
Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends of the pipes."""

    stdin: int
    stdout: int
    stderr: int


@dataclass(slots=True)
class ProbeResult:
    """What the probe showed: whether a server is older, or only slow, or does not work at all."""

    has_read: Callable[[], bool] = lambda: True
    """Return whether the server has read anything that was sent to it; if not, it is slow or ended by itself."""
    has_answered_late: bool = False
    """Whether the server answered the newer protocol's first request after `PROBE_S`."""


@asynccontextmanager
async def open_process(
    server: StdioServer,
    *,
    limit_bytes: int,
    memory: MessageMemory,
    direct_calls: DirectCalls,
    probe_result: ProbeResult,
    on_end: OnEnd,
) -> AsyncGenerator[Streams]:
    """Start the server and yield the streams that the SDK's client wants; call `on_end` if it ends by itself."""
    child, pipes = _start(server)
    reader = PipeReader(pipes.stdout, limit_bytes, memory, direct_calls.feed)
    process = _ServerProcess(server.name, child, pipes, reader, direct_calls, probe_result)
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


def _start(server: StdioServer) -> tuple[Child, _Pipes]:
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
        # Leave out the command, because sessions should not know it.
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
    """The process of one server and its pipes."""

    def __init__(
        self,
        name: str,
        child: Child,
        pipes: _Pipes,
        reader: PipeReader,
        direct_calls: DirectCalls,
        probe_result: ProbeResult,
    ) -> None:
        self._name = name
        self._probe_result = probe_result
        probe_result.has_read = self._has_read
        self._child = child
        self._pipes = pipes
        self._reader = reader
        self._writer = PipeWriter(pipes.stdin)
        self._direct_calls = direct_calls
        direct_calls.open(self._writer)
        self._has_stdin = True
        self._has_hung_up = False
        self._is_stopping = False
        self._is_reported = False
        self._strange_since, self._strange_lines = 0.0, 0
        self._is_read = asyncio.Event()
        self._probe: RequestId | None = None
        """The id of the newer protocol's first request, until it is answered."""
        self._is_probed = asyncio.Event()
        self._is_probe_over = asyncio.Event()
        self._writing = anyio.CancelScope()
        self._is_written = asyncio.Event()
        self._stderr_tail: deque[str] = deque(maxlen=_TAIL_LINES)

    async def read(self, to_client: Incoming, on_end: OnEnd) -> None:
        """Pass on messages from the server's stdout until it ends, or sends one so long that its id is not found."""
        try:
            async with to_client:
                while (line := await self._reader.next()) is not None:
                    if isinstance(line, bytes) and not line.lstrip().startswith(b"{"):
                        if self._is_flooded():
                            self._report(on_end, "flooded its output with lines that are no messages")
                            return
                        continue
                    if isinstance(line, Overlong):
                        log.warning("MCP server %s sent a message of more than %d bytes", self._name, line.limit_bytes)
                    message = self._check_probe_answer(_message(line))
                    if message is None:
                        return
                    await to_client.send(message)
                self._has_hung_up = True
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client is gone, so nobody reads the rest
        finally:
            self._reader.close()
            self._direct_calls.close()
            self._is_read.set()
            self._is_probed.set()
            self._is_probe_over.set()
        # A server that has closed its stdout is of no use, even if its process goes on.
        if not await self._ends_within(_DRAIN_S):
            self._report(on_end, "closed its output")

    def _is_flooded(self) -> bool:
        """Return whether too many lines are no messages. Some servers log to stdout, which is tolerated up to this."""
        now = time.monotonic()
        if now > self._strange_since + _STRANGE_S:
            self._strange_since, self._strange_lines = now, 0
        self._strange_lines += 1
        return self._strange_lines >= _STRANGE_LINES

    def _check_probe_answer(self, message: SessionMessage | Exception | None) -> SessionMessage | Exception | None:
        """Return the message; a malformed one that can only answer the probe becomes a refusal of the probe."""
        if self._probe is None:
            return message
        content = message.message if isinstance(message, SessionMessage) else None
        is_refusal = isinstance(content, JSONRPCError) and content.id is None
        if isinstance(message, Exception) or is_refusal:
            message = _unknown(self._probe)
        elif not isinstance(content, JSONRPCResponse | JSONRPCError) or str(content.id) != str(self._probe):
            return message
        elif self._is_probe_over.is_set():
            self._probe_result.has_answered_late = isinstance(content, JSONRPCResponse)
        self._probe = None
        self._is_probe_over.set()
        return message

    async def answer_probe(self, to_client: Incoming) -> None:
        """Refuse the newer protocol's first request if the server does not answer, as some do with unknown methods."""
        async with to_client:
            await self._is_probed.wait()
            # Poll, because nothing signals that the other end has read. A server that starts slowly has not yet.
            while not self._is_probe_over.is_set() and not self._probe_result.has_read():  # noqa: ASYNC110
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
        """Write the client's messages to the server's stdin."""
        try:
            with self._writing, contextlib.suppress(OSError):
                async with from_client:
                    async for item in from_client:
                        message = item.message
                        if isinstance(message, JSONRPCRequest) and message.method == "tools/list":
                            self._direct_calls.learn(message.params)
                        if isinstance(message, JSONRPCRequest) and message.method == _PROBE:
                            self._probe = message.id
                            self._is_probed.set()
                        line = message.model_dump_json(by_alias=True, exclude_unset=True)
                        await self._writer.send(f"{line}\n".encode())
        finally:
            self._is_written.set()

    async def read_stderr(self) -> None:
        """Read the server's stderr and keep its last lines, for the case that it fails."""
        lines = Lines(_CHUNK)
        since, heard_bytes = time.monotonic(), 0
        while chunk := await _read(self._pipes.stderr):
            heard_bytes += len(chunk)
            if heard_bytes > _HEARD_BYTES:
                # Let the pipe fill up, so that a server that floods it waits and others get the processor.
                await anyio.sleep(max(0.0, since + 1 - time.monotonic()))
                since, heard_bytes = time.monotonic(), 0
            # Decode only the lines that would be kept, because there may be a flood of them.
            for line in [*lines.feed(chunk)][-_TAIL_LINES:]:
                text = (line.head if isinstance(line, Overlong) else line).decode(errors="replace")[:_LINE_CHARACTERS]
                self._stderr_tail.append(text)
                log.debug("MCP server %s: %s", self._name, text)

    async def watch(self, on_end: OnEnd) -> None:
        """Report the end of the process once its output is read."""
        status = await self._child.wait()
        self._child.kill_group()
        with anyio.move_on_after(_DRAIN_S):
            await self._is_read.wait()
        self._report(on_end, _ending_text(status))

    def _report(self, on_end: OnEnd, how: str) -> None:
        if not self._is_stopping and not self._is_reported:
            self._is_reported = True
            detail = f"it said last: {' / '.join(self._stderr_tail) or 'nothing'}"
            log.warning("MCP server %s %s; %s", self._name, how, detail)
            self._settle_probe_result()
            on_end(how, detail)

    def _settle_probe_result(self) -> None:
        """Fix the answer of `has_read` now, because later the pipe may be closed and its number reused."""
        has_read = self._probe_result.has_read()
        self._probe_result.has_read = lambda: has_read

    def _has_read(self) -> bool:
        """Return whether the server has read something from its stdin pipe."""
        waiting = array("i", [0])
        try:
            fcntl.ioctl(self._pipes.stdin, termios.FIONREAD, waiting)
        except OSError:
            return True
        return waiting[0] < self._writer.sent_bytes

    async def stop(self, on_end: OnEnd) -> None:
        """Stop the server as the protocol says: close its stdin, wait, then kill it and all processes of its group."""
        # The client may have noticed the end of its output, and given up, before we noticed the end of the process.
        if self._has_hung_up and await self._ends_within(_DRAIN_S):
            self._report(on_end, _ending_text(await self._child.wait()))
        self._is_stopping = True
        # End the writer before the descriptor is closed, because its number may be reused at once.
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
        """Close the pipes and release the process, which has ended."""
        self._close_stdin()
        self._reader.close()
        os.close(self._pipes.stdout)
        os.close(self._pipes.stderr)
        self._child.release()

    def _close_stdin(self) -> None:
        if self._has_stdin:
            self._has_stdin = False
            self._settle_probe_result()
            self._direct_calls.close()
            self._writer.close()
            os.close(self._pipes.stdin)


def _message(line: Line) -> SessionMessage | Exception | None:
    """Return a line as a message for the SDK.

    A line that is too long becomes an error of its call, so that other calls go on; None if its call is unknown.
    """
    if isinstance(line, Overlong):
        number = number_of(line.head, line.tail)
        error = ErrorData(code=TOO_LARGE, message=too_large(line))
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error)) if number else None
    if has_too_many_values(line):
        error = ErrorData(code=TOO_LARGE, message=f"its answer has more than {MAX_VALUES:,} values")
        number = number_of(line, line[-TAIL_BYTES:])
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error)) if number else None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        notification = change_notification(line)
        return SessionMessage(notification) if notification else error


def _unknown(number: RequestId) -> SessionMessage:
    error = ErrorData(code=METHOD_NOT_FOUND, message=f"{_PROBE} was not answered")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error))


def _ending_text(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


async def _read(descriptor: int) -> bytes:
    """Return the next bytes; none if the writer is gone."""
    # Yield first, because a server that never stops writing must leave time for others.
    await anyio.lowlevel.checkpoint()
    while True:
        try:
            return os.read(descriptor, _CHUNK)
        except BlockingIOError:
            await wait_readable(descriptor)
        except OSError:
            return b""
