"""What tests of surfaces are about: one server, or several that answer as one.

`BELLJAR_UNDER_TEST=workers` puts another server in front of the one that a test opens: clients connect to that one,
which has no room for sessions, so that all they ask for is passed on. `BELLJAR_UNDER_TEST=hosts` does the same with one
of another machine, which has nothing in common with it but the fleet's key, its list of machines and a store.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from pydantic import SecretStr

from belljar.fleet.routing import Fleet
from belljar.http.app import serve_http
from belljar.http.server_socket import open_reachable_runtime
from belljar.mcp.server import build_http_app
from belljar.runtime import Runtime
from belljar.settings import Settings
from serving_process import free_port

ALONE, WORKERS, HOSTS = "alone", "workers", "hosts"
KINDS = (ALONE, WORKERS, HOSTS)
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
    # No setting allows it, so that no server is without room for ever.
    no_room = {"max_sessions": 0, "pool_size": 0}
    if kind == HOSTS:
        settings, other = (settings.model_copy(update=values) for values in _hosts(settings))
        machine = other.data_directory
    else:
        machine = settings.data_directory
        folder = machine / "workers" / "2"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        other = settings.model_copy(update={"data_directory": folder})
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(open_reachable_runtime(settings))
        fleet, _ = await stack.enter_async_context(_served(runtime, settings.data_directory))
        front = await stack.enter_async_context(open_reachable_runtime(other.model_copy(update=no_room)))
        before, fronts[runtime.name] = await stack.enter_async_context(_served(front, machine))
        before.peers.is_closed = True  # names and keys are not its own either
        with anyio.fail_after(30):
            while not (fleet.peers.ready and before.peers.ready):
                await fleet.peers.look()
                await before.peers.look()
        yield runtime
        del fronts[runtime.name]


def _hosts(settings: Settings) -> list[dict[str, Any]]:
    """What makes these settings those of two machines: of the one with the sessions, and of the one in front."""
    folder = settings.data_directory / "hosts"
    front = folder / "front"
    front.mkdir(mode=0o700, parents=True, exist_ok=True)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    (folder / "peers").write_text("".join(f"http://{address}\n" for address in addresses))
    shared: dict[str, Any] = {
        "http": "127.0.0.1:0",
        "fleet_peers": f"file:{folder / 'peers'}",
        "fleet_key": SecretStr("f" * 32),
    }
    if not settings.store and settings.hibernate and not settings.keep_alive:
        (folder / "store").mkdir(mode=0o700, exist_ok=True)
        shared |= {"store": f"file://{folder / 'store'}", "store_key": SecretStr("s" * 32)}
    directories = (settings.data_directory, front)
    return [
        {**shared, "fleet_address": address, "data_directory": directory}
        for address, directory in zip(addresses, directories, strict=True)
    ]


@asynccontextmanager
async def _served(runtime: Runtime, machine: Path) -> AsyncGenerator[tuple[Fleet, str]]:
    """One server of several in this process, and its URL: starting another one takes seconds."""
    urls, ready = list[str](), anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    fleet = Fleet(runtime, machine)
    async with anyio.create_task_group() as tasks:
        app = build_http_app(runtime, None, fleet)
        tasks.start_soon(partial(serve_http, app, "127.0.0.1", 0, on_ready=on_ready))
        await ready.wait()
        yield fleet, urls[0]
        tasks.cancel_scope.cancel()
