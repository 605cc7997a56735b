"""Calls tools from code in an ipybox kernel, as its MCP server does: generated functions, threads for many at once."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from ipybox import CodeExecutor, generate_mcp_sources
from ipybox.mcp_server import MCPServer
from line_server import answer_all, described

_LOOP = """
import time
from mcptools.{server} import {tool} as called

took = []
for _ in range({count}):
    began = time.perf_counter()
    called.run(called.Params(**{arguments!r}))
    took.append(time.perf_counter() - began)
print(took)
"""

_THREADS = """
import time
from concurrent.futures import ThreadPoolExecutor
from mcptools.{server} import {tool} as called

took = []
with ThreadPoolExecutor({count}) as threads:
    for _ in range({times}):
        began = time.perf_counter()
        list(threads.map(lambda _: called.run(called.Params(**{arguments!r})), range({count})))
        took.append(time.perf_counter() - began)
print(took)
"""


async def main(servers: dict[str, Any]) -> None:
    for name, parameters in servers.items():
        await generate_mcp_sources(name, parameters, Path("mcptools"))
    settings = {"approve_tool_calls": False, "kernel_init_timeout": 60, "kernel_env": {"PYTHONPATH": str(Path.cwd())}}
    async with CodeExecutor(**settings) as executor:

        async def answer(question: dict[str, Any]) -> Any:
            op = question.pop("op")
            if op == "describe":
                return described("ipybox", await MCPServer()._mcp.list_tools())
            result = await executor.execute((_LOOP if op == "one-by-one" else _THREADS).format(**question))
            return json.loads(result.text or "")

        await answer_all(answer)


asyncio.run(main(json.loads(sys.argv[1])["mcpServers"]))
