"""What a server answers to the other servers of its machine, over a socket that only their user can open.

They have checked the caller, and say in a header who it is, which TCP refuses. What they pass on is answered by the
same apps that clients reach, behind the router: a request may be passed on again, but not in circles.
"""

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from mcp.server.auth.middleware.auth_context import AuthContextMiddleware, get_access_token
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken, principal_components
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar.fleet.relay import Headers
from belljar.http.auth.principals import WITHHELD, current_principal
from belljar.http.health import exact
from belljar.http.server_socket import open_socket
from belljar.journal.run_records import RunRecords
from belljar.mcp.execution_wait import passed_on
from belljar.runtime import Runtime
from belljar.servers import CALLER_HEADER, HOPS_HEADER, SCHEME_HEADER
from belljar.sessions.identified import IdentifierRecords

CALLER: Final = CALLER_HEADER.lower().encode()
SCHEME: Final = SCHEME_HEADER.lower().encode()
HOPS: Final = HOPS_HEADER.lower().encode()
_ID_CHARS: Final = 200


class _Caller(BaseModel, extra="forbid"):
    """A caller whose credentials another server has checked."""

    client_id: str
    issuer: str | None = None
    subject: str | None = None
    scopes: list[str] = []


def caller_headers() -> Headers:
    """Return the header that tells another server who is calling; empty for `local`, whose credentials nobody asks."""
    token = get_access_token()
    if token is None:
        return [(CALLER, b"")]
    client_id, issuer, subject = principal_components(token)
    told = _Caller(client_id=client_id, issuer=issuer, subject=subject, scopes=token.scopes)
    return [(CALLER, quote(told.model_dump_json(), safe="").encode())]


def hops_of(scope: Scope) -> int:
    """Return how many servers have passed a request on."""
    return next((int(value) for name, value in scope["headers"] if name == HOPS and value.isdigit()), 0)


class InnerApp:
    """The app on the socket: `apps` by their paths, for callers that another server names."""

    def __init__(self, runtime: Runtime, tag: str, apps: Mapping[str, ASGIApp]) -> None:
        self._runtime = runtime
        self._tag = tag
        own = [Route("/fleet/about", self._about), Route("/fleet/has", self._has), Route("/fleet/sessions", self._list)]
        own.append(Route("/fleet/cancel/{name}", self._cancel))
        self._app = AuthContextMiddleware(
            Starlette(routes=[*own, *(exact(Route(path, app)) for path, app in apps.items())])
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the caller whom it names."""
        if scope["type"] != "http":
            return
        if scope.get("state", {}).get("peer_uid") not in (None, 0, os.geteuid()):
            await Response(status_code=403)(scope, receive, send)
            return
        said = [value for name, value in scope["headers"] if name == CALLER]
        if (SCHEME, b"https") in scope["headers"]:
            scope["scheme"] = "https"
        try:
            caller = _Caller.model_validate_json(unquote(said[0].decode())) if said and said[0] else None
        except (ValidationError, ValueError):
            await Response(status_code=400)(scope, receive, send)
            return
        if caller is not None:
            token = AccessToken(
                token=WITHHELD,
                client_id=caller.client_id,
                subject=caller.subject,
                scopes=caller.scopes,
                claims={"iss": caller.issuer} if caller.issuer is not None else None,
            )
            scope["user"] = AuthenticatedUser(token)
        await self._app(scope, receive, send)

    async def _about(self, _: Request) -> Response:
        return JSONResponse({"tag": self._tag, "state": "ready", **room_of(self._runtime)})

    async def _has(self, request: Request) -> Response:
        return JSONResponse(has(self._runtime, current_principal(), **request.query_params))

    async def _cancel(self, request: Request) -> Response:
        if (stop := passed_on.get(request.path_params["name"])) is not None:
            stop()
        return JSONResponse(stop is not None)

    async def _list(self, _: Request) -> Response:
        sessions, principal = self._runtime.sessions, current_principal()
        infos = [session.info() for session in sessions.of(principal)] + sessions.asleep(principal)
        return JSONResponse([info.model_dump(mode="json") for info in infos])


def room_of(runtime: Runtime) -> dict[str, int]:
    """Return how many sessions this server has, and how many more it may have."""
    count = len(runtime.sessions.all())
    return {"sessions": count, "room": max(0, runtime.settings.max_sessions - count)}


def has(runtime: Runtime, principal: str, **named: str) -> bool:
    """Return whether this server has what is named: an `id`, a `name` or a `key` of this principal's."""
    sessions, journal = runtime.sessions, runtime.sessions.journal
    wanted = named.get("id", "")
    if wanted and wanted.isascii() and len(wanted) <= _ID_CHARS:
        is_session = sessions.find_open(wanted) is not None or sessions.records.find(wanted) is not None
        is_known = is_session or journal.find(wanted) is not None or RunRecords(journal, "").find(wanted) is not None
        return is_known or _is_running(runtime, wanted)
    if name := named.get("name"):
        return IdentifierRecords(journal).find(principal, name) is not None
    if key := named.get("key"):
        return journal.find_key(principal, key) is not None
    return False


def _is_running(runtime: Runtime, execution_id: str) -> bool:
    return any(session.queue.find(execution_id) is not None for session in runtime.sessions.all())


@asynccontextmanager
async def open_inner_app(runtime: Runtime, path: Path, tag: str, apps: Mapping[str, ASGIApp]) -> AsyncGenerator[None]:
    """Answer the other servers on the socket at this path, until the block ends."""
    app = InnerApp(runtime, tag, apps)
    async with open_socket(path, lambda: app, most=runtime.settings.max_connections):
        yield
