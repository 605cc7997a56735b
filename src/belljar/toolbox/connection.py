"""One open connection to an MCP server, in a task of its own: connect, list the tools, call them, notice changes.

A caller may be cancelled or slow; the connection goes on for the others. It ends when its server ends or when it is
closed. It is never opened again: `upstreams.py` makes a new one.
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.lowlevel
import httpx2
from mcp import Client, InputRequiredRoundsExceededError
from mcp.client import ClientRequestContext
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    METHOD_NOT_FOUND,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolResult,
    ErrorData,
    Implementation,
    InputRequest,
    InputRequiredResult,
    InputResponses,
    ToolListChangedNotification,
)
from pydantic import ValidationError

from belljar.distribution import own_version
from belljar.errors import UpstreamFailed
from belljar.questions.models import Ask
from belljar.settings import MEBIBYTE, Settings
from belljar.toolbox import answers
from belljar.toolbox.answers import SESSION_GONE, code, detail, error_message, is_on_the_way
from belljar.toolbox.base import MODERN, JsonObject, OnProgress, ServerCatalogue, ToolAnswer, ToolDefinition
from belljar.toolbox.direct_calls import DirectCalls, RawResponse
from belljar.toolbox.http_server import NOWHERE, open_address
from belljar.toolbox.list_repair import RepairedStream, repair_content
from belljar.toolbox.message_memory import MessageMemory
from belljar.toolbox.server_config import Connectable, StdioServer
from belljar.toolbox.server_process import ProbeResult, open_process
from belljar.toolbox.upstream_questions import CallInFlight, CallsInFlight

# Results of calls, for both versions of the protocol and both transports. Over pipes a call goes through `DirectCalls`,
# and goes on with the SDK only if its server needs more input. Over HTTP the SDK makes the whole call.

_KIND: Final = "resultType"
_NEEDS_INPUT: Final = "input_required"
_STATE_ONLY_S: Final = 0.05


class CallResults:
    """Makes the calls of one connection and reads their results."""

    def __init__(self, client: Client, server: str, direct_calls: DirectCalls | None, *, is_legacy: bool) -> None:
        self._client = client
        self._server = server
        self._direct_calls = direct_calls
        self._is_legacy = is_legacy

    async def answer(self, tool: str, arguments: JsonObject, call: CallInFlight) -> ToolAnswer:
        """Call a tool and return its answer. Raises what the SDK raises."""
        if self._direct_calls is None:
            result = await self._client.call_tool(tool, arguments, progress_callback=call.progress)
            return answers.read_answer(self._server, result)
        raw = await self._direct_calls.call(tool, arguments, call.on_progress)
        try:
            return await self._read(raw, tool, arguments, call)
        except BaseException:
            raw.release()
            raise

    async def _read(self, raw: RawResponse, tool: str, arguments: JsonObject, call: CallInFlight) -> ToolAnswer:
        kind = None if self._is_legacy else raw.fields.get(_KIND)
        if kind == _NEEDS_INPUT:
            needed = InputRequiredResult.model_validate(raw.fields, by_name=False)
            raw.release()
            return answers.read_answer(self._server, await self._with_input(needed, tool, arguments, call))
        if kind not in (None, "complete"):
            raise ValueError("a kind of result that nobody knows")
        if _KIND in raw.fields:
            del raw.fields[_KIND]
        result = _result(raw.fields)
        if not result.is_error:
            await self._client.session.validate_tool_result(tool, result)
        return answers.read_answer(self._server, result, raw.release)

    async def _with_input(
        self, needed: InputRequiredResult, tool: str, arguments: JsonObject, call: CallInFlight
    ) -> CallToolResult:
        """Ask for everything that the server needs at once, and call again; the SDK asks for whatever it needs then."""
        responses: InputResponses = {}
        refused: list[ErrorData] = []

        async def put(key: str, request: InputRequest) -> None:
            session, meta = self._client.session, request.params.meta if request.params else None
            context = ClientRequestContext(session=session, request_id=key, meta=meta)
            response = await session.dispatch_input_request(context, request)
            if isinstance(response, ErrorData):
                refused.append(response)
                tasks.cancel_scope.cancel()
            else:
                responses[key] = response

        async with anyio.create_task_group() as tasks:
            for key, request in (needed.input_requests or {}).items():
                tasks.start_soon(put, key, request)
        if refused:
            raise MCPError.from_error_data(refused[0])
        if not needed.input_requests:
            await anyio.sleep(_STATE_ONLY_S)  # the server only wants the call to be repeated
        return await self._client.call_tool(
            tool,
            arguments,
            progress_callback=call.progress,
            input_responses=responses or None,
            request_state=needed.request_state,
        )


def _result(fields: JsonObject) -> CallToolResult:
    """Return the result in the fields; a block that cannot be read is replaced, and the others stay."""
    try:
        return CallToolResult.model_validate(fields, by_name=False)
    except ValidationError:
        repair_content(fields)
        return CallToolResult.model_validate(fields, by_name=False)


log = logging.getLogger(__name__)

UNKNOWN_EFFECT: Final = "Whether the call took effect is not known"
MAX_TOOLS: Final = 2_000
MAX_PAGES: Final = 200
MAX_CHARACTERS: Final = 16_000_000
"""The most characters of one server's tools with their schemas and descriptions, which are in the host's memory and in
the tree's files."""
_DRAIN_S: Final = 2.0
_ROUNDS: Final = 200
"""How often a server may want more input in one call, even if it only wants time."""
_RELISTEN_S: Final = 5.0
_MEET_S: Final = 15.0
"""How long a process that has read our first request may stay silent; an older server may have hung because of it."""
_PART_S: Final = 10.0
"""How long closing a connection may take, because a server need not answer when we disconnect."""
# What the SDK raises for a message that breaks the protocol, and for an invalid address.
_FOREIGN: Final = (MCPError, ValidationError, RuntimeError, ValueError, OSError, httpx2.HTTPError, anyio.EndOfStream)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """The time and memory that a server may take."""

    start_s: float = 60.0
    wait_s: float = 30.0
    """How long a call or an import waits for its server to be connected."""
    silence_s: float = 300.0
    message_bytes: int = 64 * MEBIBYTE
    memory_bytes: int = 256 * MEBIBYTE
    """The most memory of large answers that are not yet passed on, of all servers together."""
    questions: int = 20
    """The most questions (an approval, a form, an address to open) in one call."""


