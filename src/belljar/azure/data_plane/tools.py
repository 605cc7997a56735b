"""The surface's MCP tools: an environment is launched, then Python and shell commands run in it.

An environment's id is an identifier of the data plane, so both reach the same sessions.

The platform's tutorials call them with plain `curl`: no `Accept` for event streams, `initialize` without parameters,
`tools/call` without any `initialize` before it. The SDK's transport refuses all of that, so such requests are answered
here, and those of MCP clients go to the SDK. Both call the same tools.
"""

import asyncio
import base64
import json
import time
from contextvars import ContextVar
from typing import Annotated, Any, Final, cast

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    CallToolResult,
    ImageContent,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    RequestId,
    TextContent,
)
from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar import logs, metrics, tracing
from belljar.azure.data_plane.calls import bounded_body
from belljar.azure.data_plane.cell_values import picture_in
from belljar.azure.data_plane.executions import Executions, Order, Report, command_cell, exec_cell
from belljar.azure.data_plane.problems import json_response
from belljar.distribution import own_version
from belljar.errors import InvalidArgument, SessionNotFound
from belljar.http.auth import current_principal
from belljar.http.jsonrpc import read_message, refusal
from belljar.mcp.content import asked_structure, media_blocks
from belljar.mcp.execution_wait import follow, stopping_when_cancelled
from belljar.mcp.resources import InterpreterResources
from belljar.mcp.tools import CHANGES, ENDS, Answer, Ctx, add_tools, refusals_as_results
from belljar.outputs.displays import fitted
from belljar.outputs.forms import PICTURES
from belljar.runtime import Runtime

TIMEOUT_S: Final = 220.0
"""What Azure gives a call."""
TEXT_PICTURE_BYTES: Final = 96 * 1024
"""The largest picture that is put into text, for callers who see nothing else."""
PLAIN_PICTURE_BYTES: Final = 4 * 1024 * 1024
MAX_ARGUMENTS: Final = 1_000
is_plain: ContextVar[bool] = ContextVar("belljar_plain_rpc", default=False)
"""Whether the caller speaks the platform's plain dialect, and so sees text alone."""

EnvironmentId = Annotated[str, Field(description="environmentId that launchShell answered with")]
PROTOCOL: Final = "2025-03-26"
ENVIRONMENT_GONE: Final = -32000
LARGE_BYTES: Final = 1024 * 1024
_ALIASES: Final = {"launchPythonEnvironment": "launchShell"}
"""Names that earlier tutorials have."""
_MCP_HEADERS: Final = (b"mcp-session-id", b"mcp-protocol-version", b"last-event-id")


class EnvironmentNotFound(SessionNotFound):
    """An environment that was never launched, or whose session is over."""

    code = "environment-not-found"


