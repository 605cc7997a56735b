"""A sandbox that is held open before anyone asks for a session."""

import gc
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import Runtime, open_runtime
from belljar.sessions.session import Session
from belljar.settings import Settings
from waiting import until

pytestmark = pytest.mark.anyio

OWNER = "somebody"


@pytest.fixture
async def runtime(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Runtime]:
    tmp_path.chmod(0o755)
    settings = Settings(
        environment=str(default_environment.python), data_directory=tmp_path / "data", pool_size=0, preload=[]
    )
    async with open_runtime(settings) as runtime:
        if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        await filled(runtime)
        yield runtime


async def filled(runtime: Runtime) -> None:
    await until(lambda: runtime.sessions.pool.is_full)


async def ran(session: Session, code: str) -> str | None:
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(60)
    return execution.result().result


def held(runtime: Runtime) -> list[str]:
    return [
        folder.name for folder in (runtime.settings.data_directory / "sessions").iterdir() if "." not in folder.name
    ]


async def test_a_session_gets_the_sandbox_that_was_held_open_and_another_takes_its_place(runtime: Runtime) -> None:
    (waiting,) = held(runtime)
    session = runtime.sessions.create(OWNER)
    assert session.id == waiting
    assert await ran(session, "21 * 2") == "42"
    await filled(runtime)
    (next_one,) = {*held(runtime)} - {session.id}
    assert runtime.sessions.create(OWNER).id == next_one


async def test_a_held_sandbox_is_nobodys_session(runtime: Runtime) -> None:
    (waiting,) = held(runtime)
    assert runtime.sessions.of(OWNER) == []
    with pytest.raises(Exception, match="does not exist"):
        runtime.sessions.get(waiting, "")


async def test_a_sandbox_held_open_by_a_process_that_died_is_not_used(runtime: Runtime) -> None:
    environment = await runtime.starter.environments.get(runtime.settings.environment)
    environment_zygote = await runtime.starter.zygotes.of(environment)
    zygote = environment_zygote and await environment_zygote.zygote()
    assert zygote is not None
    for pid in zygotes():
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not zygote.is_alive())
    assert await ran(runtime.sessions.create(OWNER), "21 * 2") == "42"


def zygotes() -> list[int]:
    """The processes of this server's sandboxes that have everything imported."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            runs = f"zygote-.{os.getpid()}-".encode() in (entry / "mountinfo").read_bytes()
        except OSError:
            continue
        if runs and b"zygote" in words and words[0].endswith(b"python"):
            found.append(int(entry.name))
    return found


async def test_an_environment_that_cannot_be_used_is_told_in_a_line_and_raised_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(environment=str(tmp_path / "none"), data_directory=tmp_path / "data", preload=[])
    async with open_runtime(settings) as runtime:
        session = runtime.sessions.create(OWNER)
        execution = session.submit(make_cell(session.settings, "1"))
        await execution.wait(60)
        assert "no such environment" in str(execution.result().cause)
        await until(lambda: "no session can be kept ready: no such environment" in caplog.text)
    gc.collect()  # a task that nobody asked for its failure says so when it is collected
    assert "never retrieved" not in caplog.text
