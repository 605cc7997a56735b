"""A model of Azure OpenAI drives the toolbox: it searches for tools of other servers and calls them from code.

Needs the variables of `azure_agent.py`, in the environment or in a `.env` beside you. The model has three tools in its
prompt, whatever number of servers is behind them.
"""

import json
import sys

from shared import TIME, belljar_client, pypi_server, read_env, run

INSTRUCTIONS = (
    "Find tools with search_tools, then call them from Python with execute_code (from servers.SERVER import TOOL). "
    "Print only what you need."
)
QUESTION = "When it is noon in Oslo, what time is it in Tokyo and in Lima?"


async def main() -> None:
    """Ask the question of the command line, or the one above."""
    read_env()
    try:
        from azure_agent import answer, check
    except ModuleNotFoundError:
        raise SystemExit("this example takes the package openai: pip install openai") from None
    check()
    servers = json.dumps({"time": pypi_server(TIME, "--local-timezone=UTC")})
    async with belljar_client("--surface", "toolbox", mcp_servers=servers) as client:
        print(await answer(client, INSTRUCTIONS, " ".join(sys.argv[1:]) or QUESTION))


if __name__ == "__main__":
    run(main)
