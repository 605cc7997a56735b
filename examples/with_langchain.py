"""An agent of LangChain that runs Python in belljar."""

import asyncio
import os
import sys

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_mcp_adapters.client import MultiServerMCPClient

INSTRUCTIONS = "Use execute_code for calculations. Pass its session_id back: variables and files stay between calls."


async def answer(question: str, model: str | BaseChatModel = "openai:gpt-5.1") -> str:
    """Return what the agent answers."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("BELLJAR_KEY")) else {}
    url = os.environ.get("BELLJAR_URL", "http://127.0.0.1:8000/mcp")
    # Every call of a tool is a connection of its own: sessions are found by their ids.
    client = MultiServerMCPClient({"belljar": {"transport": "streamable_http", "url": url, "headers": headers}})
    agent = create_agent(model, await client.get_tools(), system_prompt=INSTRUCTIONS)
    state = await agent.ainvoke({"messages": [{"role": "user", "content": question}]})
    return state["messages"][-1].text


if __name__ == "__main__":
    print(asyncio.run(answer(" ".join(sys.argv[1:]))))
