"""An agent of Pydantic AI that runs Python in belljar."""

import asyncio
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.models import Model

INSTRUCTIONS = "Use execute_code for calculations. Pass its session_id back: variables and files stay between calls."


async def answer(question: str, model: str | Model = "openai:gpt-5.1") -> str:
    """Return what the agent answers."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("BELLJAR_KEY")) else {}
    url = os.environ.get("BELLJAR_URL", "http://127.0.0.1:8000/mcp")
    agent = Agent(model, instructions=INSTRUCTIONS, toolsets=[MCPToolset(url, headers=headers)])
    async with agent:
        return (await agent.run(question)).output


if __name__ == "__main__":
    print(asyncio.run(answer(" ".join(sys.argv[1:]))))
