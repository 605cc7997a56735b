"""Limits on HTTP connections before their caller is known, and on the requests that one caller may have under way.

uvicorn limits neither the number of connections nor the time that a request takes to arrive. Both cost descriptors,
which sessions need too. So each connection has a phase, each phase has a time limit, and when there are too many
connections, the oldest one that has not sent a whole request is closed to make place for the next. All this begins when
a connection is accepted: with TLS, asyncio would tell of it only after the handshake, for which it allows a minute.
Knows nothing of tools or sessions.
"""

import asyncio
import contextlib
import logging
import os
import resource
import select
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Final, Literal

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from belljar import ipc, metrics
from belljar.errors import out_of_descriptors
from belljar.http.auth import current_principal

HEAD_S: Final = 10.0
"""Time for a request's head to be complete, counted from the start of the connection, with a TLS handshake, or from the
last answer."""
BODY_S: Final = 30.0
"""Time for a request's body to be complete, plus a second for every BODY_RATE bytes that arrive."""
BODY_RATE: Final = 16_384
UNREAD_S: Final = 60.0
"""Time in which a client that is behind with reading its answer has to read some of it."""
IDLE_S: Final = 75
"""Time for the next request on a connection: clients and proxies that reuse one expect a minute."""
LINGER_S: Final = 5.0
"""Time for a connection that is over to end; what it still sends and what it does not fetch is dropped."""
ACCEPTED_AT_ONCE: Final = 128
"""Backlog of the listener: asyncio accepts so many connections before it lets one of them be counted."""
_WATCH_S: Final = 1.0
_LATE_S: Final = 1.0
_SPARE: Final = 16
"""Connections beyond the limit that are accepted, but can only ask for the paths of `_ASKED_OF_FULL`."""
_ASKED_OF_FULL: Final = ("/health", "/ready")
_RESERVE: Final = 4
"""Descriptors that are kept for those connections."""

_Context = dict[str, Any]
_OnError = Callable[[asyncio.AbstractEventLoop, _Context], object]
Phase = Literal["head", "body", "answer", "idle", "over"]
"""What a connection waits for: a head, a body, our answer, the next request, or its end."""

log = logging.getLogger(__name__)


