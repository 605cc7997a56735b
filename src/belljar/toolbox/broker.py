"""One session's tool calls: looked up, checked, judged by the policy, approved by the person, made, and redacted.

The session says which server, which tool and which arguments; everything else is decided here. `_call` has the steps
in order. This module knows nothing about sockets.
"""

import asyncio
import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from opentelemetry.context import Context

from belljar import tracing
from belljar.errors import BelljarError, PluginFailed
from belljar.facts import CallEnd, ToolCallFacts, Verdict
from belljar.plugins import Plugins
from belljar.questions.models import Question, QuestionReply, QuestionSubject
from belljar.toolbox.answer_values import Keep, ToolValue, error_text, spill_large, value_of
from belljar.toolbox.arguments import BadArguments, Parameters
from belljar.toolbox.base import (
    AWAY,
    LATER,
    CallLog,
    Catalogue,
    End,
    JsonObject,
    OnProgress,
    ToolAnswer,
    ToolDefinition,
)
from belljar.toolbox.code_generation import parameters
from belljar.toolbox.question_subjects import call_subject
from belljar.toolbox.server_text import first_sentence, one_line, plain_arguments, suggestion, visible

if TYPE_CHECKING:
    from belljar.policy.guard import Approval, Guard
    from belljar.privacy.redaction import SessionRedactor
    from belljar.toolbox.upstreams import UpstreamConnections

# The execution that calls belong to, and the questions that servers ask during its calls.

QUESTION_CHARS = 2_000


class Caller(Protocol):
    """What a call needs of the execution that is running."""

    id: str

    async def ask(self, question: Question) -> QuestionReply | None:
        """Ask the person; return None if nobody can be asked."""
        ...

    def note_progress(self, text: str) -> None:
        """Show the progress of a call."""
        ...


@dataclass(slots=True)
class ExecutionCalls:
    """The calls of one execution that are in flight."""

    caller: Caller | None
    """None for calls of code that still runs between two executions."""
    call_log: CallLog
    trace: Context = field(default_factory=Context)
    """The execution's trace. Calls come in over a socket, where the current span is that of the session's start."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    stopped: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """The calls that were cancelled because their execution is being stopped."""


class CallQuestions:
    """Passes a server's questions during a call on to the person of the execution."""

    def __init__(self, calls: ExecutionCalls, server: str, redact: Callable[[str, int], str]) -> None:
        self._calls = calls
        self._redact = redact
        self._server = server
        self.unasked = ""
        """Added to an error if nobody could be asked, because the server takes that for a refusal."""

    def __eq__(self, other: object) -> bool:
        """Return whether both ask the same person: calls of one execution do."""
        return self is other or (isinstance(other, CallQuestions) and self._calls is other._calls)

    def __hash__(self) -> int:
        return hash(id(self._calls))

    async def __call__(self, question: Question) -> QuestionReply:
        """Ask the person, and say which server asks."""
        message = visible(question.message, QUESTION_CHARS)
        server = one_line(self._server, 100)
        about = QuestionSubject(asked_by="server", server=server)
        named = Question(f"{server} asks: {message}", question.schema, question.url, about=about)
        reply = await self._calls.caller.ask(named) if self._calls.caller else None
        if reply is None:
            asked = one_line(self._redact(message, QUESTION_CHARS), 300)
            self.unasked = f" (it asked a person: {asked!r}, and nobody can be asked here)"
            return QuestionReply("cancel")
        return reply


MAX_AT_ONCE = 32
_ERROR_CHARS = 8_000
_PROGRESS_CHARS = 200
# A privacy token is at most this many times shorter than the value it stands for.
_REDACTED_AHEAD = 32
# The largest answer that is read on the event loop instead of in a thread: it may be searched for personal data.
_MAX_INLINE_CHARS = 16_384


class ToolCatalogue(Protocol):
    """What the brokers of all sessions share: the catalogue, the connections, learned result shapes."""

    @property
    def upstreams(self) -> "UpstreamConnections":
        """Return the connections that calls go over."""
        ...

    async def catalogue(self, server: str, tool: str) -> Catalogue:
        """Return the catalogue, updated first if the tool is not in it."""
        ...

    def learn(self, owner: str, tool: ToolDefinition, value: Any) -> None:
        """Learn the shape of a result that a tool gave to an owner."""
        ...

    async def join(self, server: str) -> str:
        """Wait, for a bounded time, until sessions can import a server; return why they cannot, or an empty text."""
        ...


