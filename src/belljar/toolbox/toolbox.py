"""The toolbox of a running server: its connections, the tree that sessions see, and a broker for each session.

The tree is written when the server starts, with every server that is configured, and again whenever there is something
new to say of one. A server that is still connecting is in it as one that is.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from belljar.egress.session_sockets import SessionSocket
from belljar.files.private import make_folder
from belljar.inside import FOLDER
from belljar.sandboxes.base import Identity
from belljar.settings import Settings
from belljar.toolbox.base import LATER, Catalogue, JsonObject, ToolDefinition, Upstreams
from belljar.toolbox.broker import Broker
from belljar.toolbox.code_generation import generate
from belljar.toolbox.fair_share import FairShares
from belljar.toolbox.learned_shapes import OwnedShapes
from belljar.toolbox.names import names_of
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.server_config import load_servers
from belljar.toolbox.session_server import SearchMessage, ToolServer, open_tool_server
from belljar.toolbox.tool_listing import Detail, as_fields, show
from belljar.toolbox.tree import Tree, TreeDirectory

INSIDE = FOLDER / "toolbox"
"""What sessions import; on their path."""
READY_S = 30.0
SEARCH_S = 5.0
"""For which a search waits for servers that are just being connected; those that take longer are named."""
MEBIBYTE = 1024 * 1024

_AWAY = "not reachable now"

log = logging.getLogger(__name__)


class Toolbox:
    """One runtime's; made by `open_toolbox`."""

    def __init__(self, upstreams: Upstreams, shapes: OwnedShapes, tree: Tree, *, limit_bytes: int) -> None:
        self.upstreams = upstreams
        self.tree = tree
        self._shapes = shapes
        self._limit_bytes = limit_bytes
        self._brokers: dict[str, Broker] = {}
        self._paces = FairShares()
        self._known = Catalogue()
        self._names = names_of(self._known)
        self._index: ToolIndex | None = None
        self._opened_at = time.monotonic()
        self._is_written = asyncio.Event()
        self._is_stale = asyncio.Event()
        self._is_stale.set()
        upstreams.on_change(self._outdate)

    # What there is

    async def catalogue(self, server: str = "", tool: str = "") -> Catalogue:
        """What there is; a server of which that tool is not known is waited for, if it is still connecting."""
        if self._known.find(server, tool) is None:
            await self.upstreams.wait_for(server)
            self._look()
        return self._known

    async def join(self, server: str) -> str:
        """Wait until a server is there, and sessions can import it; why not, where it is not, within a bound."""
        await self.upstreams.wait_for(server)
        self._look()
        await self.written()
        known = self._known.servers.get(server)
        if known is None:
            return "there is no such server"
        if not known.is_connecting:
            return ""
        return f"the server {self.upstreams.still_connecting(server) or 'is still connecting'}. {LATER}"

    def _look(self) -> None:
        """Know what the connections know by now."""
        if (catalogue := self.upstreams.known()) != self._known:
            self._know(catalogue)
            self._outdate()

    def states(self) -> dict[str, int]:
        """How many servers are connected, still connecting, and not reachable."""
        servers = self.upstreams.known().servers.values()
        connecting = sum(each.is_connecting for each in servers)
        away = sum(bool(each.error) for each in servers) - connecting
        return {"connected": len(servers) - connecting - away, "connecting": connecting, "unreachable": away}

    def _know(self, catalogue: Catalogue) -> None:
        self._known, self._names, self._index = catalogue, names_of(catalogue), None

    def _outdate(self) -> None:
        self._is_written.clear()
        self._is_stale.set()

    async def search(
        self, query: str, *, owner: str, detail: Detail, limit: int, server: str = ""
    ) -> tuple[str, JsonObject]:
        """What was found, as text and for programs, with what the owner's own calls have shown of results."""
        # Only just after the start: a server that hangs must not slow every search.
        await self.upstreams.catalogue(max(0.0, self._opened_at + SEARCH_S - time.monotonic()))
        self._look()
        known, names = self._known, self._names
        if (index := self._index) is None:
            # In a thread: servers may say a lot of their tools.
            index = await asyncio.to_thread(ToolIndex, known)
            self._index = index if known is self._known else None
        found = index.search(query, limit=limit, server=self._server_named(server))
        shape_of = self._shapes.of(owner).shape
        text = show(found, detail, names, shape_of)
        fields: JsonObject = {"tools": [as_fields(tool, detail, names, shape_of) for tool in found]}
        # What is not found may be what one of these has.
        for state, is_connecting, said in (("connecting", True, "still connecting"), ("unreachable", False, _AWAY)):
            servers = [each for each in known.servers.values() if each.error and each.is_connecting == is_connecting]
            if listed := [names.package(each.server) for each in servers]:
                text = f"{text}\n# {said}: {', '.join(listed)}"
                fields[state] = listed
        return text, fields

    def _server_named(self, name: str) -> str:
        """A server by its own name, or by that of its package."""
        return next((server for server, package in self._names.packages.items() if name == package), name)

    def learn(self, owner: str, tool: ToolDefinition, value: Any) -> None:
        """A tool that declares no result answered an owner with this."""
        before = self._shapes.for_all(tool.server, tool.name)
        self._shapes.of(owner).learn(tool.server, tool.name, value)
        # The tree is everybody's, so that it has only what everybody may see.
        if self._shapes.for_all(tool.server, tool.name) != before:
            self._outdate()

    # The tree

    async def ready(self) -> None:
        """Until every server has been tried and the tree says so; one that takes too long is not waited for."""
        await self.upstreams.catalogue(READY_S)
        self._look()
        await self.written()

    async def written(self) -> None:
        """Until the tree says all that is known."""
        await self._is_written.wait()

    async def keep_written(self) -> None:
        """Write the tree whenever there is something new."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            try:
                self._know(self.upstreams.known())
                files = await asyncio.to_thread(generate, self._known, self._shapes.for_all)
                await asyncio.to_thread(self.tree.write, files)
            except Exception:
                # One catalogue that cannot be written must not keep the next from it.
                log.exception("the toolbox's tree could not be written")
            if not self._is_stale.is_set():
                self._is_written.set()

    # Sessions

    def broker(self, session_id: str) -> Broker:
        """The session's own; the first to ask for it may be its kernel, before it is anyone's."""
        if session_id not in self._brokers:
            self._brokers[session_id] = Broker(session_id, self, limit_bytes=self._limit_bytes)
        return self._brokers[session_id]

    def forget(self, session_id: str) -> None:
        """The session is over."""
        self._brokers.pop(session_id, None)

    def open_hatch(
        self, folder: Path, name: str, *, session_id: str, folder_inside: str, door: SessionSocket | None = None
    ) -> AbstractAsyncContextManager[ToolServer]:
        """A socket of that name for a kernel of the session; a door that an earlier server opened is one already."""
        broker = self.broker(session_id)
        if door is not None and door.descriptor >= 0:
            # Who knocked while no server was there is heard once it is known which execution that belongs to.
            broker.pause()
        find = partial(self._find, broker)
        return open_tool_server(
            folder, name, broker=broker, find=find, folder_inside=folder_inside, paces=self._paces, door=door
        )

    async def _find(self, broker: Broker, asked: SearchMessage) -> JsonObject:
        text, fields = await self.search(
            asked.query, owner=broker.owner, detail=asked.detail, limit=asked.limit, server=asked.server
        )
        return {"outcome": "found", "text": text, **fields}

    @property
    def readable(self) -> tuple[Path, ...]:
        """What sandboxes show of the host's."""
        return (INSIDE, self.tree.folder)

    @property
    def importable(self) -> tuple[Path, ...]:
        """What goes on the path of Python in a session."""
        return (INSIDE, self.tree.importable)

    def show_in(self, workspace: Path, identity: Identity | None) -> None:
        """Let `ls servers` work in a session folder."""
        self.tree.show_in(workspace, identity)


