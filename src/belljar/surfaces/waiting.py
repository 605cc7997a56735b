"""Waiting for an execution on behalf of one request: progress while it speaks, questions while it asks.

The request may end at any time; the execution does not notice. A question goes to the person in the form the client's
protocol era has: a request of ours in the middle of the call, or an answer that the client completes and sends again.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from mcp.server.mcpserver import Context
from mcp.types import (
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    InputRequiredResult,
)
from starlette.requests import Request

from belljar.executions.execution import Execution
from belljar.toolbox.base import Question, QuestionReply

MODERN = "2026-07-28"
PROGRESS_INTERVAL_S = 0.25
PROGRESS_CHARS = 200
ANSWER_KEY = "input"
STATE_MARK = "#"
CONSENT: dict[str, Any] = {"type": "object", "properties": {}}
"""The form of a question that is answered by accepting it."""


def can_ask(ctx: Context[Any, Any]) -> bool:
    """Whether the client can put a question to a person."""
    capabilities = ctx.client_capabilities
    return capabilities is not None and capabilities.elicitation is not None


async def follow(
    execution: Execution, ctx: Context[Any, Any], wait_s: float, *, is_streaming: bool = False
) -> InputRequiredResult | None:
    """Wait until it has finished or `wait_s` have passed; a modern client gets its question to answer instead.

    A client that streams is answered as soon as there is something new.
    """
    deadline = time.monotonic() + wait_s
    sent, told = 0, execution.sequence
    while not execution.is_finished:
        if execution.question is not None and can_ask(ctx):
            if (ctx.protocol_version or "") >= MODERN:
                return _question(execution, execution.question, ctx)
            with execution.asking() as is_ours:
                if is_ours:
                    await _ask_now(execution, execution.question, ctx)
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        # What it said while we let it settle is news too.
        is_news = told < execution.sequence or await execution.wait_for_change(min(left, 15))
        if is_news and not execution.is_finished:
            if is_streaming and execution.question is None:
                return None
            sent, told = sent + 1, execution.sequence
            await ctx.report_progress(sent, None, " ".join(execution.latest_text()[-PROGRESS_CHARS:].split()))
            await execution.wait(min(PROGRESS_INTERVAL_S, max(left, 0)))
    return None


def resume(execution: Execution, ctx: Context[Any, Any]) -> None:
    """A modern client came back with the person's answer."""
    response = (ctx.input_responses or {}).get(ANSWER_KEY)
    _, _, number = (ctx.request_state or "").partition(STATE_MARK)
    execution.reply(
        _reply(response) if isinstance(response, ElicitResult) else QuestionReply("cancel"), int(number or 0)
    )


def asked_execution(ctx: Context[Any, Any]) -> str:
    """The id of the execution that a modern client's answer is for."""
    return (ctx.request_state or "").partition(STATE_MARK)[0]


def _question(execution: Execution, question: Question, ctx: Context[Any, Any]) -> InputRequiredResult:
    request = ElicitRequest(method="elicitation/create", params=_params(question, ctx))
    state = f"{execution.id}{STATE_MARK}{execution.questions}"
    return InputRequiredResult(input_requests={ANSWER_KEY: request}, request_state=state)


async def _ask_now(execution: Execution, question: Question, ctx: Context[Any, Any]) -> None:
    number = execution.questions
    session, params = ctx.request_context.session, _params(question, ctx)
    if isinstance(params, ElicitRequestURLParams):
        elicitation_id = secrets.token_hex(16)
        result = await session.elicit_url(params.message, params.url, elicitation_id, ctx.request_id)
    else:
        result = await session.elicit_form(params.message, params.requested_schema, ctx.request_id)
    execution.reply(_reply(result), number)


def _params(question: Question, ctx: Context[Any, Any]) -> ElicitRequestFormParams | ElicitRequestURLParams:
    """A form, or an address for a client that can open some; others are told it in the question."""
    if question.url and _opens_addresses(ctx):
        return ElicitRequestURLParams(message=question.message, url=question.url)
    message = f"{question.message}\nOpen {question.url} first." if question.url else question.message
    return ElicitRequestFormParams(message=message, requested_schema=question.schema or CONSENT)


def _opens_addresses(ctx: Context[Any, Any]) -> bool:
    capabilities = ctx.client_capabilities
    elicitation = capabilities.elicitation if capabilities is not None else None
    return elicitation is not None and elicitation.url is not None


def _reply(response: ElicitResult) -> QuestionReply:
    return QuestionReply(response.action, dict(response.content or {}) if response.action == "accept" else {})


# Calls that their client gives up: whether the code that they run is stopped, or only the waiting for it.
# A client that cancels says so (`notifications/cancelled`). An HTTP client of protocol 2026-07-28 closes the response
# instead, which looks like a connection that was lost: the setting decides what that means.

InterruptOn = Literal["cancel", "disconnect", "nothing"]
CANCELLED = "by its client, which cancelled the call"
LEFT = "because its client went away"


@asynccontextmanager
async def stopping_when_cancelled(
    ctx: Context[Any, Any], interrupt_on: InterruptOn, stop: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Call `stop` with who asked for it when the client gives up the call that is waited for inside."""
    request: object = ctx.request_context.request
    watching = None
    if interrupt_on == "disconnect" and isinstance(request, Request):
        watching = asyncio.get_running_loop().create_task(_stop_on_disconnect(cast("Request[Any]", request), stop))
    try:
        yield
    except asyncio.CancelledError:
        # The server that ends cancels its calls too; then sessions are left as they are.
        if interrupt_on != "nothing" and _is_cancelled(ctx):
            stop(CANCELLED)
        raise
    finally:
        if watching is not None:
            watching.cancel()


def _is_cancelled(ctx: Context[Any, Any]) -> bool:
    # The SDK has told the two apart, but keeps it from handlers.
    outbound = ctx.request_context.session._request_outbound  # pyright: ignore[reportPrivateUsage]
    return outbound.cancel_requested.is_set()


async def _stop_on_disconnect(request: Request[Any], stop: Callable[[str], None]) -> None:
    # In a task of its own: the SDK cancels the call itself in the same moment, or, in older eras, never.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop(LEFT)
