"""Calls tools directly over the pipes of a server, without the SDK's client.

Every `tools/call` of a server on pipes goes this way, traced or not, because the host's one event loop spends 0.3 to
0.4 ms of processor time on such a call and 0.9 to 1.3 ms on one through the SDK's client: 3.0 to 3.5 times as much,
measured without tracing, with 1,200 calls of a trivial tool each way, in either version of the protocol. Only
`tools/call`, its answer, its progress and its cancellation go this way, with request ids that the SDK never reaches;
the SDK does everything else on the connection. This module does not look at what an answer says.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeGuard, cast

from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED
from pydantic_core import from_json

from belljar import spans
from belljar.ipc import Line, Overlong
from belljar.json_values import TooManyValues, check_values
from belljar.toolbox.answers import TOO_LARGE
from belljar.toolbox.base import JsonObject
from belljar.toolbox.message_memory import MemoryShare
from belljar.toolbox.pipes import PipeWriter
from belljar.toolbox.values import encoded

log = logging.getLogger(__name__)

FIRST_NUMBER: Final = 1_000_000_001
# The Python SDK writes a message's id first, the TypeScript SDK last.
_ID_AT_HEAD: Final = re.compile(rb'\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,18})\b')
_ID_AT_TAIL: Final = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*\}\s*$')
TAIL_BYTES: Final = 1_024
_META_PREFIX: Final = "io.modelcontextprotocol/"

ProgressCallback = Callable[[float, float | None, str | None], None]
"""Called with the progress, the total if it is known, and the server's message."""


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
        with spans.outgoing_span("tools/call", tool, number) as trace_context:
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
