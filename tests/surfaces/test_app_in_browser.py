"""The view of a session in a real browser, inside a host made of npm's `app-bridge`; and what hostile cells reach."""

import json
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from calls import Caller, connected, held, until_said
from mcp.client import advertise
from mcp.server.apps import APP_MIME_TYPE, EXTENSION_ID

from belljar.mcp.apps_extension import APP_TOOL as TOOL
from belljar.mcp.apps_extension import APP_URI as URI
from belljar.runtime import Runtime
from registry_packages import Unreachable, node, npm_folder
from shared_environment import shared_settings

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
PACKAGES = ("@modelcontextprotocol/ext-apps@2.0.4", "@modelcontextprotocol/client@2.4.0", "esbuild@0.25.12", "zod@4")
# The default of the specification for a view that declares nothing.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; media-src 'self' data:; connect-src 'none'; sandbox allow-scripts"
)
PAGE = "<!doctype html><title>host</title><iframe sandbox='allow-scripts' width=720 height=300></iframe>"
HOSTILE = """
from IPython.display import HTML, display
canary = "CANARY"
print(f"<img src={canary}/a onerror=alert(1)><script>fetch('{canary}/b')</script> \\u202e reversed")
display(HTML(f"<img src='{canary}/c'><script>top.pwned = 1; fetch('{canary}/d')</script>"))
raise ValueError(f"<svg onload=fetch('{canary}/e')>")
"""
FIGURE = "import matplotlib.pyplot as plt\nplt.figure(figsize=(5, 2.5))\nplt.plot([1, 4, 9, 16])\nplt.title('squares')"


class Site:
    """Serves the host's page, its script and the view; counts what else is asked for."""

    def __init__(self, script: bytes) -> None:
        self.view = b""
        self.reached: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = {
                    "/": (PAGE.encode() + b"<script src=/host.js></script>", "text/html", ""),
                    "/host.js": (script, "text/javascript", ""),
                    "/view": (site.view, "text/html; charset=utf-8", POLICY),
                }
                if self.path not in known:
                    site.reached.append(self.path)
                body, kind, policy = known.get(self.path, (b"", "text/plain", ""))
                self.send_response(200)
                self.send_header("content-type", kind)
                if policy:
                    self.send_header("content-security-policy", policy)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    try:
        packages = npm_folder(shared_settings().data_directory / "mcp-servers" / "ext-apps", *PACKAGES)
        program = str(node()[0])
    except Unreachable as error:
        pytest.skip(f"ext-apps: {error}")
    folder = tmp_path_factory.mktemp("host")
    (folder / "node_modules").symlink_to(packages / "node_modules")
    script = folder / "app_host.mjs"
    script.write_bytes(Path(__file__).with_name("app_host.mjs").read_bytes())
    bundler = [program, str(packages / "node_modules/esbuild/bin/esbuild"), str(script), "--bundle", "--format=iife"]
    if not (packages / "node_modules/esbuild/bin/esbuild").read_bytes().startswith(b"#!"):
        bundler = bundler[1:]  # npm puts the program itself in place of its launcher
    made = subprocess.run(bundler, capture_output=True, timeout=60)
    assert made.returncode == 0, made.stderr
    served = Site(made.stdout)
    thread = threading.Thread(target=served.server.serve_forever)
    thread.start()
    yield served
    served.server.shutdown()
    thread.join()
    served.server.server_close()


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    draws = advertise(EXTENSION_ID, {"mimeTypes": [APP_MIME_TYPE]})
    async with connected(runtime, extensions=[draws]) as caller:
        yield caller


