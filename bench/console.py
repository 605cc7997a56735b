"""The console beside JupyterLab: one notebook, one browser; and what an open console costs the server.

Both are opened by profiles with an empty cache, in turns. A page can be read when the text of a cell is on the screen
and nothing covers it. JupyterLab is as `pip install jupyterlab` leaves it.
"""

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcp import Client
from playwright.async_api import Browser

from bench import tasks
from bench.browsers import LINES, TIMEOUT_S, Opening, line_ages, open_browser, open_context, signed_in, timed
from bench.figures import Figure, Round, paired, percentile
from bench.jupyterlabs import open_jupyterlab
from bench.notebooks import (
    ModelNotebook,
    run_model,
    write_long_cell,
    write_long_notebook,
    write_notebook,
    write_session,
)
from bench.one_plus_one import timed as timed_calls
from bench.processes import processor_time
from bench.registries import Unreachable
from bench.servers import ERAS, belljar_command, new_session, open_http
from bench.stage import Stage

NAME = "console"
OPEN_TARGET, BYTES_TARGET, HEAP_TARGET = 0.1, 0.05, 0.2
SIZE_TARGET, LATENCY_TARGET, CALL_TARGET, START_TARGET = 1.5, 3.0, 1.1, 1.03
FIRST_LOAD_KB = 100
LINES_COUNT = 1_000_000
SESSIONS = 50
PRINTS = 60
INTERVAL_S = 0.1
CALLS = 60
OUR_CELL, THEIR_CELL = ".cell .code", ".jp-CodeCell .cm-line"
PRINTING = f"""import time
for _ in range({{count}}):
    print(f'@{{{{time.time():.4f}}}}', flush=True)
    time.sleep({INTERVAL_S})"""


@dataclass(frozen=True, slots=True)
class Scene:
    """A server with a console, somebody signed in to it, and a browser."""

    stage: Stage
    url: str
    cookies: list[Any]
    browser: Browser
    agent: Client

    def session_url(self, session_id: str) -> str:
        """The page of a session."""
        return f"{self.url}/console/sessions/{session_id}"

    async def opened(self, session_id: str, *, is_settled: bool = False) -> Opening:
        """Open the page of a session with an empty cache."""
        async with open_context(self.browser, self.cookies) as context:
            return await timed(context, self.session_url(session_id), OUR_CELL, is_settled=is_settled)


async def measure(stage: Stage) -> list[Figure]:
    """All of it; beside JupyterLab only where that can be installed."""
    figures: list[Figure] = []
    async with open_scene(stage) as scene:
        model = await run_model(scene.agent, stage.folder)
        figures += await beside_jupyterlab(scene, model)
        figures += await many_cells(scene, model)
        figures += await many_sessions(scene)
        figures += await calls(scene)
    return [*figures, *await start(stage), *await tasks.measure(stage)]


@asynccontextmanager
async def open_scene(stage: Stage) -> AsyncGenerator[Scene]:
    """Start a server, sign in by the link of `belljar console`, start the browser."""
    async with AsyncExitStack() as stack:
        browser = await stack.enter_async_context(open_browser())
        url = (await stack.enter_async_context(open_http(stage, belljar_command()))).removesuffix("/mcp")
        agent = await stack.enter_async_context(Client(f"{url}/mcp", mode=ERAS["modern"]))
        command = [*belljar_command()[:-1], "console", "--no-open", "--data-directory", str(stage.folder)]
        link = (await asyncio.to_thread(subprocess.check_output, command, text=True)).strip()
        yield Scene(stage, url, await signed_in(link), browser, agent)


# Beside JupyterLab


async def beside_jupyterlab(scene: Scene, model: ModelNotebook) -> list[Figure]:
    """1,000 cells, and one cell of 1,000,000 lines."""
    folder = scene.stage.folder / "notebooks"
    folder.mkdir()
    session_id = write_session(scene.stage.folder, model, 1_000)
    long_id = write_long_cell(scene.stage.folder, model, LINES_COUNT)
    write_notebook(folder / "cells.ipynb", model, 1_000)
    write_long_notebook(folder / "lines.ipynb", model, LINES_COUNT)
    try:
        async with open_jupyterlab(folder) as lab:
            return await _opened_in_turns(scene, session_id, long_id, lab)
    except Unreachable as error:
        return await _opened_alone(scene, session_id, long_id, f"no JupyterLab: {error}")


