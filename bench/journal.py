"""What durability costs: `1+1` through MCP with the journal as it is, beside one that keeps nothing.

Much output is the business of `lines`.
"""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from mcp import Client

from bench.figures import Figure, Round, paired
from bench.one_plus_one import taken_in_turns
from bench.servers import ERAS, belljar_command, new_session, open_http, open_stdio
from bench.stage import Stage

TARGET = 1.15
CALLS = 100
QUICK_CALLS = 60


def forgetful_command() -> list[str]:
    """Ours, but for what it writes."""
    return [sys.executable, str(Path(__file__).with_name("forgetful_server.py")), "serve"]


async def measure(stage: Stage) -> list[Figure]:
    """Both transports, in the modern era."""
    async with AsyncExitStack() as stack:
        figures = await _compare(
            stage,
            "stdio",
            await stack.enter_async_context(open_stdio(stage, forgetful_command(), "modern")),
            await stack.enter_async_context(open_stdio(stage, belljar_command(), "modern")),
        )
        forgetful_url = await stack.enter_async_context(open_http(stage, forgetful_command()))
        our_url = await stack.enter_async_context(open_http(stage, belljar_command()))
        async with (
            Client(forgetful_url, mode=ERAS["modern"]) as forgetful,
            Client(our_url, mode=ERAS["modern"]) as ours,
        ):
            return [*figures, *await _compare(stage, "http", forgetful, ours)]


async def _compare(stage: Stage, what: str, forgetful: Client, ours: Client) -> list[Figure]:
    theirs = {"code": "1+1", "session_id": await new_session(forgetful)}
    own = {"code": "1+1", "session_id": await new_session(ours)}

    async def run_peer() -> None:
        await forgetful.call_tool("execute_code", theirs)

    async def run_ours() -> None:
        await ours.call_tool("execute_code", own)

    await taken_in_turns(run_peer, run_ours, 40)
    rounds: list[Round] = [
        await taken_in_turns(run_peer, run_ours, stage.pick(CALLS, QUICK_CALLS))
        for _ in stage.rounds(stage.pick(8, 3), within_s=stage.pick(15, 4))
    ]
    return paired("journal", f"1+1 over {what}", rounds, target=TARGET, with_p99=True, note="peer: no journal")
