"""Fixtures that ask in the newer way: an answer that needs input, completed by the client and sent again."""

from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.types import (
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    TextContent,
)

Ctx = Context[Any, Any]
Asked = CallToolResult | InputRequiredResult


def add_questions(server: MCPServer[Any]) -> None:
    for tool in (
        test_input_required_result_elicitation,
        test_input_required_result_sampling,
        test_input_required_result_list_roots,
        test_input_required_result_request_state,
        test_input_required_result_multiple_inputs,
        test_input_required_result_multi_round,
        test_input_required_result_tampered_state,
        test_input_required_result_capabilities,
    ):
        server.add_tool(tool, structured_output=False)
    server.prompt(name="test_input_required_result_prompt", description="Asks first")(_prompt)


async def test_input_required_result_elicitation(ctx: Ctx) -> Asked:
    """Asks the person."""
    name = _answered(ctx, "user_name", "name")
    if name is None:
        return InputRequiredResult(input_requests={"user_name": _elicit("What is your name?", name="string")})
    return _said(f"Hello, {name}!")


async def test_input_required_result_sampling(ctx: Ctx) -> Asked:
    """Asks the model."""
    response = (ctx.input_responses or {}).get("capital_question")
    if response is None:
        return InputRequiredResult(input_requests={"capital_question": _sample("What is the capital of France?", 100)})
    return _said(f"The model said: {response.model_dump_json()}")


async def test_input_required_result_list_roots(ctx: Ctx) -> Asked:
    """Asks for the roots."""
    response = (ctx.input_responses or {}).get("client_roots")
    if response is None:
        return InputRequiredResult(input_requests={"client_roots": ListRootsRequest(method="roots/list")})
    return _said(f"The roots are: {response.model_dump_json()}")


async def test_input_required_result_request_state(ctx: Ctx) -> Asked:
    """Asks and remembers by state."""
    if ctx.request_state != "remembered" or (ctx.input_responses or {}).get("confirm") is None:
        return InputRequiredResult(
            input_requests={"confirm": _elicit("Please confirm", ok="boolean")}, request_state="remembered"
        )
    return _said("state-ok")


async def test_input_required_result_multiple_inputs(ctx: Ctx) -> Asked:
    """Asks three things at once."""
    responses = ctx.input_responses or {}
    requests: dict[str, InputRequest] = {
        "user_name": _elicit("What is your name?", name="string"),
        "greeting": _sample("Generate a greeting", 50),
        "client_roots": ListRootsRequest(method="roots/list"),
    }
    if not requests.keys() <= responses.keys():
        return InputRequiredResult(input_requests=requests, request_state="all three")
    return _said("All three answered")


async def test_input_required_result_multi_round(ctx: Ctx) -> Asked:
    """Asks twice, one after the other."""
    if ctx.request_state == "second" and (color := _answered(ctx, "step2", "color")) is not None:
        return _said(f"Both answered, {color}")
    if ctx.request_state == "first" and _answered(ctx, "step1", "name") is not None:
        question = _elicit("Step 2: What is your favorite color?", color="string")
        return InputRequiredResult(input_requests={"step2": question}, request_state="second")
    question = _elicit("Step 1: What is your name?", name="string")
    return InputRequiredResult(input_requests={"step1": question}, request_state="first")


async def test_input_required_result_tampered_state(ctx: Ctx) -> Asked:
    """Asks with a state that nobody may change."""
    if (ctx.input_responses or {}).get("confirm") is None:
        question = _elicit("Please confirm", ok="boolean")
        return InputRequiredResult(input_requests={"confirm": question}, request_state="sealed")
    return _said("The state was as it was")


async def test_input_required_result_capabilities(ctx: Ctx) -> Asked:
    """Asks only for what the client can give."""
    capabilities = ctx.client_capabilities
    requests: dict[str, InputRequest] = {}
    if capabilities is not None and capabilities.elicitation is not None:
        requests["person"] = _elicit("What is your name?", name="string")
    if capabilities is not None and capabilities.sampling is not None:
        requests["model"] = _sample("Say something", 50)
    if requests and not requests.keys() <= (ctx.input_responses or {}).keys():
        return InputRequiredResult(input_requests=requests)
    return _said("Nothing to ask")


async def _prompt(ctx: Ctx) -> list[UserMessage] | InputRequiredResult:
    context = _answered(ctx, "user_context", "context")
    if context is None:
        question = _elicit("What context should the prompt use?", context="string")
        return InputRequiredResult(input_requests={"user_context": question})
    return [UserMessage(content=TextContent(type="text", text=f"In the context of {context}"))]


def _answered(ctx: Ctx, key: str, field: str) -> Any:
    response = (ctx.input_responses or {}).get(key)
    if not isinstance(response, ElicitResult) or response.action != "accept" or response.content is None:
        return None
    return response.content.get(field)


def _elicit(message: str, **fields: str) -> ElicitRequest:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": [*fields]}
    params = ElicitRequestFormParams(message=message, requested_schema=schema)
    return ElicitRequest(method="elicitation/create", params=params)


def _sample(text: str, max_tokens: int) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    params = CreateMessageRequestParams(messages=[message], max_tokens=max_tokens)
    return CreateMessageRequest(method="sampling/createMessage", params=params)


def _said(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])
