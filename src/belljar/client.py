"""A running belljar server as Python code uses it: the sessions of `api.py`, over MCP.

A cell is never waited for in one long call: it is started, and then asked after until it has ended, so no time limit
on the way can lose its result. Knows the tools of the `interpreter` surface; imports nothing of the engine.
"""

import contextlib
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client import ClientRequestContext, Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    BlobResourceContents,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    InputRequiredResult,
    InputResponses,
    RequestParamsMeta,
    TextContent,
)
from pydantic import ValidationError

from belljar.answers import values_of
from belljar.errors import (
    BelljarError,
    EngineError,
    InvalidArgument,
    InvalidPath,
    SessionNotFound,
    Unauthorized,
    named_error,
)
from belljar.handles import Asker, Askers, OnInput, OutputStream, SessionHandle, accepted, as_list
from belljar.models import ExecutionResult, FileReference, OutputEvent, Rewinding, SessionFork

if TYPE_CHECKING:
    from belljar.environments.packages import InstallOutcome

FIRST_WAIT_S = 2.0
NEXT_WAIT_S = 20.0
LOOK_AGAIN_S = 0.25
CLEAR_TIMEOUT_S = 5.0
# More events in one answer than this: there are more already, so the next look need not wait.
_BACKLOG = 100
_REFUSAL = frozenset({"success", "error", "hint"})
# A server that makes its environment for the first session is silent for minutes.
_TIMEOUT = httpx2.Timeout(30, read=600)
START_HINT = "Start one with: belljar serve --http 127.0.0.1:8000"

Fields = dict[str, Any]
Target = str | StdioServerParameters | Transport | MCPServer[Any]


@asynccontextmanager
async def connect(server: Target, *, api_key: str | None = None) -> AsyncGenerator["RemoteServer"]:
    """Connect to a server by the URL of its `/mcp`, or by anything else that an MCP client connects to."""
    failure: Exception | None = None
    async with _open_client(server, api_key) as client:
        try:
            yield RemoteServer(client)
        except Exception as error:  # noqa: BLE001 — raised below: the client's task groups would wrap it in groups
            failure = error
    if failure is not None:
        raise failure


@asynccontextmanager
async def _open_client(server: Target, api_key: str | None) -> AsyncGenerator[Client]:
    async with contextlib.AsyncExitStack() as stack:
        target = server
        if isinstance(server, str):
            if not server.startswith(("http://", "https://")):
                raise InvalidArgument(f"{server!r} is not a URL", hint="Use one like http://127.0.0.1:8000/mcp")
            http = await stack.enter_async_context(_HttpClient(headers=_credentials(api_key), timeout=_TIMEOUT))
            # The server limits its answers; the limit here, 1 MiB unless told otherwise, would lose them.
            target = streamable_http_client(server, http_client=http, max_sse_event_size=None)
        # Files change, so nothing is cached; a callback must be there for the server to pass questions on.
        client = Client(target, cache=None, elicitation_callback=_decline)
        try:
            await stack.enter_async_context(client)
        except Exception as error:
            raise _unopened(server, error) from error
        yield client


