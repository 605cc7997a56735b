"""The toolbox of a running server: its connections, the tree of modules that sessions see, and a broker per session.

The tree is written when belljar starts, with every configured MCP server, and again whenever something changes. A
server that is still connecting is in it, marked as such.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.egress.session_sockets import SessionSocket
from belljar.files.private import make_folder
from belljar.inside import FOLDER
from belljar.plugins import Plugins
from belljar.settings import Settings
from belljar.toolbox.base import LATER, Catalogue, JsonObject, ToolDefinition
from belljar.toolbox.broker import Broker
from belljar.toolbox.code_generation import Detail, as_fields, generate, show
from belljar.toolbox.fair_share import FairShares
from belljar.toolbox.learned_shapes import OwnedShapes
from belljar.toolbox.names import names_of
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.server_config import load_servers
from belljar.toolbox.session_server import SearchMessage, ToolServer, open_tool_server
from belljar.toolbox.tree import Tree, TreeDirectory

if TYPE_CHECKING:
    from belljar.toolbox.upstreams import UpstreamConnections

INSIDE = FOLDER / "toolbox"
"""The folder of the `toolbox` package that sessions import; it is on their path."""
READY_S = 30.0
SEARCH_S = 5.0
"""How long after the start a search waits for connecting servers; slower ones are named in its answer."""

_AWAY = "not reachable now"

FindSkills = Callable[[str, str, str, int], str]
"""Returns the skills that match, as text: called in a thread with the owner, the session, the query and a limit."""

log = logging.getLogger(__name__)


class Toolbox:
    """The toolbox of one runtime; `open_toolbox` makes it."""

    def __init__(
        self,
        upstreams: "UpstreamConnections",
        shapes: OwnedShapes,
        tree: Tree,
        *,
        limit_bytes: int,
        plugins: Plugins | None = None,
    ) -> None:
        self.upstreams = upstreams
        self.tree = tree
        self._shapes = shapes
        self._limit_bytes = limit_bytes
        self._plugins = plugins or Plugins()
        self._brokers: dict[str, Broker] = {}
        self._shares = FairShares()
        self._catalogue = Catalogue()
        self._names = names_of(self._catalogue)
        self._index: ToolIndex | None = None
        self.find_skills: FindSkills | None = None
        """Finds skills for the searches of sessions; None where there are none."""
        self._opened_at = time.monotonic()
        self._is_written = asyncio.Event()
        self._is_stale = asyncio.Event()
        self._is_stale.set()
        upstreams.on_change(self._outdate)

    # Catalogue and search

    async def catalogue(self, server: str = "", tool: str = "") -> Catalogue:
        """Return the catalogue; wait for `server` first if the tool is not known and the server is still connecting."""
        if self._catalogue.find(server, tool) is None:
            await self.upstreams.wait_for(server)
            self._look()
        return self._catalogue

    async def join(self, server: str) -> str:
        """Wait, for a bounded time, until sessions can import a server; return why they cannot, or an empty text."""
        await self.upstreams.wait_for(server)
        self._look()
        await self.wait_until_written()
        known = self._catalogue.servers.get(server)
        if known is None:
            return "there is no such server"
        if not known.is_connecting:
            return ""
        return f"the server {self.upstreams.still_connecting(server) or 'is still connecting'}. {LATER}"

    def _look(self) -> None:
        """Take over the catalogue that the connections have now."""
        if (catalogue := self.upstreams.catalogue_nowait()) != self._catalogue:
            self._know(catalogue)
            self._outdate()

    def states(self) -> dict[str, int]:
        """Return how many servers are connected, still connecting, and not reachable."""
        servers = self.upstreams.catalogue_nowait().servers.values()
        connecting = sum(each.is_connecting for each in servers)
        away = sum(bool(each.error) for each in servers) - connecting
        return {"connected": len(servers) - connecting - away, "connecting": connecting, "unreachable": away}

    def _know(self, catalogue: Catalogue) -> None:
        self._catalogue, self._names, self._index = catalogue, names_of(catalogue), None

    def _outdate(self) -> None:
        self._is_written.clear()
        self._is_stale.set()

    async def search(
        self, query: str, *, owner: str, detail: Detail, limit: int, server: str = ""
    ) -> tuple[str, JsonObject]:
        """Return the tools that match, as text and as JSON, with result shapes learned from the owner's own calls."""
        # Wait for servers only just after the start, because a server that hangs must not slow down every search.
        await self.upstreams.catalogue(max(0.0, self._opened_at + SEARCH_S - time.monotonic()))
        self._look()
        known, names = self._catalogue, self._names
        if (index := self._index) is None:
            # In a thread, because tools may have long descriptions.
            index = await asyncio.to_thread(ToolIndex, known)
            if known is self._catalogue:
                self._index = index
        found = index.search(query, limit=limit, server=self._server_named(server))
        shape_of = self._shapes.of(owner).shape
        text = show(found, detail, names, shape_of)
        fields: JsonObject = {"tools": [as_fields(tool, detail, names, shape_of) for tool in found]}
        # Name the servers that are missing, because one of them may have a tool that was not found.
        for state, is_connecting, heading in (("connecting", True, "still connecting"), ("unreachable", False, _AWAY)):
            servers = [each for each in known.servers.values() if each.error and each.is_connecting == is_connecting]
            if listed := [names.packages[each.server] for each in servers]:
                text = f"{text}\n# {heading}: {', '.join(listed)}"
                fields[state] = listed
        return text, fields

    def _server_named(self, name: str) -> str:
        """Return a server's own name, given that or the name of its package."""
        return next((server for server, package in self._names.packages.items() if name == package), name)

    def learn(self, owner: str, tool: ToolDefinition, value: Any) -> None:
        """Learn the shape of a result that a tool without an output schema gave to an owner."""
        before = self._shapes.for_all(tool.server, tool.name)
        self._shapes.of(owner).learn(tool.server, tool.name, value)
        # All sessions see the tree, so it changes only with the shapes that everybody may see.
        if self._shapes.for_all(tool.server, tool.name) != before:
            self._outdate()

    # The tree

    async def wait_until_ready(self) -> None:
        """Wait until every server was tried and the tree is written, at most `READY_S` for slow servers."""
        await self.upstreams.catalogue(READY_S)
        self._look()
        await self.wait_until_written()

    async def wait_until_written(self) -> None:
        """Wait until the tree on disk is up to date."""
        await self._is_written.wait()

    async def keep_written(self) -> None:
        """Write the tree whenever there is something new."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            try:
                self._know(self.upstreams.catalogue_nowait())
                files = await asyncio.to_thread(generate, self._catalogue, self._shapes.for_all)
                await asyncio.to_thread(self.tree.write, files)
            except Exception:
                # A catalogue that cannot be written must not keep the next one from being written.
                log.exception("the toolbox's tree could not be written")
            if not self._is_stale.is_set():
                self._is_written.set()

    # Sessions

    def broker(self, session_id: str) -> Broker:
        """Return the session's broker. A pooled kernel may ask for it before the session has an owner."""
        if session_id not in self._brokers:
            self._brokers[session_id] = Broker(session_id, self, limit_bytes=self._limit_bytes, plugins=self._plugins)
        return self._brokers[session_id]

    def forget(self, session_id: str) -> None:
        """Drop the broker of a session that is over."""
        self._brokers.pop(session_id, None)

    def serve_session(
        self,
        folder: Path,
        name: str,
        *,
        session_id: str,
        folder_inside: str,
        session_socket: SessionSocket | None = None,
    ) -> AbstractAsyncContextManager[ToolServer]:
        """Serve tool calls on a socket of that name for a kernel of the session.

        `session_socket` may be the listening socket that an earlier belljar server left.
        """
        broker = self.broker(session_id)
        if session_socket is not None and session_socket.descriptor >= 0:
            # Calls may have arrived while no server was running. They wait until it is known which execution they
            # belong to.
            broker.pause()
        find = partial(self._find, broker)
        return open_tool_server(
            folder,
            name,
            broker=broker,
            find=find,
            folder_inside=folder_inside,
            paces=self._shares,
            listener=session_socket,
        )

    async def _find(self, broker: Broker, asked: SearchMessage) -> JsonObject:
        text, fields = await self.search(
            asked.query, owner=broker.owner, detail=asked.detail, limit=asked.limit, server=asked.server
        )
        if self.find_skills is not None and not asked.server:
            skills = await asyncio.to_thread(
                self.find_skills, broker.owner, broker.session_id, asked.query, asked.limit
            )
            text = f"{text}\n{skills}".strip() if skills else text
        return {"outcome": "found", "text": text, **fields}

    @property
    def readable(self) -> tuple[Path, ...]:
        """Return the host's folders that sandboxes mount read-only."""
        return (INSIDE, self.tree.folder)

    @property
    def importable(self) -> tuple[Path, ...]:
        """Return the folders that go on Python's path in a session."""
        return (INSIDE, self.tree.importable)


