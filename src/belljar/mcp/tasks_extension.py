"""The protocol's extension `io.modelcontextprotocol/tasks` (2026-07-28): long calls that a client follows by itself.

A call of `execute_code`, or of a tool of a product, that takes longer than two seconds is answered with a task, if its
request says that the client follows tasks. What a task is was there before: an execution, or what a product has (a run
of a workflow). So no task is stored; its state is read from the live execution or from the journal, also by the next
server. Clients that do not declare the extension see no difference.
"""

import time
from collections.abc import Mapping, Sequence
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

from belljar.errors import ExecutionNotFound
from belljar.executions.execution import Execution
from belljar.http.auth import current_principal
from belljar.journal.journal import ExecutionRecord
from belljar.mcp.content import error_blocks
from belljar.mcp.execution_wait import (
    PROGRESS_CHARS,
    can_ask,
    elicitation,
    offering_task,
    reply_of,
)
from belljar.mcp.interpreter import InterpreterSurface
from belljar.models import ExecutionResult, iso_ms
from belljar.products import products
from belljar.runtime import Runtime
from belljar.servers import is_living
from belljar.sessions.endings import DAY_S
from belljar.toolbox.base import MODERN

IDENTIFIER: Final = "io.modelcontextprotocol/tasks"
LEAST_POLL_MS, MAX_POLL_MS = 500, 5_000
POLLS_PER_AGE: Final = 10
"""A task is looked at about this many times while its age grows by its age."""
CANCELLED: Final = "by its client, which cancelled the task"
INTERNAL: Final = "internal-error:"
"""How the cause of an execution begins that failed by a fault of belljar."""
_ID_CHARS: Final = 200
QUESTION_KEY: Final = "question-"
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
        self._sources: tuple[TaskSource, ...] = (
            ExecutionTasks(runtime),
            *(source for product in products() for source in product.task_sources(runtime)),
        )

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
        if live is None and record.result is None and self._runs_at_another_server(record):
            return Task(task_id, "working", record.submitted_at, time.time(), "runs under another server")
        return self._ended_task(record, ctx)

    def _unfinished_task(self, record: ExecutionRecord, live: Execution, ctx: ToolContext) -> Task:
        question = live.question
        if question is not None and can_ask(ctx):
            requests = {f"{QUESTION_KEY}{live.question_number}": elicitation(question, ctx)}
            return asking_task(record.id, record.submitted_at, live.changed_at, question.message, requests)
        status = f"waits for {live.asks_person}" if live.asks_person else one_line(live.latest_text())
        return Task(record.id, "working", record.submitted_at, live.changed_at, status)

    def _ended_task(self, record: ExecutionRecord, ctx: ToolContext) -> Task:
        """Return the task of an execution that has ended, whichever way."""
        try:
            result = self._sessions.executions.result(record.id, record.principal)
        except ExecutionNotFound as error:
            return completed_task(record.id, record.submitted_at, record.submitted_at, error_blocks(error))
        ended_at = record.submitted_at + result.usage.queue_s + result.usage.wall_s
        cause = result.cause or ""
        if result.status == "interrupted" and CANCELLED in cause:
            return Task(record.id, "cancelled", record.submitted_at, ended_at, cause)
        if result.status == "rejected" and cause.startswith(INTERNAL):
            return _failed_task(record.id, record.submitted_at, ended_at, result)
        return completed_task(record.id, record.submitted_at, ended_at, self._surface.shown(result, ctx))

    def _runs_at_another_server(self, record: ExecutionRecord) -> bool:
        session = self._sessions.records.find(record.session_id)
        return session is not None and session.state == "live" and is_living(self._runs_folder, session.run)

    async def answer(self, task_id: str, principal: str, responses: Responses) -> None:
        """See `TaskSource`."""
        execution = self._sessions.executions.find(task_id, principal)
        if execution is None:
            return
        if (response := response_under(responses, f"{QUESTION_KEY}{execution.question_number}")) is not None:
            execution.reply(reply_of(response), execution.question_number)

    def cancel(self, task_id: str, principal: str) -> None:
        """See `TaskSource`."""
        execution = self._sessions.executions.find(task_id, principal)
        if execution is not None and not execution.is_finished:
            execution.interrupt(CANCELLED)


def response_under(responses: Responses, key: str) -> ElicitResult | None:
    """Return the answer under a key; what stands under keys that nobody waits for may be anything."""
    try:
        return ElicitResult.model_validate(responses[key]) if key in responses else None
    except ValidationError:
        raise MCPError(INVALID_PARAMS, f"What inputResponses has for {key[:200]} is no answer to it") from None


def _is_declared(ctx: Ctx) -> bool:
    capabilities = ctx.session.client_capabilities
    extensions = capabilities.extensions if capabilities is not None else None
    return ctx.protocol_version == MODERN and IDENTIFIER in (extensions or {})


def asking_task(
    task_id: str, created_at: float, updated_at: float, message: str, requests: Mapping[str, ElicitRequest]
) -> Task:
    """Return a task that waits for a person, with what its client is to put to them."""
    sent = {key: each.model_dump(by_alias=True, mode="json", exclude_none=True) for key, each in requests.items()}
    return Task(task_id, "input_required", created_at, updated_at, one_line(message), {"inputRequests": sent})


def completed_task(task_id: str, created_at: float, ended_at: float, answer: CallToolResult) -> Task:
    """Return a task that ended with an answer of its tool."""
    result = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
    return Task(task_id, "completed", created_at, ended_at, payload={"result": result})


def _failed_task(task_id: str, created_at: float, ended_at: float, result: ExecutionResult) -> Task:
    message = f"belljar failed: {result.cause}"
    error = {"code": INTERNAL_ERROR, "message": message}
    return Task(task_id, "failed", created_at, ended_at, message, {"error": error})


def one_line(text: str) -> str:
    """Return the end of a text as one line."""
    return " ".join(text[-PROGRESS_CHARS:].split())
