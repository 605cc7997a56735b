"""The HTTP transport: MCP servers at their paths, the check of the bind address, the Origin/Host guard, and uvicorn.

Every path but `/health`, `/health/startup`, `/ready` and the OAuth metadata is behind the guard and, where credentials
are set up, asks for them; only `/`, which says where the MCP endpoint is, asks for none. The setting `metrics` decides
who may read `/metrics`.
Knows nothing of tools or sessions, nor how callers are authenticated: that is `auth/`.
"""

import asyncio
import contextlib
import ipaddress
import logging
import re
import signal
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from types import FrameType
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import anyio
import uvicorn
from mcp.server import MCPServer
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp

from belljar.errors import SettingsError
from belljar.http.auth import AuthConfig, build_auth, check_oauth, is_loopback
from belljar.http.connections import ACCEPTED_AT_ONCE, IDLE_S, CallerShares, ConnectionLimiter, connection_limit
from belljar.http.forwarded import ProxyNotice, knows_callers
from belljar.http.health import (
    CountedRefusals,
    HostCheckMiddleware,
    LocalOnly,
    Operations,
    SpeakerRefusal,
    exact,
    health,
    signpost,
)
from belljar.http.jsonrpc import most_request_bytes
from belljar.http.resumable_streams import SessionManager
from belljar.http.tls import tls_context
from belljar.products import HttpParts
from belljar.settings import Settings, variable

_LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
_HOST: Final = re.compile(r"(\[[0-9a-z:.%_-]+\]|[^][\s:/@,*]+)(?P<port>:[0-9]+)?")
_ORIGIN: Final = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST.pattern}")
_DEFAULT_HOST: Final = "127.0.0.1"
_GRACE_S: Final = 3
_CANCEL_S: Final = 2


def parse_bind(bind: str) -> tuple[str, int]:
    """Split HOST:PORT; an empty host means 127.0.0.1, port 0 any free port, and an IPv6 address stands in brackets."""
    host, colon, port = bind.strip().rpartition(":")
    hint = "Write HOST:PORT, like 127.0.0.1:8000, [::1]:8000 or :8000"
    if not colon or not (port.isascii() and port.isdigit()):
        raise SettingsError(f"{bind!r} has no port", hint=hint)
    if int(port) > 65535:
        raise SettingsError(f"Port {port} of {bind!r} is above 65535", hint=hint)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise SettingsError(f"{bind!r} is ambiguous: an IPv6 address stands in brackets", hint=hint)
    if any(character in "[]/@*," or character.isspace() for character in host):
        raise SettingsError(f"{host!r} of {bind!r} is not a host", hint=hint)
    return host or _DEFAULT_HOST, int(port)


def check_bind(settings: Settings) -> None:
    """Raise SettingsError if other machines could reach us without credentials, our own names are not known, or TLS
    cannot be spoken as the settings want it.
    """
    check_oauth(settings)
    if not settings.http:
        return
    host, _ = parse_bind(settings.http)
    has_credentials = bool(settings.api_keys or settings.oauth_issuer)
    if not is_loopback(host) and not has_credentials and not settings.trust_network:
        raise SettingsError(
            f"{settings.http} can be reached from other machines and no credentials are set up",
            hint=f"Make a key with `belljar key` and set {variable('api_keys')}, or set {variable('oauth_issuer')} "
            f"and {variable('oauth_audience')}, or bind to {_DEFAULT_HOST}",
        )
    transport_security(settings)
    tls_context(settings)


