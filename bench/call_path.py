"""How much of belljar one call passes on the host: its files, its classes, its functions.

A real engine with a real sandbox runs in this process and is called by the MCP client in memory, a page by HTTP in
memory, so the transport (`mcp/stdio.py`, `http/app.py`) is not counted. Each call is made several times and
only what all of them passed counts, because sweeps and watches of the engine may run at the same moment.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import threading
import zipfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import CodeType, FrameType

import httpx
from mcp import Client

import belljar
from belljar.console.server import open_console
from belljar.mcp.server import build_server
from belljar.runtime import Runtime, open_runtime
from bench.servers import bare_command, new_session
from bench.stage import Stage, open_stage

ROOT = Path(belljar.__file__).parent
REPEATS = 5
MAX_FILES = {"1+1": 40, "fork_session": 66, "tool call": 63, "install": 58, "console page": 42}
"""The most files that each call may pass in a warm session, so that a newcomer can read the way. Only ever down."""
# Frames of their own in some versions of Python only.
UNCOUNTED = {"<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
CALL_A_TOOL = "from servers.bare import nothing; nothing(code='')"


@dataclass(frozen=True, slots=True)
class Passed:
    """The functions that a call passed, in order of their first call."""

    functions: list[CodeType]

    @property
    def files(self) -> list[str]:
        """Their files, relative to the package."""
        return [*dict.fromkeys(str(Path(code.co_filename).relative_to(ROOT)) for code in self.functions)]

    @property
    def classes(self) -> set[tuple[str, str]]:
        """Their classes; a function within a method belongs to that method's class."""
        owners = ((code.co_filename, code.co_qualname.split(".<locals>")[0]) for code in self.functions)
        return {(file, name.rpartition(".")[0]) for file, name in owners if "." in name}


