"""Runs of workflows as tasks of the protocol, see `mcp/tasks_extension.py`."""

import asyncio
import re
import time
from contextlib import suppress

from mcp import MCPError
from mcp.types import INVALID_PARAMS

from belljar.errors import BelljarError, InvalidArgument
from belljar.journal.run_records import ENDED
from belljar.mcp.content import Structured, asked_structure
from belljar.mcp.execution_wait import can_ask, elicitation
from belljar.mcp.tasks_extension import (
    QUESTION_KEY,
    Responses,
    Task,
    ToolContext,
    asking_task,
    completed_task,
    one_line,
    response_under,
)
from belljar.runtime import Runtime
from belljar.workflows.questions import RunQuestion
from belljar.workflows.tools import pass_on, run_answer
from belljar.workflows.workflows import workflows_of

_RUN = re.compile(r"([0-9a-f]{16})-([0-9]{13})")


class RunTasks:
    """Runs of workflows as tasks, by the run's id and the time from which the task follows it."""

    def __init__(self, runtime: Runtime) -> None:
        self._workflows = workflows_of(runtime)
        self._structured: Structured = runtime.settings.structured
        self._stopping: set[asyncio.Task[None]] = set()

    def find(self, task_id: str, principal: str, ctx: ToolContext) -> Task | None:
        """See `TaskSource`."""
        run_id, since = _run_of(task_id)
        try:
            info = self._workflows.show(run_id, principal)
            record = self._workflows.record(run_id, principal)
            waiting = self._workflows.questions(run_id, principal)
        except BelljarError:
            return None
        if record.state == "stopped":
            return Task(task_id, "cancelled", since, record.ended_at or since, record.end)
        is_over = record.state in ENDED or record.state == "interrupted"
        if not is_over and waiting and can_ask(ctx):
            requests = {_run_key(path, asked): elicitation(asked, ctx) for path, asked in waiting}
            return asking_task(task_id, since, time.time(), waiting[0][1].message, requests)
        # A client that cannot ask is answered as a call without a task is: with what the person has to decide.
        if is_over or (not can_ask(ctx) and self._workflows.has_asked(run_id, principal, since)):
            answer = run_answer(info)
            if asked_structure(ctx, self._structured) == "never":
                answer.structured_content = None
            return completed_task(task_id, since, record.ended_at or time.time(), answer)
        return Task(task_id, "working", since, time.time(), one_line(info.step and f"at step {info.step}"))

    async def answer(self, task_id: str, principal: str, responses: Responses) -> None:
        """See `TaskSource`."""
        run_id, _ = _run_of(task_id)
        try:
            waiting = self._workflows.questions(run_id, principal)
        except BelljarError:
            return
        for path, question in waiting:
            response = response_under(responses, _run_key(path, question))
            if response is None:
                continue
            try:
                await pass_on(self._workflows, run_id, principal, path, response)
            except InvalidArgument as error:
                raise MCPError(INVALID_PARAMS, str(error)) from None

    def cancel(self, task_id: str, principal: str) -> None:
        """See `TaskSource`."""
        run_id, _ = _run_of(task_id)
        try:
            record = self._workflows.record(run_id, principal)
        except BelljarError:
            return
        if record.state not in ENDED:
            # Aside, because the client need not wait until the run's step is interrupted.
            work = asyncio.get_running_loop().create_task(self._stop(record.id, principal))
            self._stopping.add(work)
            work.add_done_callback(self._stopping.discard)

    async def _stop(self, run_id: str, principal: str) -> None:
        with suppress(InvalidArgument):  # it ended by itself meanwhile
            await self._workflows.stop(run_id, principal)


def _run_of(task_id: str) -> tuple[str, float]:
    """Return the run of a task and since when the task follows it; an empty id for what is no such task."""
    match = _RUN.fullmatch(task_id)
    return (match[1], int(match[2]) / 1000) if match else ("", 0.0)


def _run_key(path: str, question: RunQuestion) -> str:
    """Return the key of a run's question, which a later question of the same step does not have."""
    return f"{QUESTION_KEY}{path}@{int(question.asked_at * 1000)}"
