"""The state before a session's first cell: kept without a copy of its process, and gone back to all the same."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.runtime import Runtime, open_runtime
from belljar.sessions import checkpoints
from belljar.sessions.session import Session
from belljar.settings import Settings

pytestmark = pytest.mark.anyio

OWNER = "somebody"
SEEN = "'x' in globals(), open('given').read(), __import__('os').path.exists('made')"


@pytest.fixture(params=[0, 1], ids=["on demand", "from the pool"])
async def runtime(
    default_environment: Environment, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncGenerator[Runtime]:
    tmp_path.chmod(0o755)
    settings = Settings(
        environment=str(default_environment.python),
        data_directory=tmp_path / "data",
        pool_size=request.param,
        preload=[],
        hibernate=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MIN_INTERVAL_S", 0.0)
        async with open_runtime(settings) as runtime:
            if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
                pytest.skip(f"sessions cannot be forked here: {gap}")
            assert await runtime.starter.wait_until_warm(settings.environment)
            yield runtime


async def ran(session: Session, code: str) -> tuple[str, str | None]:
    """An execution's id and its result."""
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(60)
    return execution.id, execution.result().result


async def changed(runtime: Runtime) -> tuple[Session, str]:
    """A session with a file that was there before its first cell, and that cell."""
    session = runtime.sessions.create(OWNER)
    await session.write_file("given", b"before")
    first, _ = await ran(session, "x = 1\nopen('given', 'w').write('after')\nopen('made', 'w').close()")
    return session, first


async def test_no_process_sleeps_for_the_state_before_the_first_cell(runtime: Runtime) -> None:
    session, first = await changed(runtime)
    kept = session.session_kernel.checkpoints.find(first, [])
    assert kept.is_fresh
    assert kept.process.memory_mb() == 0
    second, _ = await ran(session, "x = 2")
    assert not session.session_kernel.checkpoints.find(second, []).is_fresh


async def test_a_session_goes_back_to_its_beginning_as_often_as_it_likes(runtime: Runtime) -> None:
    session, first = await changed(runtime)
    await ran(session, "x = 2")
    await session.rewind(first)
    again, seen = await ran(session, SEEN)
    assert seen == "(False, 'before', False)"
    await ran(session, "x = 3\nopen('made', 'w').close()")
    await session.rewind(again)
    assert (await ran(session, SEEN))[1] == "(False, 'before', False)"


async def test_a_fork_from_the_beginning_starts_with_nothing_but_the_files(runtime: Runtime) -> None:
    session, first = await changed(runtime)
    fork, told = await runtime.sessions.fork(session.id, OWNER, at=first)
    assert (told.variables, told.lost) == ([], [])
    assert (await ran(fork, SEEN))[1] == "(False, 'before', False)"
    assert (await ran(session, "x, open('given').read()"))[1] == "(1, 'after')"
