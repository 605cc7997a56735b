"""Hostile output in a real browser: what it tries to reach, each against a canary that counts, with and without policy.

Every way is first tried in a frame with the `sandbox` attribute alone. Those that reach the canary there prove that the
test can fail; those that do not, because the browser forbids them anyway, are tried all the same.
"""

import shutil
import socket
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from consoles import Place, opened_place
from playwright.async_api import Browser, Page, async_playwright

from belljar.environments import Environment
from waiting import until

pytestmark = pytest.mark.anyio

# Each is HTML with U for the address of the canary; the path tells which way it was.
WAYS = {
    "img": "<img src=U>",
    "srcset": '<img srcset="U 1x">',
    "picture": "<picture><source srcset=U><img></picture>",
    "input": "<input type=image src=U>",
    "stylesheet": "<link rel=stylesheet href=U>",
    "css-import": "<style>@import url(U);</style>",
    "css-background": "<style>body{background:url(U)}</style>",
    "css-list": "<style>li{list-style-image:url(U)}</style><ul><li>x</ul>",
    "css-content": "<style>p::before{content:url(U)}</style><p>x",
    "font": "<style>@font-face{font-family:f;src:url(U)}p{font-family:f}</style><p>x",
    "prefetch": "<link rel=prefetch href=U>",
    "preload": "<link rel=preload as=image href=U>",
    "modulepreload": "<link rel=modulepreload href=U>",
    "preconnect": "<link rel=preconnect href=U>",
    "icon": "<link rel=icon href=U>",
    "iframe": "<iframe src=U></iframe>",
    "object": "<object data=U></object>",
    "embed": "<embed src=U>",
    "video": "<video src=U autoplay muted></video>",
    "poster": "<video poster=U></video>",
    "audio": "<audio src=U autoplay></audio>",
    "track": "<video><track default src=U></video>",
    "svg-image": "<svg><image href=U width=9 height=9 /></svg>",
    "svg-filter": "<svg><filter id=f><feImage href=U /></filter><rect width=9 height=9 filter='url(#f)'/></svg>",
    "refresh": "<meta http-equiv=refresh content='0;url=U'>",
    "base": "<base href=U><img src=x>",
    "script": "<script src=U></script>",
    "module": "<script type=module>import 'U'</script>",
    "inline-image": "<script>new Image().src = 'U'</script>",
    "handler": "<img src=data:x onerror=\"new Image().src = 'U'\">",
    "fetch": "<script>fetch('U', {mode: 'no-cors'})</script>",
    "xhr": "<script>const x = new XMLHttpRequest(); x.open('GET', 'U'); x.send()</script>",
    "beacon": "<script>navigator.sendBeacon('U', 'x')</script>",
    "event-source": "<script>new EventSource('U')</script>",
    "web-socket": "<script>new WebSocket('U'.replace('http', 'ws'))</script>",
    "worker": "<script>new Worker(URL.createObjectURL(new Blob([`fetch('U', {mode: 'no-cors'})`])))</script>",
    "worker-import": "<script>new Worker(URL.createObjectURL(new Blob([`importScripts('U')`])))</script>",
    "location": "<script>location = 'U'</script>",
    "open": "<script>open('U')</script>",
    "top": "<script>try { top.location = 'U' } catch {}</script>",
    "anchor": "<a id=a href=U>x</a><script>a.click()</script>",
    "anchor-blank": "<a id=a href=U target=_blank>x</a><script>a.click()</script>",
    "ping": "<a id=a href='#' ping=U>x</a><script>a.click()</script>",
    "form": "<form id=f action=U method=post></form><script>f.submit()</script>",
    "written": "<script>document.write('<img src=U>')</script>",
    "evaluated": "<script>eval(\"new Image().src = 'U'\")</script>",
    "frame-in-frame": "<script>const f = document.createElement('iframe'); f.src = 'U'; "
    "document.body.append(f)</script>",
    "blob-document": "<script>location = URL.createObjectURL(new Blob(['<img src=U>'], {type: 'text/html'}))</script>",
    "data-frame": "<iframe src=\"data:text/html,<img src='U'>\"></iframe>",
    "nested-srcdoc": "<iframe srcdoc=\"<img src='U'>\"></iframe>",
    "speculation": '<script type=speculationrules>{"prefetch": [{"source": "list", "urls": ["U"]}]}</script>',
}
# WebRTC sends UDP, which no policy forbids: see the page's own warning.
RTC = (
    "<script>try { const c = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:PORT'}]});"
    "c.createDataChannel('x'); c.createOffer().then((o) => c.setLocalDescription(o)) } catch {}</script>"
)


class Canary:
    """Counts what reaches it, by the name in the path."""

    def __init__(self) -> None:
        self.reached: set[str] = set()
        self.connections: set[str] = set()
        """The addresses of this machine that were connected to; each way has one of its own."""
        self.pages: dict[str, str] = {}
        canary = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                canary.connections.add(self.request.getsockname()[0])
                super().setup()

            def do_GET(self) -> None:
                name = self.path.strip("/")
                page = canary.pages.get(name)
                if page is None:
                    canary.reached.add(name.partition("/")[0])
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if page else "text/plain")
                self.end_headers()
                self.wfile.write((page or "").encode())

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def canary() -> Generator[Canary]:
    found = Canary()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join()
        found.server.server_close()


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(default_environment, tmp_path_factory.mktemp("frames")) as opened:
        yield opened


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    path = shutil.which("chromium") or pytest.skip("there is no chromium here")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def shown(place: Place, chromium: Browser, html: list[str]) -> tuple[Page, str]:
    """A page of the console on a session whose first cell displayed these, and the id of that execution."""
    ran = await place.agent.execute(f"from IPython.display import HTML, display\nfor h in {html!r}: display(HTML(h))")
    assert ran.status == "ok", ran
    page = await (await chromium.new_context()).new_page()
    await page.goto(place.console.link().link)
    await page.wait_for_url("**/console")
    # A session without frames, so that only those of the test are there.
    await page.goto(f"{place.url}/console/sessions/{await place.agent.new_session()}")
    return page, ran.execution_id


