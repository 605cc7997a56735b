"""A server that says a personal datum in every place where the protocol has a text. Run as a program, over stdio."""

import asyncio
import base64
import json
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.types import (
    Annotations,
    AudioContent,
    BlobResourceContents,
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

WHO = "ann.secret@example.com"
TOOLS = ("content", "mixed", "structured", "nested", "fails", "raises", "progress", "logs", "asks", "odd_bytes")
Ctx = ServerRequestContext[Any, Any]


def blob(data: bytes) -> str:
    return base64.b64encode(data).decode()


def contents() -> list[Any]:
    notes = Annotations(last_modified=WHO)
    more: dict[str, Any] = {"annotations": notes, "_meta": {WHO: WHO}}
    text = TextResourceContents(uri=f"memo://{WHO}", text=WHO, mime_type=f"text/{WHO}", _meta={WHO: WHO})
    raw = BlobResourceContents(uri=f"memo://{WHO}", blob=blob(WHO.encode()), mime_type=WHO, _meta={WHO: WHO})
    return [
        TextContent(type="text", text=f"by {WHO}", **more),
        TextContent(type="text", text=json.dumps({WHO: [WHO, {"deep": WHO}]}), **more),
        ImageContent(type="image", data=blob(b"\x89PNG"), mime_type=f"image/{WHO}", **more),
        AudioContent(type="audio", data=blob(b"RIFF\xff"), mime_type=f"audio/x; by={WHO}", **more),
        EmbeddedResource(type="resource", resource=text, **more),
        EmbeddedResource(type="resource", resource=raw, **more),
        ResourceLink(
            type="resource_link",
            uri=f"https://example.org/{WHO}?to=\u202e{WHO}",
            name=f"{WHO}\x1b[2J{WHO}",
            title=WHO,
            description=WHO,
            mime_type=f"text/{WHO}",
            **more,
        ),
    ]


async def list_tools(_: Ctx, __: PaginatedRequestParams | None) -> ListToolsResult:
    return ListToolsResult(tools=[Tool(name=name, input_schema={"type": "object"}) for name in TOOLS])


async def call_tool(ctx: Ctx, params: CallToolRequestParams) -> CallToolResult:
    said = TextContent(type="text", text="done")
    match params.name:
        case "content":
            return CallToolResult(content=contents())
        case "mixed":
            return CallToolResult(content=contents(), structured_content={WHO: WHO})
        case "structured":
            return CallToolResult(content=[], structured_content={WHO: {WHO: [WHO]}}, _meta={WHO: WHO})
        case "nested":
            return CallToolResult(content=[TextContent(type="text", text=json.dumps([{WHO: f"<{WHO}>"}]))])
        case "fails":
            return CallToolResult(content=contents(), structured_content={WHO: WHO}, is_error=True)
        case "raises":
            raise MCPError(-32_050, f"not for {WHO}", {WHO: WHO})
        case "progress":
            await ctx.session.report_progress(1, 2, f"half of {WHO}")
        case "logs":
            told = LoggingMessageNotificationParams(level="error", logger=WHO, data={WHO: WHO})
            await ctx.session.send_notification(LoggingMessageNotification(params=told))
        case "asks":
            field = {"type": "string", "title": WHO, "description": WHO, "default": WHO}
            form = ElicitRequestFormParams(
                message=f"Are you {WHO}?", requested_schema={"type": "object", "properties": {"who": field}}
            )
            await ctx.session.send_request(ElicitRequest(params=form), ElicitResult)
        case _:
            latin = BlobResourceContents(uri="memo://a", blob=blob(b"caf\xe9 " + WHO.encode()), mime_type="text/csv")
            wide = BlobResourceContents(uri="memo://b", blob=blob(WHO.encode("utf-16")), mime_type="text/plain")
            return CallToolResult(content=[EmbeddedResource(type="resource", resource=each) for each in (latin, wide)])
    return CallToolResult(content=[said])


async def main() -> None:
    server: Server[Any] = Server("talkative", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        # The older protocol alone: a server of the newer one neither logs nor asks by itself.
        await serve_loop(server, read, write, lifespan_state={}, init_options=server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
