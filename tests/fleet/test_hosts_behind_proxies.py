"""Two machines behind nginx and Caddy, set up as the guide says: whatever a client asks for reaches its machine."""

import hashlib
import os
import ssl
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
import pytest
from calls import ERAS, Caller, held, text_of
from hosts import Hosts, in_thread, two_hosts
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import ElicitResult
from playwright.async_api import async_playwright, expect
from resumed_streams import begin, broken_and_resumed, new_session
from workers import KEYS

from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.environments import Environment
from certificates import make_certificate
from proxies import Proxy, caddy, nginx, started
from serving_process import free_port
from waiting import until

pytestmark = pytest.mark.anyio
MANY = 128_000_000
CONNECTIONS = 4
"""Clients that come one after the other, so that each of two machines has some."""


@dataclass
class Balanced:
    """Two machines, and the one address that clients have."""

    hosts: Hosts
    url: str
    trusted: ssl.SSLContext

    @asynccontextmanager
    async def http(self) -> AsyncGenerator[httpx2.AsyncClient]:
        headers = {"authorization": f"Bearer {KEYS['ada']}"}
        async with httpx2.AsyncClient(headers=headers, verify=self.trusted, timeout=120) as client:
            yield client

    @asynccontextmanager
    async def client(self, era: str = "auto", **options: Any) -> AsyncGenerator[Caller]:
        async with (
            self.http() as http,
            Client(streamable_http_client(f"{self.url}/mcp", http_client=http), mode=era, **options) as client,
        ):
            yield Caller(client)

    async def sessions(self) -> dict[int, str]:
        """A session of each machine's."""
        found: dict[int, str] = {}
        for number in (1, 2):
            async with self.hosts.client(number, name="ada") as caller:
                found[number] = await self.hosts.session_of(caller, number)
        return found


@pytest.fixture(scope="module", params=[caddy, nginx], ids=["caddy", "nginx"])
def balanced(
    request: pytest.FixtureRequest, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Balanced]:
    proxy: Proxy = request.param
    files, port = make_certificate(tmp_path_factory.mktemp("certificate")), free_port()
    shared = {
        "BELLJAR_ALLOWED_HOSTS": "localhost,127.0.0.1",
        "BELLJAR_API_KEYS": f"ada:{KEYS['ada']}",
        "BELLJAR_PUBLIC_URL": f"https://localhost:{port}",
    }
    with two_hosts(default_environment, tmp_path_factory.mktemp("hosts"), **shared) as hosts:
        behind = [hosts.urls[number].removeprefix("http://") for number in (1, 2)]
        with started(proxy, tmp_path_factory.mktemp("proxy"), files, port, *behind) as url:
            yield Balanced(hosts, url, ssl.create_default_context(cafile=str(files.certificate)))


@pytest.fixture(autouse=True)
async def answering(balanced: Balanced) -> None:
    async def answers() -> bool:
        async with balanced.http() as client:
            try:
                return (await client.get(f"{balanced.url}/ready")).status_code == 200
            except httpx2.TransportError:
                return False

    await until(answers)


@pytest.mark.parametrize("era", ERAS)
async def test_cells_report_and_ask_through_any_connection(balanced: Balanced, era: str) -> None:
    sessions = await balanced.sessions()

    async def answer(_: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"answer": params.message.strip().upper()})

    for turn in range(CONNECTIONS):
        for number, session_id in sessions.items():
            began = anyio.Event()

            async def note(_progress: float, _total: float | None, message: str | None, began: Any = began) -> None:
                if "held" in (message or ""):
                    began.set()

            async with balanced.client(era, elicitation_callback=answer) as caller:
                code = held(f"go-{era}-{turn}") + f"[input('who?'), {number}]"
                async with anyio.create_task_group() as tasks:

                    async def release(
                        caller: Caller = caller, began: Any = began, session_id: str = session_id, turn: int = turn
                    ) -> None:
                        with anyio.fail_after(60):
                            await began.wait()
                        await caller.release(session_id, f"go-{era}-{turn}")

                    tasks.start_soon(release)
                    found = await caller.client.call_tool(
                        "execute_code", {"code": code, "session_id": session_id}, progress_callback=note
                    )
            assert f"['WHO?', {number}]" in text_of(found)


