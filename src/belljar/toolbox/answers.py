"""Converts what servers send (tools, answers, errors) into belljar's own types, checked for form and size.

No module above this one sees the SDK's types of tools and answers.
"""

import base64
import binascii
import json
import logging
from collections.abc import Callable
from typing import Final, cast

from mcp.shared.exceptions import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    Tool,
)

from belljar.toolbox.base import Annotations, Block, JsonObject, ToolAnswer, ToolDefinition
from belljar.toolbox.list_repair import unreadable

log = logging.getLogger(__name__)

_NAME_CHARACTERS: Final = 128
_TITLE_CHARACTERS: Final = 200
_DESCRIPTION_CHARACTERS: Final = 20_000
_SCHEMA_CHARACTERS: Final = 200_000
_INSTRUCTIONS_CHARACTERS: Final = 20_000


def definition(server: str, tool: Tool) -> ToolDefinition | None:
    """Return a tool as belljar's own type; None, with a line in the log, if it cannot be used."""
    if not tool.name.isprintable() or not 0 < len(tool.name) <= _NAME_CHARACTERS:
        log.warning("MCP server %s has a tool whose name cannot be used; it is left out", server)
        return None
    if not (_is_small(tool.input_schema) and _is_small(tool.output_schema)):
        log.warning("MCP server %s has a tool %s with a schema that is too large; it is left out", server, tool.name)
        return None
    return ToolDefinition(
        server,
        tool.name,
        _text(tool.description, _DESCRIPTION_CHARACTERS),
        _text(tool.title or (tool.annotations.title if tool.annotations else None), _TITLE_CHARACTERS),
        tool.input_schema,
        tool.output_schema,
        _annotations(tool),
    )


def weight(tool: ToolDefinition) -> int:
    """Return how many characters a tool's description and schemas have."""
    return len(tool.description) + len(json.dumps(tool.input_schema)) + len(json.dumps(tool.output_schema))


def instructions(text: str | None) -> str:
    """Return a server's instructions, cut to the limit."""
    return _text(text, _INSTRUCTIONS_CHARACTERS)


def read_answer(server: str, result: CallToolResult, release: Callable[[], None] | None = None) -> ToolAnswer:
    """Return the answer of a call; `release` is called when it has been passed on."""
    blocks = tuple([_decoded(server, block) for block in result.content])
    return ToolAnswer(blocks, result.structured_content, bool(result.is_error), release)


def refusal(message: str) -> ToolAnswer:
    """Return a server's error as the answer of one call; it does not concern the connection."""
    return ToolAnswer((Block("text", text=message),), is_error=True)


def _annotations(tool: Tool) -> Annotations:
    given = tool.annotations
    if given is None:
        return Annotations()
    return Annotations(
        read_only=bool(given.read_only_hint),
        destructive=given.destructive_hint is not False,
        idempotent=bool(given.idempotent_hint),
    )


def _block(block: ContentBlock) -> Block:
    match block:
        case TextContent():
            return Block("text", text=block.text)
        case ImageContent():
            return Block("image", data=_bytes(block.data), mime=block.mime_type)
        case AudioContent():
            return Block("audio", data=_bytes(block.data), mime=block.mime_type)
        case ResourceLink():
            return Block(
                "link", text=block.description or "", mime=block.mime_type or "", uri=str(block.uri), name=block.name
            )
        case EmbeddedResource():
            resource = block.resource
            mime, uri = resource.mime_type or "", str(resource.uri)
            if isinstance(resource, BlobResourceContents):
                return Block("resource", data=_bytes(resource.blob), mime=mime, uri=uri)
            return Block("resource", text=resource.text, mime=mime, uri=uri)


def _decoded(server: str, block: ContentBlock) -> Block:
    """Return a block, or a text in its place if its data cannot be read."""
    try:
        return _block(block)
    except (binascii.Error, ValueError) as error:
        log.warning("MCP server %s sent data that is not base64: %s", server, error)
        return Block("text", text=unreadable(block.type, "its data is not base64"))


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _text(text: str | None, most: int) -> str:
    return (text or "")[:most]


def _is_small(schema: JsonObject | None) -> bool:
    try:
        return len(json.dumps(schema)) <= _SCHEMA_CHARACTERS
    except (ValueError, RecursionError):
        return False


# Transport errors, as codes that pass through the SDK like a server's own errors. JSON-RPC leaves -32000 to -32099 to
# implementations; a server that used one of ours would only say that it failed.

UNREACHABLE: Final = -32_096
SESSION_GONE: Final = -32_097
TOO_LARGE: Final = -32_098

_OURS: Final = (UNREACHABLE, SESSION_GONE, TOO_LARGE)
# Many servers use the code of a closed connection for errors of their own; these are the SDK's messages for it.
_CLOSED: Final = ("Connection closed", "SSE stream ")
_MESSAGE_CHARACTERS: Final = 2_000


def is_on_the_way(error: MCPError) -> bool:
    """Return whether the call got lost, rather than being answered with an error."""
    return error.code in _OURS or (error.code == CONNECTION_CLOSED and error.message.startswith(_CLOSED))


def error_message(error: BaseException) -> str:
    """Return an error's message, bounded and on one line, because a server may have written it."""
    error = _innermost(error)
    text = error.message if isinstance(error, MCPError) else str(error) or type(error).__name__
    shown = "".join(character if character.isprintable() else " " for character in text[:_MESSAGE_CHARACTERS])
    return " ".join(shown.split())


def detail(error: BaseException) -> str:
    """Return the part of one of belljar's own errors that only the operator should read."""
    error = _innermost(error)
    data: object = error.data if isinstance(error, MCPError) and error.code in _OURS else ""
    return data[:_MESSAGE_CHARACTERS] if isinstance(data, str) else ""


def code(error: BaseException) -> int:
    """Return the protocol's code of an error; 0 if it has none."""
    error = _innermost(error)
    return error.code if isinstance(error, MCPError) else 0


def _innermost(error: BaseException) -> BaseException:
    """Return the first error within nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
