"""Makes the pictures of the console for README and docs, from a scripted session; `scripts/screenshots` runs it."""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from consoles import Place, opened_place
from playwright.async_api import Browser, async_playwright

from belljar.environments import open_environment
from shared_environment import shared_settings

CELLS = [
    "import numpy as np, pandas as pd\n"
    "rng = np.random.default_rng(7)\n"
    "sales = pd.DataFrame({\n"
    "    'region': rng.choice(['North', 'South', 'East', 'West'], 600),\n"
    "    'month': rng.integers(1, 13, 600),\n"
    "    'revenue': rng.gamma(3, 900, 600).round(2),\n"
    "})\n"
    "sales.groupby('region')['revenue'].agg(['sum', 'mean', 'count']).round(1)",
    "import matplotlib.pyplot as plt\n"
    "by_month = sales.pivot_table(index='month', columns='region', values='revenue', aggfunc='sum')\n"
    "by_month.plot(figsize=(7, 2.6), title='Revenue by month')\n"
    "plt.show()\n"
    "by_month.to_csv('by_month.csv')",
    "import sys\nprint('\\x1b[32mok\\x1b[0m: 12 checks passed')\nprint('3 rows have no region', file=sys.stderr)",
]
RUNNING = "import time\nfor epoch in range(1000):\n    print('epoch', epoch, flush=True)\n    time.sleep(0.3)"
SIZE = {"width": 1200, "height": 860}


async def main(folder: Path) -> None:
    environment = await open_environment(shared_settings(), "default")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data:
        async with opened_place(environment, Path(data)) as place, async_playwright() as playwright:
            path = shutil.which("chromium")
            browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            session_id = await scripted(place)
            for scheme in ("light", "dark"):
                await photograph(place, browser, session_id, scheme, folder)
            await place.agent.call("interrupt_execution", session_id=session_id)
            await browser.close()


async def scripted(place: Place) -> str:
    made = await place.agent.fields("new_session", reason="Revenue by region")
    for code in CELLS:
        await place.agent.execute(code, made["session_id"])
    other = await place.agent.fields("new_session", reason="Parse the supplier invoices")
    await place.agent.execute("total = sum(range(10))\ntotal", other["session_id"])
    await place.agent.execute(RUNNING, made["session_id"], wait_s=0)
    return made["session_id"]


async def photograph(place: Place, browser: Browser, session_id: str, scheme: str, folder: Path) -> None:
    context = await browser.new_context(color_scheme=scheme, viewport=SIZE)  # pyright: ignore[reportArgumentType]
    page = await context.new_page()
    await page.goto(place.console.link().link)
    await page.wait_for_url("**/console")
    await page.locator(".session").first.wait_for()
    top = {"x": 0, "y": 0, "width": 1200, "height": 330}
    await page.screenshot(path=folder / f"console-sessions-{scheme}.png", clip=top)  # pyright: ignore[reportArgumentType]
    await page.goto(f"{place.url}/console/sessions/{session_id}")
    await page.locator(".status-running").wait_for()
    await page.evaluate("() => scrollTo(0, 0)")
    await page.frame_locator("iframe").locator("table").first.wait_for()
    await page.locator(".picture img").scroll_into_view_if_needed()
    await page.evaluate("() => scrollTo(0, 0)")
    await page.screenshot(path=folder / f"console-session-{scheme}.png")
    await context.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
