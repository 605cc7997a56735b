"""What tests of surfaces are about: one server, or several of a machine that answer as one.

`BELLJAR_UNDER_TEST=workers` puts another server in front of the one that a test opens: clients connect to that one,
which has no room for sessions, so that all they ask for is passed on.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from belljar.fleet.routing import Fleet
from belljar.http.app import serve_http
from belljar.http.server_socket import open_reachable_runtime
from belljar.mcp.server import build_http_app
from belljar.runtime import Runtime
from belljar.settings import Settings

ALONE, WORKERS = "alone", "workers"
KINDS = (ALONE, WORKERS)
"""Another one is a branch of `opened` that fills `fronts`."""
KIND = os.environ.get("BELLJAR_UNDER_TEST") or ALONE
kind = KIND
"""What is opened now."""
fronts: dict[str, str] = {}
"""The URL at which clients reach what another server has, by that one's name."""


@asynccontextmanager
async def opened(settings: Settings) -> AsyncGenerator[Runtime]:
    """A server of the kind that is tested: the one that has the sessions."""
    assert kind in KINDS, f"BELLJAR_UNDER_TEST is one of {', '.join(KINDS)}"
    if kind == ALONE:
        async with open_reachable_runtime(settings) as runtime:
            yield runtime
        return
    folder = settings.data_directory / "workers" / "2"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # No setting allows it, so that no server is without room for ever.
    front = settings.model_copy(update={"data_directory": folder, "max_sessions": 0, "pool_size": 0})
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(open_reachable_runtime(settings))
        await stack.enter_async_context(_served(runtime, settings.data_directory))
        other = await stack.enter_async_context(open_reachable_runtime(front))
        fronts[runtime.name] = await stack.enter_async_context(_served(other, settings.data_directory))
        yield runtime
        del fronts[runtime.name]


@asynccontextmanager
async def _served(runtime: Runtime, machine: Path) -> AsyncGenerator[str]:
    """The URL of one server of a machine, in this process: starting another one takes seconds."""
    urls, ready = list[str](), anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    fleet = Fleet(runtime, machine)
    async with anyio.create_task_group() as tasks:
        app = build_http_app(runtime, None, fleet)
        tasks.start_soon(partial(serve_http, app, "127.0.0.1", 0, on_ready=on_ready))
        await ready.wait()
        await fleet.peers.look()
        yield urls[0]
        tasks.cancel_scope.cancel()
