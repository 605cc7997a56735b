"""MCP servers as a client meets them: `belljar serve` and a bare one of the SDK's, over stdio or HTTP."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from bench.stage import Stage

ERAS = {"legacy": "legacy", "modern": "auto"}
READY_S = 60.0


def bare_command() -> list[str]:
    """The peer: one tool that does nothing."""
    return [sys.executable, str(Path(__file__).with_name("bare_server.py"))]


def belljar_command() -> list[str]:
    """Ours, as it is installed."""
    return [str(Path(sys.executable).with_name("belljar")), "serve"]


@asynccontextmanager
async def open_stdio(
    stage: Stage, command: list[str], era: str, variables: Mapping[str, str] = {}
) -> AsyncGenerator[Client]:
    """Start a server, with settings of its own in `variables`, and connect to it."""
    environment = {**_variables(stage), **variables}
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=environment)
    with (stage.folder / "servers.log").open("a") as log:
        async with Client(stdio_client(parameters, errlog=log), mode=ERAS[era]) as client:
            yield client


@asynccontextmanager
async def open_http(
    stage: Stage, command: list[str], variables: Mapping[str, str] = {}, on_spawn: Callable[[int], object] = id
) -> AsyncGenerator[str]:
    """Start a server on a free port of the loopback interface; its URL. `on_spawn` is told its process id."""
    process = await asyncio.create_subprocess_exec(
        *command,
        "--http",
        "127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
        env={**_variables(stage), **variables},
    )
    assert process.stderr is not None
    on_spawn(process.pid)
    try:
        async with asyncio.timeout(READY_S):
            url = await _announced(process.stderr)
        # Nobody reads on, and a pipe that is full would stop the server.
        draining = asyncio.create_task(process.stderr.read())
        yield url
        draining.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def new_session(client: Client) -> str:
    """Start a session by running a first cell; its id."""
    answer = await client.call_tool("execute_code", {"code": "1+1"})
    structured: dict[str, Any] = answer.structured_content or {}
    if structured.get("result") != "2":
        raise RuntimeError(f"execute_code answered {answer.content}")
    return str(structured["session_id"])


IS_FORKED = "int('zygote' in __import__('sys').orig_argv) + 1"
_TIMEOUT_S = 60.0


async def warm_session(client: Client) -> str:
    """Start a session that is forked from a warm zygote; its id. The zygote imports modules for seconds before that."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            # Each that is not forked waits for its own cold start, so nothing spins.
            answer = await client.call_tool("execute_code", {"code": IS_FORKED})
            structured: dict[str, Any] = answer.structured_content or {}
            if structured["result"] == "2":
                return str(structured["session_id"])
            await client.call_tool("clear_session", {"session_id": structured["session_id"]})


async def _announced(lines: asyncio.StreamReader) -> str:
    while line := await lines.readline():
        # Before that it may say where the other servers of its data directory are.
        _, mark, rest = line.decode(errors="replace").partition("serves MCP at ")
        if mark:
            return rest.split()[0]
    raise RuntimeError("the server ended before it was ready")


def _variables(stage: Stage) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("BELLJAR_")}
    # An installed package has its bytecode: compiling all of it would take longer than the start that is measured.
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    # An empty settings file, so that the user's does not count.
    settings = stage.folder / "belljar.toml"
    settings.touch()
    return {**own, "BELLJAR_DATA_DIRECTORY": str(stage.folder), "BELLJAR_CONFIG": str(settings)}
