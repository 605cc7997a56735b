"""Fixtures that speak with the client while they run: progress, logs, questions of the older protocol, list changes."""

from typing import Any

import anyio
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import (
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    EmptyResult,
    InputRequiredResult,
    SamplingMessage,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    UnsubscribeRequestParams,
)

MISSING_REQUIRED_CLIENT_CAPABILITY = -32021
PAUSE_S = 0.05
Ctx = Context[Any, Any]


def add_conversations(server: MCPServer[Any]) -> None:
    for tool in (
        test_tool_with_progress,
        test_tool_with_logging,
        test_logging_tool,
        test_sampling,
        test_elicitation,
        test_elicitation_sep1034_defaults,
        test_elicitation_sep1330_enums,
        test_streaming_elicitation,
        test_missing_capability,
        test_trigger_tool_change,
        test_trigger_prompt_change,
        test_reconnection,
    ):
        server.add_tool(tool, structured_output=False)
    _add_older_methods(server)


def _add_older_methods(server: MCPServer[Any]) -> None:
    # The SDK serves these methods of 2025-11-25 only from its lower level.
    lower = server._lowlevel_server  # pyright: ignore[reportPrivateUsage]
    for method, params in (
        ("resources/subscribe", SubscribeRequestParams),
        ("resources/unsubscribe", UnsubscribeRequestParams),
        ("logging/setLevel", SetLevelRequestParams),
    ):
        lower.add_request_handler(method, params, _accept)


async def _accept(ctx: Any, params: Any) -> EmptyResult:
    return EmptyResult()


async def test_tool_with_progress(ctx: Ctx) -> CallToolResult:
    """Reports progress."""
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
        await anyio.sleep(PAUSE_S)
    return _said("Progress reported")


async def test_tool_with_logging(ctx: Ctx) -> CallToolResult:
    """Logs."""
    for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.info(message)  # pyright: ignore[reportDeprecated]
        await anyio.sleep(PAUSE_S)
    return _said("Logged")


async def test_logging_tool(ctx: Ctx) -> CallToolResult:
    """Logs once."""
    await ctx.info("Logged by a tool")  # pyright: ignore[reportDeprecated]
    return _said("Logged")


async def test_sampling(ctx: Ctx, prompt: str) -> CallToolResult:
    """Asks the client's model."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
    reply = await ctx.session.create_message(messages=[message], max_tokens=100)  # pyright: ignore[reportDeprecated]
    content = reply.content
    return _said(f"LLM response: {content.text if isinstance(content, TextContent) else content}")


async def test_elicitation(ctx: Ctx, message: str) -> CallToolResult:
    """Asks the person."""
    schema = _object(
        {
            "username": {"type": "string", "description": "User's response"},
            "email": {"type": "string", "description": "User's email address"},
        },
        required=["username", "email"],
    )
    outcome = await ctx.session.elicit_form(message, schema)
    return _said(f"User response: action: {outcome.action}, content: {outcome.content}")


async def test_elicitation_sep1034_defaults(ctx: Ctx) -> CallToolResult:
    """Asks with defaults."""
    schema = _object(
        {
            "name": {"type": "string", "default": "John Doe"},
            "age": {"type": "integer", "default": 30},
            "score": {"type": "number", "default": 95.5},
            "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
            "verified": {"type": "boolean", "default": True},
        }
    )
    outcome = await ctx.session.elicit_form("Check these", schema)
    return _said(f"Elicitation completed: action={outcome.action}, content={outcome.content}")


async def test_elicitation_sep1330_enums(ctx: Ctx) -> CallToolResult:
    """Asks with choices of every form."""
    plain = ["option1", "option2", "option3"]
    titled = [{"const": f"value{number}", "title": f"Choice {number}"} for number in (1, 2, 3)]
    schema = _object(
        {
            "untitledSingle": {"type": "string", "enum": plain},
            "titledSingle": {"type": "string", "oneOf": titled},
            "legacyEnum": {
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": {"type": "array", "items": {"type": "string", "enum": plain}},
            "titledMulti": {"type": "array", "items": {"anyOf": titled}},
        }
    )
    outcome = await ctx.session.elicit_form("Choose", schema)
    return _said(f"Elicitation completed: action={outcome.action}, content={outcome.content}")


async def test_streaming_elicitation(ctx: Ctx) -> CallToolResult | InputRequiredResult:
    """Asks in the middle of a stream, the newer way."""
    if (ctx.input_responses or {}).get("streamed"):
        return _said("Answered")
    schema = _object({"name": {"type": "string"}}, required=["name"])
    params = ElicitRequestFormParams(message="What is your name?", requested_schema=schema)
    request = ElicitRequest(method="elicitation/create", params=params)
    await ctx.report_progress(1, 2)
    return InputRequiredResult(input_requests={"streamed": request})


async def test_missing_capability(ctx: Ctx) -> CallToolResult:
    """Needs a client that samples."""
    if ctx.client_capabilities is None or ctx.client_capabilities.sampling is None:
        raise MCPError(
            code=MISSING_REQUIRED_CLIENT_CAPABILITY,
            message="The client must sample",
            data={"requiredCapabilities": {"sampling": {}}},
        )
    return _said("The client samples")


async def test_trigger_tool_change(ctx: Ctx) -> CallToolResult:
    """Says that the tools changed."""
    await ctx.notify_tools_changed()
    return _said("Told")


async def test_trigger_prompt_change(ctx: Ctx) -> CallToolResult:
    """Says that the prompts changed."""
    await ctx.notify_prompts_changed()
    return _said("Told")


async def test_reconnection(ctx: Ctx) -> CallToolResult:
    """Closes its stream half way and goes on."""
    await ctx.close_sse_stream()
    await anyio.sleep(PAUSE_S)
    return _said("Went on")


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or []}


def _said(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])
