"""A warm `1+1` through MCP beside a tool that does nothing: same client, same transport, both protocol eras."""

from contextlib import AsyncExitStack

from mcp import Client

from bench.figures import Figure, paired
from bench.one_plus_one import taken_in_turns
from bench.servers import ERAS, bare_command, belljar_command, open_http, open_stdio, warm_session
from bench.stage import Stage

TARGET = 2.0
TAIL_TARGET = 3.0
CALLS = 100
QUICK_CALLS = 60


async def measure(stage: Stage) -> list[Figure]:
    """Both transports, each in both eras."""
    figures: list[Figure] = []
    async with AsyncExitStack() as stack:
        bare_url = await stack.enter_async_context(open_http(stage, bare_command()))
        our_url = await stack.enter_async_context(open_http(stage, belljar_command()))
        for era, mode in ERAS.items():
            async with (
                open_stdio(stage, bare_command(), era) as bare,
                open_stdio(stage, belljar_command(), era) as ours,
            ):
                figures += await _compare(stage, f"stdio, {era}", bare, ours)
            async with Client(bare_url, mode=mode) as bare, Client(our_url, mode=mode) as ours:
                figures += await _compare(stage, f"http, {era}", bare, ours)
    return figures


async def _compare(stage: Stage, what: str, bare: Client, ours: Client) -> list[Figure]:
    arguments = {"code": "1+1", "session_id": await warm_session(ours)}

    async def run_peer() -> None:
        await bare.call_tool("nothing", arguments)

    async def run_ours() -> None:
        await ours.call_tool("execute_code", arguments)

    await taken_in_turns(run_peer, run_ours, 20)
    rounds = [
        await taken_in_turns(run_peer, run_ours, stage.pick(CALLS, QUICK_CALLS))
        for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(10, 2))
    ]
    note = f"peer: no-op tool; {bare.protocol_version}"
    return paired("mcp", what, rounds, target=TARGET, with_p99=True, tail=TAIL_TARGET, note=note)
