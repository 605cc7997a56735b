"""Messages of MCP that a server makes itself for a request that it passes on: events, and errors as answers."""

import json
from collections.abc import Mapping
from typing import Any

from mcp.types import INTERNAL_ERROR

from belljar.errors import BelljarError
from belljar.mcp.content import error_blocks


def data_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode()


def event_of(data: bytes) -> bytes:
    """Return a message as an event of a stream."""
    return b"event: message\r\ndata: " + data + b"\r\n\r\n"


def answer_to(message: Mapping[str, Any], error: BelljarError) -> dict[str, Any]:
    """Return an error as the answer to a request."""
    if message.get("method") == "tools/call":
        result = error_blocks(error).model_dump(mode="json", by_alias=True, exclude_none=True)
        return {"jsonrpc": "2.0", "id": message.get("id"), "result": result}
    told = {"code": INTERNAL_ERROR, "message": f"{error.code}: {error}"}
    return {"jsonrpc": "2.0", "id": message.get("id"), "error": told}
