"""A small agent on Azure OpenAI: the tools of an MCP server are the model's tools, until it answers in words.

Takes the `openai` package (`pip install openai`) and these variables, which may stand in a `.env`:
`AZURE_OPENAI_ENDPOINT`, `AZURE_OPENAI_API_KEY`, `AZURE_OPENAI_CHAT_DEPLOYMENT_NAME` (gpt-4o-mini), and
`AZURE_OPENAI_API_VERSION` (2024-08-01-preview).
"""

import json
import os
from typing import Any

from mcp import Client
from mcp.types import TextContent
from openai import AsyncAzureOpenAI

MAX_TURNS = 12
NEEDED = ("AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_API_KEY")
# The embedder is for programs that search by meaning. Tools and skills are found by words here, so none is called.
DEFAULTS = {
    "AZURE_OPENAI_CHAT_DEPLOYMENT_NAME": "gpt-4o-mini",
    "AZURE_OPENAI_API_VERSION": "2024-08-01-preview",
    "AZURE_OPENAI_EMBEDDER_NAME": "text-embedding-ada-002",
    "AZURE_OPENAI_EMBEDDER_VERSION": "2023-05-15",
}


def setting(name: str) -> str:
    """Return a variable or its default; the program ends with words where one is missing."""
    value = os.environ.get(name) or DEFAULTS.get(name, "")
    if not value:
        raise SystemExit(f"{name} is not set: put {' and '.join(NEEDED)} into the environment or a .env")
    return value


def check() -> None:
    """End the program with words where a variable is missing, before anything is started."""
    for name in NEEDED:
        setting(name)


async def answer(client: Client, instructions: str, question: str) -> str:
    """Let the model work on a question with the server's tools, and return its answer; each call is printed."""
    endpoint, key = (setting(name) for name in NEEDED)
    model = AsyncAzureOpenAI(
        azure_endpoint=endpoint, api_key=key, api_version=setting("AZURE_OPENAI_API_VERSION"), max_retries=2
    )
    tools = [_as_function(tool) for tool in (await client.list_tools()).tools]
    messages: list[Any] = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
    async with model:
        for _ in range(MAX_TURNS):
            reply = await model.chat.completions.create(
                model=setting("AZURE_OPENAI_CHAT_DEPLOYMENT_NAME"), messages=messages, tools=tools
            )
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content or ""
            messages += [await _called(client, call) for call in said.tool_calls]
    return f"the model did not come to an end in {MAX_TURNS} turns"


def _as_function(tool: Any) -> Any:
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


async def _called(client: Client, call: Any) -> dict[str, str]:
    """Call a tool of the server for the model; what is wrong with a call is told to the model, not raised."""
    print(f"-> {call.function.name}")
    try:
        result = await client.call_tool(call.function.name, json.loads(call.function.arguments or "{}"))
        text = "\n".join(block.text for block in result.content if isinstance(block, TextContent))
    except ValueError as error:
        text = f"the arguments are not JSON: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": text}
