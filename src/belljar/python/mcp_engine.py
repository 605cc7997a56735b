"""A connected server as an engine: the verbs that session handles need, as calls of tools and reads of resources."""

import contextlib
import itertools
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast
from urllib.parse import quote

from mcp import Client, MCPError
from mcp.types import (
    INVALID_PARAMS,
    BlobResourceContents,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    InputResponses,
    RequestParamsMeta,
    TextContent,
)
from pydantic import JsonValue, ValidationError

from belljar.engine.contract import MAX_WAIT_S, USUAL_MAP, Access, Asks, CalledEngine, Engine, MapOptions
from belljar.engine.models import (
    ClientQuestion,
    ExecutionProgress,
    FileEntryInfo,
    FileListing,
    FilePart,
    Installation,
    LiveSession,
    Piece,
    ProgressStep,
    Submitted,
)
from belljar.engine.operations import OPERATIONS
from belljar.errors import BelljarError, EngineError, InvalidArgument, InvalidPath, named_error
from belljar.models import ExecutionResult, MappedResult, OutputEvent, SessionFork, SessionInfo
from belljar.python.mapping import map_by_calls

Fields = dict[str, Any]

_REFUSAL = frozenset({"success", "error", "hint"})


def _fields_of(answer: CallToolResult) -> Fields:
    """Return the structured content of an answer; a refusal is raised as the error that it names."""
    fields = answer.structured_content
    if isinstance(fields, dict) and not _is_refusal(answer, cast("Fields", fields)):
        return cast("Fields", fields)
    if isinstance(fields, dict):
        refusal = cast("Fields", fields)
        raise named_error(str(refusal.get("error")), str(refusal.get("hint") or ""))
    text = "\n".join(block.text for block in answer.content if isinstance(block, TextContent))
    if " validation error" in text:
        raise InvalidArgument(text)
    raise named_error(text.removeprefix("Error: "))


def _is_refusal(answer: CallToolResult, fields: Fields) -> bool:
    """Return whether an answer says only why there is none; a cell that failed has a result all the same."""
    return _REFUSAL.issuperset(fields) or (answer.is_error and bool(fields.get("error")) and "status" not in fields)


@contextlib.contextmanager
def mapped_errors() -> Generator[None]:
    """Raise the SDK's errors as ours."""
    try:
        yield
    except MCPError as error:
        raise as_belljar_error(error) from error
    except ValidationError as error:
        raise EngineError(f"the server's answer has not the form of MCP: {error.errors()[0]['msg']}") from error


def as_belljar_error(error: MCPError) -> BelljarError:
    """Return an error of the SDK as ours; the server puts the code of our error in front of the message."""
    data: object = error.data
    hint = str(cast("Fields", data).get("hint", "")) if isinstance(data, dict) else ""
    named = named_error(error.message, hint)
    is_refusal = error.code == INVALID_PARAMS and type(named) is EngineError
    return InvalidArgument(error.message, hint=hint) if is_refusal else named


