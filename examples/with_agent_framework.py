"""An agent of Microsoft's Agent Framework that runs Python in belljar."""

import asyncio
import os
import sys

from agent_framework import Agent, BaseChatClient, MCPStreamableHTTPTool

INSTRUCTIONS = "Use execute_code for calculations. Pass its session_id back: variables and files stay between calls."


async def answer(question: str, client: BaseChatClient | None = None) -> str:
    """Return what the agent answers."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("BELLJAR_KEY")) else {}
    url = os.environ.get("BELLJAR_URL", "http://127.0.0.1:8000/mcp")
    if client is None:
        from agent_framework.openai import OpenAIChatClient

        client = OpenAIChatClient(model_id="gpt-5.1")
    async with (
        MCPStreamableHTTPTool("belljar", url, static_headers=headers, load_prompts=False) as belljar,
        Agent(client, INSTRUCTIONS, name="analyst", tools=[belljar]) as agent,
    ):
        return (await agent.run(question)).text


if __name__ == "__main__":
    print(asyncio.run(answer(" ".join(sys.argv[1:]))))
