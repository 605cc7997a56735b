"""All sessions of a runtime: made, found by their owner, swept when idle, ended together."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from belljar import measures, spans
from belljar.errors import Busy, ExecutionNotFound, InvalidArgument, SessionNotFound
from belljar.files.removal import remove_tree
from belljar.kernels.base import Kernel
from belljar.kernels.custody import Custody
from belljar.kernels.starting import KernelStarter
from belljar.logs import pseudonym
from belljar.models import ExecutionResult, SessionFork, SessionInfo
from belljar.outputs.displays import display_uri, read_display
from belljar.outputs.notebook import notebook_of, written
from belljar.outputs.summary import Summary
from belljar.policy.guard import Guard
from belljar.policy.opening import Guardrails
from belljar.privacy.opening import Veils
from belljar.privacy.veil import Veil
from belljar.sessions.admission import Admission
from belljar.sessions.archive import open_archive
from belljar.sessions.execution import Execution, output_uri
from belljar.sessions.folders import SessionFolders
from belljar.sessions.forks import fork_kernel
from belljar.sessions.journal import Journal
from belljar.sessions.pool import Pool, new_folders
from belljar.sessions.roll import Entry, Roll
from belljar.sessions.session import Session, iso
from belljar.sessions.sharing import open_shelves
from belljar.sessions.trimming import remove_outputs

DAY_S = 24 * 60 * 60
MOST_KEY_CHARS = 200
NOTEBOOK_CELL_CHARS = 1_000_000
# Deleting it takes some 20 ms.
MUCH_OUTPUT_BYTES = 4 * 1024 * 1024
NEW_SESSION_HINT = "Call execute_code with an empty session_id for a new session, then make its variables again"

log = logging.getLogger(__name__)


class Registry:
    """Sessions by id. Another principal's session answers exactly as an unknown one."""

    def __init__(
        self,
        guardrails: Guardrails,
        veils: Veils,
        folder: Path,
        journal: Journal,
        roll: Roll,
        starter: KernelStarter,
        custody: Custody | None = None,
    ) -> None:
        settings = guardrails.settings
        self._custody = custody
        self.settings = settings
        self._guardrails = guardrails
        self._veils = veils
        self._shelves = open_shelves(settings)
        self.journal = journal
        self.roll = roll
        self._folder = folder
        self._starter = starter
        self.pool = Pool(starter, folder, roll, environment=settings.environment, size=settings.pool_size)
        self._admission = Admission(
            most_running=settings.max_running,
            most_waiting=settings.max_waiting,
            headroom_mb=settings.memory_headroom_mb,
        )
        self._sessions: dict[str, Session] = {}
        self._leaving: dict[str, str] = {}
        """Sessions on their way to disk, and whose they are."""
        self._opened_at, self._opened_ticks = time.time(), time.monotonic()

    def create(self, principal: str, *, environment: str = "", reason: str = "") -> Session:
        """A new session; its kernel starts with its first cell."""
        self._check_room()
        name = environment or self.settings.environment
        self._starter.check(name)
        asked_at = time.perf_counter()
        unborn = self.pool.take(name)
        folders = unborn.folders if unborn else self._new_folders(name)
        session = self._open(folders, principal, name, reason)
        self._enter(session)
        if unborn is not None:
            session.life.adopt(unborn.kernel, is_fresh=True)
            measures.kernel_starts.observe(time.perf_counter() - asked_at, "pool")
        measures.sessions_opened.add("new")
        return session

    def _new_folders(self, environment: str) -> SessionFolders:
        return self.pool.take_room(environment) or new_folders(self._folder, self._starter)

    def _check_room(self) -> None:
        if len(self._sessions) >= self.settings.max_sessions:
            raise Busy(
                f"{len(self._sessions)} sessions are open, the most that max_sessions allows",
                hint="Clear one with clear_session, or try again when an idle one has expired",
            )
        self._admission.check_memory()

    def _open(
        self, folders: SessionFolders, principal: str, environment: str, reason: str, veil: Veil | None = None
    ) -> Session:
        tools = self._starter.broker(folders.session_id)
        session = Session(
            folders,
            principal=principal,
            environment=environment,
            reason=reason,
            settings=self.settings,
            journal=self.journal,
            roll=self.roll,
            admission=self._admission,
            start_kernel=partial(self._starter.start, environment),
            guard=self._guardrails.guard(folders.session_id, principal, folders.root),
            veil=veil or self._veils.veil(),
            shelf=self._shelves.of(principal) if self._shelves and (tools or self.settings.shares_always) else None,
            tools=tools,
            custody=self._custody,
        )
        self._sessions[session.id] = session
        spans.note(session_id=session.id)
        return session

    def guard(self, name: str, principal: str, folder: Path) -> tuple[Guard, Veil]:
        """For code that runs outside a session, under the same policy."""
        return self._guardrails.guard(name, principal, folder), self._veils.veil()

    def _enter(self, session: Session) -> None:
        self.roll.enter(session.id, session.principal, session.environment, session.reason)
        self.journal.commit()
        log.info("session %s created", session.id, extra=_about(session))

    async def fork(
        self, session_id: str, principal: str, *, at: str = "", reseed: bool = False
    ) -> tuple[Session, SessionFork]:
        """A new session that goes on from the state of another one, or from its state before an execution."""
        origin = self.get(session_id, principal)
        self._check_room()
        origin.check_idle()
        async with origin.turn:
            forked = await fork_kernel(origin, self._starter, self._folder, at=at, reseed=reseed)
            reason = f"fork of {origin.id}"
            session = self._open(forked.folders, principal, origin.environment, reason, origin.veil.fork())
            self._enter(session)
            session.life.adopt(forked.kernel)
            session.life.variables = forked.variables
            session.guard.inherit(origin.guard)
            self.roll.note(session.id, 0, forked.variables)
            measures.sessions_opened.add("fork")
        variables, lost = list(forked.variables), forked.lost
        return session, SessionFork(session_id=session.id, origin=origin.id, variables=variables, lost=lost)

    def get(self, session_id: str, principal: str) -> Session:
        """The caller's session, woken if it sleeps, marked as used."""
        if self._leaving.get(session_id) == principal:
            raise Busy(
                f"session {session_id} is being put to sleep on disk",
                hint="Make the same call again in 5 seconds: it wakes the session",
            )
        session = self._sessions.get(session_id) or self._woken(session_id, principal)
        if session is None or session.principal != principal:
            raise SessionNotFound(self._absence(session_id, principal), hint=NEW_SESSION_HINT)
        session.touch()
        spans.note(session_id=session.id)
        return session

    def _woken(self, session_id: str, principal: str) -> Session | None:
        """A session that sleeps on disk, as the caller's own again; its kernel starts with its next cell."""
        entry = self.roll.find(session_id)
        if entry is None or entry.principal != principal or entry.state != "asleep":
            return None
        self._check_room()
        if not self.roll.claim(session_id):
            return None
        folders = SessionFolders(session_id, self._folder / session_id, self._starter.take_identity())
        folders.make()
        session = self._open(folders, principal, entry.environment, entry.reason)
        session.resume(entry)
        measures.sessions_opened.add("woken")
        log.info("session %s is awake again", session_id, extra=_about(session))
        return session

    def take_over(self, entry: Entry, folders: SessionFolders, kernel: Kernel) -> Session:
        """A session whose kernel an earlier server left, as that one had it."""
        self.roll.take_over(entry.id)
        session = self._open(folders, entry.principal, entry.environment, entry.reason)
        session.take_over(entry, kernel)
        measures.sessions_opened.add("kept")
        log.info("session %s goes on with its variables", entry.id, extra=_about(session))
        return session

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

    # Executions by their own id

    def execution(self, execution_id: str, principal: str) -> Execution | None:
        """A live or recent execution of the caller's; None when only the journal may have it."""
        for session in self._sessions.values():
            if session.principal == principal and (execution := session.execution(execution_id)) is not None:
                return execution
        return None

    def has_checkpoint(self, execution_id: str, principal: str) -> bool:
        """Whether the variables there were before the caller's execution can be had back by a rewind."""
        execution = self.execution(execution_id, principal)
        return execution is not None and execution.session.life.checkpoints.holds(execution_id)

    def submitted(self, key: str, principal: str) -> str | None:
        """The caller's execution that was submitted under this key before."""
        if not key.isprintable() or len(key) > MOST_KEY_CHARS:
            raise InvalidArgument(
                f"idempotency_key has {len(key)} characters or unprintable ones",
                hint=f"Pass at most {MOST_KEY_CHARS} printable characters, such as a UUID",
            )
        return self.journal.find_key(principal, key) if key else None

    def result(self, execution_id: str, principal: str, since: int = 0) -> ExecutionResult:
        """What an execution gave, from event number `since` on."""
        live = self.execution(execution_id, principal)
        if live is not None:
            # Who is told of output asks for what comes after it: the next server, if this one is killed.
            self.journal.commit()
            return self._replayed(live.result(), since) if since > 0 else live.result()
        record = self.journal.find(execution_id)
        if record is None or record.principal != principal:
            raise ExecutionNotFound(
                f"execution {execution_id[:64]!r} does not exist",
                hint="Use the execution_id that execute_code answered with; executions go with their cleared session",
            )
        whole = record.result
        if whole is None:
            raise ExecutionNotFound(f"execution {execution_id!r} ended with the server that ran it")
        return self._replayed(whole, since) if since > 0 else whole

    def _replayed(self, whole: ExecutionResult, since: int) -> ExecutionResult:
        """The same result with only the output after `since`."""
        uri = output_uri(whole.execution_id)
        summary = Summary(budget_chars=self.settings.output_budget_chars, uri=uri)
        for event in self.journal.events(whole.execution_id, since):
            summary.add(event)
        return whole.model_copy(
            update={
                "output": [text for _, text in summary.segments()],
                "stdout": summary.stream("stdout"),
                "stderr": summary.stream("stderr"),
                "displays": summary.displays,
                "truncated": summary.truncation,
            }
        )

    # What executions left behind

    def display_reader(self, session_id: str) -> Callable[[str], bytes | None]:
        """Reads a display of a session's executions by its URI; gives None for what is not there. For any thread."""
        return partial(read_display, self._folder / session_id / "displays")

    def display(self, execution_id: str, name: str, principal: str) -> bytes:
        """One display of the caller's execution."""
        record = self.journal.find(execution_id)
        content = None
        if record is not None and record.principal == principal:
            content = self.display_reader(record.session_id)(display_uri(execution_id, name))
        if content is None:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} has no display {name[:64]!r}")
        return content

    def has_events(self, execution_id: str, since: int) -> bool:
        """Whether an execution said anything after event number `since`."""
        return next(self.journal.events(execution_id, since), None) is not None

    async def whole_output(self, execution_id: str, principal: str, offset: int, limit: int) -> str:
        """All stream text of the caller's execution, or a part of it."""
        self.result(execution_id, principal)
        self.journal.commit()
        return await asyncio.to_thread(self.journal.read_output, execution_id, offset, limit)

    async def notebook(self, session: Session) -> str:
        """Every execution of a session with what it said, as an .ipynb; of long output head and tail."""
        self.journal.commit()
        return await asyncio.to_thread(self._notebook, session.id)

    def _notebook(self, session_id: str) -> str:
        # Read bit by bit on a connection of its own: a session may have said more than memory holds.
        with open_archive(self.settings.data_directory) as archive:
            cells = archive.cells(session_id, is_live=lambda: True)
            reader = self.display_reader(session_id)
            return written(notebook_of(session_id, cells, reader, limit_chars=NOTEBOOK_CELL_CHARS))

    # Ends

    async def clear(self, session_id: str, principal: str) -> None:
        """End a session on its owner's word; nothing of it stays."""
        session = self.get(session_id, principal)
        await self._end(session, "was cleared")

    async def sweep(self) -> list[str]:
        """Put to sleep, or end, the sessions that were idle too long; what runs is never swept."""
        minutes = self.settings.session_idle_s / 60
        ended: list[str] = []
        for session in self.all():
            # Looked at one by one: while the last one ended, this one may have been used or cleared.
            if session.id in self._sessions and session.is_expired:
                await self._retire(session, f"expired at {iso(time.time())} after {minutes:g} idle minutes")
                ended.append(session.id)
        await self._forget_outdated()
        return ended

    async def _retire(self, session: Session, end: str) -> None:
        """The session goes to sleep, unless that is switched off."""
        if not self.settings.hibernate or session.is_blank():
            await self._end(session, end)
            return
        self._sessions.pop(session.id, None)
        self._leaving[session.id] = session.principal
        try:
            report = await session.put_to_sleep(end)
            await self._starter.vacate(session.id)
        finally:
            del self._leaving[session.id]
        self._release_identity(session)
        kept = f"{len(report.kept)} variables kept" if report else "its variables are lost"
        measures.hibernations.add("files" if report is None else "some" if report.lost else "all")
        log.info("session %s %s and sleeps, %s", session.id, end, kept, extra=_about(session))

    async def _forget_outdated(self) -> None:
        # A clock that is set forward must not make everything old at once; one that is set back does no harm.
        now = min(time.time(), self._opened_at + time.monotonic() - self._opened_ticks)
        for entry in self.roll.outdated(now - self.settings.keep_days * DAY_S):
            await asyncio.to_thread(remove_tree, self._folder / entry.id)
            self.roll.forget(entry.id)

    async def _end(self, session: Session, end: str) -> None:
        self._sessions.pop(session.id, None)
        await session.aclose()
        await self._starter.vacate(session.id)
        await asyncio.to_thread(session.remove_files)
        if self.journal.output_bytes(session.id) > MUCH_OUTPUT_BYTES:
            with suppress(sqlite3.Error):  # then it takes longer below
                await asyncio.to_thread(remove_outputs, self.journal.path, session.id)
        self._release_identity(session)
        self.journal.forget_session(session.id)
        self.roll.end(session.id, end)
        log.info("session %s %s", session.id, end, extra=_about(session))

    def _release_identity(self, session: Session) -> None:
        self._starter.forget(session.id)
        identity = session.folders.identity
        # A fork is its origin's user: the number is free when the last of them has gone.
        if identity is not None and all(other.folders.identity != identity for other in self._sessions.values()):
            self._starter.release_identity(identity)

    async def aclose(self) -> None:
        """Leave every session to the next server, where there may be one; else put it to sleep, or end it."""
        await self.pool.aclose()
        await asyncio.gather(*(self._leave(session, "ended with its server") for session in self.all()))

    async def _leave(self, session: Session, end: str) -> None:
        if self._custody is None or not self._custody.has(session.id) or session.is_blank():
            await self._retire(session, end)
            return
        self._sessions.pop(session.id, None)
        await session.leave(end)
        log.info("session %s is left to the next server", session.id, extra=_about(session))


def _about(session: Session) -> dict[str, str]:
    """The ids that a log line about it carries."""
    return {"session_id": session.id, "principal": pseudonym(session.principal)}


@asynccontextmanager
async def open_registry(
    guardrails: Guardrails,
    veils: Veils,
    folder: Path,
    journal: Journal,
    roll: Roll,
    starter: KernelStarter,
    custody: Custody | None = None,
) -> AsyncGenerator[Registry]:
    """A registry with its sweep running in the background."""
    registry = Registry(guardrails, veils, folder, journal, roll, starter, custody)
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
