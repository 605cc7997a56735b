"""The other servers: which there are, which of them answer, who of them has what is asked for or room for more.

Those of the same machine, a data directory and those in its folder `workers`, are reached by a socket in the folder of
each below `runs`; those of other machines by the addresses of `fleet_peers`. Apart from that they are the same. All are
asked once a second how they are, and at once by whoever waits for one.
"""

import asyncio
import logging
import random
import ssl
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlencode

from belljar import metrics
from belljar.engine.contract import Engine
from belljar.errors import Busy
from belljar.fleet.addresses import Addresses, Listed
from belljar.fleet.assertions import ASSERTION, FleetKey
from belljar.fleet.identity import About
from belljar.fleet.known_hosts import KnownHosts
from belljar.fleet.peer import SILENT_S, Own, Peer, State
from belljar.fleet.relay import Connections, Headers
from belljar.servers import FLEET_SOCKET, HTTP_SOCKET, WORKERS

LOOK_S: Final = 1.0
WAIT_S: Final = 10.0
"""How long a request waits for a server that is away: one that was killed starts again within two seconds."""
_STILL_S: Final = 5.0
"""After how long standing still this server may have been given up: others ask it three times before that."""
_ALONE_S: Final = 2.0
"""After how long without a word from any other it may be, likewise."""
_WAIT_LOOK_S: Final = 0.2
_LOOK_WAIT_S: Final = 0.5
"""How long a look waits for those that are slow to answer; their answers count when they come."""
_PATIENCE_S: Final = 30.0
_START_S: Final = 30.0
"""How long after our own start a server that has a folder, and was not seen yet, may still be starting."""
_MOST_FOUND: Final = 10_000
_UNKNOWN_S: Final = 5.0
"""How long it is remembered that no server has an id."""
_WANTED_S: Final = 60.0
_FEWER: Final = 2
"""By how many sessions another server has to have fewer before a new one is made there and not here."""
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Peers:
    """The other servers, as of the last look."""

    def __init__(
        self,
        own: Own,
        addresses: Addresses | None = None,
        key: FleetKey | None = None,
        tls: ssl.SSLContext | None = None,
        draw_tag: Callable[[], str] = str,
        has_drain: Callable[[], bool] = lambda: False,
    ) -> None:
        self.own = own
        self._draw_tag = draw_tag
        """Draws other letters for the ids of this server, and returns them; none where it has sessions."""
        self.ready: dict[str, Peer] = {}
        """Those that answer and may be asked, by their ids."""
        self.hosts: dict[str, Peer] = {}
        """Those of other machines, by their URLs, whatever their state."""
        self.is_closed = False
        """Whether this one takes no new sessions, and keeps those that it has."""
        self._has_drain = has_drain
        self._addresses = addresses
        self._key = key
        self._tls = tls
        self._workers: dict[Path, Peer] = {}
        """Those of this machine that have a socket, by its path."""
        self._folders: set[Path] = set()
        """Of the data directories of all servers of this machine that are not this one."""
        self._seen: dict[Path, str] = {}
        """The ids of those that have answered since this one started."""
        self._known: dict[str, Peer] = {}
        """All that could have sessions, by their ids: those that answer, and those that are away, lost or have left."""
        self._tags: dict[str, set[str]] = {}
        self._started_at = time.monotonic()
        self._found: OrderedDict[tuple[str, ...], str] = OrderedDict()
        """The id of the server that has what was asked for before."""
        self._unknown: OrderedDict[tuple[str, ...], float] = OrderedDict()
        self._ticked_at = self._started_at
        self._doubted_at = 0.0
        """When it was noticed last that the others may give this server up: it stood still, or one does not hear it."""
        self._asking: dict[Peer, asyncio.Task[None]] = {}
        """The questions to servers that are under way."""
        self._looking = asyncio.Lock()
        self._joint_look: asyncio.Task[None] | None = None
        self._wanted: deque[float] = deque(maxlen=_MOST_FOUND)
        self._told: dict[str, tuple[State, str]] = {}
        """What the log has said of each address."""
        self.lost_since: dict[str, float] = {}
        """When machines that are lost were heard last, by their ids, in seconds since the epoch."""
        self._known_hosts = KnownHosts(own.data_directory)
        self._has_news = False
        """Whether what was told of machines has changed since it was written down."""
        if addresses is not None:
            for known in self._known_hosts.read():
                self.hosts[known.url] = known.restore(self._host(Listed(known.url, name=known.name)))

    # Looking

    async def look_for_room(self) -> None:
        """Look, if nobody had room a second ago: one look for all who ask at once."""
        if not any(peer.state == "ready" and peer.room > 0 for peer in self.ready.values()):
            if self._joint_look is None or self._joint_look.done():
                self._joint_look = asyncio.create_task(self.look())
            await asyncio.shield(self._joint_look)

    async def look(self) -> None:
        """Find out which servers there are, and how they are."""
        async with self._looking:
            sockets = await asyncio.to_thread(self._sockets)
            before = self._workers
            self._workers = {path: before.pop(path, None) or Peer(path, Connections(path)) for path in sockets}
            for peer in before.values():
                peer.connections.close()
            if self._addresses is not None:
                self._list(await self._addresses.read())
            for peer in (*self._workers.values(), *self.hosts.values()):
                # Nobody waits for one that has left, or is lost and is in no list any more.
                if peer not in self._asking and (peer.is_listed or peer.state not in ("lost", "left")):
                    self._asking[peer] = task = asyncio.create_task(self._look_at(peer))
                    task.add_done_callback(lambda _, peer=peer: self._asking.pop(peer, None))
            if self._asking:
                await asyncio.wait([*self._asking.values()], timeout=_LOOK_WAIT_S)
            self._sort()
            if self._has_news:
                self._has_news = False
                hosts = [host for host in self.hosts.values() if host.id not in self._seen.values()]
                await asyncio.to_thread(self._known_hosts.write, hosts)

    async def _look_at(self, peer: Peer) -> None:
        await peer.look()
        had_own_tag = peer.has_own_tag
        await peer.judge(self.own)
        if peer.has_own_tag and not had_own_tag and (tag := self._draw_tag()):
            log.info("ids of this server begin with %s from now on: those of %s begin as its own did", tag, peer.place)
            self.own = replace(self.own, tag=tag)
            await peer.judge(self.own)
        if peer.about is not None and not (peer.misses or peer.refusal) and self.own.tag in peer.about.silent:
            self._doubted_at = time.monotonic()
        self._sort()

    def _sockets(self) -> list[Path]:
        folders = [self.own.machine, *self.own.machine.glob(f"{WORKERS}/*")]
        self._folders = {folder for folder in folders if folder.is_dir()} - {self.own.data_directory}
        paths = [path for folder in folders for path in sorted(folder.glob(f"runs/*/{FLEET_SOCKET}"))]
        return [path for path in paths if path.parent.name != self.own.name]

    def _list(self, listed: Iterable[Listed]) -> None:
        """Note which machines are listed now, and the further servers that each of them has told of."""
        wanted = {one.url: one for one in listed}
        for peer in [*self.hosts.values()]:
            # What this server is itself, and its own machine's others, are reached by sockets.
            is_other = not peer.is_self and peer.id not in self._seen.values()
            if is_other and peer.about is not None and isinstance(peer.place, str) and peer.place in wanted:
                for port in peer.about.ports:
                    url = f"{peer.place.rpartition(':')[0]}:{port}"
                    wanted.setdefault(url, Listed(url, name=wanted[peer.place].name))
        for peer in self.hosts.values():
            peer.is_listed = False
        for url, one in wanted.items():
            peer = self.hosts.get(url) or self._host(one)
            peer.is_listed, peer.is_gone = True, one.is_gone
            self.hosts[url] = peer

    def _host(self, one: Listed) -> Peer:
        key = self._key
        if key is None:
            raise AssertionError("machines are listed, and there is no key")

        def sign(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
            if any(name == ASSERTION for name, _ in headers):
                return []
            return [(ASSERTION, key.assertion(peer.tag, method, target, headers))]

        connections = Connections(one.url, sign, self._tls, one.name)
        peer = Peer(one.url, connections, key, sign, one.name)
        return peer

    def _sort(self) -> None:
        """Bring the servers in order, by what each has said last."""
        known: dict[str, Peer] = {}
        for path, worker in self._workers.items():
            if worker.about is not None and not worker.misses:
                self._seen[path.parents[2]] = worker.id
            worker.give_up(is_over=worker.is_silent)
            if worker.id:
                known[worker.id] = worker if not worker.misses or worker.id not in known else known[worker.id]
        of_machine = {*known, *self._seen.values(), self.own.id}
        # Of two addresses of one server, the one counts at which it was heard last.
        for host in sorted(self.hosts.values(), key=lambda one: one.heard_at):
            if host.about is None or host.id in of_machine or host.tag == self.own.tag:
                continue
            before = known.get(host.id)
            if before is not None and not host.misses and not before.misses and before.name == host.name:
                continue
            known[host.id] = host
        for host in [*self.hosts.values()]:
            host.give_up(is_over=host.is_lost or (host.misses > 0 and host.is_silent))
            if (
                not host.is_given_up
                and host.id in known
                and known[host.id] is not host
                and host.misses
                and not host.is_listed
            ):
                del self.hosts[str(host.place)]  # it has another address now
        self._known = known
        self.ready = {id_: peer for id_, peer in known.items() if peer.state in ("ready", "draining", "drained")}
        self._tags = {}
        for id_, peer in known.items():
            self._tags.setdefault(peer.tag, set()).add(id_)
        self._note_states()

    def _note_states(self) -> None:
        """Say in the log what has become of machines, once each."""
        for url, host in self.hosts.items():
            state, why = host.state, host.refusal
            before, _ = self._told.get(url, ("starting", ""))
            if self._told.get(url) == (state, why) or host.is_self or host.id in self._seen.values():
                continue
            self._told[url] = state, why
            self._has_news = True
            known_as = f"{url} ({host.tag})" if host.tag else url
            match state:
                case "refused":
                    log.error("nothing is passed on to %s: %s", known_as, why)
                case "lost" | "away":
                    if state == "lost" and host.id:
                        self.lost_since[host.id] = time.time() - host.silent_s
                        metrics.fleet_losses.add()
                    log.warning("the server at %s is %s", known_as, state)
                case "ready":
                    self.lost_since.pop(host.id, None)
                    log.info("the server at %s is ready", known_as)
                case _:
                    if before != "starting" or state != "starting":
                        log.info("the server at %s is %s", known_as, state)

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Look once a second, until the block ends."""
        work = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            tasks = [work, *self._asking.values()]
            for task in tasks:
                task.cancel()
            for peer in (*self._workers.values(), *self.hosts.values()):
                peer.connections.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self.doubted_at()
            self._ticked_at = time.monotonic()
            try:
                await self.look()
            except Exception:
                # A server that does not look any more would take all others for lost.
                log.exception("the other servers could not be looked for")
            await asyncio.sleep(LOOK_S)

    # Which

    @property
    def has_hosts(self) -> bool:
        """Whether there may be servers of other machines."""
        return self._addresses is not None

    def _absent(self) -> bool:
        """Return whether a server that may have something does not answer at the moment."""
        is_starting = time.monotonic() - self._started_at < _START_S
        workers = self._folders if is_starting else self._folders & {*self._seen}
        if any(self._seen.get(folder) not in self.ready for folder in workers):
            return True
        hosts = self.hosts.values()
        return any(host.state == "away" or (host.state == "starting" and not host.is_gone) for host in hosts)

    def by_mark(self, text: str) -> Peer | None:
        """Return the server that keeps what has this id in its memory."""
        return next((peer for peer in self.ready.values() if text.startswith(peer.mark)), None)

    def id_of_tag(self, tag: str) -> str:
        """Return the id of the server whose ids begin so; empty for nobody's, and where two have drawn the same."""
        ids = {*self._tags.get(tag, ()), *([self.own.id] if tag == self.own.tag else [])}
        return next(iter(ids)) if len(ids) == 1 else ""

    def state_of(self, id_: str) -> State:
        """Return how a server is; `starting` for one that is not known and may yet be heard."""
        peer = self._known.get(id_)
        return peer.state if peer is not None else "starting"

    async def common_state_of(self, id_: str) -> State:
        """Return how a server is for all that answer: one that another hears is at most away.

        One that nobody has seen for as long as this server runs is lost.
        """
        state = self.own_view_of(id_)
        if state not in ("starting", "lost", "left"):
            return state
        question = f"/fleet/seen?{urlencode({'id': id_})}"
        peers = [peer for peer in self.ready.values() if peer.id != id_]
        answers = await asyncio.gather(*(peer.ask(question) for peer in peers))
        seen = {answer.decode(errors="replace") for answer in answers if answer is not None}
        if seen & {"ready", "draining", "drained", "away", "refused"}:
            return "away"
        return "left" if "left" in seen else "lost" if "lost" in seen else state

    def own_view_of(self, id_: str) -> State:
        """Return how a server is for this one, also if it was never heard: lost once whoever is there has answered."""
        state = self.state_of(id_)
        is_known = id_ in self._known or self._addresses is None or self._addresses.problem
        if is_known or time.monotonic() - self._started_at < SILENT_S:
            return state
        return "starting" if any(host.state == "starting" for host in self.hosts.values()) else "lost"

    @property
    def is_draining(self) -> bool:
        """Whether this server takes no new sessions."""
        return self.is_closed or self._has_drain()

    def gives_up(self, id_: str) -> bool:
        """Return whether a server, also this one, leaves to others what sleeps in the store."""
        return (
            self._has_drain() if id_ == self.own.id else self.state_of(id_) in ("draining", "drained", "lost", "left")
        )

    def is_over(self, id_: str) -> bool:
        """Return whether a server is not waited for any more."""
        return self.state_of(id_) in ("lost", "left")

    def are_some_over(self) -> bool:
        """Return whether any server is known that is not waited for any more."""
        return any(self.is_over(id_) for id_ in self._known)

    def silent_for(self, id_: str) -> float:
        """Return for how many seconds a server has said nothing."""
        peer = self._known.get(id_)
        return peer.silent_s if peer is not None else time.monotonic() - self._started_at

    def silent(self) -> list[str]:
        """Return the letters of the servers of other machines that do not answer."""
        return [host.tag for host in self.hosts.values() if host.misses and host.tag and not host.has_left]

    def doubted_at(self) -> float:
        """Return when others may have given this server up last: now, while it hears nobody or they do not hear it."""
        now = time.monotonic()
        others = [host for host in self.hosts.values() if host.is_listed and not host.is_self]
        is_alone = bool(others) and not any(peer.is_host for peer in self.ready.values())
        is_gone = any(host.is_self and host.is_gone for host in self.hosts.values())
        if now - self._ticked_at > _STILL_S or is_gone or (is_alone and now - self._heard_at() > _ALONE_S):
            self._doubted_at = now
        return self._doubted_at

    def _heard_at(self) -> float:
        """Return when a server of another machine was heard last."""
        heard = (host.heard_at for host in self.hosts.values() if host.about is not None and not host.is_self)
        return max(heard, default=self._started_at)

    async def live_at(self, id_: str, caller: Headers) -> str:
        """Return the id of the server that has a session open; empty where none that answers does."""
        question = f"/fleet/has?{urlencode({'live': id_})}"
        peers = [*self.ready.values()]
        answers = await asyncio.gather(*(peer.ask(question, caller) for peer in peers))
        return next((peer.id for peer, answer in zip(peers, answers, strict=True) if answer == b"true"), "")

    async def say_goodbye(self) -> None:
        """Tell the others that this server ends in order, and that its sessions are in the store."""
        peers = [*self.ready.values()]
        question = f"/fleet/goodbye?{urlencode({'id': self.own.id})}"
        await asyncio.gather(*(peer.ask(question, method="POST") for peer in peers))

    def hear_goodbye(self, id_: str) -> None:
        """Note that a server has ended in order."""
        if (peer := self._known.get(id_)) is not None:
            peer.has_left = True
            self._sort()

    async def awaited(self, id_: str) -> Peer:
        """Return a server that may be away for a moment; raise `Busy` if it does not come back in time."""
        if (peer := self.ready.get(id_)) is not None:
            return peer
        if (known := self._known.get(id_)) is not None and known.refusal:
            raise Busy(
                f"nothing is passed on to the server of this session: {known.refusal}",
                hint="Its operator has to give both servers the same version, settings and policy",
            )
        metrics.fleet_held.add()
        try:
            async with asyncio.timeout(WAIT_S):
                while (peer := self.ready.get(id_)) is None:
                    await asyncio.sleep(_WAIT_LOOK_S)
                    await self.look()
                return peer
        except TimeoutError:
            raise away() from None

    async def finder(self, caller: Headers, **named: str) -> str:
        """Return the id of the server that has what is named; empty where none has it.

        While a server is away, it may be the one: then this waits for it, and raises `Busy` if it stays away.
        """
        key = (*(value.decode() for _, value in caller), *named, *named.values())
        if (found := self._found.get(key)) is not None and not self.gives_up(found):
            return found
        if self._unknown.get(key, 0) > time.monotonic():
            return ""
        question = f"/fleet/has?{urlencode(named)}"
        asked: set[str] = set()
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    peers = [peer for id_, peer in self.ready.items() if id_ not in asked]
                    answers = await asyncio.gather(*(peer.ask(question, caller) for peer in peers))
                    for peer, answer in zip(peers, answers, strict=True):
                        if answer == b"true":
                            _remember(self._found, key, peer.id)
                            return peer.id
                        if answer is not None:
                            asked.add(peer.id)
                    if not self._absent() and not self.ready.keys() - asked:
                        break
                    await asyncio.sleep(_WAIT_LOOK_S)
                    await self.look()
        except TimeoutError:
            raise away() from None
        if "id" in named:  # a name or a key may be taken in a moment, at another server
            _remember(self._unknown, key, time.monotonic() + _UNKNOWN_S)
        return ""

    def freest(self, sessions: int, room: int) -> Peer | None:
        """Return the server that a new session is made at; None for this one, which has so many and room for more.

        One of this machine is preferred if it has fewer; one of another machine has it only where this one is full.
        """
        others = [peer for peer in self.ready.values() if peer.state == "ready" and peer.room > 0]
        if self.is_draining:
            room = 0
        best = min((peer for peer in others if not peer.is_host), key=lambda peer: peer.sessions, default=None)
        if best is not None and room > 0 and best.sessions + _FEWER > sessions:
            best = None
        if best is None and room <= 0:
            hosts = [peer for peer in others if peer.is_host]
            best = max(random.sample(hosts, min(2, len(hosts))), key=_freedom, default=None)
            if best is None:
                self._wanted.append(time.monotonic())
        if best is not None:
            # It is counted before it is told, or all callers of a second would go there.
            best.sessions, best.room = best.sessions + 1, best.room - 1
        metrics.fleet_placements.add("here" if best is None else "host" if best.is_host else "worker")
        return best

    def elected(self, *name: str) -> str:
        """Return the id of the server that a name without a session belongs to, the same at every server."""
        ids = {id_ for id_, peer in self._known.items() if peer.state in ("ready", "away")}
        ids |= {self._seen[folder] for folder in self._folders & {*self._seen}}
        ids -= {id_ for id_ in ids if self.gives_up(id_)}
        if not (self.is_draining and ids):
            ids.add(self.own.id)

        def weight(id_: str) -> bytes:
            return blake2b("\0".join((id_, *name)).encode(errors="replace")).digest()

        return max(ids, key=weight)

    async def engines(self) -> dict[str, Engine]:
        """Return the engines of the others, by the names of their folders."""
        from belljar.engine.remote import RemoteEngine

        found: dict[str, Engine] = {}
        for peer in self.ready.values():
            if isinstance(peer.place, Path):
                found[peer.name] = RemoteEngine(peer.place.with_name(HTTP_SOCKET), _PATIENCE_S)
            elif peer.sign is not None:
                found[peer.name] = RemoteEngine(
                    peer.place, _PATIENCE_S, sign=peer.sign, tls=self._tls, tls_name=peer.tls_name
                )
        return found

    # What operators see

    def status(self, own: About) -> list[dict[str, object]]:
        """Return how all servers of the fleet are, this one first."""
        rows: list[dict[str, object]] = [_row(own, "this server", own.state)]
        known_here = {own.id}
        for peer in self._workers.values():
            rows.append(_row(peer.about, "a worker beside it", peer.state))
            known_here.add(peer.id)
        for url, host in sorted(self.hosts.items()):
            if host.is_self or (host.id in known_here and not host.refusal):
                continue
            since = round(host.silent_s, 1)
            rows.append(_row(host.about, url, host.state) | {"why": host.refusal, "silent_s": since})
        if self._addresses is not None and self._addresses.problem:
            rows.append(_row(None, self._addresses.where, "unreadable") | {"why": self._addresses.problem})
        return rows

    def wanted(self) -> int:
        """Return for how many new sessions of the last minute no server had room."""
        since = time.monotonic() - _WANTED_S
        return sum(at > since for at in self._wanted)

    def states(self) -> Counter[str]:
        """Return how many servers of other machines are in each state."""
        return Counter(host.state for host in self.hosts.values() if not host.is_self)


def away() -> Busy:
    """Return what callers are told whose server does not answer."""
    return Busy("the server of this session is away", hint="It starts again by itself: call again in a few seconds")


def _row(about: About | None, place: str, state: str) -> dict[str, object]:
    told = about.model_dump(exclude={"digest", "state", "ports"}) if about is not None else {}
    return {"at": place, "state": state, "tag": "", "why": "", "silent_s": 0.0, **told}


def _freedom(peer: Peer) -> tuple[int, int]:
    return (peer.about.memory_mb, peer.about.pool) if peer.about else (0, 0)


def _remember(table: OrderedDict[tuple[str, ...], _T], key: tuple[str, ...], value: _T) -> None:
    table[key] = value
    if len(table) > _MOST_FOUND:
        table.popitem(last=False)
