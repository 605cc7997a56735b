"""What befalls a console that is open: servers that are killed, tabs that sleep, nights, twenty tabs."""

import json
import re
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from browsers import HIDABLE, opened_chromium, signed_in
from calls import Caller, held, until_said
from consoles import Place, opened_place
from mcp import Client
from playwright.async_api import Browser, Page, expect

from belljar.environments import Environment
from belljar.settings import hash_key
from serving_process import http_server, serve_command
from waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
KEY = "alice-" + "a" * 30
COUNTING = (
    "import os, time\nn = 0\nwhile not os.path.exists('enough'):\n"
    "    print('line', n, flush=True); n += 1\n    time.sleep(0.1)\nprint('that was all')"
)


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    async with opened_chromium() as browser:
        yield browser


@contextmanager
def server_at(port: int, environment: Environment, folder: Path) -> Generator[None]:
    """A server that keeps sessions alive, always at the same port."""
    command = serve_command(environment, "--http", f"127.0.0.1:{port}")
    chosen = {
        "BELLJAR_KEEP_ALIVE": "true",
        "BELLJAR_KEEP_ALIVE_S": "60",
        "BELLJAR_API_KEYS": f"alice:sha256:{hash_key(KEY)}",
    }
    with http_server(command, folder, **chosen) as (_, process):
        yield
        process.kill()
        process.wait()


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"line (\d+)", text)]


