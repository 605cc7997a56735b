"""Every configured server: connected when first needed, once, and again when it has died.

Catalogues are read once and kept, also while a server is away; what changes them is a server that says so, or one that
came back with others. A call is sent again only where it certainly was not heard. Connecting goes on in a task of the
server's own: who needs that server waits for it, for a while; nobody else does.
"""

import asyncio
import contextlib
import contextvars
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import anyio

from belljar.errors import UpstreamFailed
from belljar.toolbox.base import LATER, Ask, Catalogue, JsonObject, OnProgress, ServerCatalogue, ToolAnswer
from belljar.toolbox.connection import SessionGone, UpstreamConnection, UpstreamLimits
from belljar.toolbox.message_memory import MessageMemory
from belljar.toolbox.server_config import ServerConfig, StdioServer, UnusableServer

# Which servers speak the older protocol only: found out once, and kept for the next start.
# Servers that were built on an early SDK die of the newer protocol's first request, or never answer it. Finding that
# out costs a start and some seconds. What is kept is a digest of the command or the address and when it was seen; it
# is forgotten after a week, because servers are updated.


_KEPT_S: Final = 7 * 24 * 3600.0
_MOST: Final = 1_000
_MOST_BYTES: Final = 200_000


class ProtocolVersions:
    """In a file, or in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seen = _read(path) if path else {}

    def is_legacy(self, server: ServerConfig) -> bool:
        """Whether it was last seen to speak the older protocol only."""
        return time.time() - self._seen.get(_digest(server), -_KEPT_S) < _KEPT_S

    def learn(self, server: ServerConfig, *, is_legacy: bool) -> None:
        """Keep which it is; what is known already is not written again."""
        if is_legacy == self.is_legacy(server):
            return
        if is_legacy:
            self._seen[_digest(server)] = time.time()
        else:
            self._seen.pop(_digest(server), None)
        if self._path is not None:
            # Other servers of belljar may have learnt something meanwhile: at worst they learn it again.
            newest = dict(sorted(self._seen.items(), key=lambda item: item[1])[-_MOST:])
            _write(self._path, newest)


def _digest(server: ServerConfig) -> str:
    if isinstance(server, UnusableServer):
        return ""
    known = [server.command, *server.arguments] if isinstance(server, StdioServer) else [server.url]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, float]:
    try:
        with path.open("rb") as file:
            found: object = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    listed = cast("dict[object, object]", found) if isinstance(found, dict) else {}
    return {str(name): float(seen) for name, seen in listed.items() if isinstance(seen, int | float)}


def _write(path: Path, seen: dict[str, float]) -> None:
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(seen, file)
        draft.replace(path)
    except OSError as error:
        log.warning("which protocol servers speak cannot be kept: %s", error)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


log = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_ATTEMPTS: Final = 2
_CALM_S: Final = 0.5


@asynccontextmanager
async def open_upstreams(
    servers: Mapping[str, ServerConfig], limits: UpstreamLimits | None = None, eras: Path | None = None
) -> AsyncGenerator["UpstreamConnections"]:
    """The connections to these servers, none of them open yet; all are closed at the end, and their processes gone.

    `eras` is the file in which it is kept which of them speak the older protocol.
    """
    connections = UpstreamConnections(servers, limits or UpstreamLimits(), ProtocolVersions(eras))
    try:
        yield connections
    finally:
        await connections.aclose()


class UpstreamConnections:
    """The Upstreams of `base.py`."""

    def __init__(self, servers: Mapping[str, ServerConfig], limits: UpstreamLimits, eras: ProtocolVersions) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._limits = limits
        memory = MessageMemory(limits.memory_bytes)
        self._upstreams = {name: Upstream(server, limits, memory, eras, self._tell) for name, server in servers.items()}

    @property
    def names(self) -> Sequence[str]:
        """The configured servers."""
        return [*self._upstreams]

    def known(self) -> Catalogue:
        """What they are known to offer now; those that were never tried, or are due again, are connected meanwhile."""
        for upstream in self._upstreams.values():
            upstream.start()
        return self._catalogue()

    async def catalogue(self, within_s: float | None = None) -> Catalogue:
        """What they offer, once each has answered or failed for the first time, or the time is over."""
        self.known()
        with anyio.move_on_after(within_s):
            for upstream in self._upstreams.values():
                await upstream.first_attempt()
        return self._catalogue()

    async def wait_for(self, server: str) -> None:
        """Wait for one server that is still connecting, within a bound."""
        if (upstream := self._upstreams.get(server)) is not None:
            upstream.start()
            await upstream.first_attempt(self._limits.wait_s)

    def still_connecting(self, server: str) -> str:
        """How long a server has been connecting, and what it waits for; empty where it is not."""
        upstream = self._upstreams.get(server)
        return upstream.still_connecting if upstream else ""

    async def refresh(self) -> Catalogue:
        """What they offer, asked anew."""
        async with anyio.create_task_group() as tasks:
            for upstream in self._upstreams.values():
                tasks.start_soon(upstream.refresh)
        return self._catalogue()

    async def call(
        self, server: str, tool: str, arguments: JsonObject, *, on_progress: OnProgress, ask: Ask
    ) -> ToolAnswer:
        """Call a tool. Cancelling the task cancels the call upstream. Raises UpstreamFailed."""
        upstream = self._upstreams.get(server)
        if upstream is None:
            raise UpstreamFailed(
                f"there is no MCP server {server}", hint=f"There are: {', '.join(self.names) or 'none'}"
            )
        return await upstream.call(tool, arguments, on_progress, ask)

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call this when a catalogue is another one than before."""
        self._callbacks.append(changed)

    async def aclose(self) -> None:
        """Close them all at once; may be called twice."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for upstream in self._upstreams.values():
                    tasks.start_soon(upstream.aclose)

    def _catalogue(self) -> Catalogue:
        return Catalogue({name: upstream.catalogue for name, upstream in self._upstreams.items()})

    def _tell(self) -> None:
        for changed in self._callbacks:
            changed()


class Upstream:
    """One server: its connection, if there is one, and what is known of it."""

    def __init__(
        self,
        server: ServerConfig,
        limits: UpstreamLimits,
        memory: MessageMemory,
        eras: ProtocolVersions,
        on_change: Callable[[], None],
    ) -> None:
        connecting = f"MCP server {server.name} is still connecting"
        self.catalogue = ServerCatalogue(server.name, error=connecting, is_connecting=True)
        self._server = server
        self._limits = limits
        self._memory = memory
        self._eras = eras
        self._on_change = on_change
        self._connection: UpstreamConnection | None = None
        self._candidate: UpstreamConnection | None = None
        """The one that is being opened."""
        self._opening: asyncio.Task[None] | None = None
        self._began_at = 0.0
        self._failure: UpstreamFailed | None = None
        self._wait_s = _FIRST_WAIT_S
        self._retry_at = 0.0
        self._is_stale = False
        self._refreshed_at = 0.0
        self._background: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Connect, if that was never tried; and again, where it failed and nothing is known of its tools."""
        is_due = self._failure is not None and not self.catalogue.tools and time.monotonic() >= self._retry_at
        if not self._is_closed and (self._opening is None or is_due):
            self._begin()

    async def first_attempt(self, within_s: float | None = None) -> None:
        """Until its first attempt to connect has succeeded or failed; later ones are waited for by nobody."""
        if self.catalogue.is_connecting and self._opening is not None:
            await asyncio.wait([self._opening], timeout=within_s)

    @property
    def still_connecting(self) -> str:
        """How long it has been connecting, and what it waits for; empty where it is there, or has failed."""
        if self._opening is None or self._opening.done():
            return ""
        doing = self._candidate.doing if self._candidate else "it has not been started yet"
        return f"is still connecting ({time.monotonic() - self._began_at:.0f} s so far): {doing}"

    async def refresh(self) -> None:
        """Read the catalogue anew; a failure is in the catalogue."""
        self._retry_at = 0.0
        try:
            connection = await self._connected(None)
            self._take(await connection.read_catalogue())
        except UpstreamFailed as error:
            self._note(error)

    async def call(self, tool: str, arguments: JsonObject, on_progress: OnProgress, ask: Ask) -> ToolAnswer:
        """Call a tool, on a new connection where the old one has gone."""
        for _ in range(_ATTEMPTS):
            connection = await self._connected(self._limits.wait_s)
            try:
                return await connection.call(tool, arguments, on_progress, ask)
            except SessionGone:
                if self._connection is connection:
                    self._connection = None
                await connection.aclose()
        raise UpstreamFailed(f"MCP server {self._server.name} forgets its connections as soon as they are made")

    async def aclose(self) -> None:
        """Close the connection for good."""
        self._is_closed = True
        for task in (self._background, self._opening):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._connection is not None:
            await self._connection.aclose()

    async def _connected(self, within_s: float | None) -> UpstreamConnection:
        """The connection, waited for no longer than that. Raises UpstreamFailed; connecting goes on all the same."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._is_closed:
            raise UpstreamFailed(f"MCP server {self._server.name} is closed: belljar stops")
        is_under_way = self._opening is not None and not self._opening.done()
        if not is_under_way and self._failure is not None and time.monotonic() < self._retry_at:
            raise _again(self._failure)
        await asyncio.wait([self._begin()], timeout=within_s)
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if still := self.still_connecting:
            raise UpstreamFailed(f"MCP server {self._server.name} {still}", hint=LATER)
        if self._failure is not None:
            raise _again(self._failure)
        raise UpstreamFailed(f"MCP server {self._server.name} ended as soon as it was connected")

    def _begin(self) -> asyncio.Task[None]:
        """Connect, in a task that belongs to nobody who waits for it."""
        if self._opening is None or self._opening.done():
            self._began_at = time.monotonic()
            loop = asyncio.get_running_loop()
            self._opening = loop.create_task(self._open(), context=contextvars.Context())
        return self._opening

    async def _open(self) -> None:
        """Have a connection, or a failure."""
        if self._connection is not None:
            before, self._connection = self._connection, None
            await before.aclose()
        try:
            connection = await self._negotiated()
        except UpstreamFailed as error:
            # The era that it had the last time may no longer be its own.
            self._eras.learn(self._server, is_legacy=False)
            self._retry_at = time.monotonic() + self._wait_s
            self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)
            self._note(error)
            return
        finally:
            self._candidate = None
        self._connection = connection
        self._eras.learn(self._server, is_legacy=connection.is_surely_legacy)
        self._failure, self._wait_s = None, _FIRST_WAIT_S
        log.info("MCP server %s is connected: %d tools", self._server.name, len(connection.catalogue.tools))
        self._take(connection.catalogue)

    async def _negotiated(self) -> UpstreamConnection:
        """In the era that it is known to have; a process that the newer one's first request ends or silences is
        started again, and then meets the older handshake only."""
        if self._eras.is_legacy(self._server):
            return await self._opened(is_legacy=True)
        try:
            return await self._opened(is_legacy=False)
        except UpstreamFailed as error:
            if self._candidate is None or not self._candidate.may_be_older:
                raise
            log.info("%s; it is started again with the older protocol's handshake", error.message)
        return await self._opened(is_legacy=True)

    async def _opened(self, *, is_legacy: bool) -> UpstreamConnection:
        if isinstance(self._server, UnusableServer):
            said = f"MCP server {self._server.name} {self._server.reason}"
            raise UpstreamFailed(said, detail=self._server.detail)
        self._candidate = UpstreamConnection(self._server, self._limits, self._memory, self._on_tools_changed)
        await self._candidate.open(is_legacy=is_legacy)
        return self._candidate

    def _note(self, error: UpstreamFailed) -> None:
        """What was known stays known: a server that is away has the tools that it had."""
        if self._failure is None:
            log.warning("%s%s", error.message, f" ({error.detail})" if error.detail else "")
        self._failure = error
        if not self.catalogue.tools:
            self._take(ServerCatalogue(self._server.name, error=error.message, detail=error.detail))

    def _take(self, catalogue: ServerCatalogue) -> None:
        before, self.catalogue = self.catalogue, catalogue
        if before != catalogue:
            self._on_change()

    def _on_tools_changed(self) -> None:
        """Read the catalogue in the background; once, however often the server says meanwhile that it has changed."""
        self._is_stale = True
        if not self._is_closed and (self._background is None or self._background.done()):
            self._background = asyncio.get_running_loop().create_task(self._refresh_while_stale())

    async def _refresh_while_stale(self) -> None:
        while True:
            # A server that says so all the time is not asked all the time.
            await anyio.sleep(max(0.0, self._refreshed_at + _CALM_S - time.monotonic()))
            self._is_stale = False
            await self.refresh()
            self._refreshed_at = time.monotonic()
            if not self._is_stale:
                return


def _again(failure: UpstreamFailed) -> UpstreamFailed:
    return UpstreamFailed(failure.message, hint=failure.hint, detail=failure.detail)
