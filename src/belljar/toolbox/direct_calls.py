"""Calls tools directly over the pipes of a server, without the SDK's client.

Every `tools/call` of a server on pipes goes this way, traced or not, because the host's one event loop spends 0.3 to
0.4 ms of processor time on such a call and 0.9 to 1.3 ms on one through the SDK's client: 3.0 to 3.5 times as much,
measured without tracing, with 1,200 calls of a trivial tool each way, in either version of the protocol. Only
`tools/call`, its answer, its progress and its cancellation go this way, with request ids that the SDK never reaches;
the SDK does everything else on the connection. The pipes are read here, too: each line is offered at once to a
callback, and waits for `next()` if the callback does not take it. This module does not look at what an answer says.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeGuard, cast

from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED
from pydantic_core import from_json

from belljar import tracing
from belljar.ipc import Line, Lines, Overlong
from belljar.json_values import TooManyValues, check_values
from belljar.toolbox.answer_values import encoded
from belljar.toolbox.answers import TOO_LARGE
from belljar.toolbox.base import JsonObject
from belljar.toolbox.message_memory import LARGE_BYTES, MemoryShare, MessageMemory

_CHUNK: Final = 65_536

Take = Callable[[Line, MemoryShare | None], bool]
"""Returns whether it takes a line; then it also has to release the line's share of memory."""
log = logging.getLogger(__name__)

FIRST_NUMBER: Final = 1_000_000_001
# The Python SDK writes a message's id first, the TypeScript SDK last.
_ID_AT_HEAD: Final = re.compile(rb'\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,18})\b')
_ID_AT_TAIL: Final = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*\}\s*$')
TAIL_BYTES: Final = 1_024
_META_PREFIX: Final = "io.modelcontextprotocol/"

ProgressCallback = Callable[[float, float | None, str | None], None]
"""Called with the progress, the total if it is known, and the server's message."""


class PipeReader:
    """Reads lines from a descriptor."""

    def __init__(self, descriptor: int, limit_bytes: int, memory: MessageMemory, take: Take) -> None:
        self._descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._lines = Lines(limit_bytes)
        self._memory = memory
        self._share: MemoryShare | None = None
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Line] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False
        self._is_read = False

    def open(self) -> None:
        """Start or resume reading."""
        if not self._is_read and not self._has_ended:
            self._is_read = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def close(self) -> None:
        """Stop reading, before the descriptor is closed; may be called twice."""
        self._pause()
        self._has_ended = True
        self._arrived.set()
        self._free()

    async def next(self) -> Line | None:
        """Return the next line that `take` did not take; None if the writer is gone.

        While such a line waits to be fetched, nothing more is read.
        """
        while not self._waiting:
            if self._has_ended:
                return None
            self._arrived.clear()
            if self._share is None or self._share.is_granted:
                self.open()
            await self._arrived.wait()
        return self._waiting.popleft()

    def _pause(self) -> None:
        if self._is_read:
            self._is_read = False
            self._loop.remove_reader(self._descriptor)

    def _on_readable(self) -> None:
        # Read one piece at a time, because a server that never stops writing must leave time for others.
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        for line in self._lines.feed(chunk):
            share, self._share = self._share, None
            if share is not None:
                share.shrink(len(line) if isinstance(line, bytes) else 0)
            if not self._take(line, share):
                if share is not None:
                    share.release()
                self._waiting.append(line)
        if not chunk:
            self._has_ended = True
        if self._has_ended or self._waiting:
            self._pause()
            self._arrived.set()
        if self._lines.size > LARGE_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        if self._lines.is_dropped:
            self._free()
        elif self._share is None:
            self._share = self._memory.reserve(self._limit_bytes, self._go_on, self._give_up)
            if not self._share.is_granted:
                self._pause()

    def _free(self) -> None:
        if self._share is not None:
            self._share.release()
            self._share = None

    def _give_up(self) -> None:
        self._lines.give_up()
        self._free()

    def _go_on(self) -> None:
        if not self._waiting:
            self.open()


