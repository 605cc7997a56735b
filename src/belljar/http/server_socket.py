"""The socket of a server, `runs/NAME/http.sock`: the HTTP API for the server's own user, who says for whom they ask.

The folder is closed to others (0700), and whoever can open the socket may run code in every session. So a request says
itself for whom it asks, in headers that TCP refuses; one that does not say it asks as the server's operator. What
answers is imported at the first connection, because most servers get none.
"""

import asyncio
import math
import os
import pwd
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from belljar import ipc
from belljar.errors import InvalidArgument
from belljar.request_headers import NAME_HEADER, OPERATOR_HEADER, PRINCIPAL_HEADER, SPEAKER_HEADERS, VIA_HEADER
from belljar.runtime import Runtime, open_runtime
from belljar.servers import HTTP_SOCKET
from belljar.settings import Settings

if TYPE_CHECKING:
    import ssl

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from belljar.engine.contract import Access
    from belljar.http.attachment_api import AttachmentApi

_MOST_CONNECTIONS: Final = 256
_MOST_STREAMS: Final = 200
_MOST_CHARS: Final = 1_000
_END_S: Final = 5.0


@asynccontextmanager
async def open_reachable_runtime(settings: Settings, **options: Any) -> AsyncGenerator[Runtime]:
    """Open a runtime that the commands of its user, and their console, reach; `options` as `open_runtime` has them."""
    async with open_runtime(settings, **options) as runtime, serve_socket(runtime):
        yield runtime


@asynccontextmanager
async def serve_socket(runtime: Runtime) -> AsyncGenerator[None]:
    """Answer on the socket of this server until the block ends."""
    opened: list[AttachmentApi] = []
    path = runtime.settings.data_directory / "runs" / runtime.name / HTTP_SOCKET
    try:
        # Who is attached may read on after hours, because the user who would wait for the descriptor is the same.
        async with open_socket(path, lambda: speaker_api(runtime, opened), most=_MOST_CONNECTIONS, unread_s=math.inf):
            yield
    finally:
        for attachments in opened:
            await attachments.aclose()


@asynccontextmanager
async def open_socket(
    path: Path, make: Callable[[], "ASGIApp"], *, most: int, unread_s: float | None = None
) -> AsyncGenerator[None]:
    """Answer HTTP on a socket until the block ends, with an app that is made at the first connection."""
    async with answering(make, most=most, unread_s=unread_s) as protocol, ipc.listen(path, protocol):
        yield


@asynccontextmanager
async def answering(
    make: Callable[[], "ASGIApp"], *, most: int, unread_s: float | None = None, tls: "ssl.SSLContext | None" = None
) -> AsyncGenerator[Callable[[], asyncio.BaseProtocol]]:
    """Yield what makes the protocol of each connection; at the end, connections are cut off and waited for."""
    made: list[_Answering] = []

    def protocol() -> asyncio.BaseProtocol:
        if not made:
            made.append(_Answering(make(), most, unread_s, tls))
        return made[0].protocol()

    try:
        yield protocol
    finally:
        for each in made:
            await each.aclose()


class _Answering:
    """The connections of a socket, and what answers on them."""

    def __init__(self, app: "ASGIApp", most: int, unread_s: float | None, tls: "ssl.SSLContext | None") -> None:
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        from belljar.http.connections import IDLE_S, ConnectionLimiter, connection_limit

        # Descriptors in reserve are for the health of the server, which is asked elsewhere.
        self._connections = ConnectionLimiter(connection_limit(most), reserve=0, unread_s=unread_s, tls=tls)
        self._state = ServerState()
        self._config = Config(
            app,
            http=self._connections.protocol,  # pyright: ignore[reportArgumentType]  # called, and nothing else
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=IDLE_S,
        )
        self._watching = asyncio.get_running_loop().create_task(self._connections.close_overdue())

    def protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection."""
        return self._connections.protocol(self._config, self._state, {})

    async def aclose(self) -> None:
        """Cut off what is under way, and wait for it."""
        self._watching.cancel()
        self._connections.abort_all()
        for task in self._state.tasks:
            task.cancel()
        await asyncio.wait([self._watching, *self._state.tasks], timeout=_END_S)


def speaker_api(runtime: Runtime, opened: "list[AttachmentApi]") -> "ASGIApp":
    """Return the HTTP API for whom a request names itself, and add its attachments to those that are `opened`."""
    from starlette.applications import Starlette

    from belljar.http.api import RestApi
    from belljar.http.attachment_api import AttachmentApi
    from belljar.http.event_streams import StreamShares
    from belljar.http.health import exact

    streams = StreamShares(_MOST_STREAMS)
    engine = runtime.late_engine.get()
    engine.start()
    attachments = AttachmentApi(engine, streams)
    opened.append(attachments)
    api = RestApi(engine, max_upload_bytes=runtime.settings.max_upload_bytes, streams=streams)
    app = Starlette(routes=[exact(route) for route in (*api.routes(), *attachments.routes())])
    app.router.redirect_slashes = False
    return _Speaker(app, runtime.settings.only_owner)


class _Speaker:
    """Middleware that tells `app` who asks, which is what the request says, from users who may say it."""

    def __init__(self, app: "ASGIApp", owner: str) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass the request on with `request.state.access` set, or refuse it."""
        from starlette.requests import Request

        from belljar.http.api_operations import problem, refused

        if scope["type"] != "http":
            return
        request = Request(scope)
        uid = scope.get("state", {}).get("peer_uid")
        if uid not in (None, 0, os.geteuid()):
            refusal = refused(403, "forbidden", f"user {uid} is not the user of this server")
            await refusal(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["access"] = _access(request, self._owner, uid)
        except InvalidArgument as error:
            await problem(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _access(request: "Request", owner: str, uid: int | None) -> "Access":
    """Return for whom the request asks."""
    from belljar.engine.contract import Access

    said = {name: _said(request, name) for name in SPEAKER_HEADERS}
    principal = said[PRINCIPAL_HEADER]
    if principal is None:
        return Access(owner, is_operator=True, name=_user(uid), via="terminal")
    if not principal or said[OPERATOR_HEADER] not in (None, "0", "1") or said[VIA_HEADER] not in (None, *_VIAS):
        raise InvalidArgument(
            f"{PRINCIPAL_HEADER} is empty, or {OPERATOR_HEADER} or {VIA_HEADER} has another form",
            hint=f"{OPERATOR_HEADER} is 0 or 1, {VIA_HEADER} one of {', '.join(_VIAS)}; without any of them, the"
            " server's operator asks",
        )
    is_operator, via = said[OPERATOR_HEADER] == "1", "terminal" if said[VIA_HEADER] == "terminal" else "console"
    return Access(principal, is_operator=is_operator, name=said[NAME_HEADER] or "", via=via)


_VIAS: Final = ("console", "terminal")


def _said(request: "Request", name: str) -> str | None:
    values = request.headers.getlist(name)
    text = unquote(values[0]) if values else None
    if len(values) > 1 or (text is not None and (len(text) > _MOST_CHARS or not text.isprintable())):
        raise InvalidArgument(
            f"{name} is said more than once, is longer than {_MOST_CHARS:,} characters, or cannot be printed"
        )
    return text


def _user(uid: int | None) -> str:
    """Return the name of the user at the other end."""
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid() if uid is None else uid).pw_name
    return "its operator"
