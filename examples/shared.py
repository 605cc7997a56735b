"""What the examples share: MCP servers from PyPI that need no account, a belljar server to talk to, and `.env`."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client
from uv import find_uv_bin

from belljar.models import ExecutionResult
from belljar.settings.sources import apply_env_file

TIME = "mcp-server-time"
SQLITE = "mcp-server-sqlite"


def pypi_server(package: str, *arguments: str) -> dict[str, Any]:
    """Return the entry of `mcpServers` for a server on PyPI; uv, which comes with belljar, fetches and starts it."""
    # mcp-server-sqlite was written for the first major version of the SDK, and does not say so.
    pins = ["--with", "mcp<2"] if package == SQLITE else []
    # Servers get none of our variables by themselves; uv needs those that say where the package index is.
    own = {name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_CERT_", "HTTPS_PROXY"))}
    return {"command": find_uv_bin(), "args": ["tool", "run", *pins, package, *arguments], "env": own}


def read_env() -> None:
    """Read the `.env` of the working directory: what is set already stays, and only names are printed."""
    if Path(".env").exists():
        print(apply_env_file(".env", is_named=True), file=sys.stderr)


def _own_env_file() -> dict[str, str]:
    """Name the `.env` that `read_env` has read, so that the server trusts it as the example does."""
    return {"env_file": ".env"} if Path(".env").exists() else {}


@asynccontextmanager
async def belljar_client(*flags: str, **settings: str) -> AsyncGenerator[Client]:
    """Start `belljar serve` and connect to it, as any MCP client does; settings go by their names."""
    variables = {f"BELLJAR_{name.upper()}": value for name, value in {**_own_env_file(), **settings}.items()}
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "belljar", "serve", *flags], env={**os.environ, **variables}
    )
    async with Client(stdio_client(server, errlog=sys.stderr)) as client:
        yield client


def shown(result: ExecutionResult) -> str:
    """Return what a cell printed; an example ends with an error if the cell did."""
    if result.status != "ok":
        raise SystemExit(f"the cell ended with {result.status}: {result.error}")
    return result.stdout.strip()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run an example."""
    asyncio.run(main())  # pyright: ignore[reportArgumentType]
