"""The console in a real browser: cells that appear while they run, keys, themes, narrow screens, rules for access."""

import json
import shutil
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import held, until_said
from consoles import Place, events, opened_place
from playwright.async_api import Browser, Page, async_playwright, expect

from belljar.console import templating
from belljar.environments import Environment
from registry_packages import Unreachable, node, npm_folder
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\n"


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(
        default_environment, tmp_path_factory.mktemp("browser"), fork_start=True, checkpoints=5
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    path = shutil.which("chromium") or pytest.skip("there is no chromium here")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def signed_in(place: Place, chromium: Browser, **options: object) -> Page:
    page = await (await chromium.new_context(**options)).new_page()  # pyright: ignore[reportArgumentType]
    await page.goto(place.console.link().link)
    await page.wait_for_url("**/console")
    # The token is not left where a history or a referrer could have it.
    assert "#" not in page.url
    return page


async def test_a_figure_appears_while_its_cell_still_runs(place: Place, chromium: Browser) -> None:
    session_id = await place.agent.new_session()
    page = await signed_in(place, chromium)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    await expect(page.get_by_text("Nothing has run yet")).to_be_visible()
    running = await place.agent.execute(
        FIGURE + held("go") + "print('\\x1b[31mred\\x1b[0m')\n1/0", session_id, wait_s=0
    )
    await expect(page.locator(".picture img")).to_be_visible(timeout=60_000)
    assert await page.locator(".picture img").evaluate("image => image.decode().then(() => image.naturalWidth > 100)")
    await expect(page.locator(".status-running")).to_be_visible()
    await place.agent.release(session_id, "go")
    await expect(page.locator(".ansi-red")).to_have_text("red")
    await expect(page.locator(".block.error")).to_contain_text("ZeroDivisionError")
    await expect(page.locator(".status-error")).to_be_visible()
    await expect(page.locator(".status-running")).to_have_count(0)
    await place.agent.ended(running.execution_id)
    before = await page.locator("#cells").inner_text()
    await page.reload()
    await expect(page.locator(".status-error")).to_be_visible()
    # What came live is what a page that is opened later shows.
    assert (await page.locator("#cells").inner_text()).split() == before.split()
    assert errors == []


async def test_a_person_runs_a_cell_by_keyboard_and_a_rewind_folds_what_it_undoes(
    place: Place, chromium: Browser
) -> None:
    ran = await place.agent.execute("x = 1")
    page = await signed_in(place, chromium)
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    await page.keyboard.press("r")
    await page.keyboard.type("x = 2; print('mine', x)")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".cell").nth(1)).to_contain_text("mine 2")
    await expect(page.locator(".cell").nth(1).locator(".author")).not_to_be_empty()
    await expect(page.locator("#code")).to_have_value("")
    # The way back is offered as soon as the cell has ended, and folding by its key does not go it.
    mine = page.locator(".cell").nth(1)
    await expect(mine.get_by_text("Rewind…")).to_be_visible()
    # Also in a page that is loaded again, to which the end of its last cell is told once more.
    await page.reload()
    after = await page.evaluate("() => document.body.dataset.after")
    async with place.operator() as browser:
        path = f"/console/stream?page=session:{ran.session_id}&after={after}"
        async with events(browser, path) as happened:
            heads = (event["data"] async for event in happened if event["data"]["target"].startswith("head-"))
            assert "Rewind" in (await anext(heads))["html"]
    await expect(mine.get_by_text("Rewind…")).to_be_visible()
    await mine.focus()
    await page.keyboard.press("o")
    await expect(mine.locator(".outputs")).to_be_hidden()
    await page.keyboard.press("o")
    await expect(mine.locator(".outputs")).to_be_visible()
    undone = await place.agent.fields("rewind_session", session_id=ran.session_id, to="1")
    assert len(undone["undone"]) == 1
    await expect(page.locator(".cell.undone")).to_have_count(1)
    await expect(page.locator(".cell.undone .code")).to_be_hidden()
    await page.get_by_role("button", name="Show what was undone").click()
    await expect(page.locator(".cell.undone .code")).to_be_visible()