def _credentials(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class RemoteServer:
    """A connection to a server; made by `connect`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @asynccontextmanager
    async def open_session(self, environment: str = "") -> AsyncGenerator[SessionHandle]:
        """A session on the server, cleared when the block ends."""
        fields = await self.call("new_session", {"environment": environment})
        family: list[RemoteSession] = []
        handle = RemoteSession(self, str(fields["session_id"]), family)
        try:
            yield handle
        finally:
            # A server that is out of reach ends the sessions by itself when nothing has used them for a while.
            with anyio.move_on_after(CLEAR_TIMEOUT_S, shield=True):
                for member in [*family]:
                    with contextlib.suppress(BelljarError):
                        await member.aclose()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Fields:
        """The fields of a tool's answer; a refusal is raised."""
        answer = await self.send(tool, arguments)
        if isinstance(answer, InputRequiredResult):
            raise EngineError(f"the server asked a question in answer to {tool}")
        return _fields(answer)

    async def send(
        self,
        tool: str,
        arguments: dict[str, Any],
        question: InputRequiredResult | None = None,
        answers: InputResponses | None = None,
        *,
        wants_events: bool = False,
    ) -> CallToolResult | InputRequiredResult:
        """One call, or its continuation with the answers to a question."""
        meta: Fields = {"belljar/structured": "always", **({"belljar/events": True} if wants_events else {})}
        with _mapped_errors():
            return await self._client.session.call_tool(
                tool,
                arguments,
                meta=cast("RequestParamsMeta", meta),
                input_responses=answers,
                request_state=question.request_state if question else None,
                allow_input_required=True,
            )

    async def read(self, uri: str) -> bytes:
        """What stands behind a resource's URI."""
        with _mapped_errors():
            answer = await self._client.read_resource(uri)
        content = answer.contents[0]
        return b64decode(content.blob) if isinstance(content, BlobResourceContents) else content.text.encode()


class RemoteSession:
    """See `SessionHandle`."""

    def __init__(
        self, server: RemoteServer, session_id: str, family: "list[RemoteSession]", forked: SessionFork | None = None
    ) -> None:
        self._server = server
        self._id = session_id
        self._forked = forked
        self._askers = Askers()
        self._family = family
        """All that end with one block: the session it opened and the forks of it."""
        family.append(self)

    @property
    def id(self) -> str:
        """See `SessionHandle`."""
        return self._id

    # Cells

    async def execute(
        self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None
    ) -> ExecutionResult:
        """See `SessionHandle`."""
        # A question leads back to the call it came in answer to; asking after an execution can be repeated.
        first_wait_s = FIRST_WAIT_S if on_input is None else 0
        with self._askers.of_cell(on_input) as asker:
            result = _result(await self._follow("execute_code", self._cell(code, timeout_s, first_wait_s), asker))
            while result.status == "running":
                again = {"execution_id": result.execution_id, "wait_s": NEXT_WAIT_S}
                result = _result(await self._follow("get_execution", again, asker))
        return accepted(result)

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None) -> OutputStream:
        """See `SessionHandle`."""
        return OutputStream(self._events(code, timeout_s, on_input))

    async def _events(
        self, code: str, timeout_s: float | None, on_input: OnInput | None
    ) -> AsyncGenerator[OutputEvent | ExecutionResult]:
        with self._askers.of_cell(on_input) as asker:
            answer = await self._follow("execute_code", self._cell(code, timeout_s, 0), asker, wants_events=True)
            seen = 0
            while True:
                events = [OutputEvent.model_validate(event) for event in answer.pop("events", [])]
                result = accepted(_result(answer))
                for event in events:
                    seen = event.sequence
                    yield event
                if result.status != "running" and not events:
                    break
                wait_s = 0 if len(events) > _BACKLOG else LOOK_AGAIN_S
                again = {"execution_id": result.execution_id, "since": seen, "wait_s": wait_s}
                answer = await self._follow("get_execution", again, asker, wants_events=True)
            # Asked once more from the start: an answer with `since` leaves out the output before it.
            yield _result(await self._follow("get_execution", {"execution_id": result.execution_id}, asker))

    def _cell(self, code: str, timeout_s: float | None, wait_s: float) -> dict[str, Any]:
        limit = {} if timeout_s is None else {"timeout_s": timeout_s}
        return {"code": code, "session_id": self._id, "wait_s": wait_s, **limit}

    async def _follow(
        self, tool: str, arguments: dict[str, Any], asker: Asker, *, wants_events: bool = False
    ) -> Fields:
        """Call, and answer the questions that come instead of an answer."""
        send = partial(self._server.send, tool, arguments, wants_events=wants_events)
        answer = await send()
        while isinstance(answer, InputRequiredResult):
            try:
                text = await asker.ask(_prompt(answer))
            except Exception:
                # The cell must not wait for somebody who will not come.
                await send(answer, _answers(answer, None))
                raise
            answer = await send(answer, _answers(answer, text))
        return _fields(answer)

    async def interrupt(self) -> list[str]:
        """See `SessionHandle`."""
        answer = await self._server.call("interrupt_execution", {"session_id": self._id})
        self._askers.take_back()
        return [str(execution_id) for execution_id in answer["interrupted"]]

    # Files

    async def upload(self, name: str, content: bytes | str) -> FileReference:
        """See `SessionHandle`."""
        form = {"text": content} if isinstance(content, str) else {"base64": b64encode(content).decode()}
        answer = await self._server.call("upload_file", {"session_id": self._id, "name": name, **form})
        return FileReference.model_validate(answer)

    async def download(self, name: str) -> bytes:
        """See `SessionHandle`."""
        try:
            return await self._server.read(f"kernel://{self._id}/{quote(name)}")
        except InvalidArgument as error:
            raise InvalidPath(
                f"the path {name[:120]!r} leaves the session folder", hint="Use a relative path"
            ) from error

    async def files(self) -> list[FileReference]:
        """See `SessionHandle`."""
        answer = await self._server.call("list_session_files", {"session_id": self._id})
        return [FileReference.model_validate(file) for file in answer["files"]]

    async def display(self, uri: str) -> bytes:
        """See `SessionHandle`."""
        return await self._server.read(uri)

    # Packages

    async def install(self, packages: Sequence[str]) -> "list[InstallOutcome]":
        """See `SessionHandle`."""
        from belljar.environments.packages import InstallOutcome

        arguments = {"session_id": self._id, "packages": as_list(packages)}
        answer = await self._server.call("install_dependencies", arguments)
        return [InstallOutcome(**outcome) for outcome in answer["packages"]]

    # Other states

    @property
    def forked(self) -> SessionFork | None:
        """See `SessionHandle`."""
        return self._forked

    async def fork(self, *, at: str = "", reseed: bool = False) -> SessionHandle:
        """See `SessionHandle`."""
        answer = await self._server.call("fork_session", {"session_id": self._id, "at": at, "reseed": reseed})
        forked = SessionFork.model_validate(answer)
        return RemoteSession(self._server, forked.session_id, self._family, forked)

    async def rewind(self, to: str | int) -> Rewinding:
        """See `SessionHandle`."""
        return Rewinding.model_validate(await self._server.call("rewind_session", {"session_id": self._id, "to": to}))

    async def aclose(self) -> None:
        """See `SessionHandle`."""
        with contextlib.suppress(SessionNotFound):
            await self._server.call("clear_session", {"session_id": self._id})
        if self in self._family:
            self._family.remove(self)


