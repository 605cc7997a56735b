"""`belljar serve --workers`: the parent, its servers and their folders."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from calls import Caller
from mcp import Client

from belljar.environments import Environment
from serving_process import COLD, http_server, serve_over_http, tree, variables
from waiting import until

pytestmark = pytest.mark.anyio


def workers_command(environment: Environment, count: int | str) -> list[str]:
    return [*serve_over_http(environment), "--workers", str(count)]


def folder_of(folder: Path, number: int) -> Path:
    return folder if number == 1 else folder / "workers" / str(number)


def pid_of(folder: Path, number: int) -> int | None:
    """The server of that number, once it answers the others."""
    runs = folder_of(folder, number).glob("runs/*/address")
    pids = [int(path.parent.name.partition("-")[0]) for path in runs]
    return next((pid for pid in pids if is_running(pid)), None)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def sessions_in(folder: Path, number: int) -> set[str]:
    with suppress(sqlite3.Error), closing(sqlite3.connect(folder_of(folder, number) / "journal.sqlite")) as journal:
        query = "SELECT id FROM sessions WHERE state IN ('live', 'asleep') AND principal <> ''"
        return {identifier for (identifier,) in journal.execute(query)}
    return set()


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[Caller]:
    async with Client(f"{url}/mcp") as client:
        yield Caller(client)


async def session_of(url: str, folder: Path, number: int) -> str:
    """A session of the server of that number, made over a connection that came to it."""
    with anyio.fail_after(90):
        while True:
            async with connected(url) as caller:
                session_id = await caller.new_session()
                if session_id in sessions_in(folder, number):
                    await caller.execute("kept = 6 * 7", session_id)
                    return session_id


async def test_one_that_is_killed_comes_back_with_its_sessions_and_the_others_stay(
    default_environment: Environment, tmp_path: Path
) -> None:
    with http_server(workers_command(default_environment, 2), tmp_path, **COLD) as (url, parent):
        pids = {number: await until(lambda number=number: pid_of(tmp_path, number)) for number in (1, 2)}
        theirs, others = await session_of(url, tmp_path, 2), await session_of(url, tmp_path, 1)
        os.kill(pids[2], signal.SIGKILL)
        # Until its parent has reaped it, a thread of it may still hold the socket, and connections come to it.
        await until(lambda: not Path(f"/proc/{pids[2]}").exists())
        async with connected(url) as caller:
            assert (await caller.execute("kept", others)).result == "42"
        again = await until(lambda: pid_of(tmp_path, 2))
        assert again != pids[2]
        assert pid_of(tmp_path, 1) == pids[1]

        async def is_back() -> bool:
            async with connected(url) as caller:
                return theirs in str(await caller.fields("list_sessions"))

        while not await is_back():
            await anyio.sleep(0.1)
        async with connected(url) as caller:
            assert (await caller.execute("6 * 7", theirs)).result == "42"
        servers = tree(parent.pid)
        parent.terminate()
        assert await anyio.to_thread.run_sync(parent.wait, 30) == 0
        assert not [pid for pid in servers if is_running(pid)]


@pytest.mark.timeout(240)
async def test_a_worker_that_is_frozen_is_killed_and_comes_back(
    default_environment: Environment, tmp_path: Path
) -> None:
    with http_server(workers_command(default_environment, 2), tmp_path, **COLD) as (url, parent):
        frozen = await until(lambda: pid_of(tmp_path, 2))
        session_id = await session_of(url, tmp_path, 2)
        os.kill(frozen, signal.SIGSTOP)
        try:
            await until(lambda: pid_of(tmp_path, 2) not in (None, frozen), limit_s=180)
        finally:
            with suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
        assert parent.poll() is None
        async with connected(url) as caller:
            assert (await caller.execute("6 * 7", session_id)).result == "42"


async def test_a_parent_that_is_killed_leaves_no_server(default_environment: Environment, tmp_path: Path) -> None:
    with http_server(workers_command(default_environment, 2), tmp_path, **COLD) as (_, parent):
        pids = [await until(lambda number=number: pid_of(tmp_path, number)) for number in (1, 2)]
        parent.kill()
        await until(lambda: not any(map(is_running, pids)))


async def test_fewer_workers_than_before_lose_no_session(default_environment: Environment, tmp_path: Path) -> None:
    with http_server(workers_command(default_environment, 2), tmp_path, **COLD) as (url, parent):
        await until(lambda: pid_of(tmp_path, 2))
        session_id = await session_of(url, tmp_path, 2)
        parent.terminate()
        await anyio.to_thread.run_sync(parent.wait, 30)
    with http_server(serve_over_http(default_environment), tmp_path, **COLD) as (url, parent):
        await until(lambda: pid_of(tmp_path, 2))
        async with connected(url) as caller:
            with anyio.fail_after(60):
                while session_id not in str(await caller.fields("list_sessions")):
                    await anyio.sleep(0.1)
            assert (await caller.execute("kept", session_id)).result == "42"
            assert (await caller.fields("clear_session", session_id=session_id))["success"]
        parent.terminate()
        await anyio.to_thread.run_sync(parent.wait, 30)
    with http_server(serve_over_http(default_environment), tmp_path, **COLD):
        assert pid_of(tmp_path, 2) is None


async def test_limits_are_divided_and_what_belongs_to_all_lies_with_the_first(
    default_environment: Environment, tmp_path: Path
) -> None:
    limits = {"BELLJAR_MAX_SESSIONS": "5", "BELLJAR_POOL_SIZE": "1", "BELLJAR_MAX_CONNECTIONS": "64"}
    with http_server(workers_command(default_environment, 2), tmp_path, **COLD, **limits, BELLJAR_SKILLS="on") as (
        url,
        _,
    ):
        pid = await until(lambda: pid_of(tmp_path, 2))
        told = dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)
        divided = ("SESSIONS", "RUNNING", "WAITING", "CONNECTIONS")
        assert [told[f"BELLJAR_MAX_{name}"] for name in divided] == ["2", "32", "500", "32"]
        assert told["BELLJAR_POOL_SIZE"] == "1"
        await session_of(url, tmp_path, 2)
        assert not [
            name for name in ("environments", "support", "workspaces") if (tmp_path / "workers/2" / name).exists()
        ]


@pytest.mark.parametrize("count", ["0", "-1", "65", "many", "2.5", ""])
def test_a_number_of_workers_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, count: str) -> None:
    error = refused(tmp_path, "--http", "127.0.0.1:0", f"--workers={count}")
    assert "workers" in error
    assert 'it should be a whole number from 1 to 64, or "auto"' in error


def test_workers_over_stdio_are_refused_with_what_to_do(tmp_path: Path) -> None:
    error = refused(tmp_path, "--workers", "2")
    assert "workers is 2, and over stdio a server has one client" in error
    assert "--http HOST:PORT" in error


def test_an_address_that_is_taken_is_refused_once(default_environment: Environment, tmp_path: Path) -> None:
    with http_server(workers_command(default_environment, 2), tmp_path, **COLD) as (url, _):
        address = url.removeprefix("http://")
        (tmp_path / "other").mkdir()
        error = refused(tmp_path / "other", "--http", address, "--workers", "2")
    assert error.count("Cannot listen on") == 1


def test_what_is_wrong_with_the_settings_is_said_once(tmp_path: Path) -> None:
    error = refused(tmp_path, "--http", "0.0.0.0:0", "--workers", "3")
    assert error.count("no credentials are set up") == 1


def refused(folder: Path, *arguments: str) -> str:
    """What a server says that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "belljar", "serve", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=variables(folder),
        cwd=folder,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stderr
