"""Repairs lists that a server sends (tools, blocks of an answer), so that one bad entry costs only that entry.

The SDK checks a message as a whole, so one tool without a type in its schema would hide all tools of its server. This
module repairs a message before the SDK sees it: an entry with an obvious meaning is completed, another one is left out,
and a log line or a text in the answer says so.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, Self, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import (
    CallToolResult,
    ContentBlock,
    JSONRPCNotification,
    JSONRPCResponse,
    Tool,
)
from mcp_types.methods import validate_server_result
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from belljar.toolbox.base import JsonObject

log = logging.getLogger(__name__)

_CHANGED: Final = "notifications/tools/list_changed"
_LIST: Final = "tools/list"
_ESSENTIAL: Final = ("name", "title", "description", "inputSchema")
_SHOWN_CHARACTERS: Final = 60
_BLOCK: Final[TypeAdapter[ContentBlock]] = TypeAdapter(ContentBlock)


class RepairedStream:
    """Wraps the stream of a server's messages and repairs each message."""

    def __init__(self, stream: Any, server: str, version: Callable[[], str]) -> None:
        self._stream = stream
        self._server = server
        self._version = version

    @property
    def last_context(self) -> Any:
        """Return the attribute of the wrapped SDK stream, if it has one."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message, repaired."""
        item = await self._stream.receive()
        message = item.message if isinstance(item, SessionMessage) else None
        if isinstance(message, JSONRPCNotification) and message.method == _CHANGED:
            message.params = None  # nothing uses them
        elif isinstance(message, JSONRPCResponse):
            _repair(message.result, self._server, self._version())
        return item

    async def aclose(self) -> None:
        """Close the wrapped stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)


def repair_content(result: JsonObject) -> None:
    """Replace each block of a result that cannot be read by a text that says so."""
    content: Any = result.get("content")
    if content is None and result.get("structuredContent") is not None:
        result["content"] = []
    elif isinstance(content, list):
        result["content"] = [_readable(block) for block in cast("list[Any]", content)]


def unreadable(kind: object, why: str) -> str:
    """Return the text that replaces a block that cannot be read."""
    return f"(a block of type {_shown(kind)} is left out: {why})"


def change_notification(line: bytes) -> JSONRPCNotification | None:
    """Return a clean notification that the tools have changed, if a malformed line is one; else None."""
    try:
        message: Any = from_json(line)
    except ValueError:
        return None
    is_change = isinstance(message, dict) and cast("JsonObject", message).get("method") == _CHANGED
    return JSONRPCNotification(jsonrpc="2.0", method=_CHANGED) if is_change else None


def _repair(result: JsonObject, server: str, version: str) -> None:
    """Repair a result in place, if the SDK would refuse it."""
    tools = result.get("tools")
    if isinstance(tools, list) and not _is_list(result, version):
        listed = [_usable(tool, server, version) for tool in cast("list[Any]", tools)]
        result["tools"] = [tool for tool in listed if tool is not None]
    elif "content" in result or "structuredContent" in result:
        try:
            CallToolResult.model_validate(result, by_name=False)
        except ValidationError:
            repair_content(result)


def _usable(tool: Any, server: str, version: str) -> JsonObject | None:
    """Return a tool unchanged, or with its schema completed, or with only its essential fields; None if all fail."""
    if isinstance(tool, dict):
        given = cast("JsonObject", tool)
        completed = {**given, "inputSchema": _completed(given.get("inputSchema"))}
        bare = {name: completed[name] for name in _ESSENTIAL if completed.get(name) is not None}
        for candidate in (given, completed, bare):
            if _is_tool(candidate, version):
                return candidate
        tool = given.get("name")
    log.warning("MCP server %s lists a tool %s against the protocol; it alone is left out", server, _shown(tool))
    return None


def _completed(schema: Any) -> Any:
    """Return the schema with the type `object` added, because arguments are always an object."""
    if schema is None:
        return {"type": "object"}
    given: JsonObject | None = cast("JsonObject", schema) if isinstance(schema, dict) else None
    if given is not None and given.get("type") in (None, ["object"], ["object", "null"]):
        return {**given, "type": "object"}
    return cast("Any", schema)


def _is_tool(tool: JsonObject, version: str) -> bool:
    try:
        Tool.model_validate(tool, by_name=False)
    except ValidationError:
        return False
    # The newer protocol requires these fields around a list; older versions ignore them.
    return _is_list({"tools": [tool], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}, version)


def _is_list(result: JsonObject, version: str) -> bool:
    """Return whether the SDK accepts the result as a list of tools."""
    try:
        validate_server_result(_LIST, version, result)
    except ValidationError:
        return False
    except (KeyError, ValueError):
        return True  # the SDK does not check lists of this protocol version either
    return True


def _readable(block: Any) -> Any:
    try:
        _BLOCK.validate_python(block, by_name=False)
    except ValidationError:
        kind = cast("JsonObject", block).get("type") if isinstance(block, dict) else type(block).__name__
        return {"type": "text", "text": unreadable(kind, "it is not as the protocol has it")}
    return block


def _shown(given: object) -> str:
    text = given if isinstance(given, str) else type(given).__name__
    return repr(text[:_SHOWN_CHARACTERS])
