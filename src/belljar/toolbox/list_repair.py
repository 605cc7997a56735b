"""One bad entry in a list that a server sends costs that entry alone: a tool, a block of an answer.

The SDK checks a message as a whole, and one tool without a type in its schema would hide all tools of its server. What
comes in is put right here, before the SDK sees it: what has an obvious meaning gets it, the rest is left out and named.
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
    """What a server sends, put right, in place of the stream it comes from."""

    def __init__(self, stream: Any, server: str, version: Callable[[], str]) -> None:
        self._stream = stream
        self._server = server
        self._version = version

    @property
    def last_context(self) -> Any:
        """The SDK's, where its stream has one."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """The next message."""
        item = await self._stream.receive()
        message = item.message if isinstance(item, SessionMessage) else None
        if isinstance(message, JSONRPCNotification) and message.method == _CHANGED:
            message.params = None  # nothing in there is looked at
        elif isinstance(message, JSONRPCResponse):
            _repair(message.result, self._server, self._version())
        return item

    async def aclose(self) -> None:
        """Close it."""
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
    """Make each block of a result one that can be read; one that cannot becomes a text that says so."""
    content: Any = result.get("content")
    if content is None and result.get("structuredContent") is not None:
        result["content"] = []
    elif isinstance(content, list):
        result["content"] = [_readable(block) for block in cast("list[Any]", content)]


def unreadable(kind: object, why: str) -> str:
    """What stands in an answer in place of a block that cannot be read."""
    return f"(a block of type {_shown(kind)} is left out: {why})"


def change_notification(line: bytes) -> JSONRPCNotification | None:
    """The news that the tools have changed, from a message that is otherwise against the protocol."""
    try:
        message: Any = from_json(line)
    except ValueError:
        return None
    is_news = isinstance(message, dict) and cast("JsonObject", message).get("method") == _CHANGED
    return JSONRPCNotification(jsonrpc="2.0", method=_CHANGED) if is_news else None


def _repair(result: JsonObject, server: str, version: str) -> None:
    """Only what the SDK would refuse is touched."""
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
    """A tool as it is, or with its schema completed, or with no more than a call takes; None where all that fails."""
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
    """Arguments are always an object, whether or not a schema says so."""
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
    # What the newer protocol wants around a list; the older ones do not mind it.
    return _is_list({"tools": [tool], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}, version)


def _is_list(result: JsonObject, version: str) -> bool:
    """As the SDK checks it."""
    try:
        validate_server_result(_LIST, version, result)
    except ValidationError:
        return False
    except (KeyError, ValueError):
        return True  # a version without a form of its own for lists: the SDK does not check it either
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
