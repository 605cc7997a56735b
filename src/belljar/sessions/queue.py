"""A session's tasks: executions that run or wait, the latest that ended, and background work between cells.

Knows neither what an execution does nor which one has the turn.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from belljar.errors import Busy
from belljar.executions.execution import Execution

Outcome = TypeVar("Outcome")

KEPT_EXECUTIONS = 50


class ExecutionQueue:
    """The execution queue of one session. `on_done` is called with every execution that has ended."""

    def __init__(self, session_id: str, *, most: int, on_done: Callable[[Execution], None]) -> None:
        self._session_id = session_id
        self._most = most
        self._on_done = on_done
        self._executions: dict[str, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tasks_aside: set[asyncio.Task[Any]] = set()

    @property
    def is_empty(self) -> bool:
        """Return whether no execution runs or waits."""
        return not self._tasks

    def find(self, execution_id: str) -> Execution | None:
        """Return an execution that runs, waits or ended lately; None if there is none."""
        return self._executions.get(execution_id)

    def latest(self) -> Execution | None:
        """Return the execution that was added last; None if there is none."""
        return next(reversed(self._executions.values()), None)

    def running(self) -> list[Execution]:
        """Return the executions that run or wait for their turn, in order."""
        return [execution for execution in self._executions.values() if not execution.is_finished]

    # Checks

    def check_room(self) -> None:
        """Refuse another execution while too many are unfinished."""
        if len(self._tasks) >= self._most:
            raise Busy(
                f"session {self._session_id} has {len(self._tasks)} executions unfinished, the most max_queue allows",
                hint="Wait for some of them with get_execution, or interrupt them with interrupt_execution",
            )

    def check_idle(self) -> None:
        """Refuse an operation that cannot be done while a cell runs or waits."""
        if self._tasks and (running := self.running()):
            raise Busy(
                f"session {self._session_id} has {len(running)} unfinished execution{'s' if len(running) > 1 else ''}",
                hint="Wait for it with get_execution, or stop it with interrupt_execution",
            )

    # Tasks

    def add(self, execution: Execution) -> None:
        """Run an execution in its turn, whether or not anyone waits for it."""
        self._remember(execution)
        task = asyncio.get_running_loop().create_task(execution.run(), name=f"execution {execution.id}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_task_done, execution))

    def _remember(self, execution: Execution) -> None:
        self._executions[execution.id] = execution
        if len(self._executions) > KEPT_EXECUTIONS:
            oldest = next((key for key, kept in self._executions.items() if kept.is_finished), None)
            if oldest is not None:
                del self._executions[oldest]

    def _on_task_done(self, execution: Execution, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_done(execution)

    def run_aside(self, work: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        """Run work that belongs to no cell, until the session is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks_aside.add(task)
        task.add_done_callback(self._tasks_aside.discard)
        return task

    # Ends

    def stop_aside(self) -> None:
        """Cancel the work that belongs to no cell."""
        for task in [*self._tasks_aside]:
            task.cancel()

    def interrupt(self) -> None:
        """Interrupt every execution as its caller would."""
        for execution in self.running():
            execution.interrupt()

    async def drain(self) -> None:
        """Wait until every execution has ended by itself."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel the tasks of all executions, and wait until these and the other tasks have ended."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._tasks_aside, return_exceptions=True)


async def interrupt_all(executions: Sequence[Execution], why: str = "", *, waits: bool = True) -> None:
    """Stop executions of one session, given in order, and wait until they have ended, unless `waits` is off."""
    # The last one first, so that none of them starts because the one before it has ended.
    for execution in reversed(executions):
        execution.interrupt(*([why] if why else []))
    if waits:
        await asyncio.gather(*(execution.wait(execution.stop_s) for execution in executions))
