"""Sessions whose machine is lost, has left or comes back: what their callers are told, and where they go on.

A call that names what was open on a lost machine is refused once, with what may still happen there and what is kept;
only then does the session go on, as of its bundle in the store. What slept there just wakes. Where no bundle of the
caller's is found, unknown ids and those of others are answered alike.

A machine that was cut off or frozen may find that its sessions go on elsewhere. It asks the store before it answers a
call for one of them, or lets it call a tool, and ends what it does not own any more.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from belljar import metrics
from belljar.errors import BelljarError, Busy
from belljar.facts import ToolCallFacts, Verdict, hookimpl
from belljar.fleet.peer import SILENT_S
from belljar.fleet.peers import Peers, away
from belljar.fleet.relay import SessionLost
from belljar.journal.journal import has_id_form
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session

if TYPE_CHECKING:
    from belljar.sessions.session_objects import Head, Standing
    from belljar.sessions.stored import StoredSessions

_MOST_TOLD: Final = 10_000
_MOST_NAMED: Final = 5
_UNKNOWN_S: Final = 5.0


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Left:
    """What the store has of a session of the caller's."""

    session_id: str
    standing: "Standing"
    head: "Head"


class Losses:
    """Sessions that may have to go on at another machine than the one they were on."""

    def __init__(self, peers: Peers, sessions: Registry, drain_s: float) -> None:
        self._peers = peers
        self._sessions = sessions
        self._drain_s = drain_s
        self._told: OrderedDict[tuple[str, str, float], None] = OrderedDict()
        """Who was told of what, since when it was lost."""
        self._nothing: OrderedDict[tuple[str, str], float] = OrderedDict()
        """For whom the store had nothing, and until when it is not asked again."""
        self._sure: OrderedDict[str, float] = OrderedDict()
        """When the store said last that sessions are this machine's."""

    @property
    def _stored(self) -> "StoredSessions | None":
        return self._sessions.stored

    async def settle(self, principal: str, id_: str, server: str) -> str:
        """See that the caller's session can go on here, or raise what its caller has to know first.

        `server` is the one whose ids begin so; empty where that is not known. Returns the id of the server that answers
        the call, which is this one unless the store names another one that is there.
        """
        here = self._peers.own.id
        left = await self._find(principal, id_)
        if left is not None and left.standing.is_asleep:
            return here  # whoever asks first wakes it
        owner = server
        if left is not None and self._stored is not None:
            said = await self._stored.objects.owner(left.session_id, left.standing.owner)
            if said.end or said.directory == self._stored.directory:
                return here  # it is over, or this machine's
            # It may have gone on elsewhere before, and been lost there.
            owner = said.directory
        if owner in ("", here):
            return here
        state = await self._peers.common_state_of(owner)
        if state == "away" or (state == "starting" and self._peers.has_hosts):
            raise away()
        if state not in ("lost", "left"):
            return owner if left is not None else here
        if state == "left" and self._peers.silent_for(owner) < SILENT_S + self._drain_s:
            raise Busy(
                f"the machine of {id_} ends now, and puts its sessions into the store",
                hint="Make the same call again in 5 seconds",
            )
        if state == "left" and left is None:
            return here  # whatever it had, it has put
        self._tell(principal, id_, owner, left)
        if left is not None:
            await self._sessions.go_on(left.session_id, principal)
            metrics.fleet_moves.add()
        return here

    async def _find(self, principal: str, id_: str) -> _Left | None:
        """Return what the store has of a session of this caller's; None where it has nothing."""
        stored, key = self._stored, (principal, id_)
        if stored is None or not has_id_form(id_) or self._nothing.get(key, 0.0) > time.monotonic():
            return None
        try:
            standing = await stored.objects.standing(id_)
            head = await stored.objects.head(id_, standing.head) if standing.head else None
        except BelljarError as error:
            log.warning("the store cannot tell what it has of %s: %s", id_, error)
            raise Busy(
                "whether this may go on here is asked of the store, which cannot be used now",
                hint="Make the same call again in 30 seconds; the server's operator finds the reason in its log",
            ) from error
        if head is not None and head.principal == principal:
            return _Left(id_, standing, head)
        self._nothing[key] = time.monotonic() + _UNKNOWN_S
        if len(self._nothing) > _MOST_TOLD:
            self._nothing.popitem(last=False)
        return None

    def _tell(self, principal: str, id_: str, server: str, left: _Left | None) -> None:
        """Raise `SessionLost` for the first call of this caller's that names this since the machine was lost."""
        since = self._peers.lost_since.setdefault(server, time.time() - self._peers.silent_for(server))
        told = (principal, id_, since)
        if told in self._told:
            return
        self._told[told] = None
        if len(self._told) > _MOST_TOLD:
            self._told.popitem(last=False)
        hint = (
            "Nothing was run now. Call again to go on with what is left of the session, if anything is; if the machine "
            "comes back, so does the session"
        )
        if left is not None:
            count, variables = len(left.head.executions), left.head.variables
            named = ", ".join(variables[:_MOST_NAMED]) + (" and others" if len(variables) > _MOST_NAMED else "")
            last = f", the last of them {left.head.executions[-1]}" if count else ""
            hint = (
                f"Nothing was run now. Kept is its state of {_at(left.head.slept_at)}, after {count} executions{last}, "
                f"with {f'the variables {named}' if named else 'no variables'}: call again, and the session goes on "
                "from there, rewound. Whatever ran later is lost, and what it did outside is not undone"
            )
        raise SessionLost(
            f"the machine of {id_} is lost: it was last heard of at {_at(since)}, and what ran there may still run",
            hint=hint,
        )

    # Coming back

    async def make_sure(self, session: Session) -> bool:
        """Return whether an open session is this machine's; end it here if it goes on elsewhere.

        The store is asked only after a time in which others may have thought that this machine is lost.
        """
        stored, now = self._stored, time.monotonic()
        if stored is None or not self._peers.has_hosts or self._peers.doubted_at() <= self._sure.get(session.id, 0.0):
            return True
        found = stored.records.find(session.id)
        if found is None or found.owned <= 0:
            return True  # no other server can have it
        standing = await stored.objects.standing(session.id)
        if max(standing.owner, standing.head) <= found.owned:
            self._sure[session.id] = now
            if len(self._sure) > _MOST_TOLD:
                self._sure.popitem(last=False)
            return True
        where = (
            (await stored.objects.owner(session.id, standing.owner)).host
            if standing.owner > standing.head
            else "the store"
        )
        await self._sessions.endings.delete(session, f"goes on at {where}, because this machine was cut off")
        return False

    async def check_asleep(self, session_id: str) -> None:
        """Give up what sleeps here of a session that goes on elsewhere since this machine was lost."""
        stored = self._stored
        found = stored.records.find(session_id) if stored is not None else None
        if stored is None or found is None or found.state != "asleep" or found.owned <= 0:
            return
        standing = await stored.objects.standing(session_id)
        if max(standing.owner, standing.head) > found.owned:
            await stored.put(session_id)  # which finds that it is another's


class ToolHold:
    """Holds the tool calls of sessions until it is known that they are still this machine's."""

    def __init__(self, find: Callable[[str], Session | None], make_sure: Callable[[Session], Awaitable[bool]]) -> None:
        self._find = find
        self._make_sure = make_sure

    @hookimpl
    async def judge_tool_call(self, call: ToolCallFacts) -> Verdict | None:
        """See `hooks.py`."""
        session = self._find(call.session_id)
        try:
            is_ours = session is None or await self._make_sure(session)
        except BelljarError:
            return Verdict("deny", "whether this session goes on elsewhere cannot be known now: the store is away")
        return None if is_ours else Verdict("deny", "this session goes on at another machine")


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
