"""All sessions of a runtime: made, found by their owner, swept when idle, ended together.

How one ends is in `endings.py`; what executions gave, also those of sessions that have gone, in `executions.py`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from belljar import measures, spans
from belljar.errors import Busy, SessionNotFound
from belljar.executions.admission import Admission
from belljar.executions.execution import Execution
from belljar.executions.shared_folder import open_owner_folders
from belljar.journal.journal import Journal
from belljar.journal.session_records import SessionRecord, SessionRecords
from belljar.kernels.base import Kernel
from belljar.models import SessionFork, SessionInfo, SessionNotice
from belljar.policy.guard import Guard
from belljar.policy.guardrails import Guardrails
from belljar.privacy.redaction import SessionRedactor
from belljar.privacy.redactors import Redactors
from belljar.privacy.vault import TokenCounter, TokenLog
from belljar.provisioning.handover import Handover
from belljar.provisioning.starter import KernelStarter
from belljar.sessions import resumption
from belljar.sessions.closing import DAY_S, SessionCloser, about
from belljar.sessions.folders import SessionFolders
from belljar.sessions.fork import fork_kernel
from belljar.sessions.history import ExecutionHistory
from belljar.sessions.pool import Pool, new_folders
from belljar.sessions.session import Session, iso

NEW_SESSION_HINT = "Call execute_code with an empty session_id for a new session, then make its variables again"

MOST_ASLEEP = 256
"""Sessions of one owner on disk, beyond which no more are put there to make room: each may take `disk_mb`."""

log = logging.getLogger(__name__)


class Registry:
    """Sessions by id. Another principal's session answers exactly as an unknown one."""

    def __init__(
        self,
        guardrails: Guardrails,
        veils: Redactors,
        folder: Path,
        journal: Journal,
        roll: SessionRecords,
        starter: KernelStarter,
        handover: Handover,
    ) -> None:
        settings = guardrails.settings
        self._handover = handover
        self.settings = settings
        self._guardrails = guardrails
        self._veils = veils
        self._shelves = open_owner_folders(settings)
        self.journal = journal
        self.roll = roll
        self._folder = folder
        self._starter = starter
        self.pool = Pool(starter, folder, roll, environment=settings.environment, size=settings.pool_size)
        self.admission = Admission(
            most_running=settings.max_running,
            most_waiting=settings.max_waiting,
            headroom_mb=settings.memory_headroom_mb,
        )
        self._sessions: dict[str, Session] = {}
        self.executions = ExecutionHistory(self._sessions, folder, journal, settings)
        self.endings = SessionCloser(
            self._sessions,
            settings=settings,
            folder=folder,
            journal=journal,
            roll=roll,
            starter=starter,
            handover=handover,
        )

    # New ones

    def create(self, principal: str, *, environment: str = "", reason: str = "") -> Session:
        """A new session; its kernel starts with its first cell."""
        self._check_room(principal)
        name = environment or self.settings.environment
        self._starter.environments.check(name)
        asked_at = time.perf_counter()
        unborn = self.pool.take(name)
        folders = unborn.folders if unborn else self._new_folders(name)
        session = self._open(folders, principal, name, reason)
        self._enter(session)
        if unborn is not None:
            session.session_kernel.adopt(unborn.kernel, is_fresh=True)
            measures.kernel_starts.observe(time.perf_counter() - asked_at, "pool")
        measures.sessions_opened.add("new")
        return session

    def _new_folders(self, environment: str) -> SessionFolders:
        return self.pool.take_room(environment) or new_folders(self._folder, self._starter)

    async def fork(
        self, session_id: str, principal: str, *, at: str = "", reseed: bool = False
    ) -> tuple[Session, SessionFork]:
        """A new session that goes on from the state of another one, or from its state before an execution."""
        origin = await self.reach(session_id, principal)
        origin.queue.check_idle()
        await self.make_room(principal, spared=origin)
        self._check_room(principal)
        async with origin.turn:
            forked = await fork_kernel(origin, self._starter, self._folder, at=at, reseed=reseed)
            reason = f"fork of {origin.id}"
            veil = origin.veil.fork(TokenCounter(forked.folders.tokens))
            session = self._open(forked.folders, principal, origin.environment, reason, veil)
            self._enter(session)
            session.session_kernel.adopt(forked.kernel)
            session.session_kernel.variables = forked.variables
            session.guard.inherit(origin.guard)
            self.roll.record_use(session.id, forked.variables)
            measures.sessions_opened.add("fork")
        variables, lost = list(forked.variables), forked.lost
        return session, SessionFork(session_id=session.id, origin=origin.id, variables=variables, lost=lost)

    def take_over(self, entry: SessionRecord, folders: SessionFolders, kernel: Kernel, box: TokenLog | None) -> Session:
        """A session whose kernel an earlier server left, as that one had it; the box has what its tokens stand for."""
        self.roll.take_over(entry.id)
        session = self._open(folders, entry.principal, entry.environment, entry.reason, box=box)
        resumption.take_over(session, entry, kernel)
        measures.sessions_opened.add("kept")
        log.info("session %s goes on with its variables", entry.id, extra=about(session))
        return session

    # Room for them

    @property
    def _owners_most(self) -> int:
        """How many sessions one owner may have open."""
        most, share = self.settings.max_sessions, self.settings.owner_share
        return most if self.settings.only_owner else max(1, int(most * share))

    async def make_room(self, principal: str, *, spared: Session | None = None) -> None:
        """Put idle sessions to sleep until the principal may have one more, as far as there are any.

        One who is at its share gives up its own longest idle one. When all sessions together are too many, whoever
        has the most of them does, unless the principal itself would then have more.
        """
        if not self.settings.hibernate:
            return  # an idle session would be lost
        while (giver := self._giver(principal)) is not None:
            idle = [session for session in self.of(giver) if session.is_idle and session is not spared]
            if not idle or (giver == principal and self.roll.has_asleep(principal, MOST_ASLEEP)):
                return
            session = min(idle, key=lambda each: each.lease.expires_at)
            whose = "its owner's" if giver == principal else "another owner's"
            await self.endings.retire(session, f"made room for {whose} new session at {iso(time.time())}")

    def _giver(self, principal: str) -> str | None:
        """Who has to give up a session so that the principal can have one more; None where nobody has to."""
        counts = Counter(session.principal for session in self._sessions.values())
        if counts[principal] >= self._owners_most:
            return principal
        if len(self._sessions) < self.settings.max_sessions:
            return None
        largest = max(counts, key=lambda owner: (counts[owner], owner == principal))
        return largest if counts[largest] > counts[principal] + 1 else principal

    def _check_room(self, principal: str) -> None:
        own, is_full = len(self.of(principal)), len(self._sessions) >= self.settings.max_sessions
        if own >= self._owners_most and not is_full:
            raise Busy(
                f"{own} of your sessions are open and none of them can be put to sleep; owner_share of max_sessions "
                f"allows {self._owners_most} for each owner",
                hint="Wait for one to finish, stop it with interrupt_execution, or clear one with clear_session",
            )
        if is_full:
            hint = "Clear one with clear_session, or try" if own else "They are others': try"
            raise Busy(
                f"{self.settings.max_sessions} sessions are open, the most that max_sessions allows",
                hint=f"{hint} again when an idle one has expired",
            )
        self.admission.check_memory()

    def _open(
        self,
        folders: SessionFolders,
        principal: str,
        environment: str,
        reason: str,
        veil: SessionRedactor | None = None,
        *,
        box: TokenLog | None = None,
    ) -> Session:
        tools = self._starter.broker(folders.session_id)
        veil = veil or self._veils.veil(folders.tokens)
        if self._handover.is_on and self._veils.are_in_use:
            veil.keep_in(box or TokenLog())
        session = Session(
            folders,
            principal=principal,
            environment=environment,
            reason=reason,
            settings=self.settings,
            journal=self.journal,
            roll=self.roll,
            admission=self.admission,
            start_kernel=partial(self._starter.start, environment),
            guard=self._guardrails.guard(folders.session_id, principal, folders.root),
            veil=veil,
            handover=self._handover,
            shelf=self._shelves.of(principal) if self._shelves and (tools or self.settings.shares_always) else None,
            tools=tools,
        )
        self._sessions[session.id] = session
        spans.annotate(session_id=session.id)
        return session

    def _enter(self, session: Session) -> None:
        self.roll.enter(session.id, session.principal, session.environment, session.reason)
        self.journal.commit()
        log.info("session %s created", session.id, extra=about(session))

    def guard(self, name: str, principal: str, folder: Path) -> tuple[Guard, SessionRedactor]:
        """For code that runs outside a session, under the same policy."""
        return self._guardrails.guard(name, principal, folder), self._veils.veil()

    # Found

    async def reach(self, session_id: str, principal: str) -> Session:
        """Like `get`, and for a session that sleeps there is room made first."""
        if session_id not in self._sessions and self._is_asleep(self.roll.find(session_id), principal):
            await self.make_room(principal)
        return self.get(session_id, principal)

    def get(self, session_id: str, principal: str) -> Session:
        """The caller's session, woken if it sleeps, marked as used."""
        session = self._sessions.get(session_id)
        if session is None:
            self.endings.check_not_leaving(session_id, principal)
            session = self._woken(session_id, principal)
        if session is None or session.principal != principal:
            raise SessionNotFound(self._absence(session_id, principal), hint=NEW_SESSION_HINT)
        session.lease.touch()
        spans.annotate(session_id=session.id)
        return session

    def notice(self, execution: Execution) -> SessionNotice | None:
        """What the first caller of the execution's session is told; None ever after."""
        session = self._sessions.get(execution.session_id)
        return session.lease.notice() if session is not None else None

    def look(self, session_id: str, principal: str) -> tuple[SessionFolders, str]:
        """The folders and the environment of the caller's session, which is neither woken nor marked as used."""
        session = self._sessions.get(session_id)
        if session is not None and session.principal == principal:
            return session.folders, session.environment
        entry = self.roll.find(session_id) if session is None else None
        if entry is None or entry.principal != principal or entry.state != "asleep":
            raise SessionNotFound(self._absence(session_id, principal), hint=NEW_SESSION_HINT)
        return SessionFolders(session_id, self._folder / session_id, None), entry.environment

    def _woken(self, session_id: str, principal: str) -> Session | None:
        """A session that sleeps on disk, as the caller's own again; its kernel starts with its next cell."""
        entry = self.roll.find(session_id)
        if entry is None or not self._is_asleep(entry, principal):
            return None
        self._check_room(principal)
        if not self.roll.claim(session_id):
            return None
        folders = SessionFolders(session_id, self._folder / session_id, self._starter.provider.take_identity())
        folders.make()
        session = self._open(folders, principal, entry.environment, entry.reason)
        resumption.wake(session, entry)
        measures.sessions_opened.add("woken")
        log.info("session %s is awake again", session_id, extra=about(session))
        return session

    @staticmethod
    def _is_asleep(entry: SessionRecord | None, principal: str) -> bool:
        return entry is not None and entry.principal == principal and entry.state == "asleep"

    def _absence(self, session_id: str, principal: str) -> str:
        entry = self.roll.find(session_id)
        if entry is not None and entry.principal == principal and entry.state == "gone":
            return f"session {session_id!r} {entry.end}"
        return f"session {session_id[:64]!r} does not exist: it was never made, has expired, or was cleared"

    def of(self, principal: str) -> list[Session]:
        """The caller's sessions, oldest first."""
        return [session for session in self._sessions.values() if session.principal == principal]

    def asleep(self, principal: str) -> list[SessionInfo]:
        """The caller's sessions that are on disk alone, oldest first. Any call with their id wakes them."""
        kept_s = self.settings.keep_days * DAY_S
        return [
            SessionInfo(
                session_id=entry.id,
                environment=entry.environment,
                kernel="asleep",
                sandbox=self.settings.sandbox,
                state="asleep",
                created_at=iso(entry.created_at),
                last_used_at=iso(entry.used_at),
                expires_at=iso(entry.used_at + kept_s),
                age_s=round(time.time() - entry.created_at, 1),
                memory_mb=0.0,
                executions=entry.executions,
                files=0,
                reason=entry.reason,
                last_cause=entry.end,
            )
            for entry in self.roll.asleep(principal)
        ]

    def all(self) -> list[Session]:
        """Every session, for the operator."""
        return [*self._sessions.values()]

    # Ends

    async def clear(self, session_id: str, principal: str) -> None:
        """End a session on its owner's word; nothing of it stays."""
        session = self.get(session_id, principal)
        await self.endings.close(session, "was cleared")

    async def sweep(self) -> list[str]:
        """Put to sleep, or end, the sessions that were idle too long; what runs is never swept."""
        minutes = self.settings.session_idle_s / 60
        ended: list[str] = []
        for session in self.all():
            # Looked at one by one: while the last one ended, this one may have been used or cleared.
            if session.id in self._sessions and session.is_expired:
                await self.endings.retire(session, f"expired at {iso(time.time())} after {minutes:g} idle minutes")
                ended.append(session.id)
        await self.endings.forget_outdated()
        return ended

    async def aclose(self) -> None:
        """Leave every session to the next server, where there may be one; else put it to sleep, or end it."""
        await self.pool.aclose()
        await self._handover.settled()
        await asyncio.gather(*(self.endings.detach(session, "ended with its server") for session in self.all()))


@asynccontextmanager
async def open_registry(
    guardrails: Guardrails,
    veils: Redactors,
    folder: Path,
    journal: Journal,
    roll: SessionRecords,
    starter: KernelStarter,
    handover: Handover,
) -> AsyncGenerator[Registry]:
    """A registry with its sweep running in the background."""
    registry = Registry(guardrails, veils, folder, journal, roll, starter, handover)
    registry.pool.fill()
    sweeping = asyncio.get_running_loop().create_task(_sweep_for_ever(registry))
    try:
        yield registry
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        await registry.aclose()


async def _sweep_for_ever(registry: Registry) -> None:
    while True:
        await asyncio.sleep(registry.settings.sweep_interval_s)
        try:
            await registry.sweep()
        except Exception:
            # One session that cannot be ended must not keep the others alive.
            log.exception("sweep failed")