FRAME = """async ([sources, sandbox]) => {
  for (const source of sources) {
    const frame = document.createElement('iframe');
    if (sandbox !== null) frame.setAttribute('sandbox', sandbox);
    const loaded = new Promise((done) => { frame.onload = done; setTimeout(done, 1500); });
    frame.src = source;
    document.body.append(frame);
    await loaded;
  }
}"""


async def test_no_way_out_of_a_frame_reaches_the_network(place: Place, chromium: Browser) -> None:
    with canary() as bait, canary() as free:
        names = [*WAYS]
        # Without the policy: the same documents in frames that have the attribute alone.
        for name in names:
            free.pages[f"page-{name}"] = f"<!DOCTYPE html><body>{WAYS[name].replace('U', f'{free.url}/{name}')}</body>"
        page = await (await chromium.new_context()).new_page()
        free.pages["host"] = "<!DOCTYPE html><body></body>"
        await page.goto(f"{free.url}/host")
        await page.evaluate(FRAME, [[f"{free.url}/page-{name}" for name in names], "allow-scripts"])
        await until(lambda: len(free.reached & set(names)) >= 27)

        addresses = {f"127.0.0.{number}": name for number, name in enumerate(names, start=2)}
        port = bait.server.server_port
        html = [
            f"<div>{WAYS[name].replace('U', f'http://{address}:{port}/{name}')}</div>"
            for address, name in addresses.items()
        ]
        page, execution_id = await shown(place, chromium, html)
        sources = [f"/frames/{execution_id}/{number}.html" for number in range(1, len(html) + 1)]
        await page.evaluate(FRAME, [sources, "allow-scripts"])
        await page.wait_for_timeout(1500)
        assert (bait.reached, {addresses[one] for one in bait.connections}) == (set(), set())
        # With scripts nothing arrives either, but connections may be opened: the page says so before it runs them.
        await page.evaluate(FRAME, [[f"{source}?scripts=1" for source in sources], "allow-scripts"])
        await page.wait_for_timeout(1500)
        assert bait.reached == set()


async def test_webrtc_is_removed_before_scripts_run(place: Place, chromium: Browser) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(2)
        html = RTC.replace("PORT", str(listener.getsockname()[1]))
        page, execution_id = await shown(place, chromium, [f"<div>{html}</div>"])
        await page.evaluate(FRAME, [[f"/frames/{execution_id}/1.html?scripts=1"], "allow-scripts"])
        with pytest.raises(TimeoutError):
            listener.recv(100)


PROBE = """<script>
const found = [];
const attempt = (name, act) => {
  try { const got = act(); if (got !== undefined && got !== '') found.push(name) } catch {}
};
attempt('parent', () => parent.document.title);
attempt('top', () => top.location.href);
attempt('cookie', () => document.cookie);
attempt('storage', () => { localStorage.setItem('a', 'b'); return 1 });
attempt('session storage', () => { sessionStorage.setItem('a', 'b'); return 1 });
attempt('origin', () => self.origin === 'null' ? '' : self.origin);
fetch('/api/v1/sessions').then(() => found.push('api'), () => 0)
  .finally(() => { document.title = 'done'; document.body.textContent = found.join() || 'nothing' });
</script>"""


async def test_a_frame_reaches_neither_the_page_nor_cookies_nor_the_api(place: Place, chromium: Browser) -> None:
    page, execution_id = await shown(place, chromium, [f"<div>{PROBE}</div>"])
    await page.evaluate(FRAME, [[f"/frames/{execution_id}/1.html?scripts=1"], "allow-scripts"])
    frame = next(frame for frame in page.frames if "scripts=1" in frame.url)
    await frame.wait_for_selector("body:has-text('nothing')")
    # Also where the frame is opened by itself, without the attribute: the policy is enough.
    alone = await page.context.new_page()
    await alone.goto(f"{place.url}/frames/{execution_id}/1.html?scripts=1")
    await until(lambda: alone.evaluate("() => document.title === 'done'"))
    # It is its own top and parent there.
    assert set((await alone.inner_text("body")).split(",")) <= {"nothing", "parent", "top"}


async def test_a_frame_tells_its_height_and_nothing_else(place: Place, chromium: Browser) -> None:
    tall = "<div style='height:700px'>tall</div>"
    page, execution_id = await shown(place, chromium, [tall, "<script>parent.postMessage({evil: 1}, '*')</script>x"])
    record = place.runtime.sessions.journal.find(execution_id)
    assert record is not None
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    await page.goto(f"{place.url}/console/sessions/{record.session_id}")
    frame = page.locator("iframe").first
    await frame.scroll_into_view_if_needed()
    await until(lambda: frame.evaluate("element => element.offsetHeight > 700 && element.offsetHeight < 760"))
    assert errors == []
