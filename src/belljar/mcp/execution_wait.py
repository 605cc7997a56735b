"""Waiting for an execution on behalf of one request: reports of progress, questions to the person, and cancellation.

The request may end at any time without the execution noticing. A question goes to the person in the form that the
client's protocol version has: a request of ours during the call, or an answer that the client completes and repeats.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, cast

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
from belljar.questions.models import Question, QuestionReply
from belljar.questions.schema import CONSENT
from belljar.request_headers import CALL_HEADER
from belljar.toolbox.base import MODERN

if TYPE_CHECKING:
    from belljar.http.early_cancellations import EarlyCancellations

PROGRESS_INTERVAL_S = 0.25
PROGRESS_CHARS = 200
ANSWERED_CHECK_S = 0.25
ANSWER_KEY = "input"
STATE_MARK = "#"


def can_ask(ctx: Context[Any, Any]) -> bool:
    """Return whether the client can put a question to a person."""
    capabilities = ctx.client_capabilities
    return capabilities is not None and capabilities.elicitation is not None


async def follow(
    execution: Execution, ctx: Context[Any, Any], wait_s: float, *, is_streaming: bool = False
) -> InputRequiredResult | None:
    """Wait until the execution has finished or `wait_s` have passed; for a modern client, return its question instead.

    With `is_streaming`, return as soon as there is something new.
    """
    deadline = time.monotonic() + wait_s
    sent, reported = 0, execution.sequence
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
        # Output of the pause at the end of the last round is new too.
        is_news = reported < execution.sequence or await execution.wait_for_change(min(left, 15))
        if is_news and not execution.is_finished:
            if is_streaming and execution.question is None:
                return None
            sent, reported = sent + 1, execution.sequence
            await ctx.report_progress(sent, None, " ".join(execution.latest_text()[-PROGRESS_CHARS:].split()))
            await execution.wait(min(PROGRESS_INTERVAL_S, max(left, 0)))
    return None


def resume(execution: Execution, ctx: Context[Any, Any]) -> None:
    """Pass on the person's answer, with which a modern client has come back."""
    response = (ctx.input_responses or {}).get(ANSWER_KEY)
    _, _, number = (ctx.request_state or "").partition(STATE_MARK)
    execution.reply(
        reply_of(response) if isinstance(response, ElicitResult) else QuestionReply("cancel"), int(number or 0)
    )


def asked_execution(ctx: Context[Any, Any]) -> str:
    """Return the id of the execution that a modern client's answer is for."""
    return (ctx.request_state or "").partition(STATE_MARK)[0]


def _question(execution: Execution, question: Question, ctx: Context[Any, Any]) -> InputRequiredResult:
    request = elicitation(question, ctx)
    state = f"{execution.id}{STATE_MARK}{execution.question_number}"
    return InputRequiredResult(input_requests={ANSWER_KEY: request}, request_state=state)


def elicitation(question: Question, ctx: Context[Any, Any]) -> ElicitRequest:
    """Return a question as the request that a modern client puts to its person."""
    return ElicitRequest(method="elicitation/create", params=_params(question, ctx))


async def _ask_now(execution: Execution, question: Question, ctx: Context[Any, Any]) -> None:
    number = execution.question_number
    session, params = ctx.request_context.session, _params(question, ctx)
    if isinstance(params, ElicitRequestURLParams):
        elicitation_id = secrets.token_hex(16)
        elicited = session.elicit_url(params.message, params.url, elicitation_id, ctx.request_id)
    else:
        elicited = session.elicit_form(params.message, params.requested_schema, ctx.request_id)
    asking = asyncio.get_running_loop().create_task(elicited)
    try:
        # Somebody may answer at the inbox meanwhile; then the client is told that nobody waits for it any more.
        while not asking.done() and execution.question is question:
            await asyncio.wait([asking], timeout=ANSWERED_CHECK_S)
        if asking.done():
            execution.reply(reply_of(asking.result()), number)
    finally:
        asking.cancel()


def _params(question: Question, ctx: Context[Any, Any]) -> ElicitRequestFormParams | ElicitRequestURLParams:
    """Return a form, or a URL for a client that can open URLs; for others the message has the URL."""
    if question.url and _opens_urls(ctx):
        return ElicitRequestURLParams(message=question.message, url=question.url)
    return ElicitRequestFormParams(message=question.whole_message, requested_schema=question.schema or CONSENT)