@asynccontextmanager
async def open_toolbox(
    settings: Settings, directory: TreeDirectory, plugins: Plugins | None = None
) -> AsyncGenerator[Toolbox | None]:
    """Yield the toolbox of this server, with its tree in `directory`; None if no servers are configured."""
    servers = load_servers(settings)
    if not servers:
        yield None
        return
    # Imported here, because MCP's client takes longer to import than everything that a run without servers needs.
    from belljar.toolbox.connection import upstream_limits
    from belljar.toolbox.upstreams import open_upstreams

    folder = settings.data_directory / "toolbox"
    make_folder(folder)
    with directory.open(Path(settings.servers_directory or folder)) as place:
        tree = Tree(place)
        async with open_upstreams(servers, upstream_limits(settings), folder / "eras.json") as upstreams:
            shapes = OwnedShapes(folder / "shapes", settings.only_owner)
            shapes.remove_unowned()
            toolbox = Toolbox(upstreams, shapes, tree, limit_bytes=settings.tool_result_bytes, plugins=plugins)
            # Write the tree before any session can see it, with servers marked that are still connecting.
            tree.write(generate(upstreams.catalogue_nowait(), shapes.for_all))
            # Remove older versions before a session can see them, because they may hold another owner's shapes.
            tree.remove_older()
            writing = asyncio.get_running_loop().create_task(toolbox.keep_written())
            try:
                yield toolbox
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