class FoundryTools:
    """The tools over one runtime."""

    def __init__(self, runtime: Runtime, executions: Executions) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._identified = runtime.identified
        self._executions = executions

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(
            server,
            (self.launchShell, CHANGES),
            (self.runPythonCodeInRemoteEnvironment, ENDS),
            (self.runShellCommandInRemoteEnvironment, ENDS),
        )
        InterpreterResources(self._runtime.sessions).register_displays(server)

    @refusals_as_results
    async def launchShell(self) -> Answer:  # noqa: N802 - the name that clients call
        """Launch an environment for Python and shell commands. Pass its environmentId to the other tools."""
        return _answer({"environmentId": self._identified.launch(current_principal())})

    @refusals_as_results
    async def runPythonCodeInRemoteEnvironment(  # noqa: N802
        self,
        ctx: Ctx,
        environmentId: EnvironmentId,  # noqa: N803
        pythonCode: Annotated[str, Field(description="Python; the last expression's value is returned")],  # noqa: N803
    ) -> Answer:
        """Run Python. Variables and files stay for later calls with the same environmentId; empty stdout is normal."""
        report = await self._run(ctx, environmentId, pythonCode)
        value = self._executions.value(report)
        fields: dict[str, Any] = {
            "stdout": report.stdout,
            "stderr": report.stderr,
            "executionResult": value,
            "status": report.status,
            "executionTimeInMilliseconds": report.milliseconds,
        }
        is_error = not report.result.success and self._settings.failures_are_errors
        if is_plain.get():
            return await _shown_as_text(fields, picture_in(value), is_error)
        return await self._shown(ctx, fields, report, is_error)

    @refusals_as_results
    async def runShellCommandInRemoteEnvironment(  # noqa: N802
        self,
        ctx: Ctx,
        environmentId: EnvironmentId,  # noqa: N803
        shellCommand: Annotated[str | None, Field(description="For a shell, like ls -l | head")] = None,  # noqa: N803
        execCommandAndArgs: Annotated[  # noqa: N803
            list[str] | None,
            Field(min_length=1, max_length=MAX_ARGUMENTS, description="Instead: a program and its arguments, unquoted"),
        ] = None,
    ) -> Answer:
        """Run a shell command. Files stay; cd and variables of the shell last for the command alone."""
        if (shellCommand is None) == (execCommandAndArgs is None):
            raise InvalidArgument("one of shellCommand and execCommandAndArgs is taken", hint="Pass exactly one")
        code = exec_cell(execCommandAndArgs) if execCommandAndArgs is not None else command_cell(shellCommand or "")
        report = await self._run(ctx, environmentId, code)
        fields = {
            "stdout": report.stdout,
            "stderr": report.stderr,
            "exitCode": report.exit_status,
            "executionTimeInMilliseconds": report.milliseconds,
        }
        # A command that ends with a status has run, whatever the status: grep finds nothing with 1.
        is_error = not report.result.success and self._settings.failures_are_errors
        return _answer(fields, is_error=is_error)

    async def _run(self, ctx: Ctx, environment_id: str, code: str) -> Report:
        principal = current_principal()
        try:
            await self._identified.reach_launched(environment_id, principal)
        except (SessionNotFound, InvalidArgument) as error:
            shown = environment_id[:128]
            hint = "Call launchShell again for a new environment, then make its variables and files again"
            raise EnvironmentNotFound(f"Environment not found: {shown}: {error.message}", hint=hint) from None
        order = Order(environment_id, code, TIMEOUT_S)
        if is_plain.get():
            return await self._executions.run(order, principal)
        execution, execution_id = await self._executions.submit(order, principal)
        if execution is not None:
            async with stopping_when_cancelled(ctx, self._settings.interrupt_on, execution.interrupt):
                while not execution.is_finished:
                    await follow(execution, ctx, 3_600)
        return await self._executions.report(execution_id, order, principal)

    async def _shown(self, ctx: Ctx, fields: dict[str, Any], report: Report, is_error: bool) -> CallToolResult:
        """Return the fields with every figure as a block and by its link.

        Their bytes are in no text and no field, because some clients show their model those in place of the picture.
        """
        result, budget = report.result, self._settings.image_budget_bytes
        reader = self._runtime.sessions.executions.display_reader(result.session_id)
        figures = [display.uri for display in result.displays if display.uri and display.mime in PICTURES]
        if not figures:
            return _answer(fields, is_error=is_error)
        blocks = await asyncio.to_thread(lambda: dict(media_blocks(result, reader, budget)))
        value = fields["executionResult"]
        if picture_in(value) is not None:
            value = {"type": "image", "format": value["format"]}
        answer = _answer({**fields, "executionResult": value, "figures": figures}, is_error=is_error)
        answer.content += [block for block in blocks.values() if isinstance(block, ImageContent)]
        if asked_structure(ctx, self._settings.structured) == "auto":
            answer.structured_content = None
        return answer


async def _shown_as_text(fields: dict[str, Any], picture: dict[str, str] | None, is_error: bool) -> CallToolResult:
    """Return the fields, and a figure as a data URL, for callers who see nothing but text and fields."""
    if picture is None:
        return _answer(fields, is_error=is_error)
    content, mime = base64.b64decode(picture["base64_data"]), f"image/{picture['format']}"
    data, text = await asyncio.to_thread(_for_text_alone, content, mime)
    answer = _answer({**fields, "executionResult": text}, is_error=is_error)
    answer.structured_content = {**fields, "executionResult": data}
    return answer


def _for_text_alone(content: bytes, mime: str) -> tuple[Any, str]:
    """Return a picture for programs, and as a data URL for whoever sees text alone; smaller where it is too large."""
    whole, small = fitted(content, mime, PLAIN_PICTURE_BYTES), fitted(content, mime, TEXT_PICTURE_BYTES)
    data: Any = None
    if whole is not None:
        form = whole[1].removeprefix("image/")
        data = {"type": "image", "format": form, "base64_data": base64.b64encode(whole[0]).decode()}
    if small is None:
        return data, f"[{mime}, {len(content):,} bytes: too large for text]"
    return data, f"data:{small[1]};base64,{base64.b64encode(small[0]).decode()}"


