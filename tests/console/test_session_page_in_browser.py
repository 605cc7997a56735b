"""What a session's page shows of outputs, in a real browser: figures, tables, formulas, long output, the timeline."""

import re
from collections.abc import AsyncGenerator

import pytest
from browsers import axe_source, opened_chromium, signed_in, violations
from consoles import Place, opened_place
from playwright.async_api import Browser, Page, expect

from belljar.environments import Environment

pytestmark = pytest.mark.anyio
TABLE = """import pandas as pd
from IPython.display import Math, display
display(Math(r'\\frac{1}{x}'))
pd.DataFrame({'n': [3, None, 20000], 'city': ['Oslo', '<b>Bern</b>', 'Rome']})"""
FIGURE = """from IPython.display import display
import base64, io
from PIL import Image
picture = io.BytesIO(); Image.new('RGB', (300, 100), 'red').save(picture, 'PNG')
page = '<div style="width: 3000px">wide</div><script>document.title = "ran"</script>'
display({'image/png': base64.b64encode(picture.getvalue()).decode(), 'text/html': page}, raw=True)"""


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("session-page")
    async with opened_place(default_environment, folder, fork_start=True, checkpoints=5) as opened:
        yield opened


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    async with opened_chromium() as browser:
        yield browser


async def focused(page: Page) -> str:
    return await page.evaluate("() => document.activeElement?.textContent.trim() ?? ''")


async def test_outputs_are_worked_with_by_keyboard_alone(place: Place, chromium: Browser) -> None:
    session_id = await place.agent.new_session()
    for code in (TABLE, FIGURE, "for i in range(3_000): print('line', i)"):
        assert (await place.agent.execute(code, session_id, wait_s=60)).success
    page = await signed_in(place, chromium)
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text) if message.type == "error" else None)
    await page.goto(f"{place.url}/console/sessions/{session_id}")

    assert await page.locator("math mfrac").bounding_box()
    cells = page.locator(".data tbody tr")
    assert await cells.all_inner_texts() == ["0\t3\tOslo", "1\tNaN\t<b>Bern</b>", "2\t20,000\tRome"]
    await page.locator(".data [data-sort='0']").focus()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Enter")  # the largest first; what is missing is last in either order
    assert [text[0] for text in await cells.all_inner_texts()] == ["2", "0", "1"]
    await expect(page.locator(".data th[aria-sort]")).to_have_attribute("aria-sort", "descending")

    await page.locator("[data-enlarge]").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("dialog.enlarged img")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator("dialog.enlarged")).to_have_count(0)

    await page.keyboard.press("Tab")
    assert await focused(page) == "Interactive"
    await page.keyboard.press("Enter")
    frame = page.locator(".picture iframe")
    await expect(frame).to_be_visible()
    await expect(page.locator(".picture img")).to_be_hidden()
    # It is shown in the width of the page, although it is wider.
    inner = await (await frame.element_handle()).content_frame()  # pyright: ignore[reportOptionalMemberAccess]
    assert inner is not None
    await inner.wait_for_function("() => document.title === 'ran' && document.documentElement.style.zoom < 1")
    await page.get_by_label("Always in this session").check()
    await page.reload()
    await expect(page.locator(".picture iframe")).to_be_visible()
    await page.locator("[data-run-frame]").click()
    await expect(page.locator(".picture img")).to_be_visible()

    await page.get_by_role("button", name="Show all 3,000 lines").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".left-out")).to_have_count(0)
    assert "line 1500\n" in await page.locator(".outputs").last.inner_text()
    assert await page.evaluate("() => document.activeElement?.classList.contains('cell')")
    assert not [text for text in refused if "Content Security" in text]
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        assert await violations(page, axe_source()) == []
    await page.context.close()


async def test_the_history_is_drawn_with_what_was_undone_and_forks(place: Place, chromium: Browser) -> None:
    agent = place.agent
    session_id = await agent.new_session()
    await agent.execute("first = 1", session_id, wait_s=60)
    undone = await agent.execute("second = 2", session_id, wait_s=60)
    await agent.execute("third = 3", session_id, wait_s=60)
    fork = (await agent.fields("fork_session", session_id=session_id))["session_id"]
    await agent.fields("rewind_session", session_id=session_id, to=undone.execution_id)
    await agent.execute("other = 4", session_id, wait_s=60)
    page = await signed_in(place, chromium, viewport={"width": 390, "height": 800})
    await page.goto(f"{place.url}/console/sessions/{session_id}/timeline")
    rows = page.locator(".timeline li")
    assert await rows.locator(".line").all_inner_texts() == [
        "other = 4", f"fork of {session_id}", "third = 3", "second = 2", "first = 1",
    ]  # fmt: skip
    dots = [await rows.nth(place).locator("circle, rect").get_attribute("class") for place in range(5)]
    assert dots == ["latest", "fork", "undone", "undone", "kept"]
    # The line of the session passes what was undone.
    assert await rows.nth(2).locator("path.main").count() == 1
    assert await rows.nth(1).locator("a").get_attribute("href") == f"/console/sessions/{fork}"
    assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert await violations(page, axe_source()) == []
    await page.context.close()


ENDLESS = """from IPython.display import HTML
HTML('<style>html, body { height: 100% } div { height: 100vh; background: red }</style><div></div>')"""
ASKED_AGAIN = """async () => {
  const frame = document.querySelector("iframe");
  for (let times = 0; times < 20; times++) {
    const told = new Promise((resolve) => addEventListener("message", resolve, { once: true }));
    frame.contentWindow.postMessage("height", "*");
    await told;
  }
  return frame.offsetHeight;
}"""


async def test_a_page_as_high_as_its_frame_does_not_grow_for_ever(place: Place, chromium: Browser) -> None:
    ran = await place.agent.execute(ENDLESS)
    page = await signed_in(place, chromium)
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    await expect(page.frame_locator("iframe").locator("div")).to_be_attached()
    heights = [await page.evaluate(ASKED_AGAIN) for _ in range(2)]
    assert heights[0] == heights[1]
    await page.context.close()


async def test_the_last_error_is_a_click_away_and_told_in_the_list(place: Place, chromium: Browser) -> None:
    failed = await place.agent.execute("raise ValueError('<b>the first</b>')")
    page = await signed_in(place, chromium)
    row = page.locator(f"#session-{failed.session_id}")
    await expect(row.get_by_text("ValueError", exact=True)).to_be_visible()
    await page.goto(f"{place.url}/console/sessions/{failed.session_id}")
    link = page.locator("#last-error")
    await expect(link).to_have_text("Last error: [1] ValueError: <b>the first</b>")
    again = await place.agent.execute("1/0", failed.session_id)
    await expect(link).to_have_text("Last error: [2] ZeroDivisionError: division by zero")
    await place.agent.execute("'fine'", failed.session_id)
    await link.click()
    await expect(page).to_have_url(re.compile(f"#cell-{again.execution_id}$"))
    await place.agent.call("rewind_session", session_id=failed.session_id, to=again.execution_id)
    await expect(link).to_have_text("Last error: [1] ValueError: <b>the first</b>")
    await page.context.close()
