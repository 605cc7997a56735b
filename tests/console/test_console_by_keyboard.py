"""The console for everybody: axe-core on every page in every state, and each story by the keyboard alone."""

import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from browsers import axe_source, opened_chromium, signed_in, violations
from calls import held, until_said
from consoles import Place, opened_place
from playwright.async_api import Browser, Page, expect

from belljar.console.app import PATHS
from belljar.environments import Environment
from belljar.sessions import checkpoints
from belljar.settings import hash_key
from waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
KEY = "alice-" + "a" * 30
POLICY = """
[[code]]
decision = "ask"
calls = ["os.getcwd"]
reason = "it looks around"
[[code]]
decision = "deny"
calls = ["os.getpid"]
"""
# Parts of pages, streams and files, which are no pages.
NO_PAGES = re.compile(
    r"/console/(stream|static/.*|oauth/.*|executions/\{execution_id\}/(lines|whole)"
    r"|sessions/\{session_id\}/(archive|cells|picture))"
)
VIEWS: list[dict[str, Any]] = [
    {"color_scheme": "light", "viewport": {"width": 1200, "height": 800}},
    {"color_scheme": "dark", "viewport": {"width": 1200, "height": 800}},
    {"color_scheme": "light", "viewport": {"width": 320, "height": 640}},
]


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    folder = tmp_path_factory.mktemp("keyboard")
    (folder / "policy.toml").write_text(POLICY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
        async with opened_place(
            default_environment,
            folder,
            fork_start=True,
            checkpoints=40,
            policy=str(folder / "policy.toml"),
            ask_in_console="always",
            api_keys=[f"alice:sha256:{hash_key(KEY)}"],
        ) as opened:
            yield opened


@pytest.fixture(scope="module")
async def chromium(anyio_backend: str) -> AsyncGenerator[Browser]:
    async with opened_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
async def ids(place: Place) -> dict[str, str]:
    """A session with every kind of output, what was undone, and questions that wait."""
    ran = await place.agent.execute("import pandas as pd\nprint('text')\npd.DataFrame({'a': [1, 2]})")
    session = ran.session_id
    await place.agent.execute(
        "import matplotlib.pyplot as plt, sys\nplt.plot([1, 2]); plt.show()\n"
        "print('\\x1b[31mred\\x1b[0m \\x1b[33myellow\\x1b[0m \\x1b[90mgrey\\x1b[0m')\n"
        "print('warned', file=sys.stderr)\n1/0",
        session,
    )
    await place.agent.execute(
        "from IPython.display import HTML, Markdown, SVG, display\ndisplay(HTML('<script>1</script>'))\n"
        "display(Markdown('# title'))\nopen('a.txt', 'w').write('x')\nfor n in range(3000): print('line', n)",
        session,
    )
    undone = await place.agent.execute("y = 1", session)
    await place.agent.fields("rewind_session", session_id=session, to=undone.execution_id)
    await place.agent.execute("import os; os.getpid()", session)
    other = await place.agent.execute("name = input('Who are you?')", wait_s=0)
    secret = await place.agent.execute("import getpass; word = getpass.getpass('Password?')", wait_s=0)
    asks = await place.agent.execute("import os; os.getcwd()", wait_s=0)
    waiting = {other.execution_id, secret.execution_id, asks.execution_id}
    inbox = place.runtime.sessions.inbox
    await until(lambda: {one.execution_id for one in inbox.waiting(None)} >= waiting)
    return {"session_id": session, "execution_id": ran.execution_id, "question_id": f"{other.execution_id}-1"}


def pages(place: Place, ids: dict[str, str]) -> list[str]:
    """Every page of the app, by introspection."""
    guard = place.console.apps[PATHS[0]]
    found = {
        route.path
        for route in guard._app.routes  # pyright: ignore[reportAttributeAccessIssue]
        if "GET" in route.methods and route.path.startswith("/console") and not NO_PAGES.fullmatch(route.path)
    }
    paths = [re.sub(r"\{(\w+)(?::\w+)?\}", lambda part: ids.get(part[1], "x"), pattern) for pattern in sorted(found)]
    return [*paths, "/console?q=nothing-has-this", "/console?state=gone", "/console/search?q=print", "/console/nowhere"]


# What else a page can look like: which elements it takes, and what is done with them.
STATES = {
    "all unfolded": ("details:not([open])", "(all) => all.forEach((one) => { one.open = true; })"),
    "its dialog open": ("dialog", "(all) => all[0].showModal()"),
}


async def test_no_page_breaks_a_rule_for_access_in_any_theme_width_or_state(
    place: Place, ids: dict[str, str], chromium: Browser
) -> None:
    axe = axe_source()
    faults: list[Any] = []
    for view in VIEWS:
        page = await signed_in(place, chromium, bypass_csp=True, **view)
        width = view["viewport"]["width"]
        for path in pages(place, ids):
            await page.goto(place.url + path)
            where = (view["color_scheme"], width, path)
            faults += [(*where, fault) for fault in await violations(page, axe)]
            for state, (selector, arrange) in STATES.items():
                if await page.locator(selector).count():
                    await page.locator(selector).evaluate_all(arrange)
                    faults += [(*where, state, fault) for fault in await violations(page, axe)]
            if await page.evaluate("() => document.documentElement.scrollWidth") > width:
                faults.append((*where, "it scrolls sideways"))
        await page.context.close()
        stranger = await (await chromium.new_context(bypass_csp=True, **view)).new_page()
        await stranger.goto(f"{place.url}/console/enter")
        faults += [(view["color_scheme"], width, "enter", fault) for fault in await violations(stranger, axe)]
        await stranger.get_by_label("API key").fill("wrong")
        await stranger.keyboard.press("Enter")
        await expect(stranger.get_by_role("alert")).to_be_visible()
        faults += [(view["color_scheme"], width, "refused", fault) for fault in await violations(stranger, axe)]
        await stranger.context.close()
    place.console.sign_in.failures = type(place.console.sign_in.failures)()
    assert not faults, "\n".join(map(str, faults))


async def tab_to(page: Page, selector: str, most: int = 150) -> None:
    """Press Tab until an element has the focus, which has to be visible."""
    for _ in range(most):
        await page.keyboard.press("Tab")
        if await page.evaluate("(selector) => document.activeElement?.matches(selector)", selector):
            style = await page.evaluate(
                "() => { const one = getComputedStyle(document.activeElement);"
                " return one.outlineStyle !== 'none' || one.boxShadow !== 'none'; }"
            )
            assert style, f"the focus on {selector} cannot be seen"
            return
    raise AssertionError(f"the keyboard does not get to {selector}")


async def test_the_whole_story_by_keyboard_alone(place: Place, chromium: Browser) -> None:
    """Sign in with a key, open a session, run a cell, interrupt, rewind, answer a question, end, sign out."""
    async with place.person(KEY) as alice:
        session = (await alice.post("/api/v1/sessions", json={"reason": "by keyboard"})).json()["session_id"]
    page = await (await chromium.new_context()).new_page()
    keyboard = page.keyboard
    await page.goto(f"{place.url}/console/enter")
    await tab_to(page, "#key-field")
    await keyboard.type(KEY)
    await keyboard.press("Enter")
    await page.wait_for_url("**/console")
    await tab_to(page, f"#session-{session} a")
    await keyboard.press("Enter")
    await page.wait_for_url(f"**/sessions/{session}")
    # A cell
    await keyboard.press("r")
    await expect(page.locator("#code")).to_be_focused()
    await keyboard.type("x = 'first'; print(x)")
    await keyboard.press("Control+Enter")
    await expect(page.locator(".cell .outputs")).to_contain_text("first", timeout=60_000)
    # Another by the button, and its interruption
    await expect(page.locator("#code")).to_have_value("")
    await expect(page.locator("#code")).to_be_focused()
    await keyboard.type("import time; print('begun', flush=True); time.sleep(600)")
    await tab_to(page, "#compose button[type=submit]")
    await keyboard.press("Enter")
    await expect(page.locator(".cell").nth(1).locator(".outputs")).to_contain_text("begun")
    await tab_to(page, "#interrupt")
    await keyboard.press("Enter")
    await expect(page.locator(".cell").nth(1).locator(".status-interrupted")).to_be_visible(timeout=30_000)
    # Back to before the second cell
    await page.reload()
    await tab_to(page, ".cell:nth-of-type(2) .cell-acts button")
    await keyboard.press("Enter")
    await tab_to(page, ".cell:nth-of-type(2) .cell-acts form[action$='/rewind'] button")
    await keyboard.press("Enter")
    await expect(page.locator(".cell.undone")).to_have_count(1, timeout=30_000)
    # A question
    await keyboard.press("r")
    await keyboard.type("print('hello', input('Who? '))")
    await keyboard.press("Control+Enter")
    await expect(page.locator("#waiting")).to_contain_text("1")
    await tab_to(page, "nav a[href='/console/inbox']")
    await keyboard.press("Enter")
    await page.wait_for_url("**/inbox")
    await tab_to(page, ".question input")
    await keyboard.type("Olga")
    await keyboard.press("Enter")
    await expect(page.get_by_text("Nothing waits for you")).to_be_visible()
    await keyboard.press("g")
    await keyboard.press("s")
    await page.wait_for_url("**/console")
    await tab_to(page, f"#session-{session} a")
    await keyboard.press("Enter")
    await expect(page.locator(".cell").last.locator(".outputs")).to_contain_text("hello Olga")
    # What the policy asks, and a client without a way to ask could not
    await keyboard.press("r")
    await keyboard.type("import os; print('in', bool(os.getcwd()))")
    await keyboard.press("Control+Enter")
    await expect(page.locator("#waiting")).to_contain_text("1")
    await tab_to(page, "#session-state a.asks")
    await keyboard.press("Enter")
    await page.wait_for_url("**/inbox/*")
    await expect(page.locator(".question .marked")).to_contain_text("os.getcwd()")
    await tab_to(page, ".question button[value=accept]")
    await keyboard.press("Enter")
    await expect(page.get_by_text("It waits no more")).to_be_visible()
    await keyboard.press("g")
    await keyboard.press("s")
    await page.wait_for_url("**/console")
    await tab_to(page, f"#session-{session} a")
    await keyboard.press("Enter")
    await expect(page.locator(".cell").last.locator(".outputs")).to_contain_text("in True")
    # Cells by j and k, help by ?, and back out of it
    await keyboard.press("j")
    assert await page.evaluate("() => document.activeElement.matches('.cell')")
    await keyboard.press("?")
    await expect(page.locator("#keys")).to_be_visible()
    await keyboard.press("Escape")
    await expect(page.locator("#keys")).to_be_hidden()
    # The end
    await tab_to(page, "[popovertarget=more-panel]")
    await keyboard.press("Enter")
    await tab_to(page, "#more-panel form[action$='/end'] button")
    await keyboard.press("Enter")
    await page.wait_for_url("**/console*")
    await expect(page.locator(f"#session-{session}")).to_have_count(0)
    await tab_to(page, ".who button[type=submit]")
    await keyboard.press("Enter")
    await page.wait_for_url("**/console/enter")
    await page.context.close()


async def test_a_cell_is_sent_once_however_fast_its_key_is_pressed(place: Place, chromium: Browser) -> None:
    ran = await place.agent.execute("n = 0")
    page = await signed_in(place, chromium)
    await page.goto(f"{place.url}/console/sessions/{ran.session_id}")
    await page.locator("#code").fill("n += 1")
    await page.evaluate("() => { for (let i = 0; i < 3; i++) document.getElementById('compose').requestSubmit(); }")
    await expect(page.locator(".cell")).to_have_count(2)
    await expect(page.locator("#code")).to_have_value("")
    assert (await place.agent.execute("n", ran.session_id)).result == "1"
    await page.context.close()


async def test_what_is_typed_stays_while_the_page_changes(place: Place, chromium: Browser) -> None:
    session_id = await place.agent.new_session()
    page = await signed_in(place, chromium)
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    await page.locator("#code").fill("half a thou")
    running = await place.agent.execute("print('noise')\n" + held("go"), session_id, wait_s=0)
    await until_said(place.runtime, running.execution_id, "held")
    await expect(page.locator(".outputs")).to_contain_text("held")
    await page.keyboard.type("ght")
    await place.agent.release(session_id, "go")
    await expect(page.locator(".status-running")).to_have_count(0)
    await expect(page.locator("#code")).to_have_value("half a thought")
    await expect(page.locator("#code")).to_be_focused()
    await page.context.close()


async def test_a_fork_that_a_person_makes_is_told_to_the_agent(place: Place) -> None:
    ran = await place.agent.execute("x = 1")
    async with place.operator() as browser:
        made = await browser.post(f"/api/v1/sessions/{ran.session_id}/fork", json={})
        assert made.status_code == 201, made.text
    told = await place.agent.execute("x", ran.session_id)
    assert f"forked the session as {made.json()['session_id']} in this session since your last one" in "".join(
        told.output
    )