# Answers and errors


def _result(fields: Fields) -> ExecutionResult:
    return ExecutionResult.model_validate({name: value for name, value in fields.items() if name != "events"})


def _fields(answer: CallToolResult) -> Fields:
    """The structured content of an answer; a call that was refused raises what it was told."""
    fields = answer.structured_content
    if isinstance(fields, dict) and not _REFUSAL.issuperset(cast("Fields", fields)):
        return cast("Fields", fields)
    if isinstance(fields, dict):
        told = cast("Fields", fields)
        raise named_error(str(told.get("error")), str(told.get("hint") or ""))
    text = "\n".join(block.text for block in answer.content if isinstance(block, TextContent))
    if " validation error" in text:
        raise InvalidArgument(text)
    raise named_error(text.removeprefix("Error: "))


def _prompt(question: InputRequiredResult) -> str:
    requests = (question.input_requests or {}).values()
    return "\n".join(request.params.message for request in requests if isinstance(request, ElicitRequest))


def _answers(question: InputRequiredResult, text: str | None) -> InputResponses:
    return {key: _response(request, text) for key, request in (question.input_requests or {}).items()}


def _response(request: object, text: str | None) -> ElicitResult:
    params = request.params if isinstance(request, ElicitRequest) else None
    schema = params.requested_schema if isinstance(params, ElicitRequestFormParams) else {}
    values = values_of(schema, text)
    return ElicitResult(action="decline") if values is None else ElicitResult(action="accept", content=values)


async def _decline(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    """Questions are answered in `_follow`; one that comes outside a call of ours has nobody to answer it."""
    return ElicitResult(action="decline")


@contextlib.contextmanager
def _mapped_errors() -> Generator[None]:
    try:
        yield
    except MCPError as error:
        raise _told(error) from error
    except ValidationError as error:
        raise EngineError(f"the server's answer has not the form of MCP: {error.errors()[0]['msg']}") from error


def _told(error: MCPError) -> BelljarError:
    """An error of the SDK as ours; the server puts the code of its own in front of the message."""
    data: object = error.data
    hint = str(cast("Fields", data).get("hint", "")) if isinstance(data, dict) else ""
    told = named_error(error.message, hint)
    is_refusal = error.code == INVALID_PARAMS and type(told) is EngineError
    return InvalidArgument(error.message, hint=hint) if is_refusal else told


class _HttpClient(httpx2.AsyncClient):
    """Turns a failure on the way into an answer, because one exception ends the SDK's whole connection."""

    async def send(self, request: httpx2.Request, *args: Any, **kwargs: Any) -> httpx2.Response:
        place = request.url.copy_with(query=None, username=None, password=None)
        try:
            response = await super().send(request, *args, **kwargs)
        except httpx2.TransportError as error:
            reason = str(error) or type(error).__name__
            return _refused(request, f"no answer from the server at {place}: {reason}", START_HINT)
        if response.status_code in (401, 403):
            await response.aclose()
            refusal = f"{Unauthorized.code}: the server at {place} answered {response.status_code}"
            return _refused(request, refusal, "Pass one of its keys as api_key")
        return response


def _refused(request: httpx2.Request, message: str, hint: str) -> httpx2.Response:
    error = {"code": INTERNAL_ERROR, "message": message, "data": {"hint": hint}}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)


def _unopened(server: Target, error: BaseException) -> BelljarError:
    """Why a connection could not be opened, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    told = _told(error) if isinstance(error, MCPError) else EngineError(str(error) or type(error).__name__)
    if told.hint:
        return told
    place = server if isinstance(server, str) else type(server).__name__
    return EngineError(f"no MCP connection to {place}: {told.message}", hint="Give the URL of a belljar server's /mcp")
