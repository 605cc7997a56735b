"""Another server: where it is, how it is asked, what it said last, and what follows from that.

One of the same machine is reached by its socket and trusted; one of another machine by its URL, and only after it has
proved that it has the fleet's key and that nothing it has to have in common with this one differs. A server is known by
the id of its data directory, which it keeps when it starts again.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from belljar.errors import BelljarError
from belljar.fleet.assertions import ASSERTION, PROOF, FleetKey
from belljar.fleet.identity import About, difference
from belljar.fleet.relay import Connections, Headers, Sign

SILENT_S: Final = 30.0
"""After how long without a word the calls that were passed on to a server end, and one of another machine is lost."""
LOST_PROBES: Final = 3
"""How often a machine must have been asked in vain before it is lost, however long it was silent, or listed as gone."""
_ASK_S: Final = 2.0
_ANSWER_BYTES: Final = 4 * 1024 * 1024
_ABOUT_BYTES: Final = 64 * 1024
_STRANGER: Final = "another service answers there, or a server with another fleet_key"
_SELF: Final = "this server"
_DIFFERS: Final = "it differs in "
_SAME_TAG: Final = "its ids begin with "
State = Literal["starting", "ready", "draining", "drained", "away", "lost", "left", "refused"]


@dataclass(frozen=True, slots=True)
class Own:
    """This server, as it tells the others apart from itself."""

    machine: Path
    """The data directory of the first server of its machine."""
    data_directory: Path
    name: str
    id: str
    tag: str
    version: str = ""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Of its settings, by their names."""
    digest: str = ""


@dataclass(slots=True, eq=False)
class Peer:
    """Another server: one of this machine at a path, or one of another machine at a URL."""

    place: Path | str
    connections: Connections
    key: FleetKey | None = None
    """By which a server of another machine is known; None for one of this machine."""
    sign: Sign | None = None
    """Signs what it is asked, likewise."""
    tls_name: str = ""
    """That its certificate has to be for, if not its address."""
    about: About | None = None
    """What it said last."""
    heard_at: float = field(default_factory=time.monotonic)
    """When it answered last; at first, when it was first looked for."""
    misses: int = 0
    """How often it did not answer since then."""
    is_gone: bool = False
    """Whether the list of machines says that it is dead."""
    has_left: bool = False
    """Whether it has said that it ends in order."""
    is_listed: bool = True
    is_given_up: bool = False
    """Whether its connections were closed, because nobody waits for it any more."""
    refusal: str = ""
    """Why nothing is passed on to it; empty where it may be."""
    sessions: int = 0
    room: int = 0

    @property
    def is_host(self) -> bool:
        """Whether it is on another machine."""
        return isinstance(self.place, str)

    @property
    def id(self) -> str:
        """The id of its data directory; empty until it has answered."""
        return self.about.id if self.about else ""

    @property
    def tag(self) -> str:
        """The letters with which its ids begin."""
        return self.about.tag if self.about else ""

    @property
    def name(self) -> str:
        """The name of its folder below `runs`, which is another one after each start."""
        return self.place.parent.name if isinstance(self.place, Path) else self.about.name if self.about else ""

    @property
    def mark(self) -> str:
        """What begins the ids of its MCP sessions, which end with its process."""
        return mark_of(self.name)

    @property
    def is_self(self) -> bool:
        """Whether it was found to be this server itself, at an address of its own machine."""
        return self.refusal == _SELF

    @property
    def has_own_tag(self) -> bool:
        """Whether the only fault of it is that it has drawn the same letters as this server."""
        return self.refusal.startswith(_SAME_TAG)

    @property
    def is_silent(self) -> bool:
        """Whether it has been silent for so long that nobody should wait for it."""
        return self.silent_s > SILENT_S

    @property
    def silent_s(self) -> float:
        """For how many seconds it has said nothing."""
        return time.monotonic() - self.heard_at

    @property
    def is_lost(self) -> bool:
        """Whether it is a machine that nobody expects back soon."""
        return self.is_host and self.misses >= LOST_PROBES and (self.is_silent or self.is_gone)

    @property
    def state(self) -> State:
        """How it is."""
        if self.refusal:
            return "refused"
        if self.about is None:
            return "lost" if self.is_lost else "starting"
        if self.has_left:
            return "left"
        if self.is_lost:
            return "lost"
        if self.misses:
            return "away"
        return self.about.state

    def give_up(self, *, is_over: bool) -> None:
        """Close its connections once nobody waits for it, and only then: the next look goes over a new one."""
        if is_over and not self.is_given_up:
            self.connections.close()
        self.is_given_up = is_over

    async def ask(self, path: str, headers: Headers | None = None, method: str = "GET") -> bytes | None:
        """Return its answer to a question of ours; None where it has none, or does not answer."""
        try:
            asked = [(b"host", b"belljar"), *(headers or [])]
            async with asyncio.timeout(_ASK_S), self.connections.ask(method, path.encode(), asked) as answer:
                content = await answer.read(_ANSWER_BYTES)
                return content if answer.status == 200 else None
        except (BelljarError, TimeoutError):
            return None

    async def look(self) -> None:
        """Ask how it is, and note what it says."""
        refusal, about = "", None
        with suppress(BelljarError, TimeoutError):
            async with asyncio.timeout(_ASK_S):
                refusal, about = await self._ask_about()
        if about is None:
            self.misses += 1
            # Where a server of ours was before, it is away, whoever has its address meanwhile.
            self.refusal = self.refusal if self.about else refusal
            return
        if self.about is None or about.name != self.about.name:
            self.has_left = False
        self.about, self.sessions, self.room = about, about.sessions, about.room
        self.heard_at, self.misses = time.monotonic(), 0

    async def judge(self, own: Own) -> None:
        """Decide whether it may be trusted with requests, if it is on another machine and has just answered."""
        about = self.about
        if about is None or self.misses or not self.is_host:
            return
        if about.id == own.id:
            is_self = about.name == own.name
            self.refusal = _SELF if is_self else "it has a copy of this server's data directory"
        elif about.version != own.version:
            self.refusal = f"it runs version {about.version}, and this server {own.version}"
        elif about.digest != own.digest:
            if not self.refusal.startswith(_DIFFERS):  # asked once
                self.refusal = _DIFFERS + difference(own.digests, await self.ask("/fleet/settings") or b"")
        elif about.tag == own.tag:
            self.refusal = (
                f"{_SAME_TAG}{about.tag} as this server's do, and not one of both is without sessions: give one a new "
                "data_directory, and bring there what sleeps in the old one with belljar sessions import"
            )
        else:
            self.refusal = ""

    async def _ask_about(self) -> tuple[str, About | None]:
        """Return why a server is none of ours, or what it says of itself."""
        target, headers = b"/fleet/about", [(b"host", b"belljar")]
        if self.key is None:
            async with self.connections.ask("GET", target, headers) as answer:
                return "", About.read(await answer.read(_ABOUT_BYTES))
        # Signed here, because what it answers has to be a proof for this very request.
        assertion = self.key.assertion("", b"GET", target, headers)
        async with self.connections.ask("GET", target, [*headers, (ASSERTION, assertion)]) as answer:
            content = await answer.read(_ABOUT_BYTES)
        if not self.key.is_proved(answer.header(PROOF), assertion, content):
            return _STRANGER, None
        if answer.status != 200:
            return content.decode(errors="replace")[:200], None
        about = About.read(content)
        return ("" if about else "it says of itself what this version does not understand"), about


def mark_of(name: str) -> str:
    """Return what begins the ids of MCP sessions and of questions that a server of this name keeps in memory."""
    return name.rpartition("-")[2]