@asynccontextmanager
async def open_toolbox(settings: Settings, plot: TreeDirectory) -> AsyncGenerator[Toolbox | None]:
    """The toolbox of this server, whose tree stands on this plot; None where no servers are configured."""
    servers = load_servers(settings)
    if not servers:
        yield None
        return
    # Only here: the protocol's client takes longer to import than all else that a run without servers needs.
    from belljar.toolbox.connection import UpstreamLimits
    from belljar.toolbox.upstreams import open_upstreams

    folder = settings.data_directory / "toolbox"
    make_folder(folder)
    limits = UpstreamLimits(
        start_s=settings.upstream_start_s,
        wait_s=settings.upstream_wait_s,
        silence_s=settings.upstream_silence_s,
        questions=settings.upstream_questions,
        message_bytes=settings.upstream_message_mb * MEBIBYTE,
        memory_bytes=settings.upstream_memory_mb * MEBIBYTE,
    )
    with plot.open(Path(settings.servers_directory or folder)) as place:
        tree = Tree(place)
        async with open_upstreams(servers, limits, folder / "eras.json") as upstreams:
            shapes = OwnedShapes(folder / "shapes", settings.only_owner)
            shapes.remove_unowned()
            toolbox = Toolbox(upstreams, shapes, tree, limit_bytes=settings.tool_result_bytes)
            # Before anybody can look: a server that is still connecting is there as one that is.
            tree.write(generate(upstreams.known(), shapes.for_all))
            # Before it may be another owner's: the shapes in it are theirs.
            tree.remove_older()
            writing = asyncio.get_running_loop().create_task(toolbox.keep_written())
            try:
                yield toolbox
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
