"""What a person does in the console, in a real browser: completion, keys, long output, files, questions."""

import re
import shutil
from collections.abc import AsyncGenerator

import pytest
from calls import held, until_said
from consoles import Place, opened_place
from playwright.async_api import Browser, Page, async_playwright, expect

from belljar.environments import Environment
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("work")
    async with opened_place(default_environment, folder, fork_start=True, checkpoints=5) as opened:
        yield opened


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    path = shutil.which("chromium") or pytest.skip("there is no chromium here")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture
async def page(place: Place, chromium: Browser) -> AsyncGenerator[Page]:
    context = await chromium.new_context()
    page = await context.new_page()
    await page.goto(place.console.link().link)
    await page.wait_for_url("**/console")
    yield page
    await context.close()


async def test_names_are_completed_by_the_keyboard_alone(place: Place, page: Page) -> None:
    ran = await place.agent.execute("umbrella = 1\numbrage = 2")
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    await page.keyboard.press("r")
    code = page.locator("#code")
    await expect(code).to_be_focused()
    await page.keyboard.type("é = umbr")
    await page.keyboard.press("Tab")
    await expect(page.locator("#names [role=option]")).to_have_count(2)
    await expect(code).to_have_attribute("aria-expanded", "true")
    await page.keyboard.press("Escape")
    await expect(page.locator("#names")).to_be_hidden()
    await expect(code).to_have_value("é = umbr")
    # The second time it goes on, so that nobody is kept in the text.
    await page.keyboard.press("Tab")
    await expect(code).not_to_be_focused()
    await page.keyboard.press("Shift+Tab")
    await expect(code).to_be_focused()
    await page.keyboard.press("End")
    await page.keyboard.press("Backspace")
    await page.keyboard.press("Tab")
    await expect(page.locator("#names [role=option]")).to_have_count(2)
    await page.keyboard.press("ArrowDown")
    chosen = await page.locator("#names [aria-selected=true]").inner_text()
    await page.keyboard.press("Enter")
    await expect(code).to_have_value(f"é = {chosen}")
    await page.keyboard.type("; é")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".cell").last.locator(".outputs")).to_contain_text("1" if chosen == "umbrella" else "2")
    # With nothing to complete, Tab goes on as everywhere.
    await page.keyboard.press("Tab")
    await expect(code).not_to_be_focused()


async def test_keys_move_fold_and_go_and_can_be_switched_off(place: Place, page: Page) -> None:
    ran = await place.agent.execute("print('first')")
    await place.agent.execute("print('second')", ran.session_id)
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    first = page.locator(".cell").first
    await page.keyboard.press("k")
    await page.keyboard.press("k")
    await expect(first).to_be_focused()
    await page.keyboard.press("o")
    await expect(first.locator(".outputs")).to_be_hidden()
    await page.keyboard.press("o")
    await expect(first.locator(".outputs")).to_be_visible()
    await page.keyboard.press("g")
    await page.keyboard.press("i")
    await page.wait_for_url("**/console/inbox")
    await page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog", name="Keys")
    for key in ("j", "k", "o", "r", ".", "/", "g", "?"):
        await expect(help_dialog.locator("kbd", has_text=re.compile(f"^{re.escape(key)}$")).first).to_be_visible()
    await help_dialog.get_by_label("Single keys work").uncheck()
    await help_dialog.get_by_role("button", name="Close").click()
    await page.keyboard.press("?")
    await expect(help_dialog).to_be_hidden()


async def test_any_of_a_million_lines_is_shown_at_once(place: Place, page: Page) -> None:
    ran = await place.agent.execute("for n in range(1, 1_000_001): print('line', n)\nprint('Needle')", wait_s=120)
    await page.goto(f"{place.url}/console/executions/{ran.execution_id}/output")
    viewer = page.locator("#viewer")
    await expect(page.locator("#line-1")).to_have_text("line 1")
    height = await viewer.evaluate("(element) => element.scrollHeight")
    assert 7_000_000 < height <= 8_100_000
    await viewer.evaluate("(element) => element.scrollTo(0, element.scrollHeight / 2)")
    await until(lambda: is_around(page, 500_000))
    assert await page.locator(".lines li").count() <= 200
    await page.keyboard.press("/")
    await page.keyboard.type("needle")
    await page.keyboard.press("Enter")
    await expect(page.locator("#found")).to_have_text("line 1,000,001, 1 of 1")
    await expect(page.locator("#line-1000001.match")).to_be_in_viewport()
    await page.goto(f"{place.url}/console/executions/{ran.execution_id}#line-777777")
    await expect(page.locator("#line-777777")).to_be_in_viewport()


async def is_around(page: Page, line: int) -> bool:
    """Whether the first line that is seen is about this one."""
    first = await page.locator("#viewer").evaluate(
        "(viewer) => [...viewer.querySelectorAll('li')].find((li) => "
        "li.getBoundingClientRect().top >= viewer.getBoundingClientRect().top)?.value"
    )
    return first is not None and abs(first - line) < 100


async def test_output_is_followed_while_it_comes(place: Place, page: Page) -> None:
    session_id = await place.agent.new_session()
    code = "for n in range(300): print('before', n)\n" + held("go") + "for n in range(300): print('after', n)"
    running = await place.agent.execute(code, session_id, wait_s=0)
    await until_said(place.runtime, running.execution_id, "held")
    await page.goto(f"{place.url}/console/executions/{running.execution_id}")
    await page.get_by_label("Follow the end").check()
    await expect(page.locator("#line-301")).to_be_in_viewport()
    await place.agent.release(session_id, "go")
    await expect(page.locator("#line-601")).to_be_in_viewport()