def connection_limit(wanted: int) -> int:
    """Return how many connections there may be: at most a quarter of this process's descriptors."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if descriptors == resource.RLIM_INFINITY else max(_SPARE, min(wanted, descriptors // 4))


class ConnectionLimiter:
    """All connections of one server, and the limit on their number."""

    def __init__(
        self,
        most: int,
        *,
        reserve: int = _RESERVE,
        unread_s: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.most = most
        self._tls = tls
        self._reserved = reserve
        self._unread_s = unread_s
        self._open: set[BoundedProtocol] = set()
        self._has_any = asyncio.Event()
        """Whether a connection is open."""
        self._unfinished: dict[str, dict[BoundedProtocol, None]] = {}
        """Connections that have not sent a whole request, by peer, the oldest first."""
        self._has_warned = False
        self._reserve: list[int] = []
        """Descriptors that are kept for connections that ask for the server's health when there are no others left."""

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "BoundedProtocol | CountedTls":
        """Make the protocol of a connection; uvicorn calls this as it would call the protocol's class."""
        served = BoundedProtocol(self, config, server_state, app_state)
        return served if self._tls is None else CountedTls(served, self._tls)

    def admit(self, connection: "BoundedProtocol") -> Literal["served", "health-only", "refused"]:
        """Decide what a new connection gets: full service, only its health ("health-only"), or nothing."""
        if len(self._open) >= self.most:
            self._close_oldest()
        count = len(self._open)
        self._open.add(connection)
        self._has_any.set()
        if count < self.most and self._has_reserve():
            return "served"
        return "health-only" if count < self.most + _SPARE else "refused"

    def _has_reserve(self) -> bool:
        """Return whether no descriptor of the reserve is in use, after a try to get back those that are."""
        with contextlib.suppress(OSError):
            while len(self._reserve) < self._reserved:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._reserve) == self._reserved

    def _on_loop_error(self, others: _OnError | None, loop: asyncio.AbstractEventLoop, context: _Context) -> None:
        """Give up the reserve when no connection can be accepted for want of descriptors; asyncio tries again soon."""
        error = context.get("exception")
        if isinstance(error, OSError) and out_of_descriptors(error) is not None and "socket" in context:
            if self._reserve:
                log.error("no file descriptors are left: until there are, only /health and /ready are answered")
            while self._reserve:
                os.close(self._reserve.pop())
        elif others is not None:
            others(loop, context)
        else:
            loop.default_exception_handler(context)

    def _close_oldest(self) -> None:
        """Close a connection that waits for a request: heads before bodies, and last those that have had an answer.

        Of several peers, the one with the most such connections loses one.
        """
        if not self._has_warned:
            self._has_warned = True
            log.warning("%d HTTP connections are open, the most that max_connections allows", self.most)
        by_peer = sorted(self._unfinished.values(), key=len, reverse=True)
        for rank in range(3):
            victim = next((each for waiting in by_peer for each in waiting if each.rank == rank), None)
            if victim is not None:
                self.forget(victim)
                victim.abort()
                return

    def note_phase(self, connection: "BoundedProtocol", phase: Phase) -> None:
        """Record the order in which connections began to wait for a request."""
        waiting = self._unfinished.setdefault(connection.peer, {})
        waiting.pop(connection, None)
        if phase != "answer":
            waiting[connection] = None
        elif not waiting:
            del self._unfinished[connection.peer]

    def unread_s(self) -> float:
        """Return for how long a client may be behind with reading its answer."""
        return UNREAD_S if self._unread_s is None else self._unread_s

    def abort_all(self) -> None:
        """Close every connection now."""
        for connection in [*self._open]:
            connection.abort()

    def forget(self, connection: "BoundedProtocol") -> None:
        """Stop counting a connection that is closed or is about to be; may be called twice."""
        self._open.discard(connection)
        if not self._open:
            self._has_any.clear()
        self._has_warned = self._has_warned and len(self._open) > self.most // 2
        waiting = self._unfinished.get(connection.peer, {})
        waiting.pop(connection, None)
        if not waiting:
            self._unfinished.pop(connection.peer, None)

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncGenerator[None]:
        """Close connections that are overdue, until the block ends."""
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self.close_overdue())
        self._has_reserve()
        others = loop.get_exception_handler()
        loop.set_exception_handler(partial(self._on_loop_error, others))
        try:
            yield
        finally:
            loop.set_exception_handler(others)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            while self._reserve:
                os.close(self._reserve.pop())

    async def close_overdue(self) -> None:
        """Close connections that have been in their phase for too long, until cancelled.

        It looks once a second while there are connections, and takes no time of an idle server's processor.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._has_any.wait()
            slept_from = loop.time()
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            # After a pause of the whole process, what arrived meanwhile is read first.
            if now - slept_from > _WATCH_S + _LATE_S:
                continue
            self._has_reserve()
            for connection in [each for each in self._open if each.is_overdue(now)]:
                connection.abort()


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol of one connection, which also knows what it waits for and since when."""

    def __init__(
        self, connections: ConnectionLimiter, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._all = connections
        self._accepted: asyncio.Transport | None = None
        """The transport of the socket, which is below that of TLS."""
        self.peer = ""
        self.phase: Phase = "head"
        self._is_proven = False
        self._since = 0.0
        self._received = 0
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        listener = transport.get_extra_info("socket")
        if listener is not None and listener.family == socket.AF_UNIX and (user := ipc.peer_of(listener)) is not None:
            self.app_state = {**self.app_state, "peer_uid": user.uid}
        super().connection_made(transport)
        if self._accepted is None:
            self.accept(transport)

    def accept(self, transport: asyncio.Transport) -> None:
        """Count the connection from now on; with TLS, before its handshake."""
        self._accepted = self.transport = transport
        self.connections.add(self)  # which uvicorn closes at its end
        client = get_remote_addr(transport)
        self.peer = client[0] if client else ""
        admission = self._all.admit(self)
        if admission == "refused":
            transport.abort()
            return
        if admission == "health-only":
            self.app = _health_only(self.app)  # pyright: ignore[reportAttributeAccessIssue]
        self._enter("head")

    def abort(self) -> None:
        """Close the connection now, in whatever state its TLS is."""
        if self._accepted is not None:
            self._accepted.abort()

    def forget(self) -> None:
        """Stop counting the connection; may be called twice."""
        self.connections.discard(self)
        self._all.forget(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._received += len(data)
        if self.phase == "idle":
            self._enter("head")
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        """See uvicorn. After an answer that did not wait for the request's body, the connection is over."""
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._enter("over")
        self._is_proven = True
        super().on_response_complete()
        self._update_phase()

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn. A request that came while the process was paused, or busy, is read instead of dropped."""
        if self.transport.is_closing():
            return
        waiting = select.poll()
        waiting.register(self.transport.get_extra_info("socket"), select.POLLIN)
        if not waiting.poll(0):
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._unread_since = None
        super().resume_writing()

    @property
    def rank(self) -> int:
        """How soon the connection is closed when there are too many; the lowest goes first."""
        if self.phase == "over":
            return 0
        return 2 if self._is_proven else int(self.phase == "body")

    def is_overdue(self, now: float) -> bool:
        """Return whether the connection has been in its phase for too long."""
        if self.transport.is_closing() and self.phase != "over":
            self._enter("over")
        if self._unread_since is not None and now - self._unread_since > self._all.unread_s():
            return True
        limits = {"head": HEAD_S, "body": BODY_S + self._received / BODY_RATE, "over": LINGER_S}
        # uvicorn closes idle connections, and the application decides how long an answer takes.
        return now - self._since > limits.get(self.phase, float("inf"))

    def _update_phase(self) -> None:
        """Set the phase to what the connection waits for now."""
        theirs = self.conn.their_state
        if self.transport.is_closing() or (self.phase == "over" and theirs is h11.SEND_BODY):
            return
        if theirs is h11.SEND_BODY:
            phase: Phase = "body"
        elif theirs is not h11.IDLE:
            phase = "answer"
        else:
            # A client that has begun the next head has to finish it in HEAD_S; for others, uvicorn's idle limit counts.
            has_begun = self.phase == "head" or bool(self.conn.trailing_data[0])
            phase = "head" if has_begun else "idle"
        if phase != self.phase:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since = self.loop.time()
        self._received = 0
        self._all.note_phase(self, phase)


class CountedTls(SSLProtocol):
    """asyncio's TLS of a connection that is counted before the handshake."""

    def __init__(self, served: BoundedProtocol, tls: ssl.SSLContext) -> None:
        super().__init__(served.loop, served, tls, None, server_side=True)  # type: ignore[arg-type]
        self._served = served

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        self._served.accept(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio, which tells `served` only what happens after the handshake."""
        super().connection_lost(exc)
        self._served.forget()


def _health_only(app: ASGIApp) -> ASGIApp:
    """Return an app for a full server: it answers how the server is, which costs nothing, and refuses the rest."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ASKED_OF_FULL:
            await app(scope, receive, send)
            return
        refusal = {"error": "busy: the server has as many connections as it may", "hint": "Try again in 10 seconds"}
        headers = {"connection": "close", "retry-after": "10"}
        await JSONResponse(refusal, status_code=503, headers=headers)(scope, receive, send)

    return answer


# The requests that one caller may have under way, limited because streams that are left open take connections from
# others. A request is under way until its answer has ended, which for the stream of a GET is when the client leaves.


class CallerShares:
    """The number of requests under way of each caller, over all the apps that it guards."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: Counter[str] = Counter()

    def limit(self, app: ASGIApp) -> ASGIApp:
        """Return the app behind the limit; the caller has to be authenticated before it."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            caller = current_principal()
            if self._under_way[caller] >= self._most:
                metrics.refusals.add("admission")
                await self._refusal()(scope, receive, send)
                return
            self._under_way[caller] += 1
            try:
                await app(scope, receive, send)
            finally:
                self._under_way[caller] -= 1
                if not self._under_way[caller]:
                    del self._under_way[caller]

        return answer

    def _refusal(self) -> JSONResponse:
        refusal = {
            "error": f"busy: {self._most} requests of yours are under way, the most that one caller may have",
            "hint": "Close streams that nobody reads, or try again in 10 seconds",
        }
        return JSONResponse(refusal, status_code=429, headers={"retry-after": "10"})