async def test_the_page_shows_a_death_its_cause_and_what_was_lost(place: Place, chromium: Browser) -> None:
    ran = await place.agent.execute("precious = 1")
    page = await signed_in(place, chromium)
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    await place.agent.execute("import os; os._exit(3)", ran.session_id)
    last = page.locator(".cell").nth(1)
    await expect(last.locator(".status-died")).to_be_visible()
    await expect(last.locator(".cell-end")).to_contain_text("precious")


async def test_ten_thousand_lines_are_told_by_their_end_and_read_in_pages(place: Place, chromium: Browser) -> None:
    session_id = await place.agent.new_session()
    page = await signed_in(place, chromium)
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    running = await place.agent.execute(
        "for n in range(10_000): print('number', n)\n" + held("go"), session_id, wait_s=0
    )
    await until_said(place.runtime, running.execution_id, "held")
    await expect(page.locator(".tail")).to_contain_text("10,001 lines so far")
    await place.agent.release(session_id, "go")
    await expect(page.locator(".left-out")).to_be_visible()
    await expect(page.locator(".tail")).to_have_count(0)
    assert len(await page.locator(".outputs").inner_text()) < 25_000
    await page.get_by_role("link", name="Search in them").click()
    await page.get_by_label("Search").fill("number 7777")
    await page.keyboard.press("Enter")
    await expect(page.locator("#line-7778")).to_have_text("number 7777")


async def test_every_page_follows_the_rules_for_access_in_both_themes_and_on_a_narrow_screen(
    place: Place, chromium: Browser
) -> None:
    try:
        packages = npm_folder(shared_settings().data_directory / "npm" / "axe-core", "axe-core")
    except Unreachable as error:
        pytest.skip(f"axe-core: {error}")
    axe = (packages / "node_modules/axe-core/axe.min.js").read_text()
    ran = await place.agent.execute("import pandas as pd\nprint('text')\npd.DataFrame({'a': [1, 2]})")
    await place.agent.execute(FIGURE + "import sys; print('warned', file=sys.stderr)\n1/0", ran.session_id)
    pages = [
        "/console",
        "/console?q=nothing-has-this",
        f"/console/sessions/{ran.session_id}",
        f"/console/sessions/{ran.session_id}/files",
        f"/console/sessions/{ran.session_id}/timeline",
        f"/console/executions/{ran.execution_id}",
        "/console/inbox",
        "/console/workflows",
        "/console/decisions",
        "/console/health",
        "/console/nowhere",
    ]
    for scheme, width in (("light", 1200), ("dark", 1200), ("light", 320)):
        page = await signed_in(
            place, chromium, color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True
        )
        for path in pages:
            await page.goto(place.url + path)
            await page.evaluate(axe)
            found = await page.evaluate(
                "() => axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']})"
            )
            told = [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]]
            assert told == [], (scheme, width, path)
            assert await page.evaluate("() => document.documentElement.scrollWidth") <= width, (scheme, width, path)
        await page.context.close()
    await (page := await (await chromium.new_context(bypass_csp=True)).new_page()).goto(f"{place.url}/console/enter")
    await page.evaluate(axe)
    assert (await page.evaluate("() => axe.run()"))["violations"] == []


async def test_the_first_load_is_small(place: Place, chromium: Browser) -> None:
    page = await signed_in(place, chromium)
    ran = await place.agent.execute("print('hello')")
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    entries = await page.evaluate("() => performance.getEntries().map((entry) => entry.encodedBodySize ?? 0)")
    assert sum(entries) < 100_000


def test_the_scripts_of_the_console_have_sound_types(tmp_path: Path) -> None:
    try:
        packages = npm_folder(shared_settings().data_directory / "npm" / "typescript", "typescript@5")
    except Unreachable as error:
        pytest.skip(f"typescript: {error}")
    scripts = Path(templating.__file__).parent / "static"
    options = {
        "compilerOptions": {
            "checkJs": True, "allowJs": True, "noEmit": True, "strict": True, "target": "es2023", "module": "es2022",
            "lib": ["es2023", "dom", "dom.iterable"], "types": [],
        },
        "files": [str(path) for path in sorted(scripts.glob("*.js"))],
    }  # fmt: skip
    (tmp_path / "tsconfig.json").write_text(json.dumps(options))
    compiler = packages / "node_modules/typescript/bin/tsc"
    done = subprocess.run([node()[0], compiler, "-p", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