@pytest.fixture(scope="module")
async def browser(anyio_backend: str) -> AsyncGenerator[Any]:
    chromium = shutil.which("chromium") or pytest.skip("there is no chromium here")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def opened(browser: Any, site: Site, caller: Caller, theme: str, answer: Any) -> tuple[Any, Any]:
    """A host that shows this answer: its page, and the view's frame."""
    page = await browser.new_page(viewport={"width": 760, "height": 1000})

    async def call_tool(text: str) -> str:
        params = json.loads(text)
        assert params["name"] == "get_execution"
        return (await caller.client.call_tool(params["name"], params["arguments"])).model_dump_json(by_alias=True)

    async def read_resource(text: str) -> str:
        return (await caller.client.read_resource(json.loads(text)["uri"])).model_dump_json(by_alias=True)

    await page.expose_function("callTool", call_tool)
    await page.expose_function("readResource", read_resource)
    site.view = (await caller.read_text(URI)).encode()
    await page.goto(site.url)
    result = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
    await page.evaluate("([theme, result]) => window.host(theme, result)", [theme, result])
    return page, page.frame_locator("iframe")


async def test_a_host_draws_cells_follows_a_running_one_and_keeps_hostile_output_as_text(
    browser: Any, site: Site, caller: Caller, runtime: Runtime, tmp_path: Path
):
    session_id = await caller.new_session()
    await caller.execute(FIGURE, session_id)
    await caller.execute(HOSTILE.replace("CANARY", site.url), session_id)
    running = await caller.execute(f"{held()}print('and on')\n6 * 7", session_id, wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    answer = await caller.call(TOOL, session_id=session_id)
    expect = playwright.expect
    pages: list[Any] = []
    for theme in ("light", "dark"):
        page, view = await opened(browser, site, caller, theme, answer)
        pages.append((theme, page, view))
        await expect(view.locator("article")).to_have_count(3)
        await expect(view.locator("img")).to_have_count(1)
        assert await view.locator("img").evaluate("(img) => img.decode().then(() => img.naturalWidth)") > 100
        await expect(view.locator("article").nth(1)).to_contain_text(f"<img src={site.url}/a")
        await expect(view.locator("article").nth(1)).to_contain_text("<svg onload")
        await expect(view.locator("article").nth(2)).to_contain_text("held")
    await caller.release(session_id)
    for theme, page, view in pages:
        await expect(view.locator("article").nth(2)).to_contain_text("and on")
        await expect(view.locator("article").nth(2)).to_contain_text("42")
        await expect(view.get_by_role("status")).to_have_text("up to date")
        assert await page.evaluate("window.pwned") is None
        await page.screenshot(path=tmp_path / f"{theme}.png")
    assert site.reached in ([], ["/favicon.ico"], ["/favicon.ico"] * 2)


async def test_the_view_opens_the_session_in_the_console_where_the_server_has_one(
    browser: Any, site: Site, caller: Caller, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
):
    session_id = await caller.new_session()
    await caller.execute("1", session_id)
    _, view = await opened(browser, site, caller, "light", await caller.call(TOOL, session_id=session_id))
    await playwright.expect(view.get_by_text("In [1]")).to_be_visible()
    await playwright.expect(view.get_by_role("button", name="Open in the console")).to_be_hidden()
    monkeypatch.setattr(runtime.sessions.inbox, "console_url", lambda: "https://jar.example.org")
    page, view = await opened(browser, site, caller, "dark", await caller.call(TOOL, session_id=session_id))
    await view.get_by_role("button", name="Open in the console").click()
    await page.wait_for_function("() => window.openedLink")
    assert await page.evaluate("window.openedLink") == f"https://jar.example.org/console/sessions/{session_id}"


async def test_what_has_no_cells_is_told_in_words(browser: Any, site: Site, caller: Caller):
    session_id = await caller.new_session()
    _, view = await opened(browser, site, caller, "light", await caller.call(TOOL, session_id=session_id))
    await playwright.expect(view.get_by_role("status")).to_contain_text("It has run nothing yet")
    _, view = await opened(browser, site, caller, "light", await caller.call(TOOL, session_id="0" * 32))
    await playwright.expect(view.locator("main")).to_contain_text("session-not-found")
