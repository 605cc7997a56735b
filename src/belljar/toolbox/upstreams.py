"""All configured MCP servers: each is connected when first needed, and again after it has died.

Catalogues are kept while a server is unreachable; they change when the server says so, or when it comes back with
other tools. A call is sent again only if the server certainly did not receive it. Each server connects in a task of its
own: callers of that server wait for it, for a bounded time, and nobody else does. Also remembers which servers speak
only the older protocol.
"""

import asyncio
import contextvars
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import anyio

from belljar.errors import UpstreamFailed
from belljar.files.private import replace_file
from belljar.questions.models import Ask
from belljar.toolbox.base import LATER, Catalogue, JsonObject, OnProgress, ServerCatalogue, ToolAnswer
from belljar.toolbox.connection import SessionGone, UpstreamConnection, UpstreamLimits
from belljar.toolbox.message_memory import MessageMemory
from belljar.toolbox.server_config import ServerConfig, StdioServer, UnusableServer

# Protocol versions: which servers speak only the older protocol, kept for the next start.
# Servers that were built on an early SDK crash on the newer protocol's first request, or never answer it. Finding that
# out costs a start and some seconds. What is kept is a digest of the command or the address and the time; it is
# forgotten after a week, because servers are updated.


_KEPT_S: Final = 7 * 24 * 3600.0
_MAX: Final = 1_000
_MAX_BYTES: Final = 200_000


