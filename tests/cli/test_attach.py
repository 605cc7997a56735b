import asyncio
import json
import os
import re
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import belljar as package
from belljar.environments import Environment
from live_server import clean_environment

pytestmark = pytest.mark.anyio

DEADLINE_S = 60
PIPE = asyncio.subprocess.PIPE
SPARED: dict[str, object] = {"fork_start": False, "pool_size": 0, "checkpoints": 0}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def agent(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[package.SessionHandle, Path]]:
    """The session of an agent, and the data directory of its server."""
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o711)
    flags: dict[str, object] = {"data_directory": folder, "environment": str(default_environment.python), **SPARED}
    async with package.open_session(**flags) as session:
        yield session, folder


@asynccontextmanager
async def attached(
    folder: Path, *arguments: str, stdout: int = PIPE, cwd: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    # Among planted files it starts as front ends start it; elsewhere as a copy of a warm process.
    first = ("-P",) if cwd else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *first, "-m", "belljar", "attach", *arguments),
        cwd=cwd,
        stdin=PIPE,
        stdout=stdout,
        stderr=PIPE,
        env=clean_environment(BELLJAR_DATA_DIRECTORY=folder),
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_cells_typed_into_a_console_run_in_the_agents_session(
    agent: tuple[package.SessionHandle, Path],
) -> None:
    session, folder = agent
    await session.execute("shared = [1]")
    typed = "shared.append(2)\nfor number in shared:\n    print(number)\n\nname = input('Who? ')\nada\nname\n1 / 0\n"
    async with attached(folder, session.id[:8]) as process:
        out, err = await process.communicate(typed.encode())
    assert out.decode().split() == ["1", "2", "'ada'"]
    assert "ZeroDivisionError: division by zero" in err.decode()
    assert process.returncode == 1
    after = await session.execute("shared, name")
    assert after.result == "([1, 2], 'ada')"
    assert "ran 5 cells in this session since your last one" in after.output[0]


async def test_what_the_agent_runs_is_seen_at_the_console(agent: tuple[package.SessionHandle, Path]) -> None:
    session, folder = agent
    async with attached(folder) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"print('here', file=__import__('sys').stderr)\n")
        assert (await process.stderr.readline()) == b"here\n"
        await session.execute("secret = 6 * 7\nprint('agent says', secret)")
        said = b""
        while b"agent says 42\n" not in said:
            said += await process.stderr.readline()
        out, _ = await process.communicate(b"")
    assert b"secret = 6 * 7" in said
    assert (process.returncode, out) == (0, b"")


async def test_nothing_that_a_session_says_acts_on_the_terminal(agent: tuple[package.SessionHandle, Path]) -> None:
    session, folder = agent
    screen, terminal = os.openpty()
    try:
        async with attached(folder, session.id, stdout=terminal) as process:
            await process.communicate(b"print('\\x1b]0;owned\\x07red \\x1b[31mroses\\x9b2J')\n")
        shown = os.read(screen, 65_536)
    finally:
        os.close(screen)
        os.close(terminal)
    assert shown == b"red roses\r\n"


async def test_the_end_of_the_session_ends_the_console(default_environment: Environment, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    flags: dict[str, object] = {"data_directory": tmp_path, "environment": str(default_environment.python), **SPARED}
    async with package.open_session(**flags) as session, attached(tmp_path, session.id) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"'here'\n")
        assert await process.stdout.readline() == b"'here'\n"
        await session.aclose()
        assert process.stderr is not None
        assert await process.stderr.read() == b"the session has ended\n"


