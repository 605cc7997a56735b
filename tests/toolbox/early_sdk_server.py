"""A server as one was written with the first SDKs; run with a Python that has one of those."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import asyncio

import mcp.types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

server = Server("early")


@server.list_tools()
async def list_tools():
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return [types.Tool(name="echo", description="Says it again.", inputSchema=text)]


@server.call_tool()
async def call_tool(name, arguments):
    return [types.TextContent(type="text", text=arguments["text"])]


async def main():
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
