"""All sessions of a runtime: made, found by their owner, swept when idle, ended together."""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from belljar.errors import Busy, ExecutionNotFound, SessionNotFound
from belljar.kernels.starting import KernelStarter
from belljar.models import ExecutionResult, OutputEvent
from belljar.outputs.displays import display_uri, read_display
from belljar.outputs.summary import Summary
from belljar.sessions.execution import Execution, output_uri
from belljar.sessions.journal import Journal
from belljar.sessions.session import Session, SessionFolders, iso
from belljar.settings import Settings

REMEMBERED_ENDS = 1_000
NEW_SESSION_HINT = "Call execute_code with an empty session_id for a new session, then make its variables again"

log = logging.getLogger(__name__)


class Registry:
    """Sessions by id. Another principal's session answers exactly as an unknown one."""

    def __init__(self, settings: Settings, folder: Path, journal: Journal, starter: KernelStarter) -> None:
        self.settings = settings
        self.journal = journal
        self._folder = folder
        self._starter = starter
        self._sessions: dict[str, Session] = {}
        self._ends: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def create(self, principal: str, *, environment: str = "", reason: str = "") -> Session:
        """A new session; its kernel starts with its first cell."""
        if len(self._sessions) >= self.settings.max_sessions:
            raise Busy(
                f"{len(self._sessions)} sessions are open, the most that max_sessions allows",
                hint="Clear one with clear_session, or try again when an idle one has expired",
            )
        name = environment or self.settings.environment
        self._starter.check(name)
        session_id = secrets.token_hex(16)
        folders = SessionFolders(session_id, self._folder / session_id, self._starter.take_identity())
        folders.make()
        session = Session(
            folders,
            principal=principal,
            environment=name,
            reason=reason,
            settings=self.settings,
            journal=self.journal,
            start_kernel=partial(self._starter.start, name),
        )
        self._sessions[session.id] = session
        log.info("session %s created, environment %s", session.id, name)
        return session

    def get(self, session_id: str, principal: str) -> Session:
        """The caller's session, marked as used."""
        session = self._sessions.get(session_id)
        if session is None or session.principal != principal:
            raise SessionNotFound(self._absence(session_id, principal), hint=NEW_SESSION_HINT)
        session.touch()
        return session

    def _absence(self, session_id: str, principal: str) -> str:
        owner, end = self._ends.get(session_id, ("", ""))
        if end and owner == principal:
            return f"session {session_id!r} {end}"
        return f"session {session_id[:64]!r} does not exist: it was never made, has expired, or was cleared"

    def of(self, principal: str) -> list[Session]:
        """The caller's sessions, oldest first."""
        return [session for session in self._sessions.values() if session.principal == principal]

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

    def result(self, execution_id: str, principal: str, since: int = 0) -> ExecutionResult:
        """What an execution gave, from event number `since` on."""
        live = self.execution(execution_id, principal)
        if live is not None:
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

    def history(self, session: Session) -> list[tuple[str, ExecutionResult | None, list[OutputEvent]]]:
        """Every execution of a session with what it said."""
        return [
            (record.code, record.result, list(self.journal.events(record.id)))
            for record in self.journal.of_session(session.id)
        ]

    # Ends

    async def clear(self, session_id: str, principal: str) -> None:
        """End a session on its owner's word; nothing of it stays."""
        session = self.get(session_id, principal)
        await self._end(session, "was cleared")

    async def sweep(self) -> list[str]:
        """End the sessions that were idle too long; what runs is never swept."""
        minutes = self.settings.session_idle_s / 60
        ended: list[str] = []
        for session in self.all():
            # Looked at one by one: while the last one ended, this one may have been used or cleared.
            now = time.time()
            if session.id in self._sessions and not session.is_busy and session.expires_at <= now:
                await self._end(session, f"expired at {iso(now)} after {minutes:g} idle minutes")
                ended.append(session.id)
        return ended

    async def _end(self, session: Session, end: str) -> None:
        self._sessions.pop(session.id, None)
        self._ends[session.id] = (session.principal, end)
        while len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)
        await session.aclose()
        await asyncio.to_thread(session.remove_files)
        if session.folders.identity is not None:
            self._starter.release_identity(session.folders.identity)
        self.journal.forget_session(session.id)
        log.info("session %s %s", session.id, end)

    async def aclose(self) -> None:
        """End every session."""
        for session in self.all():
            await self._end(session, "ended with its server")


@asynccontextmanager
async def open_registry(
    settings: Settings, folder: Path, journal: Journal, starter: KernelStarter
) -> AsyncGenerator[Registry]:
    """A registry with its sweep running in the background."""
    registry = Registry(settings, folder, journal, starter)
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
