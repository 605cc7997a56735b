"""Decides which server a request is for, by what it names, and passes it on if that is another one.

Ids begin with the letters of the server that made them; whoever has older ones, names that callers chose and keys of
calls without a session, is asked for. What names nothing is answered here, and so is what nobody knows: the answer to
another caller's id is that to an unknown one, at whichever server it comes from.
"""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qs, urlsplit

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar import metrics
from belljar.distribution import own_version
from belljar.egress.rules import reserve_for_fleet
from belljar.engine.contract import Engine
from belljar.errors import BelljarError, Busy, SettingsError
from belljar.fleet.addresses import Addresses, check_fleet, numbers_of
from belljar.fleet.assertions import ASSERTION, FleetKey
from belljar.fleet.identity import room_of, settings_digests, whole_digest
from belljar.fleet.inner_app import (
    CALLER,
    HOPS,
    SCHEME,
    InnerApp,
    caller_headers,
    has,
    hops_of,
    open_asserted_app,
    open_inner_app,
)
from belljar.fleet.legacy_calls import LegacyCalls
from belljar.fleet.losses import Losses, ToolHold
from belljar.fleet.messages import answer_to, data_of, event_of
from belljar.fleet.peer import Own, Peer, mark_of
from belljar.fleet.peers import Peers
from belljar.fleet.relay import PeerAway, passed_on, relay, session_lost
from belljar.http.app import open_listener, parse_bind
from belljar.http.auth import current_principal
from belljar.http.jsonrpc import most_request_bytes
from belljar.http.resumable_streams import LARGE_BYTES, SessionManager
from belljar.http.tls import tls_context
from belljar.journal.journal import TAG_LETTERS, has_id_form
from belljar.json_values import has_too_many_values
from belljar.mcp.tools import NO_SESSION
from belljar.models import SessionInfo
from belljar.runtime import Runtime
from belljar.servers import FLEET_SOCKET, WORKERS, directory_id

_INFOS: Final = TypeAdapter(list[SessionInfo])
MOST_HOPS: Final = 3
_NAMES_S: Final = 5.0
"""How often the addresses of machines are looked up that have names."""
_OF_BROWSERS: Final = ("/console", "/api/v1/", "/frames/")
_COOKIE: Final = re.compile(r"(?:__Host-)?belljar-[0-9]+=([^;]+)")
_ENTER: Final = "/console/enter"
_SESSION_HEADER: Final = b"mcp-session-id"
_NEW_SESSION: Final = ("execute_code", "new_session", "install_dependencies", "run_workflow")
_OF_CURRENT_SESSION: Final = ("exec", "list_files", "download_file", "new_session")
_AZURE_MCP: Final = "azure-mcp"
_EXECUTOR: Final = "executor"


@dataclass(frozen=True, slots=True)
class Named:
    """What a request names: one of these, or nothing."""

    id: str = ""
    """Of a session, an execution, a task or a run."""
    mark: str = ""
    """Of the server that keeps in its memory what the request goes on with."""
    name: str = ""
    """That its caller chose for a session."""
    key: str = ""
    """Under which calls without a session run once."""
    is_new: bool = False
    """Whether a session is made for it."""


