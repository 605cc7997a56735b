"""A server that is a process: messages as lines over its pipes, its stderr in our log, nothing of it left behind.

In place of the SDK's transport, which reads lines of any length and hands our own stderr to the server. Knows
messages, not what they say.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import ErrorData, JSONRPCError, jsonrpc_message_adapter

from belljar.errors import BelljarError, UpstreamFailed
from belljar.sandboxes.child import Child, start_child, wait_readable
from belljar.toolbox.config import StdioServer
from belljar.toolbox.faults import TOO_LARGE
from belljar.toolbox.lines import Lines, Overlong

log = logging.getLogger(__name__)

_CHUNK: Final = 65_536
_GRACE_S: Final = 2.0
_DRAIN_S: Final = 1.0
_TAIL_LINES: Final = 20
_LINE_CHARACTERS: Final = 400
# Where a message has its id depends on who wrote it: the Python SDK's comes first, the TypeScript one's last.
_ID_AT_HEAD: Final = re.compile(rb'\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,18})\b')
_ID_AT_TAIL: Final = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*\}\s*$')

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]
Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends."""

    stdin: int
    stdout: int
    stderr: int


@asynccontextmanager
async def open_process(
    server: StdioServer, *, limit_bytes: int, on_end: Callable[[str], None]
) -> AsyncGenerator[Streams]:
    """Start it, and yield the streams that the SDK's client wants; `on_end` is told in words how it ended by itself."""
    child, pipes = _started(server)
    process = _Process(server.name, child, pipes, limit_bytes)
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.read, to_client, on_end)
            tasks.start_soon(process.write, from_client)
            tasks.start_soon(process.hear)
            tasks.start_soon(process.watch, on_end)
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
        why = error.message.removeprefix("Cannot start ")
        raise UpstreamFailed(
            f"MCP server {server.name} cannot be started: {why}", hint="Install its command, or correct it"
        ) from error
    finally:
        for descriptor in (theirs_in, theirs_out, theirs_error):
            os.close(descriptor)
    for descriptor in (ours_in, ours_out, ours_error):
        os.set_blocking(descriptor, False)
    return child, _Pipes(ours_in, ours_out, ours_error)


class _Process:
    """One server's process."""

    def __init__(self, name: str, child: Child, pipes: _Pipes, limit_bytes: int) -> None:
        self._name = name
        self._child = child
        self._pipes = pipes
        self._limit_bytes = limit_bytes
        self._has_stdin = True
        self._has_hung_up = False
        self._is_stopping = False
        self._is_told = False
        self._is_read = asyncio.Event()
        self._writing = anyio.CancelScope()
        self._is_written = asyncio.Event()
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)

    async def read(self, to_client: Incoming, on_end: Callable[[str], None]) -> None:
        """Messages from its stdout, until it ends or sends one that is too long to tell whose it is."""
        lines = Lines(self._limit_bytes)
        try:
            async with to_client:
                while chunk := await _read(self._pipes.stdout):
                    for line in lines.feed(chunk):
                        message = self._message(line)
                        if message is None:
                            return
                        await to_client.send(message)
                self._has_hung_up = True
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client has gone: what is left to say has no reader
        finally:
            self._is_read.set()
        # Without its stdout it is of no use, whether or not it lives on.
        if not await self._ends_within(_DRAIN_S):
            self._tell(on_end, "closed its output")

    def _message(self, line: bytes | Overlong) -> SessionMessage | Exception | None:
        if isinstance(line, Overlong):
            return self._refusal(line)
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as error:
            return error

    def _refusal(self, line: Overlong) -> SessionMessage | None:
        """An error in place of the answer, so that other calls go on; None when it cannot be told which call it was."""
        found = _ID_AT_HEAD.match(line.head) or _ID_AT_TAIL.search(line.tail)
        log.warning("MCP server %s sent a message of more than %d bytes", self._name, self._limit_bytes)
        if found is None:
            return None
        error = ErrorData(code=TOO_LARGE, message=f"it answered with more than {self._limit_bytes:,} bytes")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error))

    async def write(self, from_client: Outgoing) -> None:
        """Messages to its stdin."""
        try:
            with self._writing, contextlib.suppress(OSError):
                async with from_client:
                    async for item in from_client:
                        line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                        await _write(self._pipes.stdin, f"{line}\n".encode())
        finally:
            self._is_written.set()

    async def hear(self) -> None:
        """What it says on stderr: the last lines are kept, for when it fails."""
        lines = Lines(_CHUNK)
        while chunk := await _read(self._pipes.stderr):
            for line in lines.feed(chunk):
                text = (line.head if isinstance(line, Overlong) else line).decode(errors="replace")[:_LINE_CHARACTERS]
                self._said.append(text)
                log.debug("MCP server %s: %s", self._name, text)

    async def watch(self, on_end: Callable[[str], None]) -> None:
        """Tell of its end, once what it had written is read."""
        status = await self._child.wait()
        self._child.kill_group()
        with anyio.move_on_after(_DRAIN_S):
            await self._is_read.wait()
        self._tell(on_end, _in_words(status))

    def _tell(self, on_end: Callable[[str], None], how: str) -> None:
        if not self._is_stopping and not self._is_told:
            self._is_told = True
            log.warning("MCP server %s %s; it said last: %s", self._name, how, " / ".join(self._said) or "nothing")
            on_end(how)

    async def stop(self, on_end: Callable[[str], None]) -> None:
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
        os.close(self._pipes.stdout)
        os.close(self._pipes.stderr)
        self._child.release()

    def _close_stdin(self) -> None:
        if self._has_stdin:
            self._has_stdin = False
            os.close(self._pipes.stdin)


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


async def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            await _wait_writable(descriptor)


async def _wait_writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    is_writable: asyncio.Future[Any] = loop.create_future()
    loop.add_writer(descriptor, lambda: is_writable.done() or is_writable.set_result(None))
    try:
        await is_writable
    finally:
        loop.remove_writer(descriptor)