class ProtocolVersions:
    """Remembers which servers speak only the older protocol, in a file or only in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seen = _read(path) if path else {}

    def is_legacy(self, server: ServerConfig) -> bool:
        """Return whether the server spoke only the older protocol when it was last seen."""
        return time.time() - self._seen.get(_digest(server), -_KEPT_S) < _KEPT_S

    def learn(self, server: ServerConfig, *, is_legacy: bool) -> None:
        """Remember which protocol a server speaks; write the file only if that is new."""
        if is_legacy == self.is_legacy(server):
            return
        if is_legacy:
            self._seen[_digest(server)] = time.time()
        else:
            self._seen.pop(_digest(server), None)
        if self._path is not None:
            # This overwrites what other belljar servers may have learned meanwhile; at worst they learn it again.
            newest = dict(sorted(self._seen.items(), key=lambda item: item[1])[-_MAX:])
            _write(self._path, newest)


def _digest(server: ServerConfig) -> str:
    if isinstance(server, UnusableServer):
        return ""
    known = [server.command, *server.arguments] if isinstance(server, StdioServer) else [server.url]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, float]:
    try:
        with path.open("rb") as file:
            found: object = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    listed = cast("dict[object, object]", found) if isinstance(found, dict) else {}
    return {str(name): float(seen) for name, seen in listed.items() if isinstance(seen, int | float)}


def _write(path: Path, seen: dict[str, float]) -> None:
    try:
        replace_file(path, json.dumps(seen))
    except OSError as error:
        log.warning("which protocol servers speak cannot be kept: %s", error)


log = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_ATTEMPTS: Final = 2
_CALM_S: Final = 0.5


@asynccontextmanager
async def open_upstreams(
    servers: Mapping[str, ServerConfig], limits: UpstreamLimits | None = None, versions_file: Path | None = None
) -> AsyncGenerator["UpstreamConnections"]:
    """Yield the connections to these servers, none of them open yet; close them at the end, with their processes.

    `versions_file` is the file that remembers which of them speak only the older protocol.
    """
    connections = UpstreamConnections(servers, limits or UpstreamLimits(), ProtocolVersions(versions_file))
    try:
        yield connections
    finally:
        await connections.aclose()


class UpstreamConnections:
    """The connections to all configured servers: one for each, opened when first needed."""

    def __init__(self, servers: Mapping[str, ServerConfig], limits: UpstreamLimits, versions: ProtocolVersions) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._limits = limits
        memory = MessageMemory(limits.memory_bytes)
        self._upstreams = {
            name: Upstream(server, limits, memory, versions, self._notify) for name, server in servers.items()
        }

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the configured servers."""
        return [*self._upstreams]

    def catalogue_nowait(self) -> Catalogue:
        """Return what is known now, and start connecting to servers that were never tried or are due for a retry."""
        for upstream in self._upstreams.values():
            upstream.start()
        return self._catalogue()

    async def catalogue(self, within_s: float | None = None) -> Catalogue:
        """Return what the servers offer once each has answered or failed for the first time, or the time is over."""
        self.catalogue_nowait()
        with anyio.move_on_after(within_s):
            for upstream in self._upstreams.values():
                await upstream.first_attempt()
        return self._catalogue()

    async def wait_for(self, server: str) -> None:
        """Wait for one server that is still connecting, for a bounded time."""
        if (upstream := self._upstreams.get(server)) is not None:
            upstream.start()
            await upstream.first_attempt(self._limits.wait_s)

    def still_connecting(self, server: str) -> str:
        """Return how long a server has been connecting and what it waits for; empty if it is not connecting."""
        upstream = self._upstreams.get(server)
        return upstream.still_connecting if upstream else ""

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
        """Have `changed` called whenever a catalogue differs from the one before."""
        self._callbacks.append(changed)

    async def aclose(self) -> None:
        """Close all connections at the same time; may be called twice."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for upstream in self._upstreams.values():
                    tasks.start_soon(upstream.aclose)

    def _catalogue(self) -> Catalogue:
        return Catalogue({name: upstream.catalogue for name, upstream in self._upstreams.items()})

    def _notify(self) -> None:
        for changed in self._callbacks:
            changed()


class Upstream:
    """One server: its connection, if there is one, and its catalogue."""

    def __init__(
        self,
        server: ServerConfig,
        limits: UpstreamLimits,
        memory: MessageMemory,
        versions: ProtocolVersions,
        on_change: Callable[[], None],
    ) -> None:
        connecting = f"MCP server {server.name} is still connecting"
        self.catalogue = ServerCatalogue(server.name, error=connecting, is_connecting=True)
        self._server = server
        self._limits = limits
        self._memory = memory
        self._versions = versions
        self._on_change = on_change
        self._connection: UpstreamConnection | None = None
        self._candidate: UpstreamConnection | None = None
        """The connection that is being opened."""
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
        """Connect if that was never tried, or if it failed, is due for a retry, and no tools are known."""
        is_due = self._failure is not None and not self.catalogue.tools and time.monotonic() >= self._retry_at
        if not self._is_closed and (self._opening is None or is_due):
            self._start_opening()

    async def first_attempt(self, within_s: float | None = None) -> None:
        """Wait until the first attempt to connect has succeeded or failed; do not wait for later attempts."""
        if self.catalogue.is_connecting and self._opening is not None:
            await asyncio.wait([self._opening], timeout=within_s)

    @property
    def still_connecting(self) -> str:
        """Return how long the server has been connecting and what it waits for; empty if it is connected or failed."""
        if self._opening is None or self._opening.done():
            return ""
        doing = self._candidate.doing if self._candidate else "it has not been started yet"
        return f"is still connecting ({time.monotonic() - self._began_at:.0f} s so far): {doing}"

    async def refresh(self) -> None:
        """Read the catalogue again; a failure is recorded in the catalogue."""
        self._retry_at = 0.0
        try:
            connection = await self._open_connection(None)
            self._take(await connection.read_catalogue())
        except UpstreamFailed as error:
            self._note(error)

    async def call(self, tool: str, arguments: JsonObject, on_progress: OnProgress, ask: Ask) -> ToolAnswer:
        """Call a tool, on a new connection if the old one is gone."""
        for _ in range(_ATTEMPTS):
            connection = await self._open_connection(self._limits.wait_s)
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

    async def _open_connection(self, within_s: float | None) -> UpstreamConnection:
        """Return the open connection, after at most `within_s`. Raises UpstreamFailed, while connecting may go on."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._is_closed:
            raise UpstreamFailed(f"MCP server {self._server.name} is closed: belljar stops")
        is_under_way = self._opening is not None and not self._opening.done()
        if not is_under_way and self._failure is not None and time.monotonic() < self._retry_at:
            raise _again(self._failure)
        await asyncio.wait([self._start_opening()], timeout=within_s)
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if still := self.still_connecting:
            raise UpstreamFailed(f"MCP server {self._server.name} {still}", hint=LATER)
        if self._failure is not None:
            raise _again(self._failure)
        raise UpstreamFailed(f"MCP server {self._server.name} ended as soon as it was connected")

    def _start_opening(self) -> asyncio.Task[None]:
        """Start connecting, in a task that goes on if those who wait for it are cancelled; return the task."""
        if self._opening is None or self._opening.done():
            self._began_at = time.monotonic()
            loop = asyncio.get_running_loop()
            self._opening = loop.create_task(self._open(), context=contextvars.Context())
        return self._opening

    async def _open(self) -> None:
        """Open a new connection, or record why that failed."""
        if self._connection is not None:
            before, self._connection = self._connection, None
            await before.aclose()
        try:
            connection = await self._negotiate()
        except UpstreamFailed as error:
            # The protocol version that the server had last time may no longer be right.
            self._versions.learn(self._server, is_legacy=False)
            self._retry_at = time.monotonic() + self._wait_s
            self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)
            self._note(error)
            return
        finally:
            self._candidate = None
        self._connection = connection
        self._versions.learn(self._server, is_legacy=connection.is_surely_legacy)
        self._failure, self._wait_s = None, _FIRST_WAIT_S
        log.info("MCP server %s is connected: %d tools", self._server.name, len(connection.catalogue.tools))
        self._take(connection.catalogue)

    async def _negotiate(self) -> UpstreamConnection:
        """Connect with the protocol version that the server is known to speak.

        A process that dies or falls silent after the newer protocol's first request is started again, with the older
        handshake only.
        """
        if self._versions.is_legacy(self._server):
            return await self._connect(is_legacy=True)
        try:
            return await self._connect(is_legacy=False)
        except UpstreamFailed as error:
            if self._candidate is None or not self._candidate.may_be_older:
                raise
            log.info("%s; it is started again with the older protocol's handshake", error.message)
        return await self._connect(is_legacy=True)

    async def _connect(self, *, is_legacy: bool) -> UpstreamConnection:
        if isinstance(self._server, UnusableServer):
            message = f"MCP server {self._server.name} {self._server.reason}"
            raise UpstreamFailed(message, detail=self._server.detail)
        self._candidate = UpstreamConnection(self._server, self._limits, self._memory, self._on_tools_changed)
        await self._candidate.open(is_legacy=is_legacy)
        return self._candidate

    def _note(self, error: UpstreamFailed) -> None:
        """Record a failure; a server that is unreachable keeps the tools that it had."""
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
        """Read the catalogue in the background; once more, however often the server reports changes meanwhile."""
        self._is_stale = True
        if not self._is_closed and (self._background is None or self._background.done()):
            self._background = asyncio.get_running_loop().create_task(self._refresh_while_stale())

    async def _refresh_while_stale(self) -> None:
        while True:
            # A server that reports changes all the time is asked at most once in `_CALM_S`.
            await anyio.sleep(max(0.0, self._refreshed_at + _CALM_S - time.monotonic()))
            self._is_stale = False
            await self.refresh()
            self._refreshed_at = time.monotonic()
            if not self._is_stale:
                return


def _again(failure: UpstreamFailed) -> UpstreamFailed:
    return UpstreamFailed(failure.message, hint=failure.hint, detail=failure.detail)
