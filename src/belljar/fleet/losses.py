"""Sessions whose machine is lost, has left or comes back: what their callers are told, and where they go on.

A call that names what was open on a lost machine is refused once, with what may still happen there and what is kept;
only then does the session go on, as of its bundle in the store. What slept there just wakes. Where no bundle of the
caller's is found, unknown ids and those of others are answered alike.

A machine that was cut off or frozen may find that its sessions go on elsewhere. It asks the store before it answers a
call for one of them, or lets it call a tool, and ends what it does not own any more.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
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
from belljar.sessions.queue import interrupt_all
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session
from belljar.sessions.store import StoreFailed

if TYPE_CHECKING:
    from belljar.sessions.session_objects import Head, Standing
    from belljar.sessions.stored import StoredSessions

_MOST_TOLD: Final = 10_000
_MOST_NAMED: Final = 5
_WATCH_S: Final = 3.0
_CUT_OFF: Final = "because its machine reaches neither another one nor the store, and the session may go on elsewhere"
_MOST_CHARS: Final = 1_000
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
        self._nothing: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """For whom the store had nothing, and until when it is not asked again."""
        self._sure: OrderedDict[str, float] = OrderedDict()
        """When the store said last that sessions are this machine's."""

    @property
    def _stored(self) -> "StoredSessions | None":
        return self._sessions.stored

    async def settle(self, principal: str, server: str = "", **named: str) -> str:
        """See that the caller's session can go on here, or raise what its caller has to know first.

        What is named is an `id` of a session, an execution or a run, the `name` of a session, or the `key` of a call.
        `server` is the one whose ids begin so; empty where that is not known. Returns the id of the server that answers
        the call, which is this one unless the store names another one that is there.
        """
        here = self._peers.own.id
        ((kind, value),) = named.items()
        left = await self._find(principal, kind, value)
        if left is not None and left.standing.is_asleep and self._stored is not None:
            with _store_asked():
                await self._stored.keep(left.session_id)  # for what reads it where it sleeps
            return here  # whoever asks first wakes it
        owner = server
        if left is not None and self._stored is not None:
            with _store_asked():
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
        # A name that a caller chose is in no message.
        shown = left.session_id if left is not None else value
        if state == "left" and self._peers.silent_for(owner) < SILENT_S + self._drain_s:
            raise Busy(
                f"the machine of {shown} ends now, and puts its sessions into the store",
                hint="Make the same call again in 5 seconds",
            )
        if state == "left" and left is None:
            return here  # whatever it had, it has put
        self._tell(principal, shown, owner, left)
        if left is not None:
            await self._sessions.go_on(left.session_id, principal)
            metrics.fleet_moves.add()
        return here

    async def _find(self, principal: str, kind: str, value: str) -> _Left | None:
        """Return what the store has of a session of this caller's; None where it has nothing."""
        stored, key = self._stored, (principal, kind, value)
        if stored is None or len(value) > _MOST_CHARS or self._nothing.get(key, 0.0) > time.monotonic():
            return None
        try:
            is_session = kind == "id" and has_id_form(value) and (await stored.objects.standing(value)).head
            session_id = value if is_session else await stored.objects.session_of(principal, kind, value)
            standing = await stored.objects.standing(session_id) if session_id else None
            head = await stored.objects.head(session_id, standing.head) if standing and standing.head else None
        except BelljarError as error:
            if kind != "id" and not self._peers.are_some_over():
                return None  # all that ever were are there, and have nothing of that name
            raise _store_away(error) from error
        if standing is not None and head is not None and head.principal == principal:
            return _Left(session_id, standing, head)
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
        with _store_asked():
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

    async def watch(self) -> None:
        """Look after what is open here while others may have given this machine up.

        What goes on elsewhere is ended. While nobody can tell, because no other machine and no store answers, cells of
        sessions that may go on elsewhere are stopped once this machine must count as lost.
        """
        looked_at, unsure_since = 0.0, None
        while True:
            await asyncio.sleep(_WATCH_S)
            began = time.monotonic()
            if self._peers.doubted_at() <= looked_at:
                continue
            try:
                for session in self._sessions.all():
                    await self.make_sure(session)
                looked_at, unsure_since = began, None
            except BelljarError as error:
                unsure_since = unsure_since or began
                if began - unsure_since > SILENT_S - _WATCH_S:
                    await self._stop_cells(error)

    async def _stop_cells(self, error: BelljarError) -> None:
        for session in self._sessions.all():
            found = self._stored.records.find(session.id) if self._stored is not None else None
            if found is not None and found.owned > 0 and (running := session.queue.running()):
                log.error("cells of session %s are stopped, because this machine is cut off: %s", session.id, error)
                await interrupt_all(running, _CUT_OFF, waits=False)

    async def check_asleep(self, session_id: str) -> None:
        """Give up what sleeps here of a session that goes on elsewhere since this machine was lost."""
        stored = self._stored
        found = stored.records.find(session_id) if stored is not None else None
        if stored is None or found is None or found.state != "asleep" or found.owned <= 0:
            return
        with _store_asked():
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


@contextmanager
def _store_asked() -> Generator[None]:
    """Tell callers to come again where the store cannot be used now."""
    try:
        yield
    except StoreFailed as error:
        raise _store_away(error) from error


def _store_away(error: BelljarError) -> Busy:
    log.warning("the store cannot tell what may go on here: %s", error)
    return Busy(
        "whether this may go on here is asked of the store, which cannot be used now",
        hint="Make the same call again in 30 seconds; the server's operator finds the reason in its log",
    )


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