async def _opened_in_turns(scene: Scene, session_id: str, long_id: str, lab: str) -> list[Figure]:
    async def theirs(name: str, *, is_settled: bool = False) -> Opening:
        async with open_context(scene.browser, []) as context:
            return await timed(context, f"{lab}/lab/tree/{name}?reset", THEIR_CELL, is_settled=is_settled)

    peer, ours = await theirs("cells.ipynb", is_settled=True), await scene.opened(session_id, is_settled=True)
    taken = Round([peer.readable_s], [ours.readable_s])
    for _ in scene.stage.rounds(scene.stage.pick(4, 2), within_s=scene.stage.pick(40, 10)):
        taken.peer.append((await theirs("cells.ipynb")).readable_s)
        taken.ours.append((await scene.opened(session_id)).readable_s)
    long_ours, long_peer = await scene.opened(long_id, is_settled=True), None
    with contextlib.suppress(TimeoutError):  # it is not readable within `TIMEOUT_S` on a busy machine
        long_peer = await theirs("lines.ipynb", is_settled=True)
    note = f"peer: JupyterLab; n={len(taken.ours)}"
    return [
        *paired(NAME, "1,000 cells → first readable", [taken], target=OPEN_TARGET, note=note),
        _bytes(ours, peer), _first_load(ours), _heap(long_ours, long_peer),
    ]  # fmt: skip


async def _opened_alone(scene: Scene, session_id: str, long_id: str, note: str) -> list[Figure]:
    ours, long_ours = await scene.opened(session_id, is_settled=True), await scene.opened(long_id, is_settled=True)
    opened = Figure(NAME, "1,000 cells → first readable", "ms", ours.readable_s * 1000, note=note)
    return [opened, _first_load(ours), _heap(long_ours, None)]


def _bytes(ours: Opening, peer: Opening) -> Figure:
    note = "pages, scripts, styles, pictures; cache empty"
    what = "first load of 1,000 cells"
    return Figure(NAME, what, "kB", ours.size_bytes / 1000, peer.size_bytes / 1000, BYTES_TARGET, note=note)


def _first_load(ours: Opening) -> Figure:
    note = "with the newest 50 cells and their figures"
    return Figure(NAME, "first load", "kB", ours.size_bytes / 1000, None, FIRST_LOAD_KB, "value", note)


def _heap(ours: Opening, peer: Opening | None) -> Figure:
    what, theirs = f"script heap, a cell of {LINES_COUNT:,} lines", peer.heap_bytes / 1e6 if peer else None
    note = "peer: the saved notebook" if peer else f"JupyterLab: not readable after {TIMEOUT_S:.0f} s"
    return Figure(NAME, what, "MB", ours.heap_bytes / 1e6, theirs, HEAP_TARGET, note=note)


# Against ourselves


async def many_cells(scene: Scene, model: ModelNotebook) -> list[Figure]:
    """A session of 10,000 cells beside one of 100."""
    few, many = (write_session(scene.stage.folder, model, count) for count in (100, 10_000))
    await scene.opened(few)
    taken = Round()
    for _ in scene.stage.rounds(scene.stage.pick(7, 3), within_s=scene.stage.pick(25, 10)):
        taken.peer.append((await scene.opened(few)).readable_s)
        taken.ours.append((await scene.opened(many)).readable_s)
    what, note = "10,000 cells → first readable", f"peer: our own 100; n={len(taken.ours)}"
    return paired(NAME, what, [taken], target=SIZE_TARGET, note=note)