def _answer(fields: dict[str, Any], *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=json.dumps(fields, ensure_ascii=False))],
        structured_content=fields,
        is_error=is_error,
    )


class PlainRpc:
    """An app that answers requests of the plain dialect, and passes all others on to `app`."""

    def __init__(self, server: MCPServer[Any], app: ASGIApp, *, limit_bytes: int) -> None:
        self._server = server
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if not _is_plain(scope):
            await self._app(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        try:
            body = await bounded_body(request, request.stream(), self._limit_bytes)
        except ClientDisconnect:
            body = b""
        if body is None:
            refused = refusal(INVALID_REQUEST, f"The message has more than {self._limit_bytes:,} bytes", None)
            return _response(refused, 413)
        message = await anyio.to_thread.run_sync(read_message, body) if len(body) > LARGE_BYTES else read_message(body)
        if isinstance(message, list):
            return _response(message[0], 400) if message else Response(status_code=202)
        if isinstance(message, JSONRPCNotification) or not isinstance(message, JSONRPCRequest):
            return Response(status_code=202)
        with logs.about(principal=current_principal()):
            answer = await self._serve(request, message)
        if isinstance(answer, JSONRPCError):
            return _response(answer)
        return json_response({"jsonrpc": "2.0", "id": message.id, "result": answer})

    async def _serve(self, request: Request, message: JSONRPCRequest) -> dict[str, Any] | JSONRPCError:
        match message.method:
            case "initialize":
                return {
                    "protocolVersion": PROTOCOL,
                    "capabilities": {"tools": {"call": True, "list": True}},
                    "serverInfo": {"name": "belljar", "version": own_version()},
                    "instructions": self._server.instructions,
                }
            case "ping":
                return {}
            case "tools/list":
                tools = await self._server.list_tools()
                return {"tools": [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]}
            case "tools/call":
                return await self._call(request, message)
            case _:
                return refusal(METHOD_NOT_FOUND, f"Method not found: {message.method[:64]}", message.id)

    async def _call(self, request: Request, message: JSONRPCRequest) -> dict[str, Any] | JSONRPCError:
        params = message.params or {}
        name, arguments = params.get("name"), params.get("arguments")
        name = _ALIASES.get(name, name) if isinstance(name, str) else ""
        known = {tool.name for tool in await self._server.list_tools()}
        if name not in known:
            return refusal(INVALID_PARAMS, f"Unknown tool: {name[:64]!r}; there are {', '.join(known)}", message.id)
        if arguments is not None and not isinstance(arguments, dict):
            return refusal(INVALID_PARAMS, '"arguments" has to be an object', message.id)
        began_at, outcome = time.perf_counter(), "error"
        token = is_plain.set(True)
        try:
            with tracing.request_span(message.method, name, (request.headers,)):
                answer = await self._server.call_tool(name, cast("dict[str, Any]", arguments or {}))
            if not isinstance(answer, CallToolResult):
                return refusal(
                    INTERNAL_ERROR, "The tool asks a question, which this dialect cannot pass on", message.id
                )
            outcome = "error" if answer.is_error else "ok"
            return _result(answer, message.id)
        except ToolError as error:
            return {"content": [{"type": "text", "text": str(error)}], "isError": True}
        finally:
            is_plain.reset(token)
            metrics.tool_calls.observe(time.perf_counter() - began_at, name, outcome)


def _result(answer: CallToolResult, request_id: RequestId) -> dict[str, Any] | JSONRPCError:
    structured: dict[str, Any] = answer.structured_content or {}
    error = structured.get("error")
    if answer.is_error and isinstance(error, str) and error.startswith(f"{EnvironmentNotFound.code}: "):
        # Clients of this dialect find out by an error that they have to launch another environment.
        message = error.partition(": ")[2]
        return refusal(ENVIRONMENT_GONE, f"{message}. {structured.get('hint', '')}", request_id)
    # Protocol 2025-03-26 has no types of results.
    return answer.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"result_type"})


def _is_plain(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if any(name in _MCP_HEADERS for name, _ in headers):
        return False
    accept = b",".join(value for name, value in headers if name == b"accept")
    return b"text/event-stream" not in accept.lower()


def _response(message: JSONRPCMessage, status: int = 200) -> Response:
    return json_response(json.loads(message.model_dump_json(by_alias=True, exclude_unset=True)), status)
