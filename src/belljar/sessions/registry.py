"""All sessions of a runtime: created, forked, found by their owner, swept when idle, ended together.

How a session ends is in `endings.py`, how it comes back in `resumption.py`; the results of executions, also of
sessions that are gone, are in `history.py`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from belljar import metrics, tracing
from belljar.change_signal import ChangeLog
from belljar.errors import BelljarError, Busy, InvalidArgument, KernelDied, SessionNotFound
from belljar.executions.admission import Admission, SessionRoom
from belljar.executions.execution import Execution
from belljar.executions.shared_workspace import open_shared_workspaces
from belljar.files.workspace import Workspace
from belljar.journal.journal import Journal
from belljar.journal.question_records import QuestionRecords
from belljar.journal.session_records import SessionRecord, SessionRecords, sleeping_info
from belljar.kernels.base import Kernel
from belljar.models import MAX_REASON_CHARS, SessionFork, SessionInfo, SessionNotice, iso
from belljar.plugins import Plugins
from belljar.policy.guard import Guard
from belljar.policy.guardrails import Guardrails
from belljar.privacy.redaction import Redactors, SessionRedactor
from belljar.privacy.vault import TokenCounter, TokenLog
from belljar.provisioning.handover import Handover
from belljar.provisioning.starter import KernelStarter
from belljar.questions.inbox import Inbox
from belljar.questions.models import InboxQuestion
from belljar.servers import describe_server, is_living
from belljar.sessions import resumption
from belljar.sessions.endings import SessionEndings
from belljar.sessions.folders import SessionFolders
from belljar.sessions.fork import ForkedKernel, fork_kernel, side_by_side
from belljar.sessions.history import ExecutionHistory
from belljar.sessions.pool import Pool, new_folders
from belljar.sessions.session import Session, idle_time
from belljar.skills.library import SkillLibrary
from belljar.skills.session_view import SessionSkills
from belljar.toolbox.server_text import one_line

if TYPE_CHECKING:
    from belljar.sessions.drain import Drain
    from belljar.sessions.stored import StoredSessions

NEW_SESSION_HINT = "Call execute_code with an empty session_id for a new session, then make its variables again"

MAX_ASLEEP = 256
"""How many sessions of one owner may be on disk before no more are hibernated to make room: each may take `disk_mb`."""

FORKS_AT_ONCE = 16
"""How many forks of one call are made side by side; more would only wait for a processor."""

log = logging.getLogger(__name__)


class Registry:
    """The sessions of a runtime by id. Another principal's session is answered exactly as an unknown one."""

    def __init__(
        self,
        guardrails: Guardrails,
        redactors: Redactors,
        folder: Path,
        journal: Journal,
        records: SessionRecords,
        starter: KernelStarter,
        handover: Handover,
        plugins: Plugins,
        library: SkillLibrary | None = None,
        stored: "StoredSessions | None" = None,
    ) -> None:
        settings = guardrails.settings
        self.plugins = plugins
        self._library = library
        self._handover = handover
        self.settings = settings
        self.guardrails = guardrails
        self._redactors = redactors
        self._shared_workspaces = open_shared_workspaces(settings)
        self.journal = journal
        self.records = records
        self._folder = folder
        self._runs = settings.data_directory / "runs"
        self.recover_others: Callable[[], None] = lambda: None
        """Records the sessions of servers that have ended without notice as asleep; of whoever knows the servers."""
        self.list_others: Callable[[], Awaitable[list[SessionInfo]]] | None = None
        """Returns the caller's sessions at other servers of this machine; None where there are none."""
        self.starter = starter
        self.pool = Pool(
            starter,
            folder,
            records,
            environment=settings.environment,
            size=settings.pool_size,
            contexts=settings.gpu_contexts,
        )
        self.admission = Admission(
            most_running=settings.max_running,
            most_waiting=settings.max_waiting,
            headroom_mb=settings.memory_headroom_mb,
        )
        self._sessions: dict[str, Session] = {}
        self._room = SessionRoom(settings, self.admission, lambda: [each.principal for each in self._sessions.values()])
        self.changes = ChangeLog()
        """What happens to its sessions, for monitors."""
        self.inbox = Inbox(QuestionRecords(journal), settings.ask_in_console)
        """What waits for people outside the clients."""
        self.inbox.on_change.append(self._publish_question)
        self.executions = ExecutionHistory(self._sessions, folder, journal, settings)
        self.endings = SessionEndings(
            self._sessions,
            settings=settings,
            folder=folder,
            journal=journal,
            records=records,
            starter=starter,
            handover=handover,
            changes=self.changes,
        )

        self.stored = stored
        """Its sessions in the store; None where the settings name none."""
        self.draining: Drain | None = None
        """What empties this server, before it stops or its machine is taken away; meanwhile it takes nothing new."""
        if stored is not None:
            self.endings.on_change_on_disk = stored.put_later
            stored.on_gone = partial(self.changes.publish, "session", "gone")

    def _publish_question(self, question: InboxQuestion) -> None:
        state = "put" if question.state == "waiting" else question.state
        self.changes.publish("question", state, question.session_id, question.owner, question.execution_id)

    # New sessions

    def create(
        self,
        principal: str,
        *,
        environment: str = "",
        reason: str = "",
        gpus: int | None = None,
        is_piece: bool = False,
    ) -> Session:
        """Create a session, from the pool where possible; otherwise its kernel starts with its first cell.

        `gpus` is how many it shall have; None for as many as the settings say. `is_piece`: it is a map's.
        """
        kept_reason = _one_line_reason(reason)
        self._room.check(principal)
        name = environment or self.settings.environment
        self.starter.environments.check(name)
        count = self.starter.gpus.count(name, gpus)
        asked_at = time.perf_counter()
        # What waits in the pool shows the folders that everybody sees, and its mounts cannot change any more.
        seen = self.starter.host_folders
        is_pooled = seen.of(principal) == seen.of("")
        is_usual = count == self.starter.gpus.default_count(name)
        pooled = self.pool.take(name) if is_pooled and is_usual else None
        if pooled is not None:
            folders = pooled.folders
        elif is_usual:
            folders = self._new_folders(name, is_pooled=is_pooled)
        else:
            folders = new_folders(self._folder, self.starter, self.records.new_id())
            self.starter.gpus.request(folders.session_id, count)
        session = self._open(folders, principal, name, kept_reason, is_piece=is_piece)
        self._record_new(session)
        if not is_piece:  # the caller of a map is never told of it
            self.journal.commit()
        if pooled is not None:
            session.session_kernel.adopt(pooled.kernel, is_fresh=True)
            metrics.kernel_starts.observe(time.perf_counter() - asked_at, "pool")
        metrics.sessions_opened.add("new")
        return session

    def _new_folders(self, environment: str, *, is_pooled: bool) -> SessionFolders:
        prepared = self.pool.take_prepared(environment) if is_pooled else None
        return prepared or new_folders(self._folder, self.starter, self.records.new_id())

    async def fork(
        self, session_id: str, principal: str, *, at: str | int = "", reseed: bool = False
    ) -> tuple[Session, SessionFork]:
        """Create one session that continues from the state of another one; see `fork_many`."""
        (session,), told = await self.fork_many(session_id, principal, at=at, reseed=reseed)
        return session, told

    async def fork_many(
        self, session_id: str, principal: str, *, at: str | int = "", reseed: bool = False, count: int = 1
    ) -> tuple[list[Session], SessionFork]:
        """Create sessions that continue from the state of another one, or from its state before an execution.

        `at` is the id of that execution, or its number counted back from the last one, which is 1. They are as many as
        there is room for, `count` at most; one place at least, or it is refused.
        """
        origin = await self.reach(session_id, principal)
        origin.check_forkable("forked")
        origin.queue.check_idle()
        before = origin.state_before(at) if isinstance(at, int) or at.isdecimal() else at
        with ExitStack() as reserved:
            places: list[ExitStack] = []
            unmade: Exception | None = None
            while len(places) < count and unmade is None:
                await self.make_room(principal, spared=origin)
                try:
                    place = reserved.enter_context(ExitStack())
                    place.enter_context(self._room.expecting(principal))
                except Busy as error:
                    if not places:
                        raise
                    unmade = error
                else:
                    places.append(place)
            made, failure = await self._fork(origin, principal, before, places, reseed=reseed)
        unmade = unmade or failure
        (first, forked), sessions = made[0], [session for session, _ in made]
        why = "" if unmade is None else f"{len(made)} of {count} were made: {unmade}"
        ids = [session.id for session in sessions] if count > 1 else []
        variables, lost = list(forked.variables), forked.lost
        return sessions, SessionFork(
            session_id=first.id, origin=origin.id, variables=variables, lost=lost, session_ids=ids, unmade=why
        )

    async def _fork(
        self, origin: Session, principal: str, before: str, places: Sequence[ExitStack], *, reseed: bool
    ) -> tuple[list[tuple[Session, ForkedKernel]], Exception | None]:
        """Fork a session into so many places, side by side; return those that were made and why one was not."""
        # What is on a GPU is saved for each fork, to one file of the origin.
        at_once = asyncio.Semaphore(1 if self.starter.gpus.of(origin.id) else FORKS_AT_ONCE)

        async def fork(place: ExitStack) -> tuple[Session, ForkedKernel]:
            with place:
                async with at_once:
                    forked = await fork_kernel(origin, self.starter, self._folder, at=before, reseed=reseed)
                return self._open_fork(origin, principal, before, forked, f"fork of {origin.id}", origin.id), forked

        async with origin.turn:
            await origin.session_kernel.ensure_started()
            made, failure = await side_by_side(
                [fork(place) for place in places],
                lambda found: self.endings.delete(found[0], "was forked for a caller who has gone"),
            )
            self.journal.commit()
        return made, failure

    async def fork_for_map(
        self, origin: Session, reason: str, *, is_frozen: bool = False, kept_as_of: str = "", reseed: bool = False
    ) -> Session:
        """Fork a session for a map, which ends the fork, unless it is kept as a fork of the session that is named.

        `is_frozen` says that nothing ever runs in the origin, so that forks of it need not take turns.
        """
        with self._room.expecting(origin.principal):
            async with nullcontext() if is_frozen else origin.turn:
                if is_frozen and (origin.session_kernel.kernel is None or not origin.session_kernel.kernel.is_alive()):
                    raise KernelDied("the process that the pieces of this map are forked from has ended")
                forked = await fork_kernel(
                    origin, self.starter, self._folder, at="", reseed=reseed, runs_nothing=is_frozen
                )
            return self._open_fork(origin, origin.principal, "", forked, reason, kept_as_of or None)

    def _open_fork(
        self,
        origin: Session,
        principal: str,
        before: str,
        forked: ForkedKernel,
        reason: str,
        origin_id: str | None,
    ) -> Session:
        """Open a fork; without the id of a session that it is known as a fork of, it is a map's."""
        is_piece = origin_id is None
        redactor = origin.redactor.fork(TokenCounter(forked.folders.tokens))
        session = self._open(forked.folders, principal, origin.environment, reason, redactor, is_piece=is_piece)
        self._record_new(session)
        if origin_id is not None:
            self.records.record_origin(session.id, origin_id, before)
        session.session_kernel.adopt(forked.kernel)
        session.session_kernel.variables = forked.variables
        session.guard.inherit(origin.guard)
        self.records.record_use(session.id, forked.variables)
        metrics.sessions_opened.add("fork")
        return session

    def take_over(
        self, entry: SessionRecord, folders: SessionFolders, kernel: Kernel, token_log: TokenLog | None
    ) -> Session:
        """Open a session whose kernel an earlier server left; `token_log` has the values of its redaction tokens."""
        self.records.take_over(entry.id)
        session = self._open(folders, entry.principal, entry.environment, entry.reason, token_log=token_log)
        resumption.take_over(session, entry, kernel)
        metrics.sessions_opened.add("kept")
        self.changes.publish("session", "woken", session.id, session.principal)
        log.info("session %s goes on with its variables", entry.id, extra=session.log_ids)
        return session

    # Limits on sessions

    async def make_room(self, principal: str, *, spared: Session | None = None) -> None:
        """Hibernate idle sessions until the principal may open one more, as far as there are any.

        A principal that has its share gives up its own longest idle session. When all sessions together are too many,
        the principal that has the most of them gives up one, unless this principal would then have more.
        """
        if not self.settings.hibernate:
            return  # an idle session would be lost
        while (giver := self._room.giver(principal)) is not None:
            idle = [session for session in self.of(giver) if session.is_idle and session is not spared]
            idle = [session for session in idle if self.endings.has_room_for(session)]
            if not idle or (giver == principal and self.records.has_asleep(principal, MAX_ASLEEP)):
                return
            session = min(idle, key=lambda each: each.lease.expires_at)
            whose = "its owner's" if giver == principal else "another owner's"
            await self.endings.hibernate(session, f"made room for {whose} new session at {iso(time.time())}")

    def _open(
        self,
        folders: SessionFolders,
        principal: str,
        environment: str,
        reason: str,
        redactor: SessionRedactor | None = None,
        *,
        token_log: TokenLog | None = None,
        is_piece: bool = False,
    ) -> Session:
        folders = replace(folders, principal=principal)
        tools = self.starter.toolbox.broker(folders.session_id) if self.starter.toolbox is not None else None
        redactor = redactor or self._redactors.new_redactor(folders.tokens)
        if self._handover.is_on and self._redactors.are_in_use:
            redactor.log_to(token_log or TokenLog())
        session = Session(
            folders,
            principal=principal,
            environment=environment,
            reason=reason,
            settings=self.settings,
            journal=self.journal,
            records=self.records,
            admission=self.admission,
            start_kernel=partial(self.starter.start, environment),
            follow_environment=partial(self.starter.environments.following, environment),
            guard=self.guardrails.guard(folders.session_id, principal, folders.root),
            plugins=self.plugins,
            redactor=redactor,
            handover=self._handover,
            gpus=self.starter.gpus,
            changes=self.changes,
            inbox=self.inbox,
            workspace_folder=self._shared_workspaces.of(principal)
            if self._shared_workspaces and (tools or self.settings.shares_always)
            else None,
            tools=tools,
            skills=SessionSkills(self._library, folders.skills, folders.identity, principal, folders.session_id)
            if self._library is not None
            else None,
            is_piece=is_piece,
        )
        self._sessions[session.id] = session
        tracing.annotate(session_id=session.id)
        return session

    def _record_new(self, session: Session) -> None:
        state = "unborn" if session.is_piece else "live"
        self.records.enter(session.id, session.principal, session.environment, session.reason, state)
        if session.is_piece:
            return
        self.changes.publish("session", "made", session.id, session.principal)
        log.info("session %s created", session.id, extra=session.log_ids)

    def guard(self, name: str, principal: str, folder: Path) -> tuple[Guard, SessionRedactor]:
        """Return a guard and a redactor for code that runs outside a session, under the same policy."""
        return self.guardrails.guard(name, principal, folder), self._redactors.new_redactor()

    # Finding sessions

    async def reach(self, session_id: str, principal: str) -> Session:
        """Return a session like `get`, but make room first for one that sleeps, here or in the store."""
        if self.draining is not None:
            await self.draining.refuse(session_id)
        if session_id not in self._sessions:
            if self._is_asleep(self.records.find(session_id), principal):
                await self.make_room(principal)
            if self.stored is not None:
                await self.stored.bring(session_id, principal, partial(self._make_room_now, principal))
        return self.get(session_id, principal)

    async def go_on(self, session_id: str, principal: str) -> Session:
        """Return a session that a server had awake which was lost, as of its latest bundle.

        The caller has been told before what is lost.
        """
        if self.stored is not None and session_id not in self._sessions:
            make_room = partial(self._make_room_now, principal)
            await self.stored.bring(session_id, principal, make_room, after_loss=True)
        session = self.get(session_id, principal)
        if (waking := session.session_kernel.waking) is not None:
            waking.is_rewound = True
        return session

    async def own(self, session_id: str, principal: str) -> bool:
        """Return whether a session may go on here, and see that no other server of the store goes on with it."""
        if self.stored is None or session_id in self._sessions:
            return True
        await self.stored.bring(session_id, principal, _take_as_is)
        return self.stored.is_free(session_id)

    async def _make_room_now(self, principal: str) -> None:
        """Make room, or refuse, before a session is claimed that no other server could wake any more."""
        await self.make_room(principal)
        self._room.check(principal)

    def get(self, session_id: str, principal: str) -> Session:
        """Return the caller's session; wake it if it sleeps, and mark it as used."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._wake(session_id, principal)
        if session is None or session.principal != principal:
            raise self._absence(session_id, principal)
        session.lease.touch()
        tracing.annotate(session_id=session.id)
        return session

    def notice(self, execution: Execution) -> SessionNotice | None:
        """Return the notice for the first caller of the execution's session; None for later ones."""
        session = self._sessions.get(execution.session_id)
        return session.lease.notice() if session is not None else None

    def folders_and_environment(self, session_id: str, principal: str) -> tuple[SessionFolders, str]:
        """Return the folders and the environment of the caller's session, without waking it or marking it as used."""
        session = self._sessions.get(session_id)
        if session is not None and session.principal == principal:
            return session.folders, session.environment
        entry = self._find_asleep(session_id, principal) if session is None else None
        if entry is None:
            raise self._absence(session_id, principal)
        return SessionFolders(session_id, self._folder / session_id, None), entry.environment

    def workspace(self, session_id: str, principal: str) -> Workspace:
        """Return the folder of the caller's session, for reading: one that sleeps sleeps on."""
        session = self._sessions.get(session_id)
        if session is not None and session.principal == principal:
            session.lease.touch()
        return Workspace(self.folders_and_environment(session_id, principal)[0].workspace)

    def running(self, session_id: str, principal: str) -> list[Execution]:
        """Return the executions of the caller's session that run or wait; none of one that sleeps."""
        self.folders_and_environment(session_id, principal)
        session = self._sessions.get(session_id)
        return session.queue.running() if session is not None else []

    def _find_asleep(self, session_id: str, principal: str) -> SessionRecord | None:
        """Return the record of a session of the caller that sleeps on disk; None if there is none."""
        self.endings.check_not_hibernating(session_id, principal)
        entry = self.records.find(session_id)
        if entry is not None and self._is_at_another_server(entry) and not is_living(self._runs, entry.run):
            self.recover_others()
            entry = self.records.find(session_id)
        return entry if entry is not None and self._is_asleep(entry, principal) else None

    def _wake(self, session_id: str, principal: str) -> Session | None:
        """Open a session of the caller that sleeps on disk; its kernel starts with its next cell."""
        entry = self._find_asleep(session_id, principal)
        if entry is None:
            return None
        self._room.check(principal)
        if self.stored is not None and not self.stored.is_free(session_id):
            raise Busy(f"session {session_id} sleeps in the store", hint="Make the same call again")
        if not self.records.claim(session_id):
            return None
        folders = SessionFolders(session_id, self._folder / session_id, self.starter.provider.take_identity())
        folders.make()
        session = self._open(folders, principal, entry.environment, entry.reason)
        resumption.wake(session, entry)
        metrics.sessions_opened.add("woken")
        self.changes.publish("session", "woken", session_id, principal)
        log.info("session %s is awake again", session_id, extra=session.log_ids)
        return session

    @staticmethod
    def _is_asleep(entry: SessionRecord | None, principal: str) -> bool:
        return entry is not None and entry.principal == principal and entry.state == "asleep"

    def _absence(self, session_id: str, principal: str) -> BelljarError:
        """Return the error for a session that the caller cannot use here."""
        entry = self.records.find(session_id)
        if entry is not None and entry.principal == principal and entry.state == "gone":
            gone = f"session {session_id!r} {entry.end}"
            return SessionNotFound(gone, hint=NEW_SESSION_HINT, session_id=session_id)
        if entry is not None and entry.principal == principal and self._is_at_another_server(entry):
            if is_living(self._runs, entry.run):
                return Busy(
                    f"session {session_id} is open in another server ({describe_server(self._runs, entry.run)})",
                    hint="Use it there; here it can be used once that server has stopped",
                )
            return Busy(
                f"session {session_id} was open in a server that has ended without notice",
                hint="The next server that starts on this data directory recovers it",
            )
        shown = session_id[:64]
        return SessionNotFound(
            f"session {shown!r} does not exist: it was never made, has expired, or was cleared",
            hint=NEW_SESSION_HINT,
            session_id=shown if shown.isprintable() else repr(shown),
        )

    def _is_at_another_server(self, entry: SessionRecord) -> bool:
        return entry.state == "live" and entry.run != self.records.run

    def of(self, principal: str) -> list[Session]:
        """Return the caller's sessions that are open here, oldest first."""
        return [session for session in self._sessions.values() if session.principal == principal]

    def asleep(self, principal: str) -> list[SessionInfo]:
        """Return the caller's sessions that are only on disk, oldest first. Any call with their id wakes them."""
        sandbox, keep_days = self.settings.sandbox, self.settings.keep_days
        return [sleeping_info(entry, sandbox=sandbox, keep_days=keep_days) for entry in self.records.asleep(principal)]

    def find_open(self, session_id: str) -> Session | None:
        """Return an open session of any owner without marking it as used; its caller decides who may see it."""
        return self._sessions.get(session_id)

    def all(self) -> list[Session]:
        """Return every open session, for the operator."""
        return [*self._sessions.values()]

    def rename(self, session_id: str, principal: str, reason: str) -> str:
        """Change the reason of the caller's session, and return it as it is kept.

        A session that sleeps is not woken, and one that is open does not count as used.
        """
        kept = _one_line_reason(reason)
        session = self._sessions.get(session_id)
        is_own = session.principal == principal if session else self._find_asleep(session_id, principal) is not None
        if not is_own or not self.records.rename(session_id, kept):
            raise self._absence(session_id, principal)
        if session is not None:
            session.reason = kept
        self.changes.publish("session", "renamed", session_id, principal)
        return kept

    # Ending sessions

    async def clear(self, session_id: str, principal: str, end: str = "was cleared") -> None:
        """End a session because its owner asks for it, and delete all of it; one that sleeps is not woken for it."""
        session = self._sessions.get(session_id)
        if session is not None and session.principal == principal:
            await self.endings.delete(session, end)
            return
        if session is None and self.stored is not None:
            # Nobody else may wake it while it is deleted.
            await self.stored.bring(session_id, principal, _take_as_is)
        entry = self._find_asleep(session_id, principal) if session is None else None
        if entry is None or not self.records.claim(session_id):
            raise self._absence(session_id, principal)
        await self.endings.delete_asleep(entry, end)

    async def sweep(self) -> list[str]:
        """Hibernate, or end, the sessions that were idle too long, except those that run a cell; return their ids."""
        idle = idle_time(self.settings.session_idle_s)
        ended: list[str] = []
        for session in self.all():
            # Checked one by one, because this session may have been used or cleared while the last one ended.
            if session.id in self._sessions and session.is_expired and self.endings.has_room_for(session):
                await self.endings.hibernate(session, f"expired at {iso(time.time())} after {idle}")
                ended.append(session.id)
        await self.endings.forget_outdated()
        return ended

    def begin_drain(self) -> "Drain":
        """Begin to have every session sleep, and to put it into the store; calls meanwhile wait."""
        if self.draining is None:
            # Imported here, because it happens once in a server's life, and in few.
            from belljar.sessions.drain import Drain

            self.draining, self._room.is_closed = Drain(self, self.settings.drain_s), True
        return self.draining

    def end_drain(self) -> None:
        """Take sessions again: those that sleep wake with the next call, and those that are awake stay so."""
        if self.draining is not None:
            self.draining.cancel()
            self.draining, self._room.is_closed = None, False

    async def drain(self) -> None:
        """Have every session sleep, and put it into the store, before the server stops."""
        await self.begin_drain().wait()

    async def aclose(self) -> None:
        """Leave every session to the next server where the handover is on; otherwise hibernate or end it."""
        await self.pool.aclose()
        await self.endings.wait_until_settled()
        await self._handover.wait_until_settled()
        await asyncio.gather(*(self.endings.leave_running(session, "ended with its server") for session in self.all()))
        if self.stored is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain_s):
                    await self.stored.put_all()
            await self.stored.aclose()


async def _take_as_is() -> None:
    """Make no room: a session that is to be deleted is not opened."""


def _one_line_reason(reason: str) -> str:
    """Return a reason as it is kept: lists show it to people and agents, so nothing in it is invisible."""
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidArgument(
            f"the reason of a session has {len(reason):,} characters", hint=f"Pass {MAX_REASON_CHARS} at most"
        )
    return one_line(reason, MAX_REASON_CHARS)
