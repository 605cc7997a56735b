"""Texts made to be slow, beside somebody who asks whether the server is well: it says so all the while."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from belljar.environments import Environment
from serving_process import http_server, serve_over_http
from waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
KEY = "alice-" + "a" * 30
# Each of these texts stopped the server for at least 8 s. A server that is well answers within milliseconds, and within
# this time on a machine that is busy with something else.
WELL_S = 5
Run = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def in_health(environment: Environment, folder: Path) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a server that must answer `/health` all the while."""
    with http_server(serve_over_http(environment), folder, BELLJAR_API_KEYS=f"alice:{KEY}") as (url, _):
        async with (
            httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client,
            httpx.AsyncClient(base_url=url, timeout=WELL_S) as doctor,
            anyio.create_task_group() as tasks,
        ):
            asked = 0

            async def ask() -> None:
                nonlocal asked
                while True:
                    assert (await doctor.get("/health")).status_code == 200
                    asked += 1

            tasks.start_soon(ask)
            yield client
            before = asked
            await until(lambda: asked > before)
            tasks.cancel_scope.cancel()


async def show(client: httpx.AsyncClient, code: str) -> None:
    """Run a cell, and look at each page and picture of it."""
    session = (await client.post("/api/v1/sessions", json={})).json()["session_id"]
    path = f"/api/v1/sessions/{session}"
    ran = (await client.post(f"{path}/executions", json={"code": code})).json()["execution_id"]

    async def is_over() -> bool:
        return (await client.get(f"/api/v1/executions/{ran}")).json()["status"] == "ok"

    await until(is_over)
    await client.post("/console/enter", data={"key": KEY}, headers={"Sec-Fetch-Site": "same-origin"})
    assert (await client.get(f"/console/sessions/{session}")).status_code == 200
    assert (await client.get(f"/frames/{ran}/1.html")).status_code == 200


async def display(client: httpx.AsyncClient, kind: str, piece: str, count: int) -> None:
    await show(client, f"from IPython.display import {kind}, display\ndisplay({kind}({piece!r} * {count}))")


async def send(client: httpx.AsyncClient, body: bytes) -> None:
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    answer = await client.post("/mcp", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text[:200]


async def call(client: httpx.AsyncClient, tool: str, **arguments: object) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
    answer = await client.post("/mcp", json=message, headers=headers)
    assert answer.status_code < 500, answer.text[:200]


TEXTS: dict[str, Run] = {
    "a page of styles without end": lambda client: display(client, "HTML", "<style", 80_000),
    "a page that is one tag": lambda client: display(client, "HTML", "<a ", 200_000),
    "Markdown of brackets": lambda client: display(client, "Markdown", "![", 500_000),
    "a message of escaped quotes": lambda client: send(client, b'{"' + b'\\"' * 32_000),
    "a message of empty objects": lambda client: send(client, b"[" + b"{}," * 4_000_000 + b"{}]"),
    "an object of empty objects": lambda client: send(
        client, b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":[' + b"{}," * 4_000_000 + b"{}]}}"
    ),
    "a skill of newlines": lambda client: call(
        client, "save_skill", name="lines", description="Has lines.", instructions="\n" * 20_000
    ),
    "code of magics": lambda client: call(client, "execute_code", code="a=!b\n" * 20_000),
}


@pytest.mark.parametrize("name", TEXTS)
async def test_a_server_is_well_whatever_is_written_to_it(
    default_environment: Environment, tmp_path: Path, name: str
) -> None:
    async with in_health(default_environment, tmp_path) as client:
        await TEXTS[name](client)
