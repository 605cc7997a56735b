"""A real Chromium for trials of the console, people who are signed in with it, and axe-core."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from consoles import Place
from playwright.async_api import Browser, Page, async_playwright

from registry_packages import Unreachable, npm_folder
from shared_environment import shared_settings

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]
# A tab in the background. Chromium without a window has none, so the page is told that it is one.
HIDABLE = """
let isHidden = false;
Object.defineProperty(document, "hidden", { get: () => isHidden });
Object.defineProperty(document, "visibilityState", { get: () => (isHidden ? "hidden" : "visible") });
globalThis.hide = (value) => { isHidden = value; document.dispatchEvent(new Event("visibilitychange")); };
"""


@asynccontextmanager
async def opened_chromium() -> AsyncGenerator[Browser]:
    path = shutil.which("chromium") or pytest.skip("there is no chromium here")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def signed_in(place: Place, chromium: Browser, **options: Any) -> Page:
    page = await (await chromium.new_context(**options)).new_page()
    await page.goto(place.console.link().link)
    await page.wait_for_url("**/console")
    return page


def axe_source() -> str:
    try:
        packages = npm_folder(shared_settings().data_directory / "npm" / "axe-core", "axe-core")
    except Unreachable as error:
        pytest.skip(f"axe-core: {error}")
    return (packages / "node_modules/axe-core/axe.min.js").read_text()


async def violations(page: Page, axe: str) -> list[Any]:
    """What axe-core finds against the rules A and AA of WCAG 2.2."""
    if not await page.evaluate("() => 'axe' in globalThis"):
        await page.evaluate(axe)
    found = await page.evaluate(f"() => axe.run(document, {{runOnly: {RULES!r}}})")
    return [(one["id"], [node["html"][:300] for node in one["nodes"][:3]]) for one in found["violations"]]