async def test_an_unknown_session_is_refused(agent: tuple[package.SessionHandle, Path]) -> None:
    session, folder = agent
    async with attached(folder, "zzz") as process:
        out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert err.decode().splitlines() == [
        "error: no live session has an id that begins with zzz",
        f"hint: There are {session.id}",
    ]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_jupyter_front_end_shares_the_agents_session(
    agent: tuple[package.SessionHandle, Path], tmp_path: Path, transport: str
) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'belljar-mcp[jupyter]'")
    session, folder = agent
    await session.execute("shared = 40")
    file = tmp_path / "c.json"
    marker, work = _planted(folder.parent)
    arguments = [session.id, "--connection", str(file), "--transport", transport]
    async with attached(folder, *arguments, cwd=work) as process:
        assert process.stdout is not None
        assert (await process.stdout.readline()).decode().strip() == str(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        told = json.loads(file.read_text())
        assert (told["transport"], told["kernel_name"], bool(told["key"])) == (transport, "belljar", True)
        client = await _connected(file)
        try:
            outputs: list[dict[str, Any]] = []
            reply = await client.execute_interactive("shared += 2\nshared", output_hook=outputs.append, timeout=30)
            assert reply["content"]["status"] == "ok"
            (result,) = [one["content"] for one in outputs if one["msg_type"] == "execute_result"]
            assert result["data"] == {"text/plain": "42"}
            assert (await session.execute("shared")).result == "42"
            seen = await _until_idle(client)
        finally:
            client.stop_channels()
        process.terminate()
        await process.wait()
    assert [(one["msg_type"], one["content"].get("code")) for one in seen if one["msg_type"] == "execute_input"] == [
        ("execute_input", "shared")
    ]
    assert {one["parent_header"]["session"] for one in seen} == {"belljar"}
    assert "execute_result" in {one["msg_type"] for one in seen}
    assert list(tmp_path.iterdir()) == []
    assert (await session.execute("shared")).result == "42"
    assert not marker.exists(), marker.read_text()


def _planted(place: Path) -> tuple[Path, Path]:
    """A working directory with a module, or a file of settings, for whatever may be looked for there."""
    marker, work = place / "imported", place / "planted"
    work.mkdir(exist_ok=True)
    files = (
        "jupyter_config",
        "ipython_config",
        "ipython_kernel_config",
        "belljar_kernel_config",
        "belljar-kernel_config",
    )
    for name in (*sys.stdlib_module_names, *packages_distributions(), *files):
        if "/" not in name:
            (work / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')")
    return marker, work


async def _connected(file: Path) -> Any:
    from jupyter_client.asynchronous.client import AsyncKernelClient

    client = AsyncKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    return client


async def _until_idle(client: Any) -> list[dict[str, Any]]:
    """What is published of the next cell."""
    seen: list[dict[str, Any]] = []
    while not seen or seen[-1]["content"].get("execution_state") != "idle":
        message = await client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("session") == "belljar":
            seen.append(message)
    return seen


class Screen:
    """A person at a terminal: what is typed, and what the terminal is sent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""
        self.everything = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def until(self, pattern: str) -> str:
        """Read until the pattern is there; return what it found, and forget what came up to it."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (found := re.search(pattern, self.text)) is None:
                    read = (await asyncio.to_thread(os.read, self._descriptor, 65_536)).decode(errors="replace")
                    self.everything += read
                    self.text += read
                    # What only moves the cursor or sets colours.
                    self.text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)
        except TimeoutError:
            raise AssertionError(f"{pattern} did not come, only {self.text!r}") from None
        self.text = self.text[found.end() :]
        return found[0]


@asynccontextmanager
async def terminal_on(folder: Path, session_id: str) -> AsyncIterator[Screen]:
    person, terminal = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "belljar", "attach", session_id),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=clean_environment(
            BELLJAR_DATA_DIRECTORY=folder,
            BELLJAR_DOWNLOAD_DIRECTORY=folder / "saved",
            XDG_STATE_HOME=folder / "state",
            TERM="xterm",
            PROMPT_TOOLKIT_NO_CPR="1",
        ),
    )
    os.close(terminal)
    try:
        yield Screen(person)
        os.write(person, b"\x04")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(person)


async def test_at_a_terminal_lines_are_edited_completed_and_remembered_and_figures_saved(
    agent: tuple[package.SessionHandle, Path],
) -> None:
    session, folder = agent
    await session.execute("treasure_chest = 41")
    async with terminal_on(folder, session.id[:8]) as screen:
        await screen.until(r"In \[\d+\]:")
        screen.type("treasure_c\t")
        await screen.until("hest")
        screen.type(" + 1\r")
        await screen.until(r"\b42\b")
        await screen.until(r"In \[\d+\]:")
        screen.type("for number in (1, 2):\r")
        await screen.until(r"\.\.\.:")
        screen.type("print(number * 1111)\r\r")
        await screen.until("2222")
        await screen.until(r"In \[\d+\]:")
        picture = "display(__import__('PIL.Image').Image.new('RGB', (2, 2)))"
        screen.type(f"from IPython.display import display; {picture}\r")
        saved = await screen.until(r"\[saved: \S+\.png\]")
        assert Path(saved.removeprefix("[saved: ").removesuffix("]")).read_bytes().startswith(b"\x89PNG")
        await screen.until(r"In \[\d+\]:")
        await session.execute("print('the agent', 6 * 7)")
        await screen.until("the agent 42")
    history = folder / "state" / "belljar" / "attach-history"
    assert "treasure_chest + 1" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    async with terminal_on(folder, session.id) as screen:
        await screen.until(r"In \[\d+\]:")
        screen.type("\x1b[A")  # up
        await screen.until("display")
        screen.type("\x03x = input('who? ')\r")
        await screen.until(r"[\r\n]who\?")
        screen.type("ada\r")
        await screen.until(r"In \[\d+\]:")
        assert (await session.execute("x")).result == "'ada'"


async def test_a_question_that_is_withdrawn_leaves_a_prompt_that_works(
    agent: tuple[package.SessionHandle, Path],
) -> None:
    session, folder = agent
    async with terminal_on(folder, session.id) as screen:
        await screen.until(r"In \[\d+\]:")
        screen.type("answer = input('who? ')\r")
        await screen.until(r"[\r\n]who\?")
        await session.interrupt()
        await screen.until("KeyboardInterrupt")
        await screen.until(r"In \[\d+\]:")
        screen.type("6 * 7\r")
        await screen.until(r"\b42\b")
        await screen.until(r"In \[\d+\]:")


async def test_a_password_is_not_shown_at_a_terminal(agent: tuple[package.SessionHandle, Path]) -> None:
    session, folder = agent
    async with terminal_on(folder, session.id) as screen:
        await screen.until(r"In \[\d+\]:")
        screen.type("import getpass; word = getpass.getpass('word? ')\r")
        await screen.until(r"[\r\n]word\?")
        screen.type("hunter2\r")
        await screen.until(r"In \[\d+\]:")
        assert (await session.execute("word")).result == "'hunter2'"
        # Somebody else's result is shown above the prompt.
        await screen.until("'hunter2'")
    assert screen.everything.count("hunter2") == 1
