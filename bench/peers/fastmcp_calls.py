"""Calls tools from code in FastMCP's code mode: its server in this process, with a proxy for each upstream server.

Its sandbox has no clock, so the time of a block with some calls is divided by their number.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from fastmcp import Client, FastMCP
from fastmcp.client.transports import StdioTransport
from fastmcp.experimental.transforms.code_mode import CodeMode
from fastmcp.server import create_proxy
from line_server import answer_all, described

_LOOP = """
for _ in range({count}):
    await call_tool("{server}_{tool}", {arguments!r})
return {count}
"""

_GATHER = """
import asyncio
await asyncio.gather(*[call_tool("{server}_{tool}", {arguments!r}) for _ in range({count})])
return {count}
"""


async def main(servers: dict[str, Any]) -> None:
    server = FastMCP("peer", transforms=[CodeMode()])
    async with AsyncExitStack() as stack:
        for name, entry in servers.items():
            # One that is connected: a proxy would start the server anew for each request.
            upstream = await stack.enter_async_context(Client(StdioTransport(entry["command"], entry["args"])))
            server.mount(create_proxy(upstream), namespace=name)
        client = await stack.enter_async_context(Client(server))

        async def answer(question: dict[str, Any]) -> Any:
            op = question.pop("op")
            if op == "describe":
                return described("fastmcp", await client.list_tools())
            if op == "one-by-one":
                return [await timed(_LOOP, question) / question["count"]]
            return [await timed(_GATHER, question) for _ in range(question["times"])]

        async def timed(code: str, question: dict[str, Any]) -> float:
            began = time.perf_counter()
            await client.call_tool("execute", {"code": code.format(**question)})
            return time.perf_counter() - began

        await answer_all(answer)


asyncio.run(main(json.loads(sys.argv[1])["mcpServers"]))
