"""What a server answers to the others: to those of its machine over a socket that only their user can open, to those of
other machines at an address where nothing is answered without an assertion.

They have checked the caller, and say in a header who it is, which clients' port refuses. What they pass on is answered
by the same apps that clients reach, behind the router: a request may be passed on again, but not in circles.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
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

from belljar.fleet.assertions import ASSERTION, PROOF, ClocksApart, FleetKey, UnprovedRequest
from belljar.fleet.identity import About, about
from belljar.fleet.peers import Peers
from belljar.fleet.relay import Headers, target_of
from belljar.http.auth.principals import WITHHELD, current_principal
from belljar.http.health import exact
from belljar.http.server_socket import answering, open_socket, speaker_api
from belljar.journal.run_records import RunRecords
from belljar.mcp.execution_wait import stop_passed_on
from belljar.request_headers import CALLER_HEADER, HOPS_HEADER, PRINCIPAL_HEADER, SCHEME_HEADER
from belljar.runtime import Runtime
from belljar.sessions.identified import IdentifierRecords
from belljar.sessions.registry import Registry

CALLER: Final = CALLER_HEADER.lower().encode()
SCHEME: Final = SCHEME_HEADER.lower().encode()
HOPS: Final = HOPS_HEADER.lower().encode()
_SPEAKER: Final = PRINCIPAL_HEADER.lower().encode()
_ID_CHARS: Final = 200

if TYPE_CHECKING:
    from belljar.http.attachment_api import AttachmentApi

log = logging.getLogger(__name__)


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
    """What answers other servers: `apps` by their paths, for callers that another server names."""

    def __init__(self, runtime: Runtime, peers: Peers, apps: Mapping[str, ASGIApp], ports: list[int]) -> None:
        self._runtime = runtime
        self._peers = peers
        self._ports = ports
        own = [Route("/fleet/about", self._about), Route("/fleet/has", self._has), Route("/fleet/sessions", self._list)]
        own.append(Route("/fleet/seen", self._seen))
        own.append(Route("/fleet/cancel/{name}", self._cancel))
        own.append(Route("/fleet/settings", self._settings))
        own.append(Route("/fleet/status", self._status))
        own.append(Route("/fleet/drain", self._drain, methods=["POST"]))
        own.append(Route("/fleet/goodbye", self._goodbye, methods=["POST"]))
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
        # As the caller came, and not as the servers speak with each other.
        scope["scheme"] = "https" if (SCHEME, b"https") in scope["headers"] else "http"
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
        return Response(self.told(), media_type="application/json")

    def told(self) -> bytes:
        """Return what this server says of itself."""
        return self._own().model_dump_json().encode()

    def _own(self) -> About:
        own = self._peers.own
        state, draining = "draining" if self._peers.is_draining else "ready", self._runtime.sessions.draining
        if draining is not None and draining.is_complete:
            state = "drained"
        return about(self._runtime, own.id, state, own.digest, self._ports, self._peers.silent())

    async def _settings(self, _: Request) -> Response:
        return JSONResponse(self._peers.own.digests)

    async def _status(self, _: Request) -> Response:
        """Answer the command `belljar fleet status`."""
        return JSONResponse(self._peers.status(self._own()))

    async def _drain(self, request: Request) -> Response:
        """Drain from now on, or no more, or pass that on to the server that is meant."""
        peers, sessions = self._peers, self._runtime.sessions
        tag, is_undone = request.query_params.get("tag", peers.own.tag), "undo" in request.query_params
        if tag != peers.own.tag:
            peer = peers.ready.get(peers.id_of_tag(tag))
            target = "/fleet/drain?undo=1" if is_undone else "/fleet/drain"
            answer = await peer.ask(target, method="POST") if peer is not None else None
            if answer is None:
                return JSONResponse({"state": "unknown" if peer is None else "silent"}, status_code=404)
            return Response(answer, media_type="application/json")
        if is_undone:
            log.warning("this server takes sessions again")
            peers.is_closed = False
            sessions.end_drain()
        elif sessions.stored is not None:
            sessions.begin_drain()
        else:
            log.warning("this server drains: it takes no new sessions, and those that it has stay until they end")
            peers.is_closed = True
        return JSONResponse({"state": self._own().state})

    async def _goodbye(self, request: Request) -> Response:
        self._peers.hear_goodbye(request.query_params.get("id", ""))
        return JSONResponse(True)

    async def _has(self, request: Request) -> Response:
        return JSONResponse(has(self._runtime, current_principal(), **request.query_params))

    async def _seen(self, request: Request) -> Response:
        """Tell how a server is, as this one sees it."""
        return Response(self._peers.own_view_of(request.query_params.get("id", "")))

    async def _cancel(self, request: Request) -> Response:
        stop_passed_on(request.path_params["name"])
        return JSONResponse(True)

    async def _list(self, _: Request) -> Response:
        sessions, principal = self._runtime.sessions, current_principal()
        infos = [session.info() for session in sessions.of(principal)] + sessions.asleep(principal)
        return JSONResponse([info.model_dump(mode="json") for info in infos])


def has(runtime: Runtime, principal: str, **named: str) -> bool:
    """Return whether this server has what is named: an `id`, a `name` or a `key` of this principal's; or `live`, an
    open session.
    """
    sessions, journal = runtime.sessions, runtime.sessions.journal
    if live := named.get("live"):
        return sessions.find_open(live) is not None
    wanted = named.get("id", "")
    if wanted and wanted.isascii() and len(wanted) <= _ID_CHARS:
        record = sessions.records.find(wanted)
        is_gone = record is not None and (record.state == "gone" or _has_given_up(sessions, wanted))
        is_session = sessions.find_open(wanted) is not None or (record is not None and not is_gone)
        is_known = is_session or journal.find(wanted) is not None or RunRecords(journal, "").find(wanted) is not None
        return is_known or _is_running(runtime, wanted)
    if name := named.get("name"):
        session_id = IdentifierRecords(journal).find(principal, name)
        return session_id is not None and not _has_given_up(sessions, session_id)
    if key := named.get("key"):
        execution_id = journal.find_key(principal, key)
        execution = journal.find(execution_id) if execution_id is not None else None
        return execution_id is not None and not (execution and _has_given_up(sessions, execution.session_id))
    return False


def _has_given_up(sessions: Registry, session_id: str) -> bool:
    """Return whether a session is left to other servers: it sleeps in the store, and this one drains."""
    stored = sessions.stored if sessions.draining is not None else None
    found = stored.records.find(session_id) if stored is not None else None
    return found is not None and found.state == "asleep" and not found.is_pending


def _is_running(runtime: Runtime, execution_id: str) -> bool:
    return any(session.queue.find(execution_id) is not None for session in runtime.sessions.all())


@asynccontextmanager
async def open_inner_app(runtime: Runtime, path: Path, app: InnerApp) -> AsyncGenerator[None]:
    """Answer the other servers of this machine on the socket at this path, until the block ends."""
    async with open_socket(path, lambda: app, most=runtime.settings.max_connections):
        yield


# Other machines


class AssertedApp:
    """The app at the internal address: what an assertion says passes through, and nothing else."""

    def __init__(self, app: InnerApp, api: ASGIApp, key: FleetKey, peers: Peers) -> None:
        self._app = app
        self._api = api
        self._key = key
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of another machine's server, or refuse it without a word."""
        if scope["type"] != "http":
            return
        method, target, is_about = scope["method"].encode(), target_of(scope), scope["path"] == "/fleet/about"
        try:
            # Who asks for the first time does not know the tag yet.
            assertion = self._key.check("" if is_about else self._peers.own.tag, method, target, scope["headers"])
        except ClocksApart as error:
            await self._tell_apart(error, scope, receive, send)
            return
        except UnprovedRequest:
            await Response(status_code=403)(scope, receive, send)
            return
        if is_about:
            await self._prove(assertion, scope, receive, send)
        elif any(name == _SPEAKER for name, _ in scope["headers"]):
            await self._api(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _prove(self, assertion: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        content = self._app.told()
        headers = {PROOF.decode(): self._key.proof(assertion, content).decode()}
        await Response(content, headers=headers, media_type="application/json")(scope, receive, send)

    async def _tell_apart(self, error: ClocksApart, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell a server that has the key, but another time, why it is refused."""
        assertion, content = next(value for name, value in scope["headers"] if name == ASSERTION), str(error).encode()
        headers = {PROOF.decode(): self._key.proof(assertion, content).decode()}
        await Response(content, status_code=403, headers=headers)(scope, receive, send)


@asynccontextmanager
async def open_asserted_app(
    runtime: Runtime, listener: socket.socket, app: InnerApp, key: FleetKey, peers: Peers, tls: ssl.SSLContext | None
) -> AsyncGenerator[None]:
    """Answer the servers of other machines on this listener, until the block ends."""
    opened: list[AttachmentApi] = []

    def make() -> ASGIApp:
        return AssertedApp(app, speaker_api(runtime, opened), key, peers)

    loop = asyncio.get_running_loop()
    try:
        async with answering(make, most=runtime.settings.max_connections, tls=tls) as protocol:
            server = await loop.create_server(protocol, sock=listener)
            try:
                yield
            finally:
                server.close()
    finally:
        for attachments in opened:
            await attachments.aclose()