class PipeWriter:
    """Writes lines to a descriptor, whole and in order. A line is sent even if its sender is cancelled meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._left = memoryview(b"")
        self._emptied = asyncio.Event()
        self._is_closed = False
        self.sent_bytes = 0

    async def send(self, line: bytes) -> None:
        """Start sending a line after those before it. Raises OSError if nobody reads any more."""
        while self._left:
            await self._emptied.wait()
        if self._is_closed:
            raise BrokenPipeError("closed")
        self._begin(memoryview(line))

    def post(self, line: bytes) -> None:
        """Send a short line without waiting, for a caller that does not need to know whether it is read."""
        if self._left:
            self._left = memoryview(bytes(self._left) + line)
        elif not self._is_closed:
            with contextlib.suppress(OSError):
                self._begin(memoryview(line))

    def close(self) -> None:
        """Stop writing, before the descriptor is closed; may be called twice."""
        if self._left:
            self._loop.remove_writer(self._descriptor)
        self._is_closed, self._left = True, memoryview(b"")
        self._emptied.set()

    def _begin(self, data: memoryview) -> None:
        self._write(data)
        if self._left:
            self._emptied.clear()
            self._loop.add_writer(self._descriptor, self._on_writable)

    def _on_writable(self) -> None:
        try:
            self._write(self._left)
        except OSError:
            self.close()
            return
        if not self._left:
            self._loop.remove_writer(self._descriptor)
            self._emptied.set()

    def _write(self, data: memoryview) -> None:
        try:
            written = os.write(self._descriptor, data)
            self.sent_bytes += written
            self._left = data[written:]
        except BlockingIOError:
            self._left = data


class ProtocolViolation(ValueError):
    """An answer breaks the protocol."""


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A result as it came, and its share of the memory for messages."""

    fields: JsonObject
    share: MemoryShare | None

    def release(self) -> None:
        """Give back the memory; may be called twice."""
        if self.share is not None:
            self.share.release()


@dataclass(slots=True)
class _Pending:
    answered: asyncio.Future[RawResponse]
    on_progress: ProgressCallback


