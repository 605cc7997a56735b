"""The protocol's extension `io.modelcontextprotocol/tasks` (2026-07-28): long calls that a client follows by itself.

A call of `execute_code` or `run_workflow` that takes longer than two seconds is answered with a task, if its request
says that the client follows tasks. What a task is was there before: an execution, or a run of a workflow. So no task is
stored; its state is read from the live execution or from the journal, also by the next server. Clients that do not
declare the extension see no difference.
"""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, cast

from mcp import MCPError
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.server import require_client_extension
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp.types import (
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitResult,
    RequestParams,
)
from pydantic import Field, ValidationError
from starlette.requests import Request

from belljar.errors import BelljarError, ExecutionNotFound, InvalidArgument
from belljar.executions.execution import Execution
from belljar.journal.journal import ExecutionRecord
from belljar.journal.run_records import ENDED
from belljar.models import ExecutionResult, iso_ms
from belljar.runtime import Runtime
from belljar.servers import is_living
from belljar.sessions.endings import DAY_S
from belljar.surfaces.auth import current_principal
from belljar.surfaces.content import Structured, asked_structure, error_blocks
from belljar.surfaces.execution_wait import (
    MODERN,
    PROGRESS_CHARS,
    can_ask,
    elicitation,
    offering_task,
    reply_of,
)
from belljar.surfaces.interpreter import InterpreterSurface
from belljar.workflows.tools import run_answer
from belljar.workflows.questions import RunQuestion

IDENTIFIER: Final = "io.modelcontextprotocol/tasks"
LEAST_POLL_MS, MAX_POLL_MS = 500, 5_000
POLLS_PER_AGE: Final = 10
"""A task is looked at about this many times while its age grows by its age."""
CANCELLED: Final = "by its client, which cancelled the task"
INTERNAL: Final = "internal-error:"
"""How the cause of an execution begins that failed by a fault of belljar."""
_ID_CHARS: Final = 200
_QUESTION = "question-"
_RUN = re.compile(r"([0-9a-f]{16})-([0-9]{13})")
Ctx = ServerRequestContext[Any, Any]
ToolContext = Context[Any, Any]
Status = Literal["working", "input_required", "completed", "cancelled", "failed"]
Responses = Mapping[str, Any]


class TaskParams(RequestParams):
    """Parameters of `tasks/get` and `tasks/cancel`."""

    task_id: str = Field(max_length=_ID_CHARS)


class UpdateTaskParams(TaskParams):
    """Parameters of `tasks/update`."""

    input_responses: dict[str, Any] = Field(max_length=100)


@dataclass(frozen=True, slots=True)
class Task:
    """A task as of now."""

    id: str
    status: Status
    created_at: float
    updated_at: float
    message: str = ""
    payload: dict[str, Any] = field(default_factory=dict[str, Any])
    """The field that its status comes with: `result`, `error` or `inputRequests`."""

    def fields(self, ttl_s: float) -> dict[str, Any]:
        """Return its fields as they are sent, without the payload."""
        age_ms = max(0.0, time.time() - self.created_at) * 1000
        status_message = {"statusMessage": self.message} if self.message else {}
        return {
            "taskId": self.id,
            "status": self.status,
            **status_message,
            "createdAt": iso_ms(self.created_at),
            "lastUpdatedAt": iso_ms(max(self.created_at, self.updated_at)),
            "ttlMs": int(ttl_s * 1000),
            "pollIntervalMs": int(min(MAX_POLL_MS, max(LEAST_POLL_MS, age_ms / POLLS_PER_AGE))),
        }


class TaskSource(Protocol):
    """What tasks are made of. Each method ignores ids that are not its own, and returns None or False for them."""

    def find(self, task_id: str, principal: str, ctx: ToolContext) -> Task | None:
        """Return the task as this client is to see it."""
        ...

    async def answer(self, task_id: str, principal: str, responses: Responses) -> None:
        """Pass on what a person answered; answers to questions that nobody waits for are ignored."""
        ...

    def cancel(self, task_id: str, principal: str) -> None:
        """Stop it soon, if it has not ended."""
        ...