class CallFailed(Exception):
    """A call was refused before it went out, or ended without a result."""

    def __init__(self, kind: str, message: str, end: End = "refused") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.end: End = end


class Broker:
    """Makes the tool calls of one session. It is made with the first kernel; `attach` gives it an owner and guards."""

    _redactor: "SessionRedactor"

    def __init__(
        self, session_id: str, catalogue: ToolCatalogue, *, limit_bytes: int, plugins: Plugins | None = None
    ) -> None:
        self.session_id = session_id
        self._plugins = plugins or Plugins()
        self.owner = ""
        """The session's owner; empty while the session is pooled."""
        self._catalogue = catalogue
        self._limit_bytes = limit_bytes
        self._guards: list[Guard] = []
        """The session's own first, then those of the workflow whose step runs; the strictest verdict counts."""
        self._keep: Keep | None = None
        self._calls: ExecutionCalls | None = None
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._parameters: dict[tuple[str, str], Parameters] = {}
        self._is_open = asyncio.Event()
        self._is_open.set()

    def attach(self, *, owner: str, guard: "Guard", redactor: "SessionRedactor", keep: Keep) -> None:
        """Give the broker an owner, guards and a way to write files into the session folder; before that calls fail."""
        self.owner = owner
        self._guards = [guard]
        self._redactor = redactor
        self._keep = keep

    @contextmanager
    def tightened(self, guard: "Guard") -> Generator[None]:
        """Have a second guard decide on calls too until the block ends; the stricter decision counts."""
        before, self._guards = self._guards, [*self._guards, guard]
        try:
            yield
        finally:
            self._guards = before

    def reconnect_for(self, code: str) -> None:
        """Start connecting again to servers that were not reached, if the code may use them."""
        if "servers" in code or "toolbox" in code:
            self._catalogue.upstreams.catalogue_nowait()

    async def join(self, server: str) -> JsonObject:
        """Wait, for a bounded time, for a server that a cell imports while it is still connecting."""
        if why := await self._catalogue.join(server):
            return {"outcome": "error", "kind": "unknown", "server": server[:200], "message": why}
        return {"outcome": "joined"}

    def pause(self) -> None:
        """Let calls wait while the session is taken over from an earlier belljar server."""
        self._is_open.clear()

    def resume(self) -> None:
        """Let calls go on, because the session is taken over."""
        self._is_open.set()

    @contextmanager
    def attribute_calls_to(self, caller: Caller, call_log: CallLog | None = None) -> Generator[CallLog]:
        """Attribute the calls that start within the block to this execution."""
        self._calls = calls = ExecutionCalls(caller, call_log or CallLog(), tracing.current_trace())
        self.resume()
        try:
            yield calls.call_log
        finally:
            self._calls = None

    def cancel(self) -> None:
        """Cancel the calls of the execution, because it is being stopped."""
        if (calls := self._calls) is not None:
            calls.stopped |= calls.tasks
            for task in calls.tasks:
                task.cancel()

    async def call(self, server: str, tool: str, arguments: JsonObject, folder: str) -> JsonObject:
        """Make a call and return its outcome. Cancelling the task cancels the call.

        `folder` is the path of the session folder as the session sees it.
        """
        await self._is_open.wait()
        calls = self._calls or ExecutionCalls(None, CallLog())
        call_log = calls.call_log
        number = call_log.start(one_line(server, 100), one_line(tool, 100))
        task = cast("asyncio.Task[Any]", asyncio.current_task())  # a coroutine always runs in a task
        calls.tasks.add(task)
        hooks = CallHooks(self._plugins, self.session_id, self.owner)
        try:
            outcome = await self._call(calls, hooks, server, tool, arguments, folder)
        except CallFailed as failure:
            call_log.finish(
                number, failure.end, first_sentence(failure.message, 200) if failure.end == "refused" else ""
            )
            await hooks.after(failure.end, reason=failure.message)
            return await self._error_for_author(failure, server, tool)
        except asyncio.CancelledError:
            call_log.finish(number, "cancelled")
            # Unless the execution's end was the only cancellation, nobody waits for an answer: re-raise.
            if task not in calls.stopped or task.uncancel():
                raise
            await hooks.after("cancelled")
            return await self._error_for_author(
                CallFailed("cancelled", "cancelled, because its cell was stopped"), server, tool
            )
        except BaseException:
            # A fault in belljar: what became of the call is not known, but it is no longer in flight.
            call_log.finish(number, "failed")
            raise
        finally:
            calls.tasks.discard(task)
            calls.stopped.discard(task)
        call_log.finish(number, "returned")
        await hooks.after("returned", value=outcome.get("value"))
        return outcome

    async def _call(
        self, calls: ExecutionCalls, hooks: "CallHooks", server: str, tool: str, arguments: JsonObject, folder: str
    ) -> JsonObject:
        if self._keep is None:
            raise CallFailed("refused", "the session has no owner yet")
        definition = await self._look_up(server, tool)
        arguments = await hooks.before(definition, self._check_arguments(definition, arguments))
        if hooks.is_changed:
            arguments = self._check_arguments(definition, arguments)
        approved, arguments = await self._judge(calls, definition, arguments)
        async with self._slots:
            arguments = await self._reveal(definition, arguments, approved)
            answer = await self._send(calls, definition, arguments)
            try:
                return await self._make_outcome(answer, definition, self._keep, folder)
            finally:
                answer.drop()

    async def _make_outcome(self, answer: ToolAnswer, tool: ToolDefinition, keep: Keep, folder: str) -> JsonObject:
        value = await self._read_value(answer, tool)
        if value.learnable and not tool.output_schema:
            self._catalogue.learn(self.owner, tool, value.value)
        try:
            return await spill_large(value, keep, folder, tool, limit_bytes=self._limit_bytes)
        except BelljarError as error:
            raise CallFailed("limit", str(error), "failed") from error
        except (RecursionError, ValueError) as error:
            raise CallFailed("limit", "the answer is too deep, or has too long a number", "failed") from error

    async def _look_up(self, server: str, tool: str) -> ToolDefinition:
        catalogue = await self._catalogue.catalogue(server, tool)
        if (found := catalogue.find(server, tool)) is not None:
            return found
        known = catalogue.servers.get(server)
        if known is None:
            raise CallFailed("unknown", f"there is no such server{suggestion(server, catalogue.servers)}")
        if known.is_connecting:
            still = self._catalogue.upstreams.still_connecting(server)
            raise CallFailed("upstream", f"the server {still or 'is still connecting'}. {LATER}", "failed")
        if known.error:
            raise CallFailed("upstream", f"{_of_server(one_line(known.error, 500), server)}. {AWAY}", "failed")
        raise CallFailed(
            "unknown", f"the server has no such tool{suggestion(tool, [each.name for each in known.tools])}"
        )

    def _check_arguments(self, tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
        parameters = self._parameters.get((tool.server, tool.name))
        if parameters is None or parameters.tool is not tool:
            parameters = self._parameters[tool.server, tool.name] = Parameters(tool)
        try:
            return parameters.checked(arguments)
        except BadArguments as error:
            raise CallFailed("arguments", str(error)) from error

    async def _judge(
        self, calls: ExecutionCalls, tool: ToolDefinition, arguments: JsonObject
    ) -> "tuple[Approval, JsonObject]":
        """Raise `CallFailed` if the call is not allowed; return whether a person approved it, and its arguments then.

        Those that a person put in place of the call's own are checked like any others.
        """
        call = self._facts(tool, arguments)
        verdict = await self._plugins.judge_tool_call(call, partial(self._judge_by_guards, call))
        outcome, reason, by, edited = "allowed", "", "", ""
        in_console = any(guard.wants_console(verdict) for guard in self._guards)
        approval: Approval = "console" if in_console else "anywhere"
        if verdict.decision == "deny":
            outcome, reason = "denied", verdict.reason or "the policy does not allow it"
        elif verdict.decision == "ask":
            about = call_subject(
                tool.server,
                tool.name,
                arguments,
                rule=verdict.rule,
                reason=verdict.reason,
                holds_for_session=self._guards[0].asks_once(verdict),
            )
            text = f"{approval_text(tool, arguments)}\n{verdict.reason}".strip()
            question = Question(text, is_ours=True, in_console=in_console, about=about)
            outcome, reason, by, edited = await self._ask_approval(calls, question, verdict.reason)
        if edited:
            judged, arguments = call, self._check_arguments(tool, json.loads(edited))
            call = self._facts(tool, arguments)
            if not await self._allows_changed(judged, call, approval):
                outcome, reason = (
                    "denied",
                    f"the policy does not allow it with the arguments that {by or 'a person'} gave",
                )
        execution_id = calls.caller.id if calls.caller is not None else ""
        self._guards[0].record_decision(call, verdict, outcome, by, execution_id=execution_id)
        if reason:
            raise CallFailed("refused", reason)
        return approval if outcome == "approved" else "", arguments

    async def _judge_by_guards(self, call: ToolCallFacts) -> Verdict:
        """Return the strictest verdict. The session's own guard decides last: what is denied before does not count."""
        strictest: Verdict | None = None
        for guard in reversed(self._guards):
            verdict = await guard.judge(call)
            if verdict.decision == "deny":
                return verdict
            if strictest is None or verdict.decision != "allow":
                strictest = verdict
        return strictest or Verdict("allow")

    async def _ask_approval(self, calls: ExecutionCalls, question: Question, why: str) -> tuple[str, str, str, str]:
        """Ask the person; return the outcome for the guard's log, the reason for the code if it refuses, who, and
        the arguments as the person changed them.
        """
        reply = await calls.caller.ask(question) if calls.caller else None
        if reply is None:
            asked = f"a person has to allow it{f' ({why})' if why else ''}, and nobody can be asked here"
            way = "somebody at the server's inbox" if question.in_console else "a client that can ask (elicitation)"
            return "declined", f"{asked}. It takes {way}, or a policy that allows it", "", ""
        if reply.action != "accept":
            said = "the person was asked and did not allow it. Do without it, or ask what they want instead"
            return "declined", f"{said}{reply.words}", reply.by, ""
        return "approved", "", reply.by, reply.edited

    def _facts(self, tool: ToolDefinition, arguments: JsonObject, *, has_values: bool = False) -> ToolCallFacts:
        return call_facts(self.session_id, self.owner, tool, arguments, has_values=has_values)

    async def _reveal(self, tool: ToolDefinition, arguments: JsonObject, approved: "Approval") -> JsonObject:
        try:
            revealed = self._redactor.fill_in(arguments, server=tool.server, tool=tool.name)
        except BelljarError as error:
            raise CallFailed("refused", str(error)) from error
        if revealed != arguments and not await self._allows(tool, revealed, approved):
            # Do not repeat the rule's reason, because it could tell the code something about the values.
            self._guards[0].record_decision(self._facts(tool, revealed), Verdict("deny", rule="tokens"), "denied")
            raise CallFailed(
                "refused",
                "the policy does not allow it with what the tokens in its arguments stand for. Do without it, or "
                "without these tokens",
            )
        return revealed

    async def _allows(self, tool: ToolDefinition, revealed: JsonObject, approved: "Approval") -> bool:
        """Return whether the call may go out with the values behind its tokens."""
        call = self._facts(tool, revealed, has_values=True)
        for guard in self._guards:
            if not await guard.allows(call, approved):
                return False
        verdict = await self._plugins.judge_tool_call(call)
        return verdict.decision != "deny" and (verdict.decision != "ask" or approved != "")

    async def _allows_changed(self, judged: ToolCallFacts, call: ToolCallFacts, approved: "Approval") -> bool:
        """Return whether the call may go out with the arguments that a person gave it."""
        if (await self._plugins.judge_tool_call(call)).decision == "deny":
            return False
        for guard in self._guards:
            if not await guard.allows_changed(judged, call, approved):
                return False
        return True

    async def _send(self, calls: ExecutionCalls, tool: ToolDefinition, arguments: JsonObject) -> ToolAnswer:
        questions = CallQuestions(calls, tool.server, self._redact)
        try:
            with tracing.within_trace(calls.trace):
                answer = await self._catalogue.upstreams.call(
                    tool.server, tool.name, arguments, on_progress=self._progress_callback(calls, tool), ask=questions
                )
        except BelljarError as error:
            message = self._redactor.redact_text(_of_server(str(error), tool.server))
            raise CallFailed("upstream", f"{message}{questions.unasked}", "failed") from error
        if answer.is_error:
            answer.drop()
            message = self._redact(error_text(answer), _ERROR_CHARS) or "it failed and said nothing"
            raise CallFailed("tool", f"{message}{questions.unasked}", "failed")
        return answer

    async def _read_value(self, answer: ToolAnswer, tool: ToolDefinition) -> ToolValue:
        """Return the value of an answer; large ones in a thread, because searching a million characters takes 1 s."""
        size = sum(len(block.text) for block in answer.blocks)
        if size <= _MAX_INLINE_CHARS and (answer.blocks or answer.structured is None):
            return value_of(answer, tool.output_schema, self._redactor.redact)
        return await asyncio.to_thread(value_of, answer, tool.output_schema, self._redactor.redact)

    def _redact(self, text: str, limit: int) -> str:
        """Return a server's text, redacted before it is cut, because half of a sensitive value would not be found."""
        return visible(self._redactor.redact(visible(text, _REDACTED_AHEAD * limit)), limit)

    def _progress_callback(self, calls: ExecutionCalls, tool: ToolDefinition) -> OnProgress:
        def note(done: float, total: float | None, message: str) -> None:
            if calls.caller is not None:
                share = f"{done:g}/{total:g}" if total else f"{done:g}"
                shown = self._redact(message, _PROGRESS_CHARS)
                calls.caller.note_progress(one_line(f"{tool.server}.{tool.name}: {share} {shown}", _PROGRESS_CHARS))

        return note

    async def _error_for_author(self, failure: CallFailed, server: str, tool: str) -> JsonObject:
        """Return an error for the author of the code: which call failed, and which parameters the tool takes."""
        takes: list[str] = []
        if failure.kind in ("arguments", "tool"):
            found = (await self._catalogue.catalogue(server, tool)).find(server, tool)
            takes = parameters(found) if found else []
        return {
            "outcome": "error",
            "kind": failure.kind,
            "server": server[:200],
            "tool": tool[:200],
            "message": failure.message,
            "parameters": takes,
        }


class CallHooks:
    """Calls the hooks of plugins for one call: before it is judged, and when it has ended."""

    def __init__(self, plugins: Plugins, session_id: str, owner: str) -> None:
        self._plugins = plugins
        self._session_id = session_id
        self._owner = owner
        self._call: ToolCallFacts | None = None
        self._began_at = time.monotonic()
        self.is_changed = False
        """Whether a plugin put other arguments in place of the code's."""

    async def before(self, tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
        """Return the arguments, which plugins may have changed; raise `CallFailed` if one of them fails."""
        self._call = call = call_facts(self._session_id, self._owner, tool, arguments)
        if "before_tool_call" not in self._plugins.used_hooks:
            return arguments
        try:
            self._call = await self._plugins.before_tool_call(call)
        except PluginFailed as error:
            raise CallFailed("refused", str(error)) from error
        self.is_changed = self._call is not call
        return {**self._call.arguments}

    async def after(self, state: End, *, reason: str = "", value: Any = None) -> None:
        """Tell plugins how the call ended, if it was one that they were told of."""
        if self._call is not None and "after_tool_call" in self._plugins.used_hooks:
            duration_s = round(time.monotonic() - self._began_at, 6)
            await self._plugins.after_tool_call(self._call, CallEnd(state, duration_s, reason, value))


def call_facts(
    session_id: str, owner: str, tool: ToolDefinition, arguments: JsonObject, *, has_values: bool = False
) -> ToolCallFacts:
    """Return a call as plugins see it."""
    claims = tool.annotations
    return ToolCallFacts(
        session_id, owner, tool.server, tool.name, arguments, claims.read_only, claims.destructive, has_values
    )


def approval_text(tool: ToolDefinition, arguments: JsonObject) -> str:
    """Return the beginning of the question whether a call may go out: which tool, with which arguments."""
    shown = plain_arguments(arguments, QUESTION_CHARS)
    return f"Allow {one_line(tool.server, 100)}.{one_line(tool.name, 100)} with\n{shown}"


def _of_server(message: str, server: str) -> str:
    """Return the message without the server's name, which is shown beside it."""
    return message.replace(f"MCP server {server} ", "the server ", 1)
