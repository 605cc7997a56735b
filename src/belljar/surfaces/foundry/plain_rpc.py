"""MCP as the platform's tutorials speak it: one JSON object in, one JSON object out, and nothing kept between calls.

They use plain `curl`: no `Accept` for event streams, `initialize` without parameters, `tools/call` without any
`initialize` before it. The SDK's transport refuses all of that, so such requests are answered here, and those of MCP
clients go to the SDK. Both call the same tools.
"""

import json
import time
from typing import Any, Final, cast

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    CallToolResult,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    RequestId,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar import logs, measures, spans
from belljar.distribution import own_version
from belljar.surfaces.auth import current_principal
from belljar.surfaces.foundry.calls import length_of
from belljar.surfaces.foundry.problems import json_response
from belljar.surfaces.foundry.tools import EnvironmentNotFound, is_plain
from belljar.surfaces.jsonrpc import read_message, refusal

PROTOCOL: Final = "2025-03-26"
ENVIRONMENT_GONE: Final = -32000
LARGE_BYTES: Final = 1024 * 1024
_ALIASES: Final = {"launchPythonEnvironment": "launchShell"}
"""Names that earlier tutorials have."""
_MCP_HEADERS: Final = (b"mcp-session-id", b"mcp-protocol-version", b"last-event-id")


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
        body = await self._body(request)
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

    async def _body(self, request: Request) -> bytes | None:
        """Return the body; None if it is too long."""
        if length_of(request) > self._limit_bytes:
            return None
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self._limit_bytes:
                    return None
        except ClientDisconnect:
            return b""
        return bytes(body)

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
            with spans.request_span(message.method, name, (request.headers,)):
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
            measures.tool_calls.observe(time.perf_counter() - began_at, name, outcome)


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