def _opens_urls(ctx: Context[Any, Any]) -> bool:
    capabilities = ctx.client_capabilities
    elicitation = capabilities.elicitation if capabilities is not None else None
    return elicitation is not None and elicitation.url is not None


def reply_of(response: ElicitResult) -> QuestionReply:
    """Return what a person answered, as an execution takes it."""
    return QuestionReply(response.action, dict(response.content or {}) if response.action == "accept" else {})


# Calls that go on as a task of the protocol, if the client has said that it follows tasks (`tasks_extension.py`).

TASK_AFTER_S = 2.0
"""How long such a call is waited for before it becomes a task: a short one is answered as it always was."""


@dataclass(slots=True)
class TaskOffer:
    """What a tool may do for one call: leave the id of what goes on, instead of waiting for it."""

    task_id: str = ""


_offer: ContextVar[TaskOffer | None] = ContextVar("task_offer", default=None)


@contextmanager
def offering_task() -> Generator[TaskOffer]:
    """Let the tool that is called in the block leave the id of a task."""
    offer = TaskOffer()
    token = _offer.set(offer)
    try:
        yield offer
    finally:
        _offer.reset(token)


def offered_wait_s(wait_s: float) -> float:
    """Return how long a call waits for what it started: not long where it may become a task."""
    return wait_s if _offer.get() is None else min(wait_s, TASK_AFTER_S)


def leave_as_task(task_id: str) -> None:
    """Have the call answered with a task, if the client follows tasks; else nothing happens."""
    if (offer := _offer.get()) is not None:
        offer.task_id = task_id


# Calls that the client gives up: whether their code is stopped, or only the waiting for it. A client that cancels says
# so (`notifications/cancelled`). An HTTP client of protocol 2026-07-28 closes the response instead, which looks like a
# lost connection: the setting `interrupt_on` decides what that means.

InterruptOn = Literal["cancel", "disconnect", "nothing"]
CANCELLED = "by its client, which cancelled the call"
LEFT = "because its client went away"


_passed_on: dict[str, Callable[[], None]] = {}
"""What stops the calls that other servers have passed on, by the names that those gave them."""


@cache
def _given_up() -> "EarlyCancellations":
    # Imported here, because a server over stdio has no others that pass calls on.
    from belljar.http.early_cancellations import EarlyCancellations

    return EarlyCancellations()


def stop_passed_on(name: str) -> None:
    """Stop the call that another server passed on under this name, or will in a moment."""
    if (stop := _passed_on.get(name)) is not None:
        stop()
    else:
        _given_up().add(name)


@asynccontextmanager
async def stopping_when_cancelled(
    ctx: Context[Any, Any], interrupt_on: InterruptOn, stop: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Call `stop`, with who asked for it, if the client gives up the call while the block waits."""
    async with stopping_when_left(ctx.request_context.request, interrupt_on, stop):
        try:
            yield
        except asyncio.CancelledError:
            # A server that ends cancels its calls too; then sessions are left as they are.
            if interrupt_on != "nothing" and _is_cancelled(ctx):
                stop(CANCELLED)
            raise


@asynccontextmanager
async def stopping_when_left(
    request: object, interrupt_on: InterruptOn, stop: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Call `stop` if the connection of an HTTP request is lost while the block waits, and settings want it to count."""
    watching = None
    name = request.headers.get(CALL_HEADER, "") if isinstance(request, Request) else ""
    if name and interrupt_on != "nothing":
        _passed_on[name] = partial(stop, CANCELLED)
        if _given_up().take(name):
            stop(CANCELLED)
    if interrupt_on == "disconnect" and isinstance(request, Request):
        watching = asyncio.get_running_loop().create_task(_stop_on_disconnect(cast("Request[Any]", request), stop))
    try:
        yield
    finally:
        _passed_on.pop(name, None)
        if watching is not None:
            watching.cancel()


def _is_cancelled(ctx: Context[Any, Any]) -> bool:
    # The SDK knows whether the client cancelled or the server ends, but does not tell handlers.
    outbound = ctx.request_context.session._request_outbound  # pyright: ignore[reportPrivateUsage]
    return outbound.cancel_requested.is_set()


async def _stop_on_disconnect(request: Request[Any], stop: Callable[[str], None]) -> None:
    # Runs in its own task, because the SDK cancels the call in the same moment or, in older protocols, never.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop(LEFT)