class TasksExtension(Extension):
    """Serves the executions and runs of one runtime as tasks, to each caller its own."""

    identifier = IDENTIFIER

    def __init__(self, runtime: Runtime) -> None:
        self._ttl_s = runtime.settings.keep_days * DAY_S
        self._sources: tuple[TaskSource, ...] = (ExecutionTasks(runtime), RunTasks(runtime))

    def methods(self) -> Sequence[MethodBinding]:
        """See `Extension`."""
        versions = frozenset({MODERN})
        return (
            MethodBinding("tasks/get", TaskParams, self._get, versions),
            MethodBinding("tasks/update", UpdateTaskParams, self._update, versions),
            MethodBinding("tasks/cancel", TaskParams, self._cancel, versions),
        )

    async def intercept_tool_call(self, params: CallToolRequestParams, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        """Let a tool leave a task, if the request says that the client follows tasks."""
        if not _is_declared(ctx):
            return await call_next(ctx)
        with offering_task() as offer:
            answer = await call_next(ctx)
        if not offer.task_id:
            return answer
        task = self._find(offer.task_id, ctx)
        # Its result, if it has one by now, is told by `tasks/get` only.
        return {"resultType": "task", **task.fields(self._ttl_s)}

    async def _get(self, ctx: Ctx, params: TaskParams) -> dict[str, Any]:
        task = self._find_task(ctx, params)
        return {**task.fields(self._ttl_s), **task.payload}

    async def _update(self, ctx: Ctx, params: UpdateTaskParams) -> dict[str, Any]:
        self._find_task(ctx, params)
        for source in self._sources:
            await source.answer(params.task_id, current_principal(), params.input_responses)
        return {}

    async def _cancel(self, ctx: Ctx, params: TaskParams) -> dict[str, Any]:
        self._find_task(ctx, params)
        for source in self._sources:
            source.cancel(params.task_id, current_principal())
        return {}

    def _find_task(self, ctx: Ctx, params: TaskParams) -> Task:
        """Return the task of a request, or refuse the request."""
        require_client_extension(ctx, IDENTIFIER)
        request: object = ctx.request
        name = cast("Request[Any]", request).headers.get(MCP_NAME_HEADER) if isinstance(request, Request) else None
        if isinstance(request, Request) and decode_header_value(name or "") != params.task_id:
            raise MCPError(HEADER_MISMATCH, "The Mcp-Name header is not the request's taskId")
        return self._find(params.task_id, ctx)

    def _find(self, task_id: str, ctx: Ctx) -> Task:
        tool_context: ToolContext = Context(request_context=ctx)
        for source in self._sources:
            if (task := source.find(task_id, current_principal(), tool_context)) is not None:
                return task
        # The same words whether it never was, is another caller's, or went with its session.
        raise MCPError(INVALID_PARAMS, "There is no such task: tasks go with their cleared or expired session")


class ExecutionTasks:
    """Executions as tasks, by their own ids."""

    def __init__(self, runtime: Runtime) -> None:
        self._sessions = runtime.sessions
        self._runs_folder = runtime.settings.data_directory / "runs"
        self._surface = InterpreterSurface(runtime)

    def find(self, task_id: str, principal: str, ctx: ToolContext) -> Task | None:
        """See `TaskSource`."""
        record = self._sessions.journal.find(task_id)
        if record is None or record.principal != principal:
            return None
        live = self._sessions.executions.find(task_id, principal)
        if live is not None and not live.is_finished:
            return self._unfinished_task(record, live, ctx)
        if live is None and record.result is None and self._runs_elsewhere(record):
            return Task(task_id, "working", record.submitted_at, time.time(), "runs under another server")
        return self._ended_task(record, ctx)

    def _unfinished_task(self, record: ExecutionRecord, live: Execution, ctx: ToolContext) -> Task:
        question = live.question
        if question is not None and can_ask(ctx):
            requests = {f"{_QUESTION}{live.question_number}": elicitation(question, ctx)}
            return _asking(record.id, record.submitted_at, live.changed_at, question.message, requests)
        status = f"waits for {live.asks_person}" if live.asks_person else _one_line(live.latest_text())
        return Task(record.id, "working", record.submitted_at, live.changed_at, status)

    def _ended_task(self, record: ExecutionRecord, ctx: ToolContext) -> Task:
        """Return the task of an execution that has ended, whichever way."""
        try:
            result = self._sessions.executions.result(record.id, record.principal)
        except ExecutionNotFound as error:
            return _completed(record.id, record.submitted_at, record.submitted_at, error_blocks(error))
        ended_at = record.submitted_at + result.usage.queue_s + result.usage.wall_s
        cause = result.cause or ""
        if result.status == "interrupted" and CANCELLED in cause:
            return Task(record.id, "cancelled", record.submitted_at, ended_at, cause)
        if result.status == "rejected" and cause.startswith(INTERNAL):
            return _failed(record.id, record.submitted_at, ended_at, result)
        return _completed(record.id, record.submitted_at, ended_at, self._surface.shown(result, ctx))

    def _runs_elsewhere(self, record: ExecutionRecord) -> bool:
        session = self._sessions.records.find(record.session_id)
        return session is not None and session.state == "live" and is_living(self._runs_folder, session.run)

    async def answer(self, task_id: str, principal: str, responses: Responses) -> None:
        """See `TaskSource`."""
        execution = self._sessions.executions.find(task_id, principal)
        if execution is None:
            return
        if (response := _response(responses, f"{_QUESTION}{execution.question_number}")) is not None:
            execution.reply(reply_of(response), execution.question_number)

    def cancel(self, task_id: str, principal: str) -> None:
        """See `TaskSource`."""
        execution = self._sessions.executions.find(task_id, principal)
        if execution is not None and not execution.is_finished:
            execution.interrupt(CANCELLED)


class RunTasks:
    """Runs of workflows as tasks, by the run's id and the time from which the task follows it."""

    def __init__(self, runtime: Runtime) -> None:
        self._workflows = runtime.workflows
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
            requests = {_run_key(path, asked): elicitation(asked.for_person(), ctx) for path, asked in waiting}
            return _asking(task_id, since, time.time(), waiting[0][1].message, requests)
        # A client that cannot ask is answered as a call without a task is: with what the person has to decide.
        if is_over or (not can_ask(ctx) and self._workflows.has_asked(run_id, principal, since)):
            answer = run_answer(info)
            if asked_structure(ctx, self._structured) == "never":
                answer.structured_content = None
            return _completed(task_id, since, record.ended_at or time.time(), answer)
        return Task(task_id, "working", since, time.time(), _one_line(info.step and f"at step {info.step}"))

    async def answer(self, task_id: str, principal: str, responses: Responses) -> None:
        """See `TaskSource`."""
        run_id, _ = _run_of(task_id)
        try:
            waiting = self._workflows.questions(run_id, principal)
        except BelljarError:
            return
        for path, question in waiting:
            response = _response(responses, _run_key(path, question))
            if response is None or response.action == "cancel":
                continue  # the person has not decided: the question stays open
            action, values = ("accept", response.content) if response.action == "accept" else ("decline", {})
            try:
                await self._workflows.answer(
                    run_id, principal, dict(values or {}), action=action, step=path, by="elicitation"
                )
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


def _response(responses: Responses, key: str) -> ElicitResult | None:
    """Return the answer under a key; what stands under keys that nobody waits for may be anything."""
    try:
        return ElicitResult.model_validate(responses[key]) if key in responses else None
    except ValidationError:
        raise MCPError(INVALID_PARAMS, f"What inputResponses has for {key[:200]} is no answer to it") from None


def _is_declared(ctx: Ctx) -> bool:
    capabilities = ctx.session.client_capabilities
    extensions = capabilities.extensions if capabilities is not None else None
    return ctx.protocol_version == MODERN and IDENTIFIER in (extensions or {})


def _run_of(task_id: str) -> tuple[str, float]:
    """Return the run of a task and since when the task follows it; an empty id for what is no such task."""
    match = _RUN.fullmatch(task_id)
    return (match[1], int(match[2]) / 1000) if match else ("", 0.0)


def _run_key(path: str, question: RunQuestion) -> str:
    """Return the key of a run's question, which a later question of the same step does not have."""
    return f"{_QUESTION}{path}@{int(question.asked_at * 1000)}"


def _asking(
    task_id: str, created_at: float, updated_at: float, message: str, requests: Mapping[str, ElicitRequest]
) -> Task:
    sent = {key: each.model_dump(by_alias=True, mode="json", exclude_none=True) for key, each in requests.items()}
    return Task(task_id, "input_required", created_at, updated_at, _one_line(message), {"inputRequests": sent})


def _completed(task_id: str, created_at: float, ended_at: float, answer: CallToolResult) -> Task:
    result = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
    return Task(task_id, "completed", created_at, ended_at, payload={"result": result})


def _failed(task_id: str, created_at: float, ended_at: float, result: ExecutionResult) -> Task:
    message = f"belljar failed: {result.cause}"
    error = {"code": INTERNAL_ERROR, "message": message}
    return Task(task_id, "failed", created_at, ended_at, message, {"error": error})


def _one_line(text: str) -> str:
    return " ".join(text[-PROGRESS_CHARS:].split())