def transport_security(settings: Settings) -> TransportSecuritySettings:
    """Return the names we answer to and the origins that browsers may call us from; off only with `trust_network`."""
    host, _ = parse_bind(settings.http or f"{_DEFAULT_HOST}:0")
    is_wildcard = _is_wildcard(host)
    if settings.trust_network and not settings.allowed_hosts:
        # The guard is against pages in a browser of this network, which are not let through to here.
        return TransportSecuritySettings(enable_dns_rebinding_protection=False)
    if is_wildcard and not (settings.allowed_hosts or settings.public_url):
        raise SettingsError(
            f"{settings.http} listens on every address and no host names are allowed",
            hint=f"Set {variable('allowed_hosts')} to each name or address that clients put in their URL, separated "
            f"by commas, like {socket.gethostname()},203.0.113.7",
        )
    # A wildcard address is not allowed as a name, because browsers can be sent to http://0.0.0.0.
    own = [] if is_wildcard else [_in_url(host)]
    loopback = _LOOPBACK_HOSTS if is_loopback(host) else ()
    public = [urlsplit(settings.public_url).netloc] if settings.public_url else []
    allowed = (*loopback, *own, *public, *settings.allowed_hosts)
    names = [pattern for name in allowed for pattern in _host_patterns(name)]
    own_origins = [f"{scheme}://{name}" for scheme in ("https", "http") for name in names]
    return TransportSecuritySettings(
        allowed_hosts=names, allowed_origins=[*own_origins, *map(_origin_pattern, settings.allowed_origins)]
    )


def told_address(settings: Settings, url: str) -> str:
    """Return the address that people are told of a server that listens at `url`.

    A wildcard is none: it leads nowhere from another machine, and requests that name it are refused. Then it is the
    first name that is allowed, at the port that we listen at: which one a container's engine publishes is not known.
    """
    if settings.public_url:
        return settings.public_url
    parts = urlsplit(url)
    if not _is_wildcard(parts.hostname or ""):
        return url
    name = next(iter(settings.allowed_hosts), "localhost")
    found = _HOST.fullmatch(name)
    return f"{parts.scheme}://{name}" if found and found["port"] else f"{parts.scheme}://{name}:{parts.port}"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_patterns(name: str) -> list[str]:
    """Return the Host headers that one name allows: with any port, unless the name has a port."""
    host = _HOST.fullmatch(name.lower())
    if host is None:
        raise SettingsError(
            f"{variable('allowed_hosts')} has {name!r}, which is not a host",
            hint="List names or addresses as they stand in URLs, like belljar.example.com or [2001:db8::7]:8000",
        )
    return [host[0]] if host["port"] else [host[0], f"{host[0]}:*"]


def _origin_pattern(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin.lower()):
        raise SettingsError(
            f"{variable('allowed_origins')} has {origin!r}, which is not an origin",
            hint="List origins as browsers send them, like https://app.example.com",
        )
    return origin.lower()


class Placement(Protocol):
    """What finds the server that a request is for, where a machine has several."""

    mark: str
    """What the ids of this server's MCP sessions begin with."""

    def wrap(self, path: str, app: ASGIApp, manager: SessionManager | None = None) -> ASGIApp:
        """Return the app at a path with a router before it."""
        ...

    def bound(self) -> AbstractAsyncContextManager[None]:
        """Take the address at which other machines ask, or raise SettingsError."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Answer the other servers until the block ends."""
        ...


