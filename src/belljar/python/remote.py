"""Connects to a server, over HTTP with a key or over anything else that an MCP client connects to.

Knows nothing of what sessions do.
"""

import contextlib
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client import ClientRequestContext, Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from mcp.types import INTERNAL_ERROR, ElicitRequestParams, ElicitResult

from belljar.engine.remote import RemoteEngine
from belljar.errors import BelljarError, EngineError, InvalidArgument, Unauthorized
from belljar.python.mcp_engine import McpEngine, as_belljar_error
from belljar.python.session_handle import SessionOpener


class RemoteServer(SessionOpener):
    """A connection to a server; made by `connect`."""


# A server that makes its environment for the first session does not answer for minutes.
_TIMEOUT = httpx2.Timeout(30, read=600)
START_HINT = "Start one with: belljar serve --http 127.0.0.1:8000"

Target = str | StdioServerParameters | Transport | MCPServer[Any]


@asynccontextmanager
async def connect(server: Target, *, api_key: str | None = None) -> AsyncGenerator[RemoteServer]:
    """Connect to a server by the URL of its `/mcp`, or by anything else that an MCP client connects to."""
    failure: Exception | None = None
    async with _open_client(server, api_key) as client:
        try:
            yield RemoteServer(McpEngine(client, _api(server, api_key)))
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
            # The server limits its answers. The SDK's own limit, 1 MiB by default, would lose larger ones.
            target = streamable_http_client(server, http_client=http, max_sse_event_size=None)
        # Nothing is cached, because files change. Without a callback the server would not pass questions on.
        client = Client(target, cache=None, elicitation_callback=_decline)
        try:
            await stack.enter_async_context(client)
        except Exception as error:
            raise _unopened(server, error) from error
        yield client


def _api(server: Target, api_key: str | None) -> RemoteEngine | None:
    """Return the HTTP API beside a server's `/mcp`. It takes keys only: whoever has none is asked to sign in."""
    if not isinstance(server, str) or not api_key:
        return None
    tls = ssl.create_default_context() if server.startswith("https:") else None
    return RemoteEngine(server.rstrip("/").removesuffix("/mcp"), tls=tls, credentials=_credentials(api_key))


def _credentials(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _decline(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    """Decline a question outside a call of ours, which nobody can answer. session handles answer those of cells."""
    return ElicitResult(action="decline")


class _HttpClient(httpx2.AsyncClient):
    """Turns a failed HTTP request into an answer, because an exception would end the SDK's whole connection."""

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
    """Return an error that says in one line why a connection could not be opened."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    mapped = as_belljar_error(error) if isinstance(error, MCPError) else EngineError(str(error) or type(error).__name__)
    if mapped.hint:
        return mapped
    place = server if isinstance(server, str) else type(server).__name__
    return EngineError(
        f"no MCP connection to {place}: {mapped.message}", hint="Give the URL of a belljar server's /mcp"
    )
