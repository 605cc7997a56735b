"""States that are kept while nobody waits: once for all cells that ended meanwhile, and not lost to any of them."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import open_runtime
from belljar.sessions import checkpoints
from belljar.sessions.checkpoints import Checkpoint, CheckpointDeposits
from belljar.sessions.session import Session
from belljar.settings import Settings

pytestmark = pytest.mark.anyio


@pytest.fixture
async def session(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Session]:
    tmp_path.chmod(0o755)
    settings = Settings(
        environment=str(default_environment.python),
        data_directory=tmp_path / "data",
        pool_size=0,
        preload=[],
        hibernate=False,
    )
    async with open_runtime(settings) as runtime:
        if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        session = runtime.sessions.create("somebody")
        await run(session, "x = 0")
        yield session


async def run(session: Session, code: str) -> None:
    session.submit(make_cell(session.settings, code))
    await session.queue.drain()


class Watching(CheckpointDeposits):
    """Hears of states with a variable."""

    def __init__(self, variable: str) -> None:
        self.is_kept = asyncio.Event()
        self._variable = variable

    def on_change(self, checkpoint: Checkpoint) -> None:
        if self._variable in checkpoint.variables:
            self.is_kept.set()

    def on_drop(self, checkpoint: Checkpoint) -> None:
        """Nothing was deposited."""


async def test_cells_that_follow_each_other_have_one_task_that_waits(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MIN_INTERVAL_S", 60.0)
    await run(session, "x = 1")
    before = len(asyncio.all_tasks())
    for _ in range(8):
        await run(session, "x += 1")
    assert len(asyncio.all_tasks()) <= before + 1


async def test_the_state_after_the_last_of_many_cells_is_kept_without_another(session: Session) -> None:
    watching = Watching("last")
    for number in range(8):
        await run(session, f"x = {number}")
    session.session_kernel.checkpoints.deposits = watching
    await run(session, "last = 1")
    async with asyncio.timeout(30):
        await watching.is_kept.wait()
    assert not session.is_busy