def upstream_limits(settings: Settings) -> UpstreamLimits:
    """Return the limits that the settings have for the servers of the toolbox."""
    return UpstreamLimits(
        start_s=settings.upstream_start_s,
        wait_s=settings.upstream_wait_s,
        silence_s=settings.upstream_silence_s,
        message_bytes=settings.upstream_message_mb * MEBIBYTE,
        memory_bytes=settings.upstream_memory_mb * MEBIBYTE,
        questions=settings.upstream_questions,
    )


class SessionGone(Exception):
    """The server has forgotten the session and did nothing, so it is safe to connect and call again."""


class UpstreamConnection:
    """One connection to a server; `open` connects it, once."""

    def __init__(
        self, server: Connectable, limits: UpstreamLimits, memory: MessageMemory, on_tools_changed: Callable[[], None]
    ) -> None:
        self.catalogue = ServerCatalogue(server.name)
        self.is_legacy = False
        self._server = server
        self._limits = limits
        self._memory = memory
        self._direct_calls = DirectCalls()
        self._probe_result = ProbeResult()
        self._is_met = False
        self._is_modern_only = False
        self._results: CallResults | None = None
        self._on_tools_changed = on_tools_changed
        self._calls = CallsInFlight(server.name)
        self._client: Client | None = None
        self._how_ended = ""
        self._detail = ""
        self._has_ended = asyncio.Event()
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether calls can be made."""
        return self._client is not None and not self._has_ended.is_set()

    @property
    def doing(self) -> str:
        """Return what the connection waits for while it connects."""
        return "it has not listed its tools yet" if self._is_met else "it has not answered yet"

    @property
    def may_be_older(self) -> bool:
        """Return whether a failed server may have failed because of the newer protocol's first request."""
        is_process = isinstance(self._server, StdioServer)
        return is_process and not self._is_met and not self._is_modern_only and self._probe_result.has_read()

    @property
    def is_surely_legacy(self) -> bool:
        """Return whether the server speaks only the older protocol, and was not merely slow to answer in the newer."""
        return self.is_legacy and not self._probe_result.has_answered_late

    async def open(self, *, is_legacy: bool) -> None:
        """Connect and read the catalogue. Raises UpstreamFailed after cleaning up."""
        mode = "legacy" if is_legacy else "auto"
        # In an empty context, because the connection must not inherit the ids and questions of the first call.
        self._task = asyncio.get_running_loop().create_task(self._live(mode), context=contextvars.Context())
        try:
            await self._ready_within(self._limits.start_s, gives_up_early=not is_legacy)
        except TimeoutError:
            doing = self.doing
            await self.aclose()
            raise self._failure(f"was not ready within {self._limits.start_s:g} s: {doing}") from None
        except BaseException:
            await self.aclose()
            raise

    async def _ready_within(self, most_s: float, *, gives_up_early: bool) -> None:
        """Wait until ready, or raise TimeoutError.

        `gives_up_early` shortens the wait for a server that has read the newer protocol's first request and is silent.
        """
        early_s = min(_MEET_S, most_s / 2)
        if gives_up_early:
            await asyncio.wait([self._is_ready], timeout=early_s)
            if not self._is_ready.done() and self.may_be_older:
                raise TimeoutError
        with anyio.fail_after(most_s - early_s if gives_up_early else most_s):
            await asyncio.shield(self._is_ready)

    async def call(self, tool: str, arguments: JsonObject, on_progress: OnProgress, ask: Ask) -> ToolAnswer:
        """Call a tool. Raises UpstreamFailed if the call got lost, SessionGone if it is safe to send it again."""
        if self._results is None or not self.is_open:
            raise SessionGone
        limits = self._limits
        call = CallInFlight(ask, on_progress, limits.silence_s, limits.questions)
        answer: ToolAnswer | None = None
        try:
            async with self._calls.enter(call):
                call.start_clock()
                with call.scope:
                    answer = await self._send(self._results, tool, arguments, call)
        except BaseException:
            if answer is not None:
                answer.drop()
            raise
        if answer is not None and not call.has_asked_too_much:
            return answer
        if call.has_asked_too_much:
            raise self._failure(
                f"asked more than {limits.questions} questions; the call was given up", hint=UNKNOWN_EFFECT
            )
        raise self._failure(f"said nothing for {limits.silence_s:g} s; it was told to stop", hint=UNKNOWN_EFFECT)

    async def _send(self, results: CallResults, tool: str, arguments: JsonObject, call: CallInFlight) -> ToolAnswer:
        try:
            return await results.answer(tool, arguments, call)
        except MCPError as error:
            if error.code == SESSION_GONE:
                raise SessionGone from error
            if is_on_the_way(error):
                if error.code == CONNECTION_CLOSED and isinstance(self._server, StdioServer):
                    with anyio.move_on_after(_DRAIN_S):  # the pipe may be closed before the process has ended
                        await self._has_ended.wait()
                what = f"it {self._how_ended}" if self._how_ended else error_message(error)
                raise self._failure(f"gave no answer: {what}", hint=UNKNOWN_EFFECT) from error
            return answers.refusal(error_message(error))
        except InputRequiredRoundsExceededError as error:
            raise self._failure(f"wanted more input {error.max_rounds} times", hint=UNKNOWN_EFFECT) from error
        except _FOREIGN as error:
            # Do not repeat the error's text, because it may quote the answer, which only the broker can redact.
            is_schema = isinstance(error, RuntimeError)
            what = "with something else than its output schema says" if is_schema else "against the protocol"
            raise self._failure(f"answered {what}", hint="The call was made; what it gave is lost") from error

    async def read_catalogue(self) -> ServerCatalogue:
        """Read all pages of the server's tools again, and return the catalogue."""
        if self._client is None or not self.is_open:
            raise self._failure(self._how_ended or "is not connected")
        try:
            with anyio.fail_after(self._limits.start_s):
                tools = await self._list_tools(self._client)
        except TimeoutError:
            raise self._failure(f"did not list its tools within {self._limits.start_s:g} s") from None
        except _FOREIGN as error:
            raise self._failure(f"cannot list its tools: {error_message(error)}") from error
        self.catalogue = ServerCatalogue(self._server.name, tools, answers.instructions(self._client.instructions))
        return self.catalogue

    async def aclose(self) -> None:
        """Close the connection and end the server's process, if it is one; may be called twice."""
        self._scope.cancel()
        if self._task is None:
            return
        with anyio.CancelScope(shield=True):
            _, unfinished = await asyncio.wait([self._task], timeout=_PART_S)
            if unfinished:
                log.warning("MCP server %s keeps its connection from being closed; it is left", self._server.name)
                self._task.cancel()
                return
        if self._is_ready.done() and not self._is_ready.cancelled():
            self._is_ready.exception()  # retrieve it, so that asyncio does not log it

    async def _live(self, mode: str) -> None:
        """Run the connection from connecting to its end."""
        try:
            with self._scope:
                async with Client(
                    self._open_streams(),
                    mode=mode,
                    cache=None,
                    input_required_max_rounds=_ROUNDS,
                    client_info=Implementation(name="belljar", version=own_version()),
                    elicitation_callback=self._calls.on_elicitation,
                    message_handler=self._on_message,
                ) as client:
                    await self._serve(client)
        except UpstreamFailed as error:
            self._is_ready.set_exception(error)
        except (BaseExceptionGroup, *_FOREIGN) as error:
            message = NOWHERE if self._is_nowhere(error) else error_message(error)
            self._is_modern_only = code(error) == UNSUPPORTED_PROTOCOL_VERSION
            # Messages that belljar wrote are sentences that begin with "it"; others are the server's or the SDK's.
            self._fail(
                message[3:] if message.startswith("it ") else f"cannot be connected to: {message}", detail(error)
            )
        finally:
            self._client = None
            self._has_ended.set()
            if not self._is_ready.done():
                self._is_ready.set_exception(self._failure(self._how_ended or "was given up while it started"))

    def _is_nowhere(self, error: BaseException) -> bool:
        """Return whether there is no MCP server at the address, because even the handshake gave HTTP 404."""
        # The SDK's text for HTTP 404.
        is_unknown = code(error) == METHOD_NOT_FOUND and error_message(error) == "Not Found"
        return is_unknown and not isinstance(self._server, StdioServer)

    async def _serve(self, client: Client) -> None:
        self._client = client
        self._is_met = True
        self.is_legacy = client.protocol_version < MODERN
        direct_calls = self._direct_calls if isinstance(self._server, StdioServer) else None
        self._results = CallResults(client, self._server.name, direct_calls, is_legacy=self.is_legacy)
        await self.read_catalogue()
        self._is_ready.set_result(None)
        async with anyio.create_task_group() as tasks:
            if not self.is_legacy and _tells_changes(client):
                tasks.start_soon(self._listen, client)
            await self._has_ended.wait()
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def _open_streams(self) -> AsyncGenerator[Any]:
        """Yield the streams that the SDK's client wants; incoming messages are repaired."""
        async with self._transport() as (from_server, to_server):
            yield RepairedStream(from_server, self._server.name, self._version), to_server

    def _version(self) -> str:
        return self._client.protocol_version if self._client else ""

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        if isinstance(self._server, StdioServer):
            return open_process(
                self._server,
                limit_bytes=self._limits.message_bytes,
                memory=self._memory,
                direct_calls=self._direct_calls,
                probe_result=self._probe_result,
                on_end=self._on_end,
            )
        return open_address(self._server, limit_bytes=self._limits.message_bytes, memory=self._memory)

    async def _list_tools(self, client: Client) -> tuple[ToolDefinition, ...]:
        found: dict[str, ToolDefinition] = {}
        cursor: str | None = None
        seen: set[str] = set()
        left = MAX_CHARACTERS
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools[:MAX_TOOLS]:
                known = answers.definition(self._server.name, tool)
                left -= answers.weight(known) if known is not None else 0
                if known is not None and len(found) < MAX_TOOLS and left >= 0:
                    found.setdefault(known.name, known)
                await anyio.lowlevel.checkpoint()
            cursor = page.next_cursor
            if cursor is None and left >= 0:
                return tuple(found.values())
            if cursor is None or cursor in seen or len(found) >= MAX_TOOLS or left < 0:
                break
            seen.add(cursor)
        log.warning("MCP server %s lists more tools than it may: the first %d are taken", self._server.name, len(found))
        return tuple(found.values())

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes of the tools, as the newer protocol requires."""
        while True:
            try:
                async with client.listen(tools_list_changed=True) as events:
                    async for _ in events:
                        self._on_tools_changed()
            except SubscriptionLost:
                pass
            except (MCPError, RuntimeError, TimeoutError) as error:
                log.debug("MCP server %s does not tell of changes: %s", self._server.name, error_message(error))
                return
            # Assume a change, because none was reported while the subscription was lost.
            await anyio.sleep(_RELISTEN_S)
            self._on_tools_changed()

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._on_tools_changed()

    def _on_end(self, how: str, detail: str) -> None:
        self._fail(how, detail)
        self._has_ended.set()
        if not self._is_ready.done():
            self._scope.cancel()

    def _fail(self, how: str, detail: str) -> None:
        if not self._how_ended:
            self._how_ended, self._detail = how, detail

    def _failure(self, how: str, *, hint: str = "") -> UpstreamFailed:
        return UpstreamFailed(f"MCP server {self._server.name} {how}", hint=hint, detail=self._detail)


def _tells_changes(client: Client) -> bool:
    tools = client.server_capabilities.tools
    return tools is not None and tools.list_changed is not False
