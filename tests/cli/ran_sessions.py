"""Sessions that really ran and are on disk now, for commands that read what they left."""

from dataclasses import dataclass
from pathlib import Path

import anyio

from belljar.environments import Environment
from belljar.executions.cell import make_cell
from belljar.http.server_socket import open_reachable_runtime
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.sessions.session import Session
from belljar.settings import Settings
from shared_environment import settings_with


@dataclass(frozen=True)
class Ran:
    """A session that sleeps in its data directory."""

    data: Path
    session_id: str
    results: list[ExecutionResult]


def settings_in(data: Path, environment: Environment) -> Settings:
    return settings_with(
        data_directory=data,
        environment=str(environment.python),
        log_level="ERROR",
        fork_start=False,
        pool_size=0,
        checkpoints=0,
        hibernate=True,
    )


async def execute(session: Session, code: str, timeout_s: float = 60) -> ExecutionResult:
    execution = session.submit(make_cell(session.settings, code, timeout_s=timeout_s))
    with anyio.fail_after(90):
        while not execution.is_finished:
            await execution.wait(60)
    return execution.result()


def ran(data: Path, environment: Environment, *cells: str, undone: int | None = None) -> Ran:
    """Run cells in a session of an engine that is closed afterwards."""

    async def run() -> Ran:
        runtime: Runtime
        async with open_reachable_runtime(settings_in(data, environment)) as runtime:
            session = runtime.sessions.create("somebody")
            results = [await execute(session, code) for code in cells]
            if undone is not None:
                runtime.sessions.journal.undo([results[undone].execution_id])
            return Ran(data, session.id, results)

    return anyio.run(run)