async def test_a_call_that_is_cancelled_stops_through_any_connection(balanced: Balanced) -> None:
    sessions = await balanced.sessions()
    for session_id in sessions.values():
        for _ in range(CONNECTIONS):
            async with balanced.client("legacy") as caller, balanced.client() as watcher:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(
                        lambda c=caller, s=session_id: c.call("execute_code", code=held("never"), session_id=s)
                    )
                    await until(lambda w=watcher, s=session_id: is_running(w, s))
                    tasks.cancel_scope.cancel()
                await until(lambda w=watcher, s=session_id: is_idle(w, s))


async def is_running(watcher: Caller, session_id: str) -> bool:
    sessions = (await watcher.fields("list_sessions"))["sessions"]
    return any(info["session_id"] == session_id and info["state"] == "running" for info in sessions)


async def is_idle(watcher: Caller, session_id: str) -> bool:
    return not await is_running(watcher, session_id)


async def test_a_stream_that_breaks_is_gone_on_with_at_whichever_machine(balanced: Balanced) -> None:
    async with balanced.http() as http, balanced.client() as watcher:
        headers = await begin(http, balanced.url)
        session_id = await new_session(http, balanced.url, headers)
        for turn in range(2 * CONNECTIONS):
            answer = await broken_and_resumed(http, (balanced.url, balanced.url), headers, session_id, watcher, turn)
            assert f"'go-{turn}'" in answer["content"][0]["text"]


async def test_files_of_128_megabytes_go_up_and_down_whole(balanced: Balanced) -> None:
    content = os.urandom(1_000_000) * (MANY // 1_000_000)
    for session_id in (await balanced.sessions()).values():
        path = f"{balanced.url}/api/v1/sessions/{session_id}/files/large.bin"
        async with balanced.http() as client:
            put = await client.put(path, content=content)
            assert put.status_code < 300, put.text
            got = await client.get(path)
        assert hashlib.sha256(got.content).digest() == hashlib.sha256(content).digest()


async def test_a_page_of_the_console_follows_a_session_of_either_machine(balanced: Balanced) -> None:
    access = Access("local", is_operator=True, via="terminal")
    link = (await servers_of(balanced.hosts.data_directory(1)).console_link(access)).link
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = await (await browser.new_context(ignore_https_errors=True)).new_page()
        await page.goto(link)
        await page.wait_for_url("**/console")
        for session_id in (await balanced.sessions()).values():
            await page.goto(f"{balanced.url}/console/sessions/{session_id}")
            async with balanced.client() as caller:
                running = await caller.execute(held() + "'ended'", session_id, wait_s=0)
                await expect(page.get_by_text("held", exact=True).first).to_be_visible(timeout=30_000)
                await caller.release(session_id)
                await caller.ended(running.execution_id)
            await expect(page.get_by_text("'ended'", exact=True).first).to_be_visible(timeout=30_000)
        await browser.close()


async def test_one_machine_is_killed_and_the_other_answers_for_all_until_it_is_back(balanced: Balanced) -> None:
    sessions, hosts = await balanced.sessions(), balanced.hosts
    async with balanced.client() as caller:
        await caller.execute("open('kept.txt', 'w').write('kept')", sessions[2])
    hosts.kill(2)
    for turn in range(2 * CONNECTIONS):
        async with balanced.client() as caller:
            assert (await caller.execute(f"{turn} + 1", sessions[1])).result == f"{turn + 1}"
    await in_thread(hosts.stop, 2)
    await in_thread(hosts.start, 2)
    for _ in range(CONNECTIONS):
        async with balanced.client() as caller:
            assert (await caller.execute("1 + 1", sessions[1])).result == "2"
            assert (await caller.execute("open('kept.txt').read()", sessions[2])).result == "'kept'"
