"""Every configured server: connected when first needed, once, and again when it has died.

Catalogues are read once and kept, also while a server is away; what changes them is a server that says so, or one that
came back with others. A call is sent again only where it certainly was not heard.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio

from belljar.errors import UpstreamFailed
from belljar.toolbox.base import Answer, Ask, Catalogue, JsonObject, OnProgress, ServerCatalogue
from belljar.toolbox.config import ServerConfig, UnusableServer
from belljar.toolbox.connection import Connection, Limits, SessionGone
from belljar.toolbox.memory import Memory

log = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_ATTEMPTS: Final = 2
_CALM_S: Final = 0.5


@asynccontextmanager
async def open_upstreams(
    servers: Mapping[str, ServerConfig], limits: Limits | None = None
) -> AsyncGenerator["Connections"]:
    """The connections to these servers, none of them open yet; all are closed at the end, and their processes gone."""
    connections = Connections(servers, limits or Limits())
    try:
        yield connections
    finally:
        await connections.aclose()


class Connections:
    """The Upstreams of `base.py`."""

    def __init__(self, servers: Mapping[str, ServerConfig], limits: Limits) -> None:
        self._callbacks: list[Callable[[], None]] = []
        memory = Memory(limits.memory_bytes)
        self._upstreams = {name: Upstream(server, limits, memory, self._tell) for name, server in servers.items()}

    @property
    def names(self) -> Sequence[str]:
        """The configured servers."""
        return [*self._upstreams]

    async def catalogue(self) -> Catalogue:
        """What they offer; servers that were never reached are connected to, all at once."""
        async with anyio.create_task_group() as tasks:
            for upstream in self._upstreams.values():
                tasks.start_soon(upstream.ensure_catalogue)
        return Catalogue({name: upstream.catalogue for name, upstream in self._upstreams.items()})

    async def refresh(self) -> Catalogue:
        """What they offer, asked anew."""
        async with anyio.create_task_group() as tasks:
            for upstream in self._upstreams.values():
                tasks.start_soon(upstream.refresh)
        return await self.catalogue()

    async def call(self, server: str, tool: str, arguments: JsonObject, *, on_progress: OnProgress, ask: Ask) -> Answer:
        """Call a tool. Cancelling the task cancels the call upstream. Raises UpstreamFailed."""
        upstream = self._upstreams.get(server)
        if upstream is None:
            raise UpstreamFailed(
                f"there is no MCP server {server}", hint=f"There are: {', '.join(self.names) or 'none'}"
            )
        return await upstream.call(tool, arguments, on_progress, ask)

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call this when a catalogue was read anew and is another one."""
        self._callbacks.append(changed)

    async def aclose(self) -> None:
        """Close them all at once; may be called twice."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for upstream in self._upstreams.values():
                    tasks.start_soon(upstream.aclose)

    def _tell(self) -> None:
        for changed in self._callbacks:
            changed()


class Upstream:
    """One server: its connection, if there is one, and what is known of it."""

    def __init__(self, server: ServerConfig, limits: Limits, memory: Memory, on_change: Callable[[], None]) -> None:
        self.catalogue = ServerCatalogue(server.name, error="not connected yet")
        self._server = server
        self._limits = limits
        self._memory = memory
        self._on_change = on_change
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._is_legacy = False
        self._has_tried = False
        self._failure: UpstreamFailed | None = None
        self._wait_s = _FIRST_WAIT_S
        self._retry_at = 0.0
        self._is_stale = False
        self._refreshed_at = 0.0
        self._background: asyncio.Task[None] | None = None
        self._is_closed = False

    async def ensure_catalogue(self) -> None:
        """Have a catalogue or the reason why not; only the first attempt is waited for."""
        if not self._has_tried:
            await self._try()
        elif self._failure is not None and not self.catalogue.tools and time.monotonic() >= self._retry_at:
            self._later()

    async def refresh(self) -> None:
        """Read the catalogue anew; a failure is in the catalogue."""
        self._retry_at = 0.0
        try:
            connection = await self._connected()
            self._take(await connection.read_catalogue())
        except UpstreamFailed as error:
            self._note(error)

    async def call(self, tool: str, arguments: JsonObject, on_progress: OnProgress, ask: Ask) -> Answer:
        """Call a tool, on a new connection where the old one has gone."""
        for _ in range(_ATTEMPTS):
            connection = await self._connected()
            try:
                return await connection.call(tool, arguments, on_progress, ask)
            except SessionGone:
                await self._drop(connection)
        raise UpstreamFailed(f"MCP server {self._server.name} forgets its connections as soon as they are made")

    async def aclose(self) -> None:
        """Close the connection for good."""
        self._is_closed = True
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait([self._background])
        if self._connection is not None:
            await self._connection.aclose()

    async def _connected(self) -> Connection:
        if self._connection is not None and self._connection.is_open:
            return self._connection
        async with self._opening:
            if self._connection is not None:
                if self._connection.is_open:
                    return self._connection
                await self._connection.aclose()
                self._connection = None
            if self._is_closed:
                raise UpstreamFailed(f"MCP server {self._server.name} is closed: belljar stops")
            if self._failure is not None and time.monotonic() < self._retry_at:
                raise UpstreamFailed(self._failure.message, hint=self._failure.hint, detail=self._failure.detail)
            return await self._open()

    async def _open(self) -> Connection:
        try:
            connection = self._new_connection()
            await connection.open(is_legacy=self._is_legacy)
        except UpstreamFailed as error:
            # The era that it had the last time may no longer be its own.
            self._is_legacy = False
            self._retry_at = time.monotonic() + self._wait_s
            self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)
            self._note(error)
            raise
        finally:
            self._has_tried = True
        self._connection = connection
        self._is_legacy = connection.is_legacy
        self._failure, self._wait_s = None, _FIRST_WAIT_S
        log.info("MCP server %s is connected: %d tools", self._server.name, len(connection.catalogue.tools))
        self._take(connection.catalogue)
        return connection

    def _new_connection(self) -> Connection:
        if isinstance(self._server, UnusableServer):
            said = f"MCP server {self._server.name} {self._server.reason}"
            raise UpstreamFailed(said, detail=self._server.detail)
        return Connection(self._server, self._limits, self._memory, self._on_tools_changed)

    async def _drop(self, connection: Connection) -> None:
        async with self._opening:
            if self._connection is connection:
                self._connection = None
            await connection.aclose()

    async def _try(self) -> None:
        try:
            await self._connected()
        except UpstreamFailed as error:
            self._note(error)

    def _note(self, error: UpstreamFailed) -> None:
        """What was known stays known: a server that is away has the tools that it had."""
        if self._failure is None:
            log.warning("%s%s", error.message, f" ({error.detail})" if error.detail else "")
        self._failure = error
        if not self.catalogue.tools:
            self.catalogue = ServerCatalogue(self._server.name, error=error.message, detail=error.detail)

    def _take(self, catalogue: ServerCatalogue) -> None:
        before, self.catalogue = self.catalogue, catalogue
        if before != catalogue and before.error != "not connected yet":
            self._on_change()

    def _on_tools_changed(self) -> None:
        self._is_stale = True
        self._later()

    def _later(self) -> None:
        """Read the catalogue in the background; once, however often it is asked for meanwhile."""
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