async def test_a_server_is_killed_in_the_middle_and_page_and_reader_go_on_without_gap_or_repeat(
    default_environment: Environment, tmp_path: Path, chromium: Browser
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {KEY}"}
    context = await chromium.new_context()
    page, other = await context.new_page(), await context.new_page()

    async def sign_in(tab: Page) -> None:
        await tab.goto(f"{url}/console/enter")
        await tab.get_by_label("Key").fill(KEY)
        await tab.keyboard.press("Enter")
        await tab.wait_for_url("**/console")

    texts: list[str] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as script:
        with server_at(port, default_environment, tmp_path):
            made = (await script.post("/api/v1/sessions", json={})).json()["session_id"]
            await sign_in(page)
            await page.goto(f"{url}/console/sessions/{made}")
            queued = (await script.post(f"/api/v1/sessions/{made}/executions", json={"code": COUNTING})).json()
            last = await read(script, made, "", texts, "line 20\n")
            await expect(page.locator(".outputs")).to_contain_text("line 20")
            # `server_at` kills it: no word, no end.
        await expect(page.locator("#connection")).to_contain_text("Not connected since")
        with server_at(port, default_environment, tmp_path):
            last = await read(script, made, last, texts, "line 60\n")
            # The person has to sign in again; in another tab, so that this one has to go on by itself.
            await expect(page.locator("#connection")).to_contain_text("sign in again", timeout=60_000)
            await sign_in(other)
            await expect(page.locator("#connection")).to_be_hidden(timeout=60_000)
            assert (await script.put(f"/api/v1/sessions/{made}/files/enough", content=b"")).status_code == 204
            await read(script, made, last, texts, "that was all\n")
            await expect(page.locator(".outputs")).to_contain_text("that was all", timeout=60_000)
            result = (await script.get(f"/api/v1/executions/{queued['execution_id']}/lines?count=1000")).json()
            whole = numbers("\n".join(result["lines"]))
            assert whole == [*range(len(whole))]
            assert numbers("".join(texts)) == whole
            assert numbers(await page.locator(".outputs").text_content() or "") == whole
    await context.close()


async def read(script: httpx.AsyncClient, session_id: str, after: str, texts: list[str], end: str) -> str:
    """Read the output of a session from a place on until a text has come; return the place."""
    place, name = after, ""
    with anyio.fail_after(90):
        path = f"/api/v1/sessions/{session_id}/events"
        async with script.stream("GET", path, params={"after": after}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                    assert name != "reset"
                elif field == "id":
                    place = value
                elif field == "data" and name == "output":
                    texts.append(json.loads(value)["output"]["text"])
                elif not line and end in "".join(texts):
                    break
    return place


# One server for the others


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(default_environment, tmp_path_factory.mktemp("accidents")) as opened:
        yield opened


async def test_a_tab_that_slept_has_everything_once_when_it_wakes(place: Place, chromium: Browser) -> None:
    session_id = await place.agent.new_session()
    page = await signed_in(place, chromium)
    await page.add_init_script(HIDABLE)
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    running = await place.agent.execute(
        "for n in range(50): print('line', n)\n" + held("go") + "for n in range(50, 99): print('line', n)",
        session_id,
        wait_s=0,
    )
    await until_said(place.runtime, running.execution_id, "held")
    await expect(page.locator(".outputs").first).to_contain_text("held")
    await page.evaluate("hide(true)")
    await place.agent.release(session_id, "go")
    await place.agent.ended(running.execution_id)
    for number in range(60):
        await place.agent.execute(f"print('cell {number}')", session_id)
    assert await page.locator(".cell").count() == 1
    await page.evaluate("hide(false)")
    await expect(page.locator(".cell")).to_have_count(61, timeout=60_000)
    await expect(page.locator(".cell").last.locator(".outputs")).to_contain_text("cell 59")
    # Not its `innerText`, which has nothing of cells that are far from the screen.
    assert numbers(await page.locator(".outputs").first.text_content() or "") == [*range(99)]
    said = re.findall(r"^cell (\d+)$", "".join(await page.locator(".outputs").all_text_contents()), re.MULTILINE)
    assert [*map(int, said)] == [*range(60)]
    await page.context.close()


async def test_twenty_tabs_of_which_one_is_looked_at(place: Place, chromium: Browser) -> None:
    """Browsers open six connections to a server: tabs that nobody sees must have none."""
    session_id = await place.agent.new_session()
    first = await signed_in(place, chromium)
    await first.context.add_init_script(HIDABLE)
    tabs: list[Page] = []
    for _ in range(20):
        tab = await first.context.new_page()
        await tab.goto(f"{place.url}/console/sessions/{session_id}")
        tabs.append(tab)
        await tab.evaluate("hide(true)")
    await tabs[7].evaluate("hide(false)")
    await place.agent.execute("print('seen')", session_id)
    await expect(tabs[7].locator(".outputs")).to_contain_text("seen")
    assert await tabs[8].locator(".outputs").count() == 0
    await tabs[7].evaluate("hide(true)")
    for tab in tabs:
        await tab.evaluate("hide(false)")
        await expect(tab.locator(".outputs")).to_contain_text("seen")
        await tab.evaluate("hide(true)")
    await first.context.close()


async def test_a_page_open_all_night_lets_the_session_fall_asleep(
    default_environment: Environment, tmp_path: Path, chromium: Browser
) -> None:
    async with opened_place(default_environment, tmp_path, hibernate=True, session_idle_s=3) as place:
        ran = await place.agent.execute("precious = 'kept'")
        page, inbox = await signed_in(place, chromium), await signed_in(place, chromium)
        await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
        await inbox.goto(f"{place.url}/console")
        await expect(page.locator("#session-state")).to_contain_text("asleep", timeout=60_000)
        await expect(inbox.locator("#others .session")).to_have_count(1)
        for path in ("", "/files", "/timeline"):
            await page.goto(f"{place.url}/console/sessions/{ran.session_id}{path}")
        assert place.runtime.sessions.find_open(ran.session_id) is None
        # Only an act wakes it, and then everything is there.
        await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
        await page.locator("#code").fill("print(precious)")
        await page.keyboard.press("Control+Enter")
        await expect(page.locator(".cell").last.locator(".outputs")).to_contain_text("kept", timeout=60_000)
        await page.context.close()
        await inbox.context.close()


async def test_streams_that_end_make_room_for_others_and_too_many_are_refused(place: Place) -> None:
    async with place.operator() as browser:
        async with anyio.create_task_group() as tasks:
            opened: list[int] = []

            async def hold() -> None:
                async with browser.stream("GET", "/api/v1/events") as answer:
                    opened.append(answer.status_code)
                    await anyio.sleep_forever()

            for _ in range(20):
                tasks.start_soon(hold)
            await until(lambda: len(opened) == 20)
            refused = await browser.get("/api/v1/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too-many-streams")
            assert refused.headers["retry-after"] == "10"
            assert opened == [200] * 20
            tasks.cancel_scope.cancel()

        async def has_room() -> bool:
            async with browser.stream("GET", "/api/v1/events") as answer:
                return answer.status_code == 200

        await until(has_room)


async def test_an_agent_whose_person_looks_on_is_served_meanwhile(place: Place) -> None:
    """Readers that take nothing hold up nobody."""
    session_id = await place.agent.new_session()
    async with place.operator() as browser, anyio.create_task_group() as tasks:

        async def stare() -> None:
            async with browser.stream("GET", f"/api/v1/sessions/{session_id}/events"):
                await anyio.sleep_forever()

        for _ in range(10):
            tasks.start_soon(stare)
        with anyio.fail_after(60):
            done = await place.agent.execute("for n in range(200_000): print('x' * 50, n)\n7", session_id)
        assert done.result == "7"
        async with Client(f"{place.url}/mcp") as client:
            assert (await Caller(client).execute("1 + 1")).result == "2"
        tasks.cancel_scope.cancel()
