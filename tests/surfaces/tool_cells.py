"""Engines with the awkward server in their toolbox, and cells that call it."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from calls import opened_runtime

from belljar.environments import Environment
from belljar.runtime import Runtime

AWKWARD = Path(__file__).parents[1] / "toolbox" / "awkward_server.py"


def awkward(era: str = "both") -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(AWKWARD), "--era", era]}


@asynccontextmanager
async def runtime_with_tools(
    environment: Environment, folder: Path, *, ready: bool = True, **chosen: Any
) -> AsyncGenerator[Runtime]:
    servers = chosen.pop("mcp_servers", {"awkward": awkward()})
    async with opened_runtime(environment, folder, mcp_servers=servers, **chosen) as runtime:
        assert runtime.toolbox is not None
        if ready:
            await runtime.toolbox.wait_until_ready()
        yield runtime


def slow_call(folder: Path) -> str:
    """The call of a tool that makes `started`, ends when `until` is there, and makes `cancelled` if it is."""
    started, until, cancelled = (str(folder / name) for name in ("started", "until", "cancelled"))
    return f"slow({started!r}, {until!r}, {cancelled!r})"