class Fleet:
    """This server as one of several: of its machine's, of a fleet's, or both."""

    def __init__(self, runtime: Runtime, machine: Path) -> None:
        settings, data_directory = runtime.settings, runtime.settings.data_directory
        self.mark = mark_of(runtime.name)
        self.runtime = runtime
        own = Own(machine, data_directory, runtime.name, directory_id(data_directory), runtime.sessions.journal.tag)
        self._key: FleetKey | None = None
        self._tls = tls_context(settings)

        def has_drain() -> bool:
            return runtime.sessions.draining is not None

        if check_fleet(settings):
            self._key = FleetKey(settings.fleet_key.get_secret_value())
            digests = settings_digests(settings, self._key)
            own = replace(own, version=own_version(), digests=digests, digest=whole_digest(digests, self._key))
            verifying = ssl.create_default_context()
            self.peers = Peers(own, Addresses(settings), self._key, verifying, self._draw_tag, has_drain)
        else:
            self.peers = Peers(own, has_drain=has_drain)
        self.losses = Losses(self.peers, runtime.sessions, settings.drain_s)
        if self._key is not None and runtime.sessions.stored is not None:
            hold = ToolHold(runtime.sessions.find_open, self.losses.make_sure)
            runtime.plugins.add("fleet", hold)
        self._apps: dict[str, ASGIApp] = {}
        self._listener: socket.socket | None = None
        self._socket = data_directory / "runs" / runtime.name / FLEET_SOCKET

    def _draw_tag(self) -> str:
        sessions = self.runtime.sessions
        return "" if sessions.all() else sessions.journal.draw_tag()

    def wrap(self, path: str, app: ASGIApp, manager: SessionManager | None = None) -> ASGIApp:
        """Return an app with a router before it, and let the other servers reach both at this path."""
        routed = Router(self, app, manager)
        self._apps[path] = routed
        return routed

    @asynccontextmanager
    async def bound(self) -> AsyncGenerator[None]:
        """Take the address at which other machines ask."""
        if self._key is None:
            yield
            return
        address = self.runtime.settings.fleet_address
        host, first = parse_bind(address)
        try:
            listener = await open_listener(host, first + self._number() - 1)
        except SettingsError as error:
            raise SettingsError(
                f"fleet_address is {address}, and {error.message[0].lower()}{error.message[1:]}",
                hint="Name an address of this machine, and a port that is free, as are those after it for its workers",
            ) from error
        with listener as self._listener:
            yield

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Answer the other servers, and know how they are, until the block ends."""
        sessions, settings = self.runtime.sessions, self.runtime.settings
        async with AsyncExitStack() as stack:
            first = parse_bind(settings.fleet_address)[1] if self._key is not None else 0
            ports = [first + number - 1 for number in self._numbers()] if first else []
            app = InnerApp(self.runtime, self.peers, self._apps, ports)
            await stack.enter_async_context(open_inner_app(self.runtime, self._socket, app))
            if self._key is not None and self._listener is not None:
                inner = open_asserted_app(self.runtime, self._listener, app, self._key, self.peers, self._tls)
                await stack.enter_async_context(inner)
            await stack.enter_async_context(self.peers.watching())
            if self._key is not None:
                await stack.enter_async_context(self._keeping_sessions_away())
                if sessions.stored is not None:
                    await stack.enter_async_context(_running(self.losses.watch()))
            sessions.list_others = self._list_others
            self.runtime.parts["fleet"] = self
            try:
                yield
            finally:
                sessions.list_others = None
                if self._key is not None and sessions.stored is not None:
                    await self.peers.say_goodbye()

    @asynccontextmanager
    async def _keeping_sessions_away(self) -> AsyncGenerator[None]:
        """Refuse sessions the way to the machines of the fleet, until the block ends."""

        async def keep() -> None:
            known: tuple[str, ...] = ()
            found: dict[str, list[str]] = {}
            while True:
                urls = tuple(self.peers.hosts)
                if urls != known or any(urlsplit(url).hostname not in numbers for url, numbers in found.items()):
                    found = await numbers_of(urls)
                    reserve_for_fleet((one, urlsplit(url).port or 0) for url in urls for one in found[url])
                    known = urls
                await asyncio.sleep(_NAMES_S)

        try:
            async with _running(keep()):
                yield
        finally:
            reserve_for_fleet([])

    def _number(self) -> int:
        """Return the number of this server among those of its machine."""
        folder = self.runtime.settings.data_directory
        return 1 if folder == self.peers.own.machine else int(folder.name)

    def _numbers(self) -> list[int]:
        """Return the numbers of all servers of this machine."""
        folders = self.peers.own.machine.glob(f"{WORKERS}/*")
        return sorted({1, self._number(), *(int(one.name) for one in folders if one.name.isdecimal())})

    def gauges(self) -> list[tuple[str, str, dict[str, float], str]]:
        """Return what `/metrics` shows of the fleet now: name, meaning, values and the name of their label."""
        if self._key is None:
            return []
        wanted = {"": float(self.peers.wanted())}
        states = {state: float(count) for state, count in self.peers.states().items()}
        return [
            ("belljar_fleet_wanted", "New sessions of the last minute for which no machine had room", wanted, ""),
            ("belljar_fleet_servers", "Servers of other machines, by how they are", states, "state"),
        ]

    async def _list_others(self) -> list[SessionInfo]:
        """Return the caller's sessions at the other servers."""
        peers, caller = [*self.peers.ready.values()], caller_headers()
        answers = await asyncio.gather(*(peer.ask("/fleet/sessions", caller) for peer in peers))
        found: list[SessionInfo] = []
        for answer in answers:
            with suppress(ValidationError):
                found += _INFOS.validate_json(answer or b"[]")
        return found

    async def engines(self) -> dict[str, Engine]:
        """Return the engines of all servers, by the names of their folders; this one is the first."""
        own: dict[str, Engine] = {self.runtime.name: self.runtime.late_engine.get()}
        return own | await self.peers.engines()


