"""Notifications of a real browser, and the titles of its tabs, about questions that wait."""

from collections.abc import AsyncGenerator
from typing import Any

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
    # Who looks at one of the tabs is told there, whichever of them listens.
    tabs = [page, other]
    for hidden in tabs:
        await hidden.evaluate("() => hide(true)")
        first = await place.agent.execute("input('one?')", session_id, wait_s=0)
        for tab in tabs:
            await expect(tab).to_have_title("(1) Sessions · belljar")
        await place.agent.call("interrupt_execution", execution_id=first.execution_id)
        for tab in tabs:
            await expect(tab).to_have_title("Sessions · belljar")
        await hidden.evaluate("() => hide(false)")
    assert [await tab.evaluate("() => told") for tab in tabs] == [[], []]
    # Both tabs in the background, where their own streams are closed.
    for tab in tabs:
        await tab.evaluate("() => hide(true)")
    asking = await place.agent.execute("input('the secret question?')", session_id, wait_s=0)
    for tab in tabs:
        await expect(tab).to_have_title("(1) Sessions · belljar")

    async def told() -> list[list[Any]]:
        found = [await tab.evaluate("() => told") for tab in tabs]
        return found if any(one["isShown"] for tab in found for one in tab) else []

    # One for both tabs, which says nothing of the question.
    shown = await until(told)
    words = {"title": "belljar", "body": "A question waits for you", "tag": "belljar-notify", "isShown": True}
    assert sorted(shown, key=len) == [[], [words]]
    await place.agent.call("interrupt_execution", execution_id=asking.execution_id)
    for tab in tabs:
        await expect(tab).to_have_title("Sessions · belljar")
    # The tab that listened is closed: the other one takes over.
    await tabs.pop(0 if shown[0] else 1).close()
    (other,) = tabs
    again = await place.agent.execute("input('again?')", session_id, wait_s=0)
    await expect(other).to_have_title("(1) Sessions · belljar")
    assert await until(told) == [[words]]
    await place.agent.call("interrupt_execution", execution_id=again.execution_id)
    # Switched off, no tab keeps a stream for it.
    await other.evaluate("() => hide(false)")
    await other.get_by_role("button", name="Keys").click()
    await other.get_by_label("Notify me when a question waits").uncheck()
    await until(lambda: other.evaluate("async () => (await navigator.locks.query()).held.length === 0"))
    await other.context.close()
