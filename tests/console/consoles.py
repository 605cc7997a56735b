"""A server with its console, in this process, and people who look at it."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
from calls import Caller, connected, opened_runtime

from belljar.console.server import ServedConsole, open_console
from belljar.environments import Environment
from belljar.http.app import serve_http
from belljar.mcp.server import build_http_app
from belljar.runtime import Runtime


@dataclass
class Place:
    """A server, the address of its console, and an agent that uses it."""

    runtime: Runtime
    console: ServedConsole
    url: str
    agent: Caller

    def browser(self) -> httpx.AsyncClient:
        """A browser as far as cookies and origins go, that is not signed in."""
        return httpx.AsyncClient(base_url=self.url, headers={"Sec-Fetch-Site": "same-origin"}, timeout=30)

    @asynccontextmanager
    async def operator(self) -> AsyncGenerator[httpx.AsyncClient]:
        """A browser that came in by a link."""
        async with self.browser() as browser:
            token = self.console.sign_in.links.make()
            answer = await browser.post("/console/enter", data={"token": token})
            assert answer.status_code == 303, answer.text
            yield browser

    @asynccontextmanager
    async def person(self, key: str) -> AsyncGenerator[httpx.AsyncClient]:
        """A browser that came in by a key."""
        async with self.browser() as browser:
            answer = await browser.post("/console/enter", data={"key": key})
            assert answer.status_code == 303, answer.text
            yield browser


@asynccontextmanager
async def opened_place(environment: Environment, folder: Path, **chosen: Any) -> AsyncGenerator[Place]:
    async with (
        opened_runtime(environment, folder, **chosen) as runtime,
        open_console(runtime) as console,
        connected(runtime) as agent,
        anyio.create_task_group() as tasks,
    ):
        assert console is not None
        ready = anyio.Event()

        def on_ready(url: str) -> None:
            console.url = url
            ready.set()

        app = build_http_app(runtime, console.apps)
        tasks.start_soon(partial(serve_http, app, "127.0.0.1", 0, on_ready=on_ready))
        await ready.wait()
        yield Place(runtime, console, console.url, agent)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def events(
    browser: httpx.AsyncClient, path: str, **headers: str
) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
    """The events of a stream, each with its name, its id and its data."""
    async with browser.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()

        async def read() -> AsyncGenerator[dict[str, Any]]:
            event: dict[str, Any] = {}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if not line and "data" in event:
                    yield event
                    event = {}
                elif name in ("event", "id"):
                    event[name] = value
                elif name == "data":
                    event["data"] = json.loads(value)

        with anyio.fail_after(60):
            yield read()
