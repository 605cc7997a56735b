"""Finds the call that a server's question belongs to, among the calls in flight on one connection.

In the newer protocol a question comes as the answer to a call, and over HTTP on the stream of one; the call is then the
task's own. A process that speaks the older protocol does not say which call it asks for. That is clear only if all
calls in flight are of one person. So once such a server has asked, calls of other people wait their turn, and a
question that could be for two people waits until it can be for one only, or is refused. A server has two seconds to
withdraw the questions of a call that it was told to stop.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import anyio
from mcp.client import ClientRequestContext
from mcp.types import (
    INVALID_REQUEST,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
)

from belljar.errors import BelljarError
from belljar.questions.models import Ask, Question, QuestionReply
from belljar.toolbox.base import OnProgress
from belljar.toolbox.server_text import visible

log = logging.getLogger(__name__)

_MESSAGE_CHARACTERS: Final = 4_000
_SCHEMA_BYTES: Final = 50_000
_SCHEMA_DEPTH: Final = 20
_URL_CHARACTERS: Final = 4_000
_LATE_S: Final = 2.0
_READ: Final = ("title", "description")


class CallInFlight:
    """One call in flight; its scope ends it when the server has been silent for too long."""

    def __init__(self, ask: Ask, on_progress: OnProgress, silence_s: float, most_questions: int) -> None:
        self.ask = ask
        self.has_asked_too_much = False
        self.scope = anyio.CancelScope()
        self._on_progress = on_progress
        self._silence_s = silence_s
        self._questions_left = most_questions
        self._questions: set[anyio.CancelScope] = set()

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Do the same as `on_progress`, as the coroutine that the SDK wants."""
        self.on_progress(progress, total, message)

    def on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Pass on the server's progress, and restart its silence limit."""
        self.start_clock()
        if math.isfinite(progress) and (total is None or math.isfinite(total)):
            self._on_progress(progress, total, (message or "")[:_MESSAGE_CHARACTERS])

    async def put(self, question: Question) -> QuestionReply | None:
        """Ask the person, with the silence limit paused; return None if the call was given up meanwhile."""
        if self._questions_left <= 0:
            # A server must not keep a person answering forever.
            self.has_asked_too_much = True
            self.scope.cancel()
            return None
        self._questions_left -= 1
        self.scope.deadline = math.inf
        with anyio.CancelScope() as asking:
            self._questions.add(asking)
            try:
                return await self.ask(question)
            finally:
                self._questions.discard(asking)
                self.start_clock()
        return None

    def withdraw(self) -> None:
        """Cancel the questions of the call, because nobody needs the answers any more."""
        for asking in self._questions:
            asking.cancel()

    def start_clock(self) -> None:
        """Restart the server's silence limit, unless a person is being asked."""
        if not self._questions:
            # Of the loop and not of anyio, which knows no loop in the callback that reads progress.
            self.scope.deadline = asyncio.get_running_loop().time() + self._silence_s


_current: ContextVar[CallInFlight | None] = ContextVar("belljar_upstream_call", default=None)


class CallsInFlight:
    """The calls in flight on one connection."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._calls: list[CallInFlight] = []
        self._waiting_questions = 0
        self._abandoned: tuple[Ask, float] | None = None
        self._must_take_turns = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def enter(self, call: CallInFlight) -> AsyncGenerator[None]:
        """Keep the call in flight within the block; the server's questions meanwhile may belong to it."""
        if self._must_take_turns:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_alone(call))
        self._calls.append(call)
        before = _current.set(call)
        is_abandoned = False
        try:
            yield
        except asyncio.CancelledError:
            is_abandoned = True
            raise
        finally:
            _current.reset(before)
            self._calls.remove(call)
            call.withdraw()
            if is_abandoned or call.scope.cancel_called:
                self._abandoned = call.ask, time.monotonic()
            if self._must_take_turns:
                await self._notify()

    async def on_elicitation(
        self, context: ClientRequestContext, params: ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        """Answer a question of the server; the SDK's client calls this for both versions of the protocol."""
        call = _current.get()
        if call is None or call not in self._calls:
            call = await self._owner()
        question = _question(params)
        if call is None or question is None:
            reason = "it is not clear who is asked" if call is None else "the question cannot be shown"
            log.warning("a question of MCP server %s was refused: %s", self._server, reason)
            return ErrorData(code=INVALID_REQUEST, message=f"Refused: {reason}")
        try:
            reply = await call.put(question)
        except BelljarError as error:
            return ErrorData(code=INVALID_REQUEST, message=error.message)
        if reply is None:
            return ErrorData(code=INVALID_REQUEST, message="Refused: the call was given up")
        content = _content(reply.values) if reply.action == "accept" and not question.url else None
        return ElicitResult(action=reply.action, content=content)

    def _is_alone(self, call: CallInFlight) -> bool:
        return all(each.ask == call.ask for each in self._calls)

    async def _owner(self) -> CallInFlight | None:
        """Wait until all calls in flight are of one person, and return one of them; None if that will not happen."""
        self._must_take_turns = True
        async with self._changed:
            self._waiting_questions += 1
            try:
                while self._calls:
                    last = self._calls[-1]
                    if not self._is_alone(last):
                        # If every call has a question that waits, no call will end by itself.
                        if self._waiting_questions >= len(self._calls):
                            return None
                        log.info("a question of MCP server %s is held: it could be two people's", self._server)
                        await self._changed.wait()
                    elif (late_s := self._late_s(last)) > 0:
                        with anyio.move_on_after(late_s):
                            await self._changed.wait()
                    else:
                        return last
                return None
            finally:
                self._waiting_questions -= 1

    def _late_s(self, call: CallInFlight) -> float:
        """Return how long a question may still belong to another person's call that was just given up.

        Within that time the server is expected to withdraw it.
        """
        if self._abandoned is None or self._abandoned[0] == call.ask:
            return 0.0
        return self._abandoned[1] + _LATE_S - time.monotonic()

    async def _notify(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._changed:
                self._changed.notify_all()


def _question(params: ElicitRequestParams) -> Question | None:
    message = params.message[:_MESSAGE_CHARACTERS]
    if isinstance(params, ElicitRequestFormParams):
        try:
            schema: dict[str, Any] = _readable(dict(params.requested_schema))
            size = len(json.dumps(schema, ensure_ascii=False).encode())
        except ValueError:  # too deep, or with a number or a character that cannot be written
            return None
        return Question(message, schema) if size <= _SCHEMA_BYTES else None
    url = params.url
    is_address = url.startswith(("https://", "http://")) and len(url) <= _URL_CHARACTERS and url.isprintable()
    return Question(message, url=url) if is_address else None


def _readable(value: Any, depth: int = 0) -> Any:
    """Return a form without invisible characters in its titles and descriptions; values for the server stay.

    Raise ValueError for one that is nested deeper than any form.
    """
    if depth > _SCHEMA_DEPTH:
        raise ValueError("the form is nested too deeply")
    if isinstance(value, list):
        return [_readable(each, depth + 1) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    return {
        name: visible(each, _MESSAGE_CHARACTERS)
        if name in _READ and isinstance(each, str)
        else _readable(each, depth + 1)
        for name, each in fields.items()
    }


_Primitive = str | int | float | bool | list[str] | None


def _content(values: dict[str, Any]) -> dict[str, _Primitive]:
    """Return the values that elicitation can carry, which are flat."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | list | None)}
