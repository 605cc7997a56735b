"""Makes the pictures of the console for README and docs, from scripted sessions; `scripts/screenshots` runs it."""

import asyncio
import io
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from calls import until_said
from consoles import Place, opened_place
from PIL import Image
from playwright.async_api import Browser, Locator, Page, async_playwright

from belljar.environments import open_environment
from shared_environment import shared_settings

POLICY = """
[[code]]
decision = "ask"
calls = ["shutil.rmtree"]
reason = "folders are deleted only with a person's yes"
answered_in = "console"
"""
MAKE_ORDERS = """
import numpy as np, pandas as pd
rng = np.random.default_rng(11)
days = pd.date_range('2026-01-01', '2026-06-30', freq='D')
rows = rng.choice(len(days), 4_000)
orders = pd.DataFrame({
    'order': np.arange(70_001, 74_001),
    'day': days[rows].strftime('%Y-%m-%d'),
    'region': rng.choice(['North', 'South', 'East', 'West'], 4_000, p=[.34, .28, .22, .16]),
    'channel': rng.choice(['shop', 'web', 'partner'], 4_000, p=[.3, .55, .15]),
    'amount': (rng.gamma(2.2, 38, 4_000)).round(2),
})
drop = (orders.region == 'South') & orders.day.between('2026-03-01', '2026-03-31')
orders.loc[drop, 'amount'] = (orders.loc[drop, 'amount'] * .35).round(2)
orders.sort_values('day').to_csv('orders.csv', index=False)
"""
CELLS = [
    "import pandas as pd\n\n"
    "orders = pd.read_csv('orders.csv', parse_dates=['day'])\n"
    "print(f'{len(orders):,} orders, {orders.day.min():%d %b} to {orders.day.max():%d %b %Y}')\n"
    "orders.head()",
    "monthly = order.pivot_table(index='month', columns='region', values='amount', aggfunc='sum')",
    "import matplotlib.pyplot as plt\n\n"
    "orders['month'] = orders.day.dt.to_period('M')\n"
    "monthly = orders.pivot_table(index='month', columns='region', values='amount', aggfunc='sum')\n"
    "ax = monthly.plot(figsize=(7.6, 2.7), linewidth=2, marker='o', markersize=4)\n"
    "ax.set(title='Revenue by region', xlabel='', ylabel='€')\n"
    "ax.spines[['top', 'right']].set_visible(False)\n"
    "plt.tight_layout(); plt.show()\n"
    "monthly.to_csv('revenue_by_region.csv')",
]
TRAINING = (
    "import time\n\nloss = 2.0\nfor step in range(1, 100_000):\n    loss *= 0.9993\n"
    "    print(f'step {step:>6,}  loss {loss:.4f}  {1_850 - step % 37} rows/s')\n"
    "    if step > 1_480: time.sleep(0.4)"
)
CLEAN_UP = """import shutil
from pathlib import Path

for folder in Path('exports').glob('2025-*'):
    shutil.rmtree(folder)"""
ASK = """
import forms
forms.ask({
    'type': 'object',
    'properties': {
        'recipients': {'type': 'string', 'title': 'Send to', 'enum': ['Finance only', 'All region leads']},
        'comment': {'type': 'string', 'title': 'Comment for the first page'},
    },
    'required': ['recipients'],
}, message='The report is ready (12 pages). Who should get it?')
"""
WIDTH, SCALE = 1040, 2
MAX_BYTES = 150_000


@dataclass(frozen=True, slots=True)
class Scene:
    """The sessions that the pictures show."""

    place: Place
    analysis: str
    training: str
    running: str


async def main(folder: Path) -> None:
    kept = shared_settings()
    environment = await open_environment(kept, "default")
    # By its name, as people see it who have set none.
    environment = replace(environment, python=Path("default"))
    os.environ["LOGNAME"] = "ada"  # whose console it is
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data:
        (Path(data) / "environments").symlink_to(kept.data_directory / "environments")
        policy = Path(data) / "policy.toml"
        policy.write_text(POLICY)
        async with (
            opened_place(
                environment, Path(data), ask_in_console="always", policy=str(policy), fork_start=True, checkpoints=3
            ) as place,
            async_playwright() as playwright,
        ):
            path = shutil.which("chromium")
            browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            scene = await scripted(place)
            for scheme in ("light", "dark"):
                await photograph(scene, browser, scheme, folder)
            for session in place.runtime.sessions.all():
                await place.agent.call("interrupt_execution", session_id=session.id)
            await browser.close()