class McpEngine(CalledEngine):
    """An `Engine` over a connection of MCP, as far as session handles need one: its verbs are calls of tools.

    A cell is never waited for in one long call. It is started, and then its result is asked for until it has ended, so
    that no time limit between here and the server can lose the result.
    """

    def __init__(self, client: Client, api: Engine | None = None) -> None:
        self._client = client
        self._api = api
        """The server by its HTTP API, for what no tool does; None where that cannot be used."""
        self._asked: dict[str, _Asked] = {}
        """The question of each execution that waits for its answer."""
        self._answers: dict[str, tuple[_Call, _Answer]] = {}
        """What the server said when a question was answered, until it is waited for."""
        self._read: dict[str, list[OutputEvent]] = {}
        """Output that came with the answer to a wait, until it is asked for."""
        self._ids: dict[str, str] = {}
        """The ids of executions that asked before the server had told them."""

    # Cells

    async def submit(
        self,
        access: Access,
        session_id: str,
        code: str,
        *,
        timeout_s: float | None = None,
        filename: str = "",
        key: str = "",
        asks: Asks = "inbox",
        client: str = "",
        keeps_files: bool = False,
        wait_s: float = 0,
    ) -> Submitted:
        """See `Engine`."""
        given = {"timeout_s": timeout_s, "filename": filename or None, "idempotency_key": key or None}
        cell = {name: value for name, value in given.items() if value is not None}
        # The answer to a question repeats the call that raised it. `get_execution` can be repeated safely, so questions
        # should come in answer to that.
        wait_s = 0 if asks == "client" else wait_s
        call = _Call("execute_code", {"code": code, "session_id": session_id, "wait_s": wait_s, **cell})
        answer = await self._send(call)
        if isinstance(answer, InputRequiredResult):
            # A question does not say which execution asks, so that it has a name of ours until it is answered.
            execution_id = f"question-{secrets.token_hex(8)}"
            progress = self._told(execution_id, call, answer)
            return Submitted(execution_id=execution_id, session_id=session_id, progress=progress)
        result = _result_of(_fields_of(answer))
        if result.status == "rejected":
            raise named_error(result.error or "the cell was refused")
        return Submitted(execution_id=result.execution_id, session_id=session_id, progress=_progress_of(result))

    async def wait(
        self,
        access: Access,
        execution_id: str,
        *,
        since: int | None = None,
        asked: int | None = None,
        wait_s: float = MAX_WAIT_S,
    ) -> ExecutionProgress:
        """See `Engine`."""
        deadline = time.monotonic() + wait_s
        while True:
            call, answer = self._answers.pop(execution_id, (None, None))
            if call is None or answer is None:
                left_s = max(0.0, min(deadline - time.monotonic(), _NEXT_WAIT_S if since is None else _LOOK_AGAIN_S))
                news = {} if since is None else {"since": since}
                call = _Call("get_execution", {"execution_id": self._id_of(execution_id), "wait_s": left_s, **news})
                answer = await self._send(call)
            progress = self._told(execution_id, call, answer)
            has_news = progress.question is not None or progress.result is not None or since is not None
            if has_news or time.monotonic() >= deadline:
                return progress

    async def reply(
        self,
        access: Access,
        execution_id: str,
        number: int,
        action: Literal["accept", "decline", "cancel"],
        values: dict[str, JsonValue],
    ) -> None:
        """See `Engine`."""
        asked = self._asked.pop(execution_id, None)
        if asked is None or asked.number != number:
            return
        content: Any = values if action == "accept" else None
        answers: InputResponses = {
            name: ElicitResult(action=action, content=content) for name in asked.question.input_requests or {}
        }
        # The call that the question came in answer to goes on.
        self._answers[execution_id] = asked.call, await self._send(asked.call, asked.question, answers)

    async def output(
        self, access: Access, execution_id: str, since: int = 0, limit: int = 500
    ) -> tuple[list[OutputEvent], bool]:
        """See `Engine`."""
        if execution_id in self._asked:  # output that comes before a question is told before it
            return [], False
        if execution_id not in self._read:
            named = self._id_of(execution_id)
            call = _Call("get_execution", {"execution_id": named, "since": since, "wait_s": 0})
            self._told(execution_id, call, await self._send(call))
        events = [event for event in self._read.pop(execution_id, []) if event.sequence > since]
        return events, bool(events)

    async def result(self, access: Access, execution_id: str, since: int = 0) -> ExecutionResult:
        """See `Engine`."""
        return _result_of(await self._tool("get_execution", execution_id=self._id_of(execution_id)))

    async def interrupt(
        self, access: Access, session_id: str = "", *, execution_id: str = "", why: str = "", waits: bool = True
    ) -> list[str]:
        """See `Engine`."""
        named = {"execution_id": self._id_of(execution_id)} if execution_id else {"session_id": session_id}
        return [str(each) for each in (await self._tool("interrupt_execution", **named))["interrupted"]]

    async def display(self, access: Access, execution_id: str, name: str) -> bytes:
        """See `Engine`."""
        return await self._resource(f"execution://{execution_id}/displays/{name}")

    # Sessions

    async def open_session(
        self,
        access: Access,
        environment: str = "",
        reason: str = "",
        gpus: int | None = None,
        patience_s: float | None = None,
    ) -> AsyncGenerator[ProgressStep]:
        """See `Engine`."""
        asked = {} if gpus is None else {"gpus": gpus}
        fields = await self._tool("new_session", environment=environment, **asked)
        yield ProgressStep(kind="done", session=SessionInfo.model_validate(fields))

    async def live_sessions(self, access: Access, *, asleep: bool = False) -> list[LiveSession]:
        """See `Engine`."""
        found = (await self._tool("list_sessions"))["sessions"]
        return [LiveSession.model_validate({"principal": access.principal, **info}) for info in found]

    async def fork(
        self, access: Access, session_id: str, at: str | int = "", *, reseed: bool = False, count: int = 1
    ) -> SessionFork:
        """See `Engine`."""
        several = {} if count == 1 else {"count": count}  # servers of earlier versions know none
        answer = await self._tool("fork_session", session_id=session_id, at=at, reseed=reseed, **several)
        return SessionFork.model_validate(answer)

    async def map(
        self,
        access: Access,
        pieces: Sequence[Piece],
        session_id: str = "",
        options: MapOptions = USUAL_MAP,
    ) -> AsyncGenerator[MappedResult]:
        """See `Engine`."""
        if self._api is not None:
            told = self._api.map(access, pieces, session_id, options)
        else:
            told = map_by_calls(self, access, pieces, session_id, options)
        async with aclosing(told) as results:
            async for result in results:
                yield result

    # Files and packages

    async def files(
        self, access: Access, session_id: str, path: str = "", after: str = "", *, recursive: bool = False
    ) -> FileListing:
        """See `Engine`."""
        answer = await self._tool("list_session_files", session_id=session_id, after=after)
        files = [FileEntryInfo(modified_at="", **{name: file[name] for name in _OF_FILES}) for file in answer["files"]]
        return FileListing(items=files, next=answer.get("next_after"))

    async def read_part(self, access: Access, session_id: str, name: str, offset: int, length: int) -> FilePart:
        """See `Engine`. It is the whole file: a resource has no parts."""
        try:
            content = await self._resource(f"kernel://{session_id}/{quote(name)}")
        except InvalidArgument as error:
            raise InvalidPath(
                f"the path {name[:120]!r} leaves the session folder", hint="Use a relative path"
            ) from error
        return FilePart(content=content, size=len(content), version="")

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """See `Engine`."""
        await self._tool("upload_file", session_id=session_id, name=name, base64=b64encode(content).decode())

    async def install(self, access: Access, session_id: str, packages: list[str]) -> AsyncGenerator[ProgressStep]:
        """See `Engine`."""
        answer = await self._tool("install_dependencies", session_id=session_id, packages=packages)
        yield ProgressStep(kind="done", installation=Installation(packages=answer["packages"]))

    # Calls

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        """Call the tool that the table of operations names for a verb that is none of those above."""
        operation = next(one for one in OPERATIONS if one.verb == verb)
        if not operation.tool:
            raise InvalidArgument(
                f"a server that is reached by MCP alone has nothing for {verb!r}", hint="Use its HTTP API"
            )
        fields = await self._tool(operation.tool, **arguments)
        return operation.answer.model_validate(fields) if operation.answer and operation.tool_answers else None

    async def _tool(self, tool: str, **arguments: Any) -> Fields:
        """Call a tool and return the fields of its answer; a refusal is raised."""
        answer = await self._send(_Call(tool, arguments))
        if isinstance(answer, InputRequiredResult):
            raise EngineError(f"the server asked a question in answer to {tool}")
        return _fields_of(answer)

    async def _send(
        self, call: "_Call", question: InputRequiredResult | None = None, answers: InputResponses | None = None
    ) -> "_Answer":
        """Send a call, or its continuation with the answers to a question."""
        for name, value in call.arguments.items():
            _check_text(name, value)
        meta: Fields = {
            "belljar/structured": "always",
            **({"belljar/events": True} if "since" in call.arguments else {}),
        }
        with mapped_errors():
            return await self._client.session.call_tool(
                call.tool,
                call.arguments,
                meta=cast("RequestParamsMeta", meta),
                input_responses=answers,
                request_state=question.request_state if question else None,
                allow_input_required=True,
            )

    async def _resource(self, uri: str) -> bytes:
        with mapped_errors():
            answer = await self._client.read_resource(uri)
        content = answer.contents[0]
        return b64decode(content.blob) if isinstance(content, BlobResourceContents) else content.text.encode()

    def _id_of(self, execution_id: str) -> str:
        return self._ids.get(execution_id, execution_id)

    def _told(self, execution_id: str, call: "_Call", answer: "_Answer") -> ExecutionProgress:
        """Return what an answer says of an execution; keep what is asked for later: its question, its output."""
        if isinstance(answer, InputRequiredResult):
            params = next(
                (each.params for each in (answer.input_requests or {}).values() if isinstance(each, ElicitRequest)),
                None,
            )
            schema = params.requested_schema if isinstance(params, ElicitRequestFormParams) else {}
            asked = self._asked[execution_id] = _Asked(call, answer)
            message = params.message if params is not None else ""
            question = ClientQuestion(number=asked.number, message=message, fields=dict(schema))
            return ExecutionProgress(status="running", question=question)
        fields = _fields_of(answer)
        result = _result_of(fields)
        self._ids |= {execution_id: result.execution_id} if execution_id != result.execution_id else {}
        if "since" in call.arguments:
            self._read[execution_id] = [OutputEvent.model_validate(event) for event in fields.get("events", [])]
        return _progress_of(result)


_Answer = CallToolResult | InputRequiredResult
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a tool."""

    tool: str
    arguments: Fields


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, and the call that the server answered with it."""

    call: _Call
    question: InputRequiredResult
    number: int = field(default_factory=lambda: next(_numbers))


_NEXT_WAIT_S: Final = 20.0
_LOOK_AGAIN_S: Final = 0.25
_OF_FILES: Final = ("name", "size", "mime_type")


def _result_of(fields: Fields) -> ExecutionResult:
    """Return the result in the fields of an answer, without the events that came with it."""
    return ExecutionResult.model_validate({name: value for name, value in fields.items() if name != "events"})


def _progress_of(result: ExecutionResult) -> ExecutionProgress:
    if result.status == "running":
        return ExecutionProgress(status="running", sequence=result.sequence)
    return ExecutionProgress(status=result.status, sequence=result.sequence, result=result)


def _check_text(name: str, value: object) -> None:
    """Refuse text that no message can hold, because the SDK would end the whole connection over it."""
    for each in cast("list[object]", value) if isinstance(value, list) else [value]:
        try:
            if isinstance(each, str):
                each.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{name} has a lone surrogate at character {error.start}", hint="Write it as an escape"
            ) from error
