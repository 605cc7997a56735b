"""Waiting for an execution on behalf of one request: progress while it speaks, questions while it asks.

The request may end at any time; the execution does not notice. A question goes to the person in the form the client's
protocol era has: a request of ours in the middle of the call, or an answer that the client completes and sends again.
"""

import time
from typing import Any

from mcp.server.mcpserver import Context
from mcp.types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult
from pydantic import BaseModel, Field

from belljar.sessions.execution import Execution

MODERN = "2026-07-28"
PROGRESS_INTERVAL_S = 0.25
PROGRESS_CHARS = 200
ANSWER_KEY = "input"
STATE_MARK = "#"


class Answer(BaseModel):
    """What the person is asked for."""

    answer: str = Field(description="The text that input() returns")


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
                return _question(execution)
            with execution.asking() as is_ours:
                if is_ours:
                    await _ask_now(execution, ctx)
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
            await execution.settle(min(PROGRESS_INTERVAL_S, max(left, 0)))
    return None


def resume(execution: Execution, ctx: Context[Any, Any]) -> None:
    """A modern client came back with the person's answer."""
    response = (ctx.input_responses or {}).get(ANSWER_KEY)
    _, _, number = (ctx.request_state or "").partition(STATE_MARK)
    execution.answer(_text(response) if isinstance(response, ElicitResult) else None, int(number or 0))


def asked_execution(ctx: Context[Any, Any]) -> str:
    """The id of the execution that a modern client's answer is for."""
    return (ctx.request_state or "").partition(STATE_MARK)[0]


def _question(execution: Execution) -> InputRequiredResult:
    request = ElicitRequest(
        method="elicitation/create",
        params=ElicitRequestFormParams(message=_prompt(execution), requested_schema=Answer.model_json_schema()),
    )
    state = f"{execution.id}{STATE_MARK}{execution.questions}"
    return InputRequiredResult(input_requests={ANSWER_KEY: request}, request_state=state)


async def _ask_now(execution: Execution, ctx: Context[Any, Any]) -> None:
    number = execution.questions
    outcome = await ctx.elicit(_prompt(execution), Answer)
    execution.answer(outcome.data.answer if outcome.action == "accept" else None, number)


def _prompt(execution: Execution) -> str:
    question = execution.question
    return question.prompt if question and question.prompt.strip() else "The code asks for input"


def _text(response: ElicitResult) -> str | None:
    if response.action != "accept" or response.content is None:
        return None
    answer = response.content.get("answer")
    return str(answer) if answer is not None else None
