"""One session's calls: looked up, checked, judged, asked about, revealed, made, hidden, and told as an outcome.

A session says which server, which tool, and with what; everything else is decided here. Read `_call` from top to
bottom. Knows nothing of sockets.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from opentelemetry.context import Context

from belljar import spans
from belljar.errors import BelljarError
from belljar.policy.base import Verdict
from belljar.toolbox.arguments import BadArguments, Parameters
from belljar.toolbox.base import (
    AWAY,
    LATER,
    Catalogue,
    JsonObject,
    OnProgress,
    Question,
    QuestionReply,
    ToolAnswer,
    ToolDefinition,
    Upstreams,
)
from belljar.toolbox.call_log import CallLog, End
from belljar.toolbox.code_generation import parameters
from belljar.toolbox.guards import AllowAll, CallGuard, NoRedaction, Redactor
from belljar.toolbox.large_results import Keep, spilled
from belljar.toolbox.texts import first_sentence, meant, one_line, plain_arguments, visible
from belljar.toolbox.values import ToolValue, error_text, value_of

# One execution as its calls see it: who can be asked and told, what is under way, and what a server asks meanwhile.

QUESTION_CHARS = 2_000


class Caller(Protocol):
    """The execution that is under way, as far as its calls concern it."""

    async def ask(self, question: Question) -> QuestionReply | None:
        """Ask the person; None when nobody can be asked."""
        ...

    def note_progress(self, text: str) -> None:
        """A call says how far it is."""
        ...


@dataclass(slots=True)
class ExecutionCalls:
    """The execution that calls belong to."""

    caller: Caller | None
    """None for what runs on between two executions."""
    ledger: CallLog
    trace: Context = field(default_factory=Context)
    """The execution's, because calls come in over a socket, where the current span is that of the session's start."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    stopped: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """Those of them that end because their execution does."""


class TurnQuestions:
    """What a server asks in the middle of a call."""

    def __init__(self, turn: ExecutionCalls, server: str, hidden: Callable[[str, int], str]) -> None:
        self._turn = turn
        self._hidden = hidden
        self._server = server
        self.unasked = ""
        """Said beside an error: the server takes what nobody answered for a no."""

    def __eq__(self, other: object) -> bool:
        """Calls of one execution ask one person."""
        return self is other or (isinstance(other, TurnQuestions) and self._turn is other._turn)

    def __hash__(self) -> int:
        return hash(id(self._turn))

    async def __call__(self, question: Question) -> QuestionReply:
        """Put it to the person, who is told whose it is."""
        message = visible(question.message, QUESTION_CHARS)
        told = Question(f"{one_line(self._server, 100)} asks: {message}", question.schema, question.url)
        reply = await self._turn.caller.ask(told) if self._turn.caller else None
        if reply is None:
            asked = one_line(self._hidden(message, QUESTION_CHARS), 300)
            self.unasked = f" (it asked a person: {asked!r}, and nobody can be asked here)"
            return QuestionReply("cancel")
        return reply


MOST_AT_ONCE = 32
_ERROR_CHARS = 8_000
_PROGRESS_CHARS = 200
# A token is that much shorter, at most, than what it stands for.
_HIDDEN_AHEAD = 32
_SMALL_CHARS = 16_384
_PLAIN_CHARS = 262_144
"""Where nothing has to be looked for in it."""


class ToolCatalogue(Protocol):
    """What all sessions share."""

    @property
    def upstreams(self) -> Upstreams:
        """Where calls go."""
        ...

    async def catalogue(self, server: str, tool: str) -> Catalogue:
        """What there is, read anew if need be when that is not in it."""
        ...

    def learn(self, owner: str, tool: ToolDefinition, value: Any) -> None:
        """A tool answered an owner with this."""
        ...

    async def join(self, server: str) -> str:
        """Wait until a server is there, and sessions can import it; why not, where it is not, within a bound."""
        ...


class CallRefused(Exception):
    """A call that ends before it went out, or without a result."""

    def __init__(self, kind: str, message: str, end: End = "refused") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.end: End = end


class Broker:
    """Made with a session's first kernel; `attach` makes it the session's own."""

    def __init__(self, session_id: str, desk: ToolCatalogue, *, limit_bytes: int) -> None:
        self.session_id = session_id
        self.owner = ""
        """Whose the session is; empty while it is nobody's."""
        self._desk = desk
        self._limit_bytes = limit_bytes
        self._guard: CallGuard = AllowAll()
        self._veil: Redactor = NoRedaction()
        self._keep: Keep | None = None
        self._turn: ExecutionCalls | None = None
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._parameters: dict[tuple[str, str], Parameters] = {}
        self._is_open = asyncio.Event()
        self._is_open.set()

    def attach(self, *, owner: str, guard: CallGuard | None = None, veil: Redactor | None = None, keep: Keep) -> None:
        """Make it someone's session, with guards and a way for files into its folder. Before that nothing goes out."""
        self.owner = owner
        self._guard = guard or self._guard
        self._veil = veil or self._veil
        self._keep = keep

    async def ready_for(self, code: str) -> None:
        """Have servers tried again that were not reached, for code that may want them; nobody is waited for."""
        if "servers" in code or "toolbox" in code:
            self._desk.upstreams.known()

    async def join(self, server: str) -> JsonObject:
        """Wait for a server that a cell imports while it is still connecting: for that one, and within a bound."""
        if why := await self._desk.join(server):
            return {"outcome": "error", "kind": "unknown", "server": server[:200], "message": why}
        return {"outcome": "joined"}

    def pause(self) -> None:
        """Let calls wait: the session is being taken over from an earlier server."""
        self._is_open.clear()

    def resume(self) -> None:
        """It is taken over."""
        self._is_open.set()

    @contextmanager
    def serving(self, caller: Caller, ledger: CallLog | None = None) -> Generator[CallLog]:
        """While an execution runs: calls that begin now are its own."""
        self._turn = turn = ExecutionCalls(caller, ledger or CallLog(), spans.current_trace())
        self.resume()
        try:
            yield turn.ledger
        finally:
            self._turn = None

    def cancel(self) -> None:
        """The execution is being stopped, and its calls with it."""
        if (turn := self._turn) is not None:
            turn.stopped |= turn.calls
            for task in turn.calls:
                task.cancel()

    async def call(self, server: str, tool: str, arguments: JsonObject, folder: str) -> JsonObject:
        """The outcome of a call; `folder` is where the session sees its own. Cancelling the task cancels the call."""
        await self._is_open.wait()
        turn = self._turn or ExecutionCalls(None, CallLog())
        ledger = turn.ledger
        number = ledger.start(one_line(server, 100), one_line(tool, 100))
        task = cast("asyncio.Task[Any]", asyncio.current_task())  # a coroutine runs in one
        turn.calls.add(task)
        try:
            outcome = await self._call(turn, server, tool, arguments, folder)
        except CallRefused as refusal:
            ledger.finish(number, refusal.end, first_sentence(refusal.message, 200) if refusal.end == "refused" else "")
            return await self._error_for_author(refusal, server, tool)
        except asyncio.CancelledError:
            ledger.finish(number, "cancelled")
            # One that is wanted by nobody any more is cancelled by more than its execution's end.
            if task not in turn.stopped or task.uncancel():
                raise
            return await self._error_for_author(
                CallRefused("cancelled", "cancelled, because its cell was stopped"), server, tool
            )
        except BaseException:
            # A fault of ours: what became of the call is not known, but it is under way no longer.
            ledger.finish(number, "failed")
            raise
        finally:
            turn.calls.discard(task)
            turn.stopped.discard(task)
        ledger.finish(number, "returned")
        return outcome

    async def _call(
        self, turn: ExecutionCalls, server: str, tool: str, arguments: JsonObject, folder: str
    ) -> JsonObject:
        if self._keep is None:
            raise CallRefused("refused", "the session is nobody's yet")
        definition = await self._look_up(server, tool)
        arguments = self._checked(definition, arguments)
        is_approved = await self._judge(turn, definition, arguments)
        async with self._room:
            arguments = self._revealed(definition, arguments, is_approved=is_approved)
            answer = await self._answered(turn, definition, arguments)
            try:
                return await self._outcome(answer, definition, self._keep, folder)
            finally:
                answer.drop()

    async def _outcome(self, answer: ToolAnswer, tool: ToolDefinition, keep: Keep, folder: str) -> JsonObject:
        value = await self._value(answer, tool)
        if value.learnable and not tool.output_schema:
            self._desk.learn(self.owner, tool, value.value)
        try:
            return await spilled(value, keep, folder, tool, limit_bytes=self._limit_bytes)
        except BelljarError as error:
            raise CallRefused("limit", str(error), "failed") from error
        except (RecursionError, ValueError) as error:
            raise CallRefused("limit", "the answer is too deep, or has too long a number", "failed") from error

    async def _look_up(self, server: str, tool: str) -> ToolDefinition:
        catalogue = await self._desk.catalogue(server, tool)
        if (found := catalogue.find(server, tool)) is not None:
            return found
        known = catalogue.servers.get(server)
        if known is None:
            raise CallRefused("unknown", f"there is no such server{meant(server, catalogue.servers)}")
        if known.is_connecting:
            still = self._desk.upstreams.still_connecting(server)
            raise CallRefused("upstream", f"the server {still or 'is still connecting'}. {LATER}", "failed")
        if known.error:
            raise CallRefused("upstream", f"{_of_server(one_line(known.error, 500), server)}. {AWAY}", "failed")
        raise CallRefused("unknown", f"the server has no such tool{meant(tool, [each.name for each in known.tools])}")

    def _checked(self, tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
        parameters = self._parameters.get((tool.server, tool.name))
        if parameters is None or parameters.tool is not tool:
            parameters = self._parameters[tool.server, tool.name] = Parameters(tool)
        try:
            return parameters.checked(arguments)
        except BadArguments as error:
            raise CallRefused("arguments", str(error)) from error

    async def _judge(self, turn: ExecutionCalls, tool: ToolDefinition, arguments: JsonObject) -> bool:
        """Refuse what may not be called; tells whether a person allowed it."""
        verdict = self._guard.judge(
            tool.server,
            tool.name,
            arguments,
            read_only=tool.annotations.read_only,
            destructive=tool.annotations.destructive,
        )
        outcome, reason = "allowed", ""
        if verdict.decision == "deny":
            outcome, reason = "denied", verdict.reason or "the policy does not allow it"
        elif verdict.decision == "ask":
            outcome, reason = await self._approved(turn, tool, arguments, verdict.reason)
        self._guard.decided(tool.server, tool.name, verdict, outcome)
        if reason:
            raise CallRefused("refused", reason)
        return outcome == "approved"

    async def _approved(
        self, turn: ExecutionCalls, tool: ToolDefinition, arguments: JsonObject, why: str
    ) -> tuple[str, str]:
        """The person's word, as the guard keeps it, and what the code is told when it is a no."""
        shown = plain_arguments(arguments, QUESTION_CHARS)
        message = f"Allow {one_line(tool.server, 100)}.{one_line(tool.name, 100)} with\n{shown}"
        question = Question(f"{message}\n{why}".strip(), is_ours=True)
        reply = await turn.caller.ask(question) if turn.caller else None
        if reply is None:
            asked = f"a person has to allow it{f' ({why})' if why else ''}, and nobody can be asked here"
            return "declined", f"{asked}. It takes a client that can ask (elicitation), or a policy that allows it"
        if reply.action != "accept":
            return "declined", "the person was asked and did not allow it. Do without it, or ask what they want instead"
        return "approved", ""

    def _revealed(self, tool: ToolDefinition, arguments: JsonObject, *, is_approved: bool) -> JsonObject:
        try:
            revealed = self._veil.fill_in(arguments, server=tool.server, tool=tool.name)
        except BelljarError as error:
            raise CallRefused("refused", str(error)) from error
        claims = tool.annotations
        if revealed != arguments and not self._guard.allows(
            tool.server,
            tool.name,
            revealed,
            read_only=claims.read_only,
            destructive=claims.destructive,
            is_approved=is_approved,
        ):
            # Without the rule's words, which could tell something of the values.
            self._guard.decided(tool.server, tool.name, Verdict("deny", rule="tokens"), "denied")
            raise CallRefused(
                "refused",
                "the policy does not allow it with what the tokens in its arguments stand for. Do without it, or "
                "without these tokens",
            )
        return revealed

    async def _answered(self, turn: ExecutionCalls, tool: ToolDefinition, arguments: JsonObject) -> ToolAnswer:
        questions = TurnQuestions(turn, tool.server, self._hidden)
        try:
            with spans.within_trace(turn.trace):
                answer = await self._desk.upstreams.call(
                    tool.server, tool.name, arguments, on_progress=self._progress(turn, tool), ask=questions
                )
        except BelljarError as error:
            said = self._veil.redact_text(_of_server(str(error), tool.server))
            raise CallRefused("upstream", f"{said}{questions.unasked}", "failed") from error
        if answer.is_error:
            answer.drop()
            said = self._hidden(error_text(answer), _ERROR_CHARS) or "it failed and said nothing"
            raise CallRefused("tool", f"{said}{questions.unasked}", "failed")
        return answer

    async def _value(self, answer: ToolAnswer, tool: ToolDefinition) -> ToolValue:
        """What a call returns. Looking through a million characters takes a second, so large ones have a thread."""
        size = sum(len(block.text) for block in answer.blocks)
        most = _PLAIN_CHARS if isinstance(self._veil, NoRedaction) else _SMALL_CHARS
        if size <= most and (answer.blocks or answer.structured is None):
            return value_of(answer, tool.output_schema, self._veil.redact)
        return await asyncio.to_thread(value_of, answer, tool.output_schema, self._veil.redact)

    def _hidden(self, text: str, limit: int) -> str:
        """A server's words, cut after they were hidden: of a value that is cut in two, the first half is no value."""
        return visible(self._veil.redact(visible(text, _HIDDEN_AHEAD * limit)), limit)

    def _progress(self, turn: ExecutionCalls, tool: ToolDefinition) -> OnProgress:
        def note(done: float, total: float | None, message: str) -> None:
            if turn.caller is not None:
                share = f"{done:g}/{total:g}" if total else f"{done:g}"
                said = self._hidden(message, _PROGRESS_CHARS)
                turn.caller.note_progress(one_line(f"{tool.server}.{tool.name}: {share} {said}", _PROGRESS_CHARS))

        return note

    async def _error_for_author(self, refusal: CallRefused, server: str, tool: str) -> JsonObject:
        """An error for the author of the code: whose it is, and what the tool takes."""
        takes: list[str] = []
        if refusal.kind in ("arguments", "tool"):
            found = (await self._desk.catalogue(server, tool)).find(server, tool)
            takes = parameters(found) if found else []
        return {
            "outcome": "error",
            "kind": refusal.kind,
            "server": server[:200],
            "tool": tool[:200],
            "message": refusal.message,
            "parameters": takes,
        }


def _of_server(message: str, server: str) -> str:
    """Whoever reads it is told beside it whose call it was."""
    return message.replace(f"MCP server {server} ", "the server ", 1)