class DirectCalls:
    """The direct calls of one connection, possible after `open`."""

    def __init__(self) -> None:
        self._outlet: PipeWriter | None = None
        self._numbers = count(FIRST_NUMBER)
        self._pending: dict[int, _Pending] = {}
        self._meta: JsonObject = {}

    def open(self, outlet: PipeWriter) -> None:
        """Start sending lines to this pipe."""
        self._outlet = outlet

    def close(self) -> None:
        """Fail all pending calls, because no answer will come; may be called twice."""
        self._outlet = None
        for pending in self._pending.values():
            _settle(pending, _closed())

    def learn(self, parameters: JsonObject | None) -> None:
        """Copy the metadata of one of the SDK's requests: in the newer protocol every request names its client."""
        meta: JsonObject = (parameters or {}).get("_meta") or {}
        self._meta = {name: value for name, value in meta.items() if name.startswith(_META_PREFIX)}

    async def call(self, tool: str, arguments: JsonObject, on_progress: ProgressCallback) -> RawResponse:
        """Return the result of a call. Raises MCPError for an error; cancelling the task cancels it at the server."""
        if (outlet := self._outlet) is None:
            raise _closed()
        number = next(self._numbers)
        with tracing.outgoing_span("tools/call", tool, number) as trace_context:
            meta = {**self._meta, **trace_context, "progressToken": number}
            return await self._exchange(
                outlet, number, {"name": tool, "arguments": arguments, "_meta": meta}, on_progress
            )

    async def _exchange(
        self, outlet: PipeWriter, number: int, parameters: JsonObject, on_progress: ProgressCallback
    ) -> RawResponse:
        line = _line("tools/call", parameters, number)
        answered: asyncio.Future[RawResponse] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(answered, on_progress)
        try:
            await outlet.send(line)
            return await answered
        except OSError:
            _drop(answered)
            raise _closed() from None
        except asyncio.CancelledError:
            _drop(answered)
            outlet.post(_line("notifications/cancelled", {"requestId": number, "reason": "caller cancelled"}))
            raise
        finally:
            del self._pending[number]

    def feed(self, line: Line, share: MemoryShare | None) -> bool:
        """Handle a line from the server; return False if it concerns no direct call."""
        if not self._pending:
            return False
        if isinstance(line, Overlong):
            return self._fail(number_of(line.head, line.tail), MCPError(TOO_LARGE, too_large(line)))
        try:
            check_values(line)
            message: Any = from_json(line)
        except TooManyValues as error:
            failure = MCPError(TOO_LARGE, f"its answer is not read: {error}")
            return self._fail(number_of(line, line[-TAIL_BYTES:]), failure, share)
        except ValueError:
            return self._fail(number_of(line, line[-TAIL_BYTES:]), ProtocolViolation("it is not JSON"), share)
        if not isinstance(message, dict):
            return False
        fields = cast("JsonObject", message)
        if "method" in fields:
            return fields["method"] == "notifications/progress" and self._note(fields.get("params"))
        number, result = _number(fields.get("id")), fields.get("result")
        pending = self._pending.get(number)
        if pending is None or pending.answered.done() or not isinstance(result, dict):
            return self._fail(number, _failure(fields.get("error")), share)
        pending.answered.set_result(RawResponse(cast("JsonObject", result), share))
        return True

    def _fail(self, number: int, failure: Exception, share: MemoryShare | None = None) -> bool:
        pending = self._pending.get(number)
        if pending is None:
            return False
        _settle(pending, failure)
        if share is not None:
            share.release()
        return True

    def _note(self, parameters: Any) -> bool:
        fields = cast("JsonObject", parameters) if isinstance(parameters, dict) else {}
        pending = self._pending.get(_number(fields.get("progressToken")))
        done, total, message = fields.get("progress"), fields.get("total"), fields.get("message")
        if pending is None or not _is_number(done):
            return not _is_number(done)  # drop a malformed one here, because the SDK would log its content
        text = message if isinstance(message, str) else None
        try:
            pending.on_progress(float(done), float(total) if _is_number(total) else None, text)
        except Exception:
            # The line is read in the event loop, where no caller could catch this, and the answer is still to come.
            log.exception("the progress of a call could not be told")
        return True


def number_of(head: bytes, tail: bytes) -> int:
    """Return the id of a message that cannot be parsed; 0 if it is not found."""
    found = _ID_AT_HEAD.match(head) or _ID_AT_TAIL.search(tail)
    return int(found[1]) if found else 0


def too_large(line: Overlong) -> str:
    """Return the error message for an answer that was too large or too slow."""
    if line.was_given_up:
        return "it took too long over a large answer, while others waited for the room that it took"
    return f"it answered with more than {line.limit_bytes:,} bytes"


def _line(method: str, parameters: JsonObject, number: int = 0) -> bytes:
    numbered = {"id": number} if number else {}
    return encoded({"jsonrpc": "2.0", **numbered, "method": method, "params": parameters}) + b"\n"


def _number(given: Any) -> int:
    """Return a request id as a number, because some servers send it back as text; 0 if it is none."""
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 19:
        return int(given)
    return given if isinstance(given, int) else 0


def _is_number(given: Any) -> TypeGuard[int | float]:
    """Return whether a value is a number that fits a float."""
    return isinstance(given, float) or (
        isinstance(given, int) and not isinstance(given, bool) and given.bit_length() <= 64
    )


def _failure(error: Any) -> Exception:
    fields = cast("JsonObject", error) if isinstance(error, dict) else {}
    code, text = fields.get("code"), fields.get("message")
    if isinstance(code, int) and isinstance(text, str):
        return MCPError(code, text, fields.get("data"))
    return ProtocolViolation("it is no answer")


def _settle(pending: _Pending, failure: Exception) -> None:
    if not pending.answered.done():
        pending.answered.set_exception(failure)


def _drop(answered: asyncio.Future[RawResponse]) -> None:
    """Give back the memory of an answer that came for a cancelled call."""
    if answered.done() and not answered.cancelled() and answered.exception() is None:
        answered.result().release()


def _closed() -> MCPError:
    return MCPError(CONNECTION_CLOSED, "Connection closed")