async def scripted(place: Place) -> Scene:
    """Work as agents do it: an analysis with a mistake in it, a training, and two that wait for a person."""
    agent = place.agent

    async def begun(reason: str, *cells: str) -> str:
        session_id = (await agent.fields("new_session", reason=reason))["session_id"]
        for code in cells:
            await agent.execute(code, session_id, wait_s=100)
        return session_id

    await begun("Convert supplier price lists", "prices = dict(zip('abc', range(3)))\nprices")
    scratch = await begun("Scratch")
    await agent.execute(MAKE_ORDERS, scratch, wait_s=100)
    analysis = await begun("Why did revenue drop in March?")
    content = (place.runtime.settings.data_directory / "sessions" / scratch / "workspace" / "orders.csv").read_text()
    await agent.fields("upload_file", session_id=analysis, name="orders.csv", text=content)
    await agent.call("clear_session", session_id=scratch)
    ended = [(await agent.execute(code, analysis, wait_s=100)).status for code in CELLS]
    assert ended == ["ok", "error", "ok"], ended
    report = await begun("Monthly report for finance", "pages = list(range(12))\nlen(pages)")
    await agent.execute(ASK, report, wait_s=0)
    tidy = await begun("Tidy up old exports", "import os\nfor m in range(4): os.makedirs(f'exports/2025-{m+9:02}')")
    await agent.execute(CLEAN_UP, tidy, wait_s=0)
    training = await begun("Train the demand model")
    running = await agent.execute(TRAINING, training, wait_s=0)
    await until_said(place.runtime, running.execution_id, "step  1,480")
    return Scene(place, analysis, training, running.execution_id)


async def photograph(scene: Scene, browser: Browser, scheme: str, folder: Path) -> None:
    """Take every picture in one theme."""
    context = await browser.new_context(
        color_scheme=scheme,  # pyright: ignore[reportArgumentType]
        viewport={"width": WIDTH, "height": 760},
        device_scale_factor=SCALE,
    )
    context.set_default_timeout(90_000)
    page = await context.new_page()
    console = f"{scene.place.url}/console"
    await page.goto(scene.place.console.link().link)
    await page.wait_for_url("**/console")
    await page.locator(".session").nth(4).wait_for()
    await taken(page, folder / f"console-sessions-{scheme}.webp", end=page.locator(".session").last)

    await page.goto(f"{console}/sessions/{scene.analysis}")
    for frame in await page.locator("iframe").all():
        await frame.scroll_into_view_if_needed()
        await frame.content_frame.locator("table").first.wait_for()
        await page.wait_for_timeout(500)  # until it has told its height
    await page.locator(".picture img").scroll_into_view_if_needed()
    await page.locator(".picture img").evaluate("image => image.decode()")
    await page.evaluate("() => scrollTo(0, 0)")
    await taken(page, folder / f"console-session-{scheme}.webp", end=page.locator(".cell").last)

    await page.goto(f"{console}/sessions/{scene.analysis}/variables")
    await page.locator("tbody tr").first.wait_for()
    await taken(page, folder / f"console-variables-{scheme}.webp", end=page.locator("table"), least=0)

    await page.goto(f"{console}/inbox")
    await page.locator(".question").nth(1).wait_for()
    await taken(page, folder / f"console-inbox-{scheme}.webp", end=page.locator(".question").last)

    await page.goto(f"{console}/executions/{scene.running}?first=1461")
    await page.locator(".lines li").nth(15).wait_for()
    await taken(page, folder / f"console-output-{scheme}.webp", end=page.locator(".lines li").nth(15))
    await context.close()


async def taken(page: Page, path: Path, *, end: Locator, least: int = 640) -> None:
    """Take the page from its top to the end of an element, as WebP of a size that a README may load."""
    await page.mouse.move(0, 0)
    box = await end.bounding_box()
    assert box is not None
    bottom = box["y"] + box["height"] + await page.evaluate("() => scrollY") + 18
    # The picture is of the whole page, and so needs a window of its height: what is outside is not painted.
    # A list that follows its end has its first lines above the window.
    await page.set_viewport_size({"width": WIDTH, "height": max(int(bottom), least)})
    await page.evaluate("() => { scrollTo(0, 0); document.querySelector('.floating')?.remove(); }")
    picture = Image.open(io.BytesIO(await page.screenshot()))
    for quality in (88, 80, 70, 60, 50):
        picture.save(path, "WEBP", quality=quality, method=6)
        if path.stat().st_size <= MAX_BYTES:
            break
    print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
