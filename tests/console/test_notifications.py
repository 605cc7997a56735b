"""Notifications of a real browser, and the titles of its tabs, about questions that wait."""

from collections.abc import AsyncGenerator

import pytest
from browsers import HIDABLE, opened_chromium, signed_in
from consoles import Place, opened_place
from playwright.async_api import Browser, expect

from belljar.environments import Environment
from waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
# Every notification that the page makes, with whether the browser has shown it.
SEEN = """
globalThis.told = [];
globalThis.Notification = class extends Notification {
  constructor(title, options) {
    super(title, options);
    const one = { title, body: options.body, tag: options.tag, isShown: false };
    told.push(one);
    this.addEventListener("show", () => { one.isShown = true; });
  }
};
"""


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(default_environment, tmp_path_factory.mktemp("notify"), ask_in_console="always") as opened:
        yield opened


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    async with opened_chromium() as browser:
        yield browser


async def test_a_question_makes_one_notification_and_the_titles_of_hidden_tabs_count_it(
    place: Place, chromium: Browser
) -> None:
    session_id = (await place.agent.execute("1")).session_id
    page = await signed_in(place, chromium, permissions=["notifications"])
    for script in (HIDABLE, SEEN):
        await page.context.add_init_script(script)
    other = await page.context.new_page()
    await other.goto(f"{place.url}/console")
    await page.goto(f"{place.url}/console")
    await page.get_by_role("button", name="Keys").click()
    await page.get_by_label("Notify me when a question waits").check()
    assert await page.evaluate("() => Notification.permission") == "granted"
    await page.get_by_role("button", name="Close").click()
    # What one looks at needs no notification: the page itself says it.
    first = await place.agent.execute("input('one?')", session_id, wait_s=0)
    await expect(page).to_have_title("(1) Sessions · belljar")
    assert await page.evaluate("() => told") == []
    await place.agent.call("interrupt_execution", execution_id=first.execution_id)
    await expect(page).to_have_title("Sessions · belljar")
    # Both tabs in the background, where their own streams are closed.
    for tab in (page, other):
        await tab.evaluate("() => hide(true)")
    asking = await place.agent.execute("input('the secret question?')", session_id, wait_s=0)
    await expect(page).to_have_title("(1) Sessions · belljar")
    await expect(other).to_have_title("(1) Sessions · belljar")
    await until(lambda: page.evaluate("() => told.some((one) => one.isShown)"))
    # One for both tabs, which says nothing of the question.
    told = [*await page.evaluate("() => told"), *await other.evaluate("() => told")]
    assert told == [{"title": "belljar", "body": "A question waits for you", "tag": "belljar-notify", "isShown": True}]
    await place.agent.call("interrupt_execution", execution_id=asking.execution_id)
    await expect(page).to_have_title("Sessions · belljar")
    # The tab that listened is closed: another one takes over.
    await page.close()
    again = await place.agent.execute("input('again?')", session_id, wait_s=0)
    await expect(other).to_have_title("(1) Sessions · belljar")
    await until(lambda: other.evaluate("() => told.length === 1 && told[0].isShown"))
    await place.agent.call("interrupt_execution", execution_id=again.execution_id)
    # Switched off, no tab keeps a stream for it.
    await other.evaluate("() => hide(false)")
    await other.get_by_role("button", name="Keys").click()
    await other.get_by_label("Notify me when a question waits").uncheck()
    await until(lambda: other.evaluate("async () => (await navigator.locks.query()).held.length === 0"))
    await other.context.close()