@dataclass(slots=True)
class Tracer:
    """Notes every function of belljar that any thread of this process enters while `watching`."""

    _seen: dict[CodeType, None] = field(default_factory=dict[CodeType, None])
    _is_watching: bool = False

    def install(self) -> None:
        """Watch this thread and all that start from now on, so it comes before the engine's worker threads do."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._is_watching:
            code = frame.f_code
            if code.co_filename.startswith(f"{ROOT}/") and code.co_name not in UNCOUNTED:
                self._seen.setdefault(code)

    @contextmanager
    def watching(self) -> Generator[dict[CodeType, None]]:
        """Yield what is passed in the block, filled while it runs."""
        self._seen = seen = {}
        self._is_watching = True
        try:
            yield seen
        finally:
            self._is_watching = False

    async def trace(self, session: "WarmSession", call: Callable[[], Awaitable[object]]) -> Passed:
        """Make the call several times; what each of them passed."""
        runs: list[dict[CodeType, None]] = []
        for _ in range(REPEATS):
            await session.rest()
            with self.watching() as seen:
                await call()
            runs.append(seen)
        return Passed([code for code in runs[-1] if all(code in run for run in runs)])


class WarmSession:
    """A session that has run a cell already, called through MCP."""

    def __init__(self, runtime: Runtime, client: Client, session_id: str) -> None:
        self._client = client
        self._session_id = session_id
        self._session = next(each for each in runtime.sessions.all() if each.id == session_id)

    @property
    def id(self) -> str:
        """Its identifier."""
        return self._session_id

    async def call(self, tool: str, **arguments: object) -> None:
        """Call a tool that must not fail."""
        answer = await self._client.call_tool(tool, {"session_id": self._session_id, **arguments})
        if answer.is_error:
            raise RuntimeError(f"{tool} answered {answer.content}")

    async def execute(self, code: str) -> None:
        """Run a cell."""
        await self.call("execute_code", code=code)

    async def rest(self) -> None:
        """Wait until the checkpoint is taken that the session takes between two cells when nobody is in a hurry."""
        while self._session.session_kernel.checkpoints.is_due or self._session.turn.locked():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _open_session(
    stage: Stage, servers: Mapping[str, object] = {}
) -> AsyncGenerator[tuple[WarmSession, httpx.AsyncClient]]:
    """A session of an engine that has these servers in its toolbox, and a browser that is signed in to its console."""
    settings = stage.settings().model_copy(update={"mcp_servers": servers})
    async with open_runtime(settings) as runtime, open_console(runtime) as console:
        assert console is not None
        pages = httpx.ASGITransport(console.apps["/console/{path:path}"])
        async with (
            Client(build_server(runtime, ["interpreter"])) as client,
            httpx.AsyncClient(transport=pages, base_url="http://127.0.0.1") as browser,
        ):
            same_origin = {"Sec-Fetch-Site": "same-origin"}
            await browser.post("/console/enter", data={"token": console.sign_in.links.make()}, headers=same_origin)
            if runtime.toolbox is not None:
                await runtime.toolbox.wait_until_ready()
            yield WarmSession(runtime, client, await new_session(client)), browser


class _QuietIndex(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _open_index() -> Generator[list[str]]:
    """Serve an index on loopback, which uv is configured for; the names of its packages, one for each call."""
    names = [f"counted{number}" for number in range(REPEATS + 1)]
    with tempfile.TemporaryDirectory(prefix="belljar-index-") as folder:
        for name in names:
            _write_wheel(Path(folder), name)
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietIndex, directory=folder)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            os.environ["UV_DEFAULT_INDEX"] = f"http://localhost:{server.server_address[1]}"
            yield names
            server.shutdown()


def _write_wheel(index: Path, name: str) -> None:
    wheel, information = index / name / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    wheel.parent.mkdir()
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    files = {
        f"{name}.py": "",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{information}/RECORD": record}.items():
            archive.writestr(path, text)


async def count() -> dict[str, Passed]:
    """What each kind of call passes."""
    tracer = Tracer()
    tracer.install()
    command, *arguments = bare_command()
    with _open_index() as packages:
        async with open_stage(is_quick=True) as stage:
            async with _open_session(stage) as (session, browser):

                async def install() -> None:
                    await session.call("install_dependencies", packages=[packages.pop()])

                async def open_page() -> None:
                    page = await browser.get(f"/console/sessions/{session.id}")
                    if page.status_code != 200:
                        raise RuntimeError(f"the page of a session answers {page.status_code}")

                cell = await tracer.trace(session, lambda: session.execute("1+1"))
                fork = await tracer.trace(session, lambda: session.call("fork_session"))
                await open_page()
                page = await tracer.trace(session, open_page)
                await install()
                installation = await tracer.trace(session, install)
            async with _open_session(stage, {"bare": {"command": command, "args": arguments}}) as (session, _):
                await session.execute(CALL_A_TOOL)
                tool_call = await tracer.trace(session, lambda: session.execute(CALL_A_TOOL))
    return {"1+1": cell, "fork_session": fork, "tool call": tool_call, "install": installation, "console page": page}


def main() -> int:
    """Print a line for each kind of call; return 1 if one of them passes more files than its limit."""
    parser = argparse.ArgumentParser(prog="scripts/count_path", description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="name the files, in order of their first call")
    parser.add_argument("--functions", action="store_true", help="name the functions too")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    counts = asyncio.run(count())
    print(f"{'call':<14}{'files':>7}{'limit':>7}{'classes':>9}{'functions':>11}")
    for name, passed in counts.items():
        numbers = f"{len(passed.classes):>9}{len(passed.functions):>11}"
        print(f"{name:<14}{len(passed.files):>7}{MAX_FILES[name]:>7}{numbers}")
    long = [name for name, passed in counts.items() if len(passed.files) > MAX_FILES[name]]
    for name in long:
        print(f"{name} passes more files than its limit: merge some, or enter fewer where there is nothing to do there")
    for name, passed in counts.items() if arguments.files or arguments.functions else ():
        print(f"\n{name}")
        for file in passed.files:
            print(f"  {file}")
            if arguments.functions:
                inside = [code for code in passed.functions if Path(code.co_filename) == ROOT / file]
                print("\n".join(f"    {code.co_qualname}" for code in inside))
    return int(bool(long))


if __name__ == "__main__":
    sys.exit(main())
