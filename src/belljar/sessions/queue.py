"""A session's executions: those that run or wait, the latest that ended, and the work that is done between cells.

Knows neither what an execution does nor whose turn it is.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from belljar.errors import Busy
from belljar.executions.execution import Execution

Outcome = TypeVar("Outcome")

KEPT_EXECUTIONS = 50


class ExecutionQueue:
    """One session's. `on_done` is called with every execution when it has left the queue."""

    def __init__(self, session_id: str, *, most: int, on_done: Callable[[Execution], None]) -> None:
        self._session_id = session_id
        self._most = most
        self._on_done = on_done
        self._executions: dict[str, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tasks_aside: set[asyncio.Task[Any]] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._tasks

    def find(self, execution_id: str) -> Execution | None:
        """One that is running or ended lately."""
        return self._executions.get(execution_id)

    def latest(self) -> Execution | None:
        """The one that was added last, if any is remembered."""
        return next(reversed(self._executions.values()), None)

    def running(self) -> list[Execution]:
        """Those that run or wait for their turn, in order."""
        return [execution for execution in self._executions.values() if not execution.is_finished]

    # What may be done

    def check_room(self) -> None:
        """Refuse one more while too many wait."""
        if len(self._tasks) >= self._most:
            raise Busy(
                f"session {self._session_id} has {len(self._tasks)} executions unfinished, the most max_queue allows",
                hint="Wait for some of them with get_execution, or interrupt them with interrupt_execution",
            )

    def check_idle(self) -> None:
        """Refuse what cannot be done while a cell runs."""
        if running := self.running():
            raise Busy(
                f"session {self._session_id} has {len(running)} unfinished execution{'s' if len(running) > 1 else ''}",
                hint="Wait for it with get_execution, or stop it with interrupt_execution",
            )

    # Work

    def add(self, execution: Execution) -> None:
        """Run it, in its turn; whoever waits for it."""
        self._remember(execution)
        task = asyncio.get_running_loop().create_task(execution.run(), name=f"execution {execution.id}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._leave, execution))

    def _remember(self, execution: Execution) -> None:
        self._executions[execution.id] = execution
        if len(self._executions) > KEPT_EXECUTIONS:
            oldest = next((key for key, kept in self._executions.items() if kept.is_finished), None)
            if oldest is not None:
                del self._executions[oldest]

    def _leave(self, execution: Execution, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_done(execution)

    def run_aside(self, work: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        """Do what is no cell's, until the session is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks_aside.add(task)
        task.add_done_callback(self._tasks_aside.discard)
        return task

    # Ends

    def stop_aside(self) -> None:
        """Leave off with what is no cell's."""
        for task in [*self._tasks_aside]:
            task.cancel()

    def interrupt(self) -> None:
        """Stop every execution as its caller would."""
        for execution in self.running():
            execution.interrupt()

    async def drain(self) -> None:
        """Until every execution has ended by itself."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Listen to no execution any longer, and wait until everything here has ended."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._tasks_aside, return_exceptions=True)
