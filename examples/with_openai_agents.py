"""An agent of the OpenAI Agents SDK that runs Python in belljar."""

import asyncio
import os
import sys

from agents import Agent, Model, Runner
from agents.mcp import MCPServerStreamableHttp

INSTRUCTIONS = "Use execute_code for calculations. Pass its session_id back: variables and files stay between calls."


async def answer(question: str, model: str | Model = "gpt-5.1") -> str:
    """Return what the agent answers."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("BELLJAR_KEY")) else {}
    url = os.environ.get("BELLJAR_URL", "http://127.0.0.1:8000/mcp")
    # A cell may take a while: five seconds, the default, is too short.
    async with MCPServerStreamableHttp(
        {"url": url, "headers": headers}, name="belljar", client_session_timeout_seconds=120
    ) as belljar:
        agent = Agent("analyst", instructions=INSTRUCTIONS, mcp_servers=[belljar], model=model)
        return (await Runner.run(agent, question)).final_output


if __name__ == "__main__":
    print(asyncio.run(answer(" ".join(sys.argv[1:]))))
