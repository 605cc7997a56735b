"""An MCP server that does what real ones do badly, all in one place: run it as a process.

    python awkward_server.py [--era legacy|modern|both] [--http [--port N]] [--endless] [--mute] [--child FILE]

Over stdio, or with `--http` at a port of its own that it says on stderr ("awkward at URL"). `--endless` never stops
listing pages of tools, `--mute` never answers anything, `--child` leaves a process behind whose pid is in FILE.
"""

import argparse
import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
from awkward_tools import TOOLS, fields
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    AudioContent,
    BlobResourceContents,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    EmbeddedResource,
    ImageContent,
    InputRequest,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

PAGE = 5
MODERN = "2026-07-28"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SOUND = base64.b64decode("UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=")
NAME = fields(("name",), name="string", age="integer")
Ctx = ServerRequestContext[Any, Any]
Answer = CallToolResult | InputRequiredResult
Question = ElicitRequestFormParams | ElicitRequestURLParams


class Awkward:
    """The state of one server: its tools, and who is inside."""

    def __init__(self, *, is_endless: bool = False) -> None:
        self.is_endless = is_endless
        self.bus = InMemorySubscriptionBus()
        self.tools = {tool.name: tool for tool in TOOLS}
        self.calls = 0
        self.inside = 0
        self.met = asyncio.Condition()

    async def list_tools(self, _ctx: Ctx, params: PaginatedRequestParams | None) -> ListToolsResult:
        start = int(params.cursor) if params and params.cursor else 0
        if self.is_endless:
            tool = Tool(name=f"tool_{start}", input_schema={"type": "object"})
            return ListToolsResult(tools=[tool], next_cursor=str(start + 1))
        tools = [*self.tools.values()]
        following = str(start + PAGE) if start + PAGE < len(tools) else None
        return ListToolsResult(tools=tools[start : start + PAGE], next_cursor=following)

    async def call_tool(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        self.calls += 1
        if params.name not in self.tools:
            raise MCPError(INVALID_PARAMS, f"there is no tool {params.name}")
        special: dict[str, Callable[..., Awaitable[Answer]]] = {
            "ask_name": self.ask_name,
            "ask_twice": self.ask_twice,
            "ask_url": self.ask_url,
            "slow": self.slow,
            "meet": self.meet,
            "grow": self.grow,
            "shrink": self.shrink,
        }
        if params.name in special:
            return await special[params.name](ctx, params)
        return self.answer(ctx, params.name, params.arguments or {})

    def answer(self, ctx: Ctx, name: str, arguments: dict[str, Any]) -> CallToolResult:
        match name:
            case "query":
                return said(json.dumps(arguments))
            case "add":
                total = arguments["a"] + arguments["b"]
                return CallToolResult(content=[text(f"{total}")], structured_content={"sum": total})
            case "tree":
                return CallToolResult(content=[], structured_content=arguments)
            case "wrong_output":
                return CallToolResult(content=[text("oops")], structured_content={"sum": "many"})
            case "records":
                rows = [{"id": n, "name": f"n{n}", "tags": ["x"]} for n in range(arguments.get("count", 3))]
                return said(json.dumps(rows))
            case "numbers":
                return CallToolResult(content=[text("42"), text("{not json")])
            case "nothing":
                return CallToolResult(content=[])
            case "fail":
                return CallToolResult(content=[text(arguments.get("why", "it failed"))], is_error=True)
            case "refuse":
                raise MCPError(INVALID_PARAMS, "the server refuses")
            case "big":
                return said("x" * arguments["size"])
            case "media":
                return CallToolResult(content=media())
            case "pid":
                return said(json.dumps({"pid": os.getpid(), "calls": self.calls}))
            case "variables":
                return said(json.dumps(sorted(os.environ)))
            case "headers":
                return said(json.dumps(dict(ctx.request.headers) if ctx.request is not None else {}))
            case "die":
                os._exit(arguments.get("code", 3))
            case "chatter":
                print(arguments["text"], file=sys.stderr, flush=True)
                return said("said")
            case _:
                return said(name)

    async def ask_name(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        question = ElicitRequestFormParams(message="Who are you?", requested_schema=NAME)
        reply = await self.asked(ctx, params, "who", question)
        return reply if isinstance(reply, InputRequiredResult) else said(f"{reply.action} {json.dumps(reply.content)}")

    async def ask_twice(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        first = ElicitRequestFormParams(message="First?", requested_schema=fields(("one",), one="string"))
        second = ElicitRequestFormParams(message="Second?", requested_schema=fields(("two",), two="boolean"))
        if ctx.protocol_version >= MODERN and params.request_state:
            one = params.request_state.removeprefix("first:")
        else:
            reply = await self.asked(ctx, params, "first", first)
            if isinstance(reply, InputRequiredResult):
                return reply
            one = str((reply.content or {}).get("one"))
        if ctx.protocol_version >= MODERN and not params.request_state:
            return needs("second", second, state=f"first:{one}")
        reply = await self.asked(ctx, params, "second", second)
        if isinstance(reply, InputRequiredResult):
            return reply
        return said(f"{one} and {(reply.content or {}).get('two')}")

    async def ask_url(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        question = ElicitRequestURLParams(message="Sign in", url="https://example.com/in", elicitation_id="e1")
        reply = await self.asked(ctx, params, "url", question)
        return reply if isinstance(reply, InputRequiredResult) else said(reply.action)

    async def asked(
        self,
        ctx: Ctx,
        params: CallToolRequestParams,
        key: str,
        question: Question,
    ) -> ElicitResult | InputRequiredResult:
        """The person's reply, or what to answer so that the client comes back with it."""
        if ctx.protocol_version < MODERN:
            request = ElicitRequest(method="elicitation/create", params=question)
            return await ctx.session.send_request(request, ElicitResult)
        reply = (params.input_responses or {}).get(key)
        return reply if isinstance(reply, ElicitResult) else needs(key, question)

    async def slow(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        arguments = params.arguments or {}
        Path(arguments["started"]).touch()
        try:
            await ctx.session.report_progress(1, 2, "half way")
            while not Path(arguments["until"]).exists():
                await anyio.sleep(0.005)
            await ctx.session.report_progress(2, 2, "there")
        except asyncio.CancelledError:
            Path(arguments["cancelled"]).touch()
            raise
        return said("done")

    async def meet(self, _ctx: Ctx, params: CallToolRequestParams) -> Answer:
        async with self.met:
            self.inside += 1
            self.met.notify_all()
            await self.met.wait_for(lambda: self.inside >= (params.arguments or {}).get("count", 2))
        return said("met")

    async def grow(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        name = (params.arguments or {})["name"]
        self.tools[name] = Tool(name=name, description="Added later.", input_schema={"type": "object"})
        return await self.changed(ctx)

    async def shrink(self, ctx: Ctx, params: CallToolRequestParams) -> Answer:
        self.tools.pop((params.arguments or {})["name"], None)
        return await self.changed(ctx)

    async def changed(self, ctx: Ctx) -> Answer:
        await self.bus.publish(ToolsListChanged())
        if ctx.protocol_version < MODERN:
            await ctx.session.send_tool_list_changed()
        return said("changed")


def media() -> list[ContentBlock]:
    image, sound, raw = (base64.b64encode(data).decode() for data in (PIXEL, SOUND, b"\x00\x01\x02"))
    return [
        text("a picture, a sound, two resources and a link"),
        ImageContent(type="image", data=image, mime_type="image/png"),
        AudioContent(type="audio", data=sound, mime_type="audio/wav"),
        EmbeddedResource(
            type="resource",
            resource=TextResourceContents(uri="memo://note", text="a note", mime_type="text/plain"),
        ),
        EmbeddedResource(
            type="resource",
            resource=BlobResourceContents(uri="memo://raw.bin", blob=raw, mime_type="application/octet-stream"),
        ),
        ResourceLink(type="resource_link", uri="memo://linked", name="linked", mime_type="text/csv"),
    ]


def text(value: str) -> TextContent:
    return TextContent(type="text", text=value)


def said(value: str) -> CallToolResult:
    return CallToolResult(content=[text(value)])


def needs(key: str, question: Question, *, state: str | None = None) -> InputRequiredResult:
    requests: dict[str, InputRequest] = {key: ElicitRequest(method="elicitation/create", params=question)}
    return InputRequiredResult(input_requests=requests, request_state=state)


def only(refused: str) -> Callable[[Ctx, CallNext], Awaitable[HandlerResult]]:
    """Keep to one era: the other's first request is not known here."""

    async def middleware(ctx: Ctx, call_next: CallNext) -> HandlerResult:
        if ctx.method == refused:
            raise MCPError(METHOD_NOT_FOUND, f"{refused} is not known")
        return await call_next(ctx)

    return middleware


def build(era: str, *, is_endless: bool) -> Server[Any]:
    awkward = Awkward(is_endless=is_endless)
    server: Server[Any] = Server(
        "awkward",
        version="1.0",
        instructions="Handle with care.",
        on_list_tools=awkward.list_tools,
        on_call_tool=awkward.call_tool,
        on_subscriptions_listen=ListenHandler(awkward.bus),
    )
    if era != "both":
        server.middleware.append(only("server/discover" if era == "legacy" else "initialize"))
    return server


async def serve_stdio(server: Server[Any], era: str) -> None:
    options = server.create_initialization_options(NotificationOptions(tools_changed=True))
    async with stdio_server() as (read, write):
        if era == "legacy":  # the loop of both eras would take the first request, known or not, for its era's
            await serve_loop(server, read, write, lifespan_state={}, init_options=options)
        else:
            await server.run(read, write, options)


async def serve_http(server: Server[Any], port: int) -> None:
    import uvicorn  # which a server that is a process does not need

    listener = socket.create_server(("127.0.0.1", port))
    print(f"awkward at http://127.0.0.1:{listener.getsockname()[1]}/mcp", file=sys.stderr, flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="error", timeout_graceful_shutdown=1)
    await uvicorn.Server(config).serve([listener])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--era", choices=["legacy", "modern", "both"], default="both")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--child", type=Path)
    chosen = parser.parse_args()
    if chosen.child:
        child = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        chosen.child.write_text(str(child.pid))
    if chosen.mute:
        sys.stdin.read()
        return
    server = build(chosen.era, is_endless=chosen.endless)
    asyncio.run(serve_http(server, chosen.port) if chosen.http else serve_stdio(server, chosen.era))


if __name__ == "__main__":
    main()
