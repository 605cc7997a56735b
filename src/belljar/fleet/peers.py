"""The other servers of this machine: where they are, which of them answer, what they have, how much room they have.

A machine is a data directory, whose server is the first one, and the data directories in its folder `workers`. A server
that takes requests of the others has a socket for them in its folder below `runs`. They are asked once a second, and at
once by whoever waits for one. A server is known by its number, which it keeps when it starts again.
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from belljar.engine.contract import Engine
from belljar.errors import BelljarError
from belljar.fleet.relay import Connections, Headers
from belljar.servers import FLEET_SOCKET, HTTP_SOCKET, WORKERS

LOOK_S: Final = 1.0
WAIT_S: Final = 10.0
"""How long a request waits for a server that is away: one that was killed starts again within two seconds."""
SILENT_S: Final = 30.0
"""After how long without a word the calls that were passed on to a server end."""
_WAIT_LOOK_S: Final = 0.2
_ASK_S: Final = 2.0
_PATIENCE_S: Final = 30.0
_START_S: Final = 30.0
"""How long after our own start a server that has a folder, and was not seen yet, may still be starting."""
_ANSWER_BYTES: Final = 4 * 1024 * 1024
_MOST_FOUND: Final = 10_000
_FEWER: Final = 2
"""By how many sessions another server has to have fewer before a new one is made there and not here."""


@dataclass(slots=True)
class Peer:
    """Another server that answers."""

    number: str
    name: str
    """Of its folder below `runs`, which is another one after each start."""
    path: Path
    tag: str = ""
    """The letters with which its ids begin."""
    state: str = ""
    sessions: int = 0
    room: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    """When it answered last."""
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.connections = Connections(self.path)

    @property
    def mark(self) -> str:
        """What begins the ids of its MCP sessions, which end with its process."""
        return mark_of(self.name)

    @property
    def is_frozen(self) -> bool:
        """Whether it has been silent for so long that nobody should wait for it."""
        return time.monotonic() - self.heard_at > SILENT_S

    async def ask(self, path: str, headers: Headers | None = None) -> bytes | None:
        """Return its answer to a question of ours; None where it has none, or does not answer."""
        asked = [(b"host", b"belljar"), *(headers or [])]
        try:
            async with asyncio.timeout(_ASK_S), self.connections.ask("GET", path.encode(), asked) as answer:
                content = await answer.read(_ANSWER_BYTES)
                return content if answer.status == 200 else None
        except (BelljarError, TimeoutError):
            return None

    async def look(self) -> bool:
        """Ask how it is; return False if it does not answer, or not as a server of ours."""
        try:
            about = json.loads(await self.ask("/fleet/about") or b"null")
            self.tag, self.state = str(about["tag"]), str(about["state"])
            self.sessions, self.room = int(about["sessions"]), int(about["room"])
            self.heard_at = time.monotonic()
        except (ValueError, TypeError, KeyError):
            return False
        return True


def mark_of(name: str) -> str:
    """Return what begins the ids of MCP sessions and of questions that a server of this name keeps in memory."""
    return name.rpartition("-")[2]


class Peers:
    """The other servers of one machine, as of the last look."""

    def __init__(self, machine: Path, own: Path, name: str, tag: str = "") -> None:
        self._machine = machine
        self.number = _number(machine, own)
        self.name = name
        self.tag = tag
        self.ready: dict[str, Peer] = {}
        """Those that answer, by their numbers."""
        self._known: dict[Path, Peer] = {}
        """All that have a socket, by its path."""
        self._folders: set[str] = set()
        self._seen: set[str] = {self.number}
        """The numbers of the servers that have answered since this one started."""
        self._started_at = time.monotonic()
        self._tags: dict[str, str] = {}
        """The number of the server with each tag, whether it answers or not."""
        self._found: OrderedDict[tuple[str, ...], str] = OrderedDict()
        """The number of the server that has what was asked for before."""
        self._looking = asyncio.Lock()

    async def look(self) -> None:
        """Find out which servers there are, and how they are."""
        async with self._looking:
            self._folders, sockets = await asyncio.to_thread(self._sockets)
            before = self._known
            self._known = {
                path: before.pop(path, None) or Peer(_number(self._machine, path.parents[2]), path.parent.name, path)
                for path in sockets
            }
            answers = await asyncio.gather(*(peer.look() for peer in self._known.values()))
            for peer in (*before.values(), *(peer for peer in self._known.values() if peer.is_frozen)):
                peer.connections.close()
            found = zip(self._known.values(), answers, strict=True)
            self.ready = {peer.number: peer for peer, is_good in found if is_good}
            self._seen |= {*self.ready}
            for peer in self.ready.values():
                # Of two that have drawn the same letters, one has to be asked.
                is_shared = peer.tag == self.tag or self._tags.get(peer.tag, peer.number) != peer.number
                self._tags[peer.tag] = "" if is_shared else peer.number

    def _sockets(self) -> tuple[set[str], list[Path]]:
        folders = [self._machine, *self._machine.glob(f"{WORKERS}/*")]
        paths = [path for folder in folders for path in sorted(folder.glob(f"runs/*/{FLEET_SOCKET}"))]
        numbers = {_number(self._machine, folder) for folder in folders if folder.is_dir()}
        return numbers, [path for path in paths if path.parent.name != self.name]

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Look once a second, until the block ends."""
        work = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            for peer in self._known.values():
                peer.connections.close()

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    @property
    def numbers(self) -> set[str]:
        """The numbers of all servers that belong to the machine now, whether they answer at this moment or not."""
        may_start = time.monotonic() - self._started_at < _START_S
        return self._folders | self._seen if may_start else self._folders & self._seen | {self.number}

    def by_mark(self, text: str) -> Peer | None:
        """Return the server that keeps what has this id in its memory."""
        return next((peer for peer in self.ready.values() if text.startswith(peer.mark)), None)

    def number_of_tag(self, tag: str) -> str:
        """Return the number of the server whose ids begin so; empty for nobody's."""
        return self._tags.get(tag, self.number if tag == self.tag else "")

    async def awaited(self, number: str) -> Peer | None:
        """Return a server that may be away for a moment; None if it does not come back in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                while (peer := self.ready.get(number)) is None:
                    await asyncio.sleep(_WAIT_LOOK_S)
                    await self.look()
                return peer
        except TimeoutError:
            return None

    async def finder(self, caller: Headers, **named: str) -> str:
        """Return the number of the server that has what is named; empty where none has it.

        While a server of the machine is away, it may be the one: then this waits for it.
        """
        key = (*(value.decode() for _, value in caller), *named, *named.values())
        if (number := self._found.get(key)) is not None:
            return number
        question = f"/fleet/has?{urlencode(named)}"
        asked: set[str] = set()
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    peers = [peer for number, peer in self.ready.items() if number not in asked]
                    answers = await asyncio.gather(*(peer.ask(question, caller) for peer in peers))
                    for peer, answer in zip(peers, answers, strict=True):
                        if answer == b"true":
                            self._found[key] = peer.number
                            if len(self._found) > _MOST_FOUND:
                                self._found.popitem(last=False)
                            return peer.number
                        if answer is not None:
                            asked.add(peer.number)
                    if not self.numbers - asked - {self.number}:
                        return ""
                    await asyncio.sleep(_WAIT_LOOK_S)
                    await self.look()
        except TimeoutError:
            return ""

    def freest(self, sessions: int, room: int) -> Peer | None:
        """Return the server that a new session is made at; None for this one, which has so many and room for more."""
        others = [peer for peer in self.ready.values() if peer.state == "ready" and peer.room > 0]
        best = min(others, key=lambda peer: peer.sessions, default=None)
        if best is None or (room > 0 and best.sessions + _FEWER > sessions):
            return None
        # It is counted before it is told, or all callers of a second would go there.
        best.sessions, best.room = best.sessions + 1, best.room - 1
        return best

    def elected(self, *name: str) -> str:
        """Return the number of the server that a name without a session belongs to, the same at every server."""

        def weight(number: str) -> bytes:
            return blake2b("\0".join((number, *name)).encode(errors="replace")).digest()

        return max(self.numbers, key=weight)

    async def engines(self) -> dict[str, Engine]:
        """Return the engines of the others, by the names of their folders."""
        from belljar.engine.remote import RemoteEngine

        return {peer.name: RemoteEngine(peer.path.with_name(HTTP_SOCKET), _PATIENCE_S) for peer in self.ready.values()}


def _number(machine: Path, data_directory: Path) -> str:
    return "1" if data_directory == machine else data_directory.name
