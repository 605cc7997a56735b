"""Parsing of JSON-RPC messages, and the errors that answer those which cannot be served, with their request's id.

The SDK drops messages that it cannot parse, and the client waits for ever. Knows nothing of transports.
"""

import json
import re
from typing import Any, Final, cast

import pydantic_core
from mcp.types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from belljar.json_values import MAX_VALUES, has_too_many_values
from belljar.settings import MEBIBYTE, Settings

REQUEST_CANCELLED: Final = -32800
"""The code with which the SDK answers a request of 2025's protocol that was cancelled."""
SCANNED_BYTES: Final = 4_096
"""How far into a message that is not parsed we look for its id."""
_BLANK_BYTES: Final = 64
# A string that is not closed ends with the text, or every quote in it would be tried as the beginning of another one.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\(?:.|\Z)[^"\\]*+)*+(?:"|\Z)|[{}\[\]]', re.DOTALL)
_ID_VALUE: Final = re.compile(rb'\s*+:\s*+("(?:[^"\\]|\\.)*+"|-?\d++(?![.eE]))')


def most_request_bytes(settings: Settings) -> int:
    """Return the size of the largest message that is read: an upload in base64, and the JSON around it."""
    return settings.max_upload_bytes * 4 // 3 + MEBIBYTE


def read_message(data: bytes) -> JSONRPCMessage | list[JSONRPCError]:
    """Return the message, or the errors to answer with if it is not a valid one."""
    refused = unread(data)
    return [refused] if refused else parse_message(data)


def parse_message(data: bytes) -> JSONRPCMessage | list[JSONRPCError]:
    """Return what `read_message` does for a message that `unread` does not refuse."""
    try:
        message = jsonrpc_message_adapter.validate_json(data, by_name=False)
    except ValidationError:
        return refusals(data)
    # The SDK's notification ignores unknown members, so a request with an unusable id is parsed as a notification.
    if isinstance(message, JSONRPCNotification) and b'"id"' in data and "id" in pydantic_core.from_json(data):
        return refusals(data)
    return message


def unread(data: bytes) -> JSONRPCError | None:
    """Return the error for a message that is refused before it is parsed: a batch, or one with too many values."""
    if data[:_BLANK_BYTES].lstrip().startswith(b"["):
        return refusal(INVALID_REQUEST, "Batches are not served: send each message by itself", None)
    if has_too_many_values(data):
        why = f"The message has more than {MAX_VALUES:,} values: put large data into files, in parts"
        return refusal(INVALID_REQUEST, why, find_id(data))
    return None


def refusals(data: bytes) -> list[JSONRPCError]:
    """Return the error for a message that cannot be served; none for a broken answer."""
    try:
        value: object = pydantic_core.from_json(data)
    except ValueError as error:
        return [refusal(PARSE_ERROR, f"Parse error: {error}", find_id(data))]
    if not isinstance(value, dict):
        return [refusal(INVALID_REQUEST, "A message is a JSON object", None)]
    members = cast("dict[str, Any]", value)
    if "method" not in members and ("result" in members or "error" in members):
        return []
    return [refusal(*_fault(members), _usable_id(members))]


def refusal(code: int, message: str, request_id: RequestId | None) -> JSONRPCError:
    """Return the error answer to a request."""
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=message))


def id_in_use(request: JSONRPCRequest) -> JSONRPCError:
    """Return the error for a request with the id of one that is under way, because an answer could be to either."""
    why = f"Request id {request.id!r} belongs to a request that is not answered yet: take another id"
    return refusal(INVALID_REQUEST, why, request.id)


def cancelled(request: JSONRPCRequest) -> JSONRPCError:
    """Return the answer to a request that its client cancelled before it came."""
    return refusal(REQUEST_CANCELLED, "Request cancelled", request.id)


def cancelled_id(message: JSONRPCMessage | list[JSONRPCError]) -> str:
    """Return the id of the request that a message cancels; empty for any other message."""
    if not isinstance(message, JSONRPCNotification) or message.method != "notifications/cancelled":
        return ""
    found = (message.params or {}).get("requestId")
    return str(found) if _is_id(found) else ""


def _fault(members: dict[str, Any]) -> tuple[int, str]:
    if members.get("jsonrpc") != "2.0":
        return INVALID_REQUEST, 'Invalid request: "jsonrpc" has to be "2.0"'
    if not isinstance(members.get("method"), str):
        return INVALID_REQUEST, 'Invalid request: "method" has to be text'
    if "id" in members and not _is_id(members["id"]):
        return INVALID_REQUEST, 'Invalid request: "id" has to be a whole number or text'
    return INVALID_PARAMS, 'Invalid request: "params" has to be an object'


def _is_id(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _usable_id(members: dict[str, Any]) -> RequestId | None:
    """Return the id to answer to; 7.0 counts as 7, and other fractions cannot be sent back."""
    found: object = members.get("id")
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return cast("RequestId", found) if _is_id(found) else None


def find_id(data: bytes) -> RequestId | None:
    """Return the id of a request that is not parsed, if its outermost object has one at the text's beginning."""
    depth, data = 0, data[:SCANNED_BYTES]
    for token in _TOKEN.finditer(data):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and token[0] == b'"id"' and (value := _ID_VALUE.match(data, token.end())):
            return _read_id(value[1])
    return None


def _read_id(value: bytes) -> RequestId | None:
    try:
        found: object = json.loads(value)
        str(found).encode()
    except ValueError:  # a lone surrogate, which could not be sent back, or bytes that are no UTF-8
        return None
    return cast("RequestId", found)