async def many_sessions(scene: Scene) -> list[Figure]:
    """From `print` to the page, while 50 sessions print and while one does."""
    session_ids = [await new_session(scene.agent) for _ in range(SESSIONS)]
    alone, among = list[float](), list[float]()
    async with open_context(scene.browser, scene.cookies) as context:
        for _ in range(scene.stage.pick(2, 1)):
            alone += await _ages(scene, context, session_ids[:1])
            among += await _ages(scene, context, session_ids)
    for session_id in session_ids:
        await scene.agent.call_tool("clear_session", {"session_id": session_id})
    own, peer = percentile(among, 95) * 1000, percentile(alone, 95) * 1000
    note = f"each a line every {INTERVAL_S * 1000:.0f} ms; peer: one; n={len(among)}"
    return [
        Figure(NAME, f"print → page, {SESSIONS} sessions print, p95", "ms", own, peer, LATENCY_TARGET, note=note),
        Figure(NAME, "the same, p50", "ms", statistics.median(among) * 1000, statistics.median(alone) * 1000),
    ]


async def _ages(scene: Scene, context: Any, session_ids: list[str]) -> list[float]:
    """Let sessions print; the ages of the first one's lines when its page showed them."""
    watched, *others = session_ids
    page = await context.new_page()
    await page.add_init_script(f"(() => {{ {LINES} }})()")
    await page.goto(scene.session_url(watched))

    async def run(session_id: str, count: int) -> None:
        code = PRINTING.format(count=count)
        await scene.agent.call_tool("execute_code", {"code": code, "session_id": session_id, "wait_s": 0})

    # The others print for longer, so that they do while the first one is looked at.
    await asyncio.gather(*(run(session_id, PRINTS * 2) for session_id in others))
    await run(watched, PRINTS)
    try:
        async with asyncio.timeout(PRINTS * INTERVAL_S * 10):
            while len(ages := await line_ages(page)) < PRINTS:
                await asyncio.sleep(INTERVAL_S)
    finally:
        await page.close()
    for session_id in others:
        await scene.agent.call_tool("interrupt_execution", {"session_id": session_id})
    return ages


async def calls(scene: Scene) -> list[Figure]:
    """`1+1` over MCP while a page shows the session, and while none is open."""
    arguments = {"code": "1+1", "session_id": await new_session(scene.agent)}

    async def run() -> None:
        await scene.agent.call_tool("execute_code", arguments)

    await timed_calls(run, 40)
    rounds: list[Round] = []
    async with open_context(scene.browser, scene.cookies) as context:
        for _ in scene.stage.rounds(scene.stage.pick(6, 3), within_s=scene.stage.pick(30, 10)):
            taken = Round()
            taken.peer.extend(await timed_calls(run, CALLS))
            page = await context.new_page()
            await page.goto(scene.session_url(arguments["session_id"]))
            taken.ours.extend(await timed_calls(run, CALLS))
            await page.close()
            rounds.append(taken)
    note = "one after another, without a pause; peer: no page open"
    return paired(NAME, "1+1 over MCP, its page open", rounds, target=CALL_TARGET, note=note)


async def start(stage: Stage) -> list[Figure]:
    """From spawn to `tools/list` over HTTP, with the console and without: the time, and that of the processor."""
    await _started(stage, "true")  # fills the disk cache
    wall, processor = Round(), Round()
    for _ in stage.rounds(stage.pick(12, 6), within_s=stage.pick(50, 20)):
        for console, walls, processors in (
            ("false", wall.peer, processor.peer),
            ("true", wall.ours, processor.ours),
        ):
            took_s, processor_s = await _started(stage, console)
            walls.append(took_s)
            processors.append(processor_s)
    what, note = "spawn → tools/list, console on", f"peer: console = false; n={len(wall.ours)}"
    return [
        *paired(NAME, f"{what}, processor time", [processor], target=START_TARGET, note=note),
        *paired(NAME, f"{what}, time", [wall], note="on a busy machine it says little"),
    ]


async def _started(stage: Stage, console: str) -> tuple[float, float]:
    """Seconds until a server has answered, and those that it used a processor."""
    pids: list[int] = []
    began = time.perf_counter()
    async with (
        open_http(stage, belljar_command(), {"BELLJAR_CONSOLE": console}, pids.append) as url,
        Client(url, mode=ERAS["modern"]) as client,
    ):
        await client.list_tools()
        return time.perf_counter() - began, processor_time(pids[0]).own_s