def build_app(
    servers: Mapping[str, MCPServer[Any]],
    settings: Settings,
    *,
    lifespan: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    operations: Operations | None = None,
    parts: HttpParts | None = None,
    with_own_auth: Mapping[str, ASGIApp] | None = None,
    placement: Placement | None = None,
    endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]] | None = None,
) -> Starlette:
    """Return one app with each server at its path, the operators' endpoints, and `lifespan` open around all of them.

    What a product puts there, `parts`, is behind the same guards as the servers. The apps of `with_own_auth` ask for
    credentials themselves, as the console does; they are behind the check of Host and Origin only.

    The `endpoints` of plugins are behind the same guards too, and take the place of nothing that is there.

    `placement` is behind the guards, before servers and products: it passes on what is for another server.

    Routes that a server declares itself (`custom_route`) are left out, because they would ask for no credentials.
    """
    auth = build_auth(settings)
    security = transport_security(settings)
    # What another server passes on was checked at its door, where other names may be allowed than at ours.
    inner = TransportSecuritySettings(enable_dns_rebinding_protection=False) if placement else security
    managers = {
        id(server): _session_manager(server, settings, inner, placement.mark if placement else "")
        for server in servers.values()
    }
    routes = [Route("/health", health, methods=["GET"])]
    if operations is not None:
        routes.append(Route("/ready", operations.ready, methods=["GET"]))
        routes.append(Route("/health/startup", operations.startup, methods=["GET"]))
        if settings.metrics != "off":
            routes.append(Route("/metrics", _guarded_metrics(operations, settings, auth), methods=["GET"]))
    # Each caller may have half of the connections. Without credentials all are one caller, which may have all of them.
    shares = CallerShares(connection_limit(settings.max_connections) // 2)
    for path, server in servers.items():
        endpoint: ASGIApp = StreamableHTTPASGIApp(managers[id(server)])
        endpoint = parts.wrap_server(path, endpoint) if parts is not None else endpoint
        if placement is not None:
            endpoint = HostCheckMiddleware(placement.wrap(path, endpoint, managers[id(server)]), security)
        endpoint = shares.limit(endpoint) if auth else endpoint
        routes.append(Route(path, CountedRefusals(auth.require_credentials(endpoint) if auth else endpoint)))
    if auth:
        routes.extend(auth.metadata_routes())
    first = signpost(servers, asks_for_credentials=auth is not None, has_data_plane=parts is not None)
    checked = HostCheckMiddleware(request_response(first), transport_security(settings))
    routes.append(Route("/", CountedRefusals(checked), methods=["GET"]))
    for path, unplaced in (with_own_auth or {}).items():
        app = placement.wrap(path, unplaced) if placement is not None else unplaced
        routes.append(exact(Route(path, CountedRefusals(HostCheckMiddleware(app, transport_security(settings))))))
    for path, answer_request in (endpoints or {}).items():
        answer = request_response(answer_request)
        checked = auth.require_credentials(shares.limit(answer)) if auth else answer
        routes.append(exact(Route(path, CountedRefusals(HostCheckMiddleware(checked, transport_security(settings))))))
    if parts is not None:
        data_plane = placement.wrap("/{path:path}", parts.data_plane) if placement is not None else parts.data_plane
        checked = auth.require_credentials(shares.limit(data_plane)) if auth else data_plane
        checked = parts.wrap_refusals(HostCheckMiddleware(checked, transport_security(settings)))
        routes.append(Route("/{path:path}", CountedRefusals(checked)))

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(lifespan())
            if placement is not None:
                await stack.enter_async_context(placement.bound())
            for manager in managers.values():
                await stack.enter_async_context(manager.run())
            if placement is not None:
                await stack.enter_async_context(placement.serving())
            yield

    notices = [] if knows_callers(settings) else [Middleware(ProxyNotice)]
    return Starlette(routes=routes, lifespan=running, middleware=[Middleware(SpeakerRefusal), *notices])


def _session_manager(
    server: MCPServer[Any], settings: Settings, security: TransportSecuritySettings, mark: str
) -> SessionManager:
    # The SDK has its session manager, and with it the inner server, only once it has made an app. Ours has several
    # servers, so the SDK's app is dropped.
    # `json_response` and `stateless` stay off: they break progress and cancellation.
    server.streamable_http_app()
    return SessionManager(
        mark,
        app=server.session_manager.app,
        max_request_body_size=most_request_bytes(settings),
        security_settings=security,
    )


def _guarded_metrics(operations: Operations, settings: Settings, auth: AuthConfig | None) -> ASGIApp:
    app: ASGIApp = request_response(operations.metrics)
    if settings.metrics == "local":
        app = LocalOnly(auth.require_credentials(app) if auth else app)
    return CountedRefusals(HostCheckMiddleware(app, transport_security(settings)))


async def serve_http(
    app: Starlette,
    host: str,
    port: int,
    *,
    on_ready: Callable[[str], object],
    log_level: str = "INFO",
    max_connections: int = 256,
    tls: ssl.SSLContext | None = None,
    shares_port: bool = False,
    before_exit: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, SIGHUP or cancellation; `on_ready` gets the URL once connections are accepted.

    With `shares_port`, other servers may listen there as well, and Linux spreads connections over all of them.
    After a signal it serves on until `before_exit` has returned, or until a second signal.
    Answers under way have a few seconds to end and are then cut off, so that an open stream cannot delay the end.
    """
    with await open_listener(host, port, shares_port=shares_port) as listener:
        url = f"{'https' if tls else 'http'}://{_in_url(host)}:{listener.getsockname()[1]}"
        connections = ConnectionLimiter(connection_limit(max_connections), tls=tls)
        config = uvicorn.Config(
            app,
            http=connections.protocol,  # pyright: ignore[reportArgumentType]  # called, and nothing else
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            log_level=log_level.lower(),
            # Access log lines hold whole URLs, and queries may hold what must not be logged.
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            # The lifespan is opened below, because uvicorn would log an error of ours as a traceback and exit.
            lifespan="off",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        async with app.router.lifespan_context(app), connections.watch():
            await _serve_until_stopped(_Server(config, lambda: on_ready(url), before_exit), listener)


async def open_listener(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Return a socket that listens there, or raise SettingsError."""
    try:
        addresses = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # "localhost" may have addresses of both families; more clients try 127.0.0.1 only than ::1 only.
        family, _, _, _, address = min(addresses, key=lambda found: found[0] != socket.AF_INET)
        is_dual = family == socket.AF_INET6 and _is_wildcard(host) and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address[:2],
            family=family,
            backlog=ACCEPTED_AT_ONCE,
            reuse_port=shares_port,
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {_in_url(host)}:{port}: {error.strerror or error}",
            hint="Choose another address or port; port 0 takes any that is free",
        ) from error
    # Accepted connections inherit TCP_NODELAY. asyncio sets it only where the socket's protocol number is known, which
    # it is not for such a listener; without it, headers and body came 40 ms apart.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


async def _serve_until_stopped(server: "_Server", listener: socket.socket) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        # Let uvicorn finish by itself: cancelled midway, it would leave its connections open.
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await serving
        raise


class _Server(uvicorn.Server):
    """A uvicorn server that calls back when it is ready, and that returns after a signal instead of dying of it."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], object],
        before_exit: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._before_exit = before_exit
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Task[None] | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)
        errors = logging.getLogger("uvicorn.error")
        errors.addFilter(_is_no_cancellation)
        try:
            await super().shutdown(sockets)
            await _end(self.server_state.tasks)
        finally:
            errors.removeFilter(_is_no_cancellation)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # The handler is a bound method on purpose: sse-starlette finds `should_exit` through it and ends its streams.
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup has it
            numbers.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._before_exit is not None and self._signals == 1:
            self._loop.call_soon_threadsafe(self._leave, self._before_exit)
            return
        self.force_exit = self.should_exit
        self.should_exit = True

    def _leave(self, before_exit: Callable[[], Awaitable[None]]) -> None:
        self._leaving = self._loop.create_task(self._leave_in_order(before_exit))

    async def _leave_in_order(self, before_exit: Callable[[], Awaitable[None]]) -> None:
        try:
            await before_exit()
        finally:
            self.should_exit = True


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel the requests that uvicorn gave up on and wait for them, so that they end before the lifespan does.

    At best uvicorn has cancelled them; it never waits for them.
    """
    for task in tasks:
        # A second cancellation would interrupt the clean-up that the first one began.
        if not task.cancelling():
            task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_S)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