class Router:
    """The app before another one: it passes on what is for another server."""

    def __init__(self, fleet: Fleet, app: ASGIApp, manager: SessionManager | None) -> None:
        self._fleet = fleet
        self._peers = fleet.peers
        self._app = app
        self._manager = manager
        self._legacy = LegacyCalls(fleet.runtime.settings.interrupt_on)
        self._has_azure = _AZURE_MCP in fleet.runtime.settings.surfaces
        self._has_executor = _EXECUTOR in fleet.runtime.settings.surfaces
        self._limit_bytes = most_request_bytes(fleet.runtime.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request here or at the server that it is for."""
        if hops_of(scope) > MOST_HOPS:
            await _refuse(Busy("this request goes round in circles between servers"), None, scope, receive, send)
        elif scope["path"].startswith(_OF_BROWSERS):
            await self._route_browser(scope, receive, send)
        elif scope["path"].rstrip("/").endswith("/mcp") or scope["path"].startswith("/mcp/"):
            await self._route_mcp(scope, receive, send)
        else:
            names = parse_qs(scope["query_string"].decode("latin-1")).get("identifier", [])
            await self._route(Named(name=names[0]) if names else Named(), None, None, scope, receive, send)

    async def _route_browser(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a browser where it is signed in, and one that signs in where its link was made."""
        cookies = b"; ".join(value for name, value in scope["headers"] if name == b"cookie").decode("latin-1")
        found, body = _COOKIE.findall(cookies), None
        if not found and scope["method"] == "POST" and scope["path"] == _ENTER:
            body, receive = await _read(receive, LARGE_BYTES)
            found = parse_qs((body or b"").decode("latin-1")).get("token", [])
        mark = next((each for each in found if self._peers.by_mark(each) is not None), "")
        await self._route(Named(mark=mark), None, body, scope, receive, send)

    async def _route_mcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = next((value.decode("latin-1") for name, value in scope["headers"] if name == _SESSION_HEADER), "")
        if session and not session.startswith(self._fleet.mark) and self._peers.by_mark(session) is None:
            await self._peers.look()  # its server may have started a moment ago
        is_theirs = bool(session) and self._peers.by_mark(session) is not None
        if scope["method"] != "POST":
            await self._route(Named(mark=session if is_theirs else ""), None, None, scope, receive, send)
            return
        body, receive = await _read(receive, self._limit_bytes)
        message = await _parsed(body) if body is not None else None
        if is_theirs:
            await self._route(Named(mark=session), message, body, scope, receive, send)
        elif message is None:
            await self._app(scope, receive, send)
        elif session and await self._legacy.take(session, message):
            await JSONResponse(None, status_code=202)(scope, receive, send)
        else:
            await self._route(self._named(message, session), message, body, scope, receive, send)

    async def _route(
        self,
        named: Named,
        message: dict[str, Any] | None,
        body: bytes | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer a request that names this, here or elsewhere."""
        try:
            while (peer := await self._place(named, scope)) is not None:
                try:
                    await self._pass_on(peer, message, body, scope, receive, send)
                except PeerAway:  # nothing was sent
                    await self._peers.look()
                else:
                    return
        except BelljarError as error:
            await _refuse(error, message, scope, receive, send)
            return
        await self._app(scope, receive, send)

    # Where

    async def _place(self, named: Named, scope: Scope) -> Peer | None:
        """Return the server that a request is for; None for this one."""
        principal, peers = current_principal(), self._peers
        if named.mark:
            return peers.by_mark(named.mark)
        if named.is_new:
            if hops_of(scope):
                return None
            if not room_of(self._fleet.runtime)["room"]:
                await peers.look_for_room()
            return peers.freest(**room_of(self._fleet.runtime))
        if named.id:
            server = await self._holder_of_id(principal, named.id, is_passed_on=hops_of(scope) > 0)
        elif named.name:
            server = await self._holder_of_name(principal, name=named.name)
        elif named.key:
            server = await self._holder_of_name(principal, key=named.key)
        else:
            return None
        return None if server in ("", peers.own.id) else await peers.awaited(server)

    async def _holder_of_id(self, principal: str, id_: str, *, is_passed_on: bool) -> str:
        """Return the id of the server that has a session, an execution or a run; empty where none has.

        `is_passed_on` says that another server sent it here, which may know of it what is not known here.
        """
        peers = self._peers
        server = peers.id_of_tag(id_[:TAG_LETTERS]) if has_id_form(id_) else ""
        if server == peers.own.id and not peers.has_hosts:
            return server
        sessions, losses = self._fleet.runtime.sessions, self._fleet.losses
        if server and not peers.gives_up(server) and server != peers.own.id:
            may_be_here = peers.has_hosts or sessions.stored is not None
            if not is_passed_on and not (may_be_here and has(self._fleet.runtime, principal, id=id_)):
                return server
        # Ids of earlier versions begin anyhow, and with a store what was here may be open elsewhere.
        if (session := sessions.find_open(id_)) is not None and await losses.make_sure(session):
            return peers.own.id
        if sessions.stored is not None and sessions.records.find(id_) is None and has(self._fleet.runtime, "", id=id_):
            return peers.own.id  # an execution, or a run
        await losses.check_asleep(id_)
        if sessions.stored is not None and (at := await peers.live_at(id_, caller_headers())):
            return at
        found = await self._holder(principal, id=id_)
        if found not in ("", peers.own.id):
            return found
        # One server remembers who was told of a loss, the same at every server.
        heir = peers.elected(id_) if not found and peers.gives_up(server) else peers.own.id
        return await losses.settle(principal, server, id=id_) if heir == peers.own.id else heir

    async def _holder_of_name(self, principal: str, **named: str) -> str:
        """Return the id of the server that has a name or a key, or that it belongs to where none has."""
        if found := await self._holder(principal, **named):
            return found
        heir = self._peers.elected(principal, *named.values())
        return await self._fleet.losses.settle(principal, **named) if heir == self._peers.own.id else heir

    async def _holder(self, principal: str, **named: str) -> str:
        if has(self._fleet.runtime, principal, **named):
            return self._peers.own.id
        return await self._peers.finder(caller_headers(), **named)

    def _named(self, message: Mapping[str, Any], session: str) -> Named:
        """Return what a message of MCP names."""
        params = _mapping(message.get("params"))
        match message.get("method"):
            case "tools/call":
                return self._named_by_call(params, session)
            case "tasks/get" | "tasks/update" | "tasks/cancel" if not session:  # 2025's protocol has none
                # That of a run has a time behind the run's id.
                return Named(id=_text(params.get("taskId")).partition("-")[0])
            case "resources/read" | "resources/subscribe" | "resources/unsubscribe":
                scheme, _, rest = _text(params.get("uri")).partition("://")
                is_ours = scheme in ("kernel", "execution", "session", "run")
                return Named(id=rest.partition("/")[0].partition("?")[0]) if is_ours else Named()
            case _:
                return Named()

    def _named_by_call(self, params: Mapping[str, Any], session: str) -> Named:
        arguments, tool = _mapping(params.get("arguments")), params.get("name")
        mark, dot, _ = _text(params.get("requestState")).partition(".")
        if dot and mark != self._fleet.mark and self._peers.by_mark(mark) is not None:
            return Named(mark=mark)
        for argument in ("session_id", "execution_id", "run_id"):
            if (text := _text(arguments.get(argument))) not in NO_SESSION:
                # A surface of Azure's takes names in place of ids.
                is_name = argument == "session_id" and self._has_azure and not has_id_form(text)
                return Named(name=text) if is_name else Named(id=text)
        if name := _text(arguments.get("environmentId")):
            return Named(name=name)
        if key := _text(arguments.get("idempotency_key")):
            return Named(key=key)
        is_azure = self._has_azure and tool in _OF_CURRENT_SESSION
        if (is_azure or self._has_executor) and not session:
            # Where the protocol has no connections, each principal has one current session, and one environment.
            return Named(key=_AZURE_MCP if is_azure else _EXECUTOR)
        return Named(is_new=tool in _NEW_SESSION and not (is_azure or self._has_executor))

    # Passing on

    async def _pass_on(
        self,
        peer: Peer,
        message: dict[str, Any] | None,
        body: bytes | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        metrics.fleet_relays.add("host" if peer.is_host else "worker")
        said = (CALLER, HOPS, SCHEME, ASSERTION)
        headers = [(name, value) for name, value in passed_on(scope) if name not in said]
        headers += [*caller_headers(), (HOPS, str(hops_of(scope) + 1).encode())]
        headers.append((SCHEME, scope["scheme"].encode()))
        if message is not None and (client := self._legacy_client(scope)) is not None:
            await self._legacy.carry(peer, client, message, headers, scope, receive, send)
        else:
            await relay(peer.connections, scope, receive, send, headers, body, last_event=_last_event(message))

    def _legacy_client(self, scope: Scope) -> dict[str, Any] | None:
        """Return what the client said of itself, if the request is of an MCP session of ours; None for others."""
        session = next((value.decode("latin-1") for name, value in scope["headers"] if name == _SESSION_HEADER), "")
        if not session or self._manager is None:
            return None
        user = scope.get("user")
        requestor = authorization_context(user) if isinstance(user, AuthenticatedUser) else None
        transport = self._manager.opened(session, requestor)
        return transport.client if transport is not None else None


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Do something beside the block, which ends it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


async def _read(receive: Receive, limit_bytes: int) -> tuple[bytes | None, Receive]:
    """Return the body of a request, and what gives it once more; None for one that is too long or not whole."""
    messages: list[Message] = []
    size = 0
    while True:
        messages.append(message := await receive())
        size += len(message.get("body", b""))
        if not message.get("more_body") or size > limit_bytes:
            break
    is_whole = message["type"] == "http.request" and not message.get("more_body")

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return (b"".join(each.get("body", b"") for each in messages) if is_whole else None), again


async def _parsed(body: bytes) -> dict[str, Any] | None:
    """Return the message in a body; None for what is none, which this server's own app refuses."""

    def parse() -> dict[str, Any] | None:
        try:
            value = None if has_too_many_values(body) else json.loads(body)
        except (ValueError, RecursionError):
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None

    return await anyio.to_thread.run_sync(parse) if len(body) > LARGE_BYTES else parse()


async def _refuse(
    error: BelljarError, message: Mapping[str, Any] | None, scope: Scope, receive: Receive, send: Send
) -> None:
    if message is not None and "id" in message:
        await JSONResponse(answer_to(message, error))(scope, receive, send)
        return
    told = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
    status = 503 if isinstance(error, Busy) else 502
    await JSONResponse(told, status_code=status, headers={"Retry-After": "2"})(scope, receive, send)


def _last_event(message: Mapping[str, Any] | None) -> bytes:
    """Return the last event of a stream that broke off, with which the call is answered."""
    if message is None or "id" not in message:
        return b""
    return event_of(data_of(answer_to(message, session_lost())))
