"""Pages in Debian's Chromium: when one can be read, what it fetched, what its scripts hold, when a line appeared."""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from playwright.async_api import Browser, BrowserContext, CDPSession, Page, async_playwright

from bench.registries import Unreachable

TIMEOUT_S = 90.0
QUIET_S = 1.0
"""A page has loaded when nothing has arrived for so long."""
LOOK_S = 0.02

# Notes when the first element of this kind is on the screen, has text, and nothing lies above it.
READABLE = """
const look = () => {
  for (const element of document.querySelectorAll(SELECTOR)) {
    const box = element.getBoundingClientRect();
    if (!box.height || box.bottom < 0 || box.top > innerHeight || !element.textContent.trim()) continue;
    const top = Math.max(0, box.top), bottom = Math.min(innerHeight, box.bottom);
    const above = document.elementFromPoint(box.left + 5, (top + bottom) / 2);
    if (above && (element.contains(above) || above.contains(element))) {
      globalThis.readableAt = performance.now();
      return;
    }
  }
  requestAnimationFrame(look);
};
if (top === self) requestAnimationFrame(look);
"""
# Notes how old each printed time is when it gets into the page, of those that were printed since the page was opened.
LINES = """
globalThis.ages = [];
const seen = new Set();
if (top === self) new MutationObserver(() => {
  const now = Date.now();
  for (const block of document.querySelectorAll(".block.stdout")) {
    for (const [, stamp] of block.textContent.matchAll(/@(\\d+\\.\\d+)\\n/g)) {
      if (seen.has(stamp) || Number(stamp) * 1000 < performance.timeOrigin) continue;
      seen.add(stamp);
      globalThis.ages.push(now / 1000 - Number(stamp));
    }
  }
}).observe(document, { subtree: true, childList: true, characterData: true });
"""


@dataclass(slots=True)
class Traffic:
    """What a page has fetched, as it came over the wire."""

    size_bytes: int = 0
    last_at: float = field(default_factory=time.monotonic)

    def add(self, event: dict[str, Any]) -> None:
        """Count one part of a response or a message of a WebSocket."""
        self.size_bytes += int(event.get("encodedDataLength", 0))
        self.last_at = time.monotonic()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a page opened."""

    readable_s: float
    size_bytes: int = 0
    heap_bytes: int = 0


@asynccontextmanager
async def open_browser() -> AsyncGenerator[Browser]:
    """Start the host's Chromium."""
    path = shutil.which("chromium")
    if path is None:
        raise Unreachable("there is no chromium here; Debian's package `chromium` brings one")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def open_context(browser: Browser, cookies: list[Any]) -> AsyncGenerator[BrowserContext]:
    """A profile with an empty cache."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    if cookies:
        await context.add_cookies(cookies)
    try:
        yield context
    finally:
        await context.close()


async def signed_in(link: str) -> list[Any]:
    """Sign in to a console with a link; the cookies that its pages need."""
    address, _, token = link.partition("#")
    async with httpx.AsyncClient(headers={"Sec-Fetch-Site": "same-origin"}) as client:
        answer = await client.post(address, data={"token": token})
        if answer.status_code != 303:
            raise RuntimeError(f"the console answers {answer.status_code} to its own link")
        site = address.split("/console")[0]
        return [{"name": name, "value": value, "url": site} for name, value in client.cookies.items()]


async def timed(context: BrowserContext, url: str, selector: str, *, is_settled: bool = False) -> Opening:
    """Open a page; when its first cell could be read and, where wanted, what it had fetched and holds in the end."""
    page = await context.new_page()
    try:
        script = READABLE.replace("SELECTOR", repr(selector))
        await page.add_init_script(f"(() => {{ {script} }})()")
        session = await context.new_cdp_session(page)
        traffic = await _counted(session)
        await page.goto(url, wait_until="commit", timeout=TIMEOUT_S * 1000)
        async with asyncio.timeout(TIMEOUT_S):
            while (readable_ms := await page.evaluate("() => globalThis.readableAt ?? 0")) == 0:
                await asyncio.sleep(LOOK_S)
            if not is_settled:
                return Opening(readable_ms / 1000)
            while time.monotonic() - traffic.last_at < QUIET_S:
                await asyncio.sleep(LOOK_S)
        return Opening(readable_ms / 1000, traffic.size_bytes, await heap_bytes(session))
    finally:
        await page.close()


async def heap_bytes(session: CDPSession) -> int:
    """What the scripts of a page hold, after two collections of what nobody needs."""
    await session.send("HeapProfiler.enable")
    for _ in range(2):
        await session.send("HeapProfiler.collectGarbage")
    return int((await session.send("Runtime.getHeapUsage"))["usedSize"])


async def line_ages(page: Page) -> list[float]:
    """How old the lines were, in seconds, when they got into the page."""
    return list(await page.evaluate("() => globalThis.ages"))


async def _counted(session: CDPSession) -> Traffic:
    traffic = Traffic()
    await session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: traffic.add(event))
    return traffic