END = "() => document.getElementById('cells').getBoundingClientRect().bottom <= innerHeight"


async def test_a_session_opens_at_its_end_and_stays_there_until_somebody_scrolls_up(place: Place, page: Page) -> None:
    session_id = await place.agent.new_session()
    for _ in range(3):
        await place.agent.execute("from IPython.display import HTML\nHTML('tall<br>' * 90)", session_id)
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    follow = page.get_by_role("button", name="Follow the end")
    # Frames tell how high they are when they have been drawn.
    await page.wait_for_function("() => document.querySelectorAll('iframe')[2].offsetHeight > 1000")
    await page.wait_for_function(END)
    await expect(follow).to_be_hidden()
    await page.mouse.move(300, 300)
    await page.mouse.wheel(0, -2_000)
    await expect(follow).to_be_visible()
    await place.agent.execute("print('later')", session_id)
    await expect(page.get_by_text("later", exact=True)).to_have_count(1)
    assert not await page.evaluate(END)
    await follow.click()
    await page.wait_for_function(END)
    await place.agent.execute("HTML('tall<br>' * 90)", session_id)
    await page.wait_for_function("() => document.querySelectorAll('iframe')[3]?.offsetHeight > 1000")
    await page.wait_for_function(END)


async def test_a_rewind_says_what_it_undoes_and_a_cells_code_is_edited_and_run_again(place: Place, page: Page) -> None:
    session_id = await place.agent.new_session()
    for code in ("x = 1", "x += 1", "x += 10"):
        await place.agent.execute(code, session_id)
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    await page.locator("[popovertarget=rewind-panel]").click()
    choices = page.locator("#rewind-panel .choice")
    await expect(choices).to_have_count(2)
    await expect(choices.nth(0)).to_contain_text("Before [3] x += 10Undoes [3], the last cell.")
    await expect(choices.nth(1)).to_contain_text("Undoes [2] and the cell after it.")
    await choices.nth(1).click()
    await expect(page.locator(".done")).to_contain_text("Rewound.")
    await expect(page.locator(".cell.undone")).to_have_count(2)
    assert "done" not in page.url
    await page.locator(".cell").nth(1).get_by_role("button", name="Edit and run again").click()
    await expect(page.locator("#code")).to_have_value("x += 1")
    await page.locator("#code").fill("x += 5; x")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".cell").last.locator(".outputs")).to_contain_text("6")


async def test_files_are_uploaded_looked_at_and_deleted(place: Place, page: Page) -> None:
    ran = await place.agent.execute("import os; os.makedirs('data')")
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}/files?path=data")
    file = {"name": "n.txt", "mimeType": "text/plain", "buffer": b"<i>seen</i>"}
    await page.get_by_label("File", exact=True).set_input_files(file)  # pyright: ignore[reportArgumentType]
    await page.get_by_role("button", name="Upload", exact=True).click()
    await page.get_by_role("link", name="n.txt").click()
    await expect(page.locator("pre.whole")).to_have_text("<i>seen</i>")
    await page.get_by_role("link", name="Back to the files").click()
    await page.locator(".files-table").get_by_text("More…").click()
    await page.get_by_role("button", name="Delete this file").click()
    await expect(page.get_by_role("heading", name="No files")).to_be_visible()


async def test_the_timeline_rewinds_and_shows_forks(place: Place, page: Page) -> None:
    ran = await place.agent.execute("x = 1")
    second = await place.agent.execute("x = 2", ran.session_id)
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}/timeline")
    cell = page.locator(".timeline > li", has_text="x = 2")
    await cell.get_by_text("Rewind…").click()
    await cell.get_by_role("button", name="Fork from before it").click()
    await page.wait_for_url(re.compile("/console/sessions/(?!" + ran.session_id + ")"))
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}/timeline")
    await expect(page.locator(".timeline > .at-fork").get_by_text("fork from before the next cell")).to_be_visible()
    await cell.get_by_text("Rewind…").click()
    await cell.get_by_role("button", name="Rewind to before this cell").click()
    await expect(page.locator(f"#cell-{second.execution_id}.undone")).to_be_visible()


async def test_a_new_name_is_in_the_heading_and_the_title_of_a_page_that_is_open(place: Place, page: Page) -> None:
    session_id = await place.agent.new_session()
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    await page.get_by_role("button", name="More…").click()
    await page.get_by_label("Name", exact=True).fill("Sales of Oslo")
    await page.get_by_role("button", name="Rename", exact=True).click()
    await expect(page.locator("h1")).to_have_text("Sales of Oslo")
    renamed = "<i>$& Bergen</i>"
    await place.agent.fields("rename_session", session_id=session_id, reason=renamed)
    await expect(page.locator("h1")).to_have_text(renamed)
    await expect(page).to_have_title(f"{renamed} · belljar")


async def test_every_page_counts_what_waits(place: Place, page: Page) -> None:
    await page.goto(f"{place.url}/console/health")
    asking = await place.agent.execute("1")
    running = await place.agent.execute("input('Go on?')", asking.session_id, wait_s=0)
    await expect(page).to_have_title("(1) Health · belljar")
    await page.get_by_role("link", name="Inbox").click()
    await page.get_by_label("Answer").fill("yes")
    await page.get_by_role("button", name="Answer").click()
    assert (await place.agent.ended(running.execution_id)).result == "'yes'"
