"""The engine of this process's own sessions: what `local_views.py` shows, what happens, and what people may do."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from pydantic import JsonValue

from belljar.engine.contract import Access
from belljar.engine.follow import SessionFollower
from belljar.engine.local_views import MAX_TEXT, LocalViews, owner_asked_for, unwritten
from belljar.engine.models import Followed, ServerEvent, SessionEntry
from belljar.engine.packages import installing_cell
from belljar.errors import InvalidArgument
from belljar.executions.cell import make_cell
from belljar.executions.inbox import InboxQuestion
from belljar.journal.session_records import iso_ms
from belljar.models import Rewinding, SessionFork
from belljar.sessions.session import Session
from belljar.settings.environments import KERNEL_PREFIX

_WAIT_S = 3600.0


class LocalEngine(LocalViews):
    """An `Engine` of the sessions of one registry."""

    # What happens

    async def server_events(self, access: Access, after: str = "") -> AsyncGenerator[ServerEvent]:
        """See `Engine`."""
        changes = self._registry.changes
        run, _, place = (after or self._place()).rpartition(":")
        number = int(place) if run == self._run and place.isdecimal() and len(place) < 18 else -1
        while True:
            if not changes.has(number):
                number = changes.number
                yield ServerEvent(id=self._place(), kind="reset")
            for change in changes.after(number):
                number = change.number
                if access.may_see(change.principal):
                    yield ServerEvent(
                        id=f"{self._run}:{number}",
                        kind=change.kind,
                        state=change.state,
                        session_id=change.session_id,
                        execution_id=change.execution_id,
                        at=iso_ms(change.at),
                    )
            await changes.wait(number, _WAIT_S)

    async def follow(self, access: Access, session_id: str, after: str = "") -> AsyncGenerator[Followed]:
        """See `Engine`."""
        await self._row(access, session_id)
        follower = SessionFollower(
            session_id,
            self._history,
            self._registry.changes,
            self._entries.running,
            self._entries.execution,
            self._session_entry,
        )
        async with aclosing(follower.run(after)) as happened:
            async for item in happened:
                yield item

    async def _session_entry(self, session_id: str) -> SessionEntry | None:
        row = await self._history.session(session_id)
        return self._entries.session(row) if row is not None else None

    # Acting

    async def create(self, access: Access, environment: str = "", reason: str = "") -> SessionEntry:
        """See `Engine`."""
        await self._registry.make_room(access.principal)
        session = self._registry.create(access.principal, environment=environment, reason=reason[:MAX_TEXT])
        self._registry.journal.commit()
        if self._registry.journal.is_failing:
            # Nobody could find it here, and each further try would make another one.
            await self._registry.clear(session.id, access.principal)
            raise unwritten("no session was made")
        return self._entries.session(await self._row(access, session.id, is_counted=True))

    async def rename(self, access: Access, session_id: str, reason: str) -> SessionEntry:
        """See `Engine`."""
        row = await self._row(access, session_id)
        kept = self._registry.rename(session_id, row.principal, reason)
        if access.name and (session := self._registry.find_open(session_id)) is not None:
            deed = f"renamed the session to {kept!r}" if kept else "removed the session's name"
            session.authors.note(f"{access.name} {deed}")
        return self._entries.session(await self._row(access, session_id, is_counted=True))

    async def run_cell(
        self, access: Access, session_id: str, code: str, timeout_s: float | None = None, key: str = ""
    ) -> str:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        may_ask = self._registry.inbox.may_ask(session.principal)
        cell = make_cell(self._registry.settings, code, timeout_s=timeout_s, allow_input=may_ask, author=access.name)
        known = self._registry.executions.submitted(key, cell.code, session.principal) if key else None
        if known is not None:
            record = self._registry.journal.find(known)
            if record is not None and record.session_id != session_id:
                raise InvalidArgument(
                    f"the key {key!r} was given for execution {known} of another session", hint="Pass a new key"
                )
            return known
        execution = session.submit(cell, key)
        self._registry.journal.commit()
        return execution.id

    async def install(self, access: Access, session_id: str, packages: list[str]) -> str:
        """See `Engine`."""
        row = await self._row(access, session_id)
        code = installing_cell(packages)
        if row.environment.startswith(KERNEL_PREFIX):
            await self._registry.environments.for_packages(row.environment)  # refuses kernels that are not Python
        return await self.run_cell(access, session_id, code)

    async def interrupt(self, access: Access, session_id: str) -> list[str]:
        """See `Engine`. A session that sleeps runs nothing, and is not woken."""
        await self._row(access, session_id)
        session = self._registry.find_open(session_id)
        if session is None:
            return []
        running = session.queue.running()
        for execution in reversed(running):
            execution.interrupt(*([f"by {access.name}"] if access.name else []))
        await asyncio.gather(*(execution.wait(execution.stop_s) for execution in running))
        return [execution.id for execution in running]

    async def fork(self, access: Access, session_id: str, at: str = "") -> SessionFork:
        """See `Engine`."""
        row = await self._row(access, session_id)
        forked = (await self._registry.fork(session_id, row.principal, at=at))[1]
        if access.name and (session := self._registry.find_open(session_id)) is not None:
            session.authors.note(f"{access.name} forked the session as {forked.session_id}")
        return forked

    async def rewind(self, access: Access, session_id: str, to: str) -> Rewinding:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        rewinding = await session.rewind(to)
        if access.name:
            count = len(rewinding.undone)
            cells = "a cell" if count == 1 else f"{count} cells"
            session.authors.note(f"{access.name} rewound the session, which undid {cells},")
        return rewinding

    async def end(self, access: Access, session_id: str) -> None:
        """See `Engine`."""
        row = await self._row(access, session_id)
        end = f"was ended by {access.name}" if access.name else "was cleared"
        await self._registry.clear(session_id, row.principal, end)

    async def write_file(self, access: Access, session_id: str, name: str, content: bytes) -> None:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        with session.in_use():
            await session.write_file(name, content)
        if access.name:
            session.authors.note(f"{access.name} put {name[:MAX_TEXT]!r} into the session folder")

    async def delete_file(self, access: Access, session_id: str, name: str) -> None:
        """See `Engine`."""
        session = await self._reach(access, session_id)
        await asyncio.to_thread(session.workspace.delete, name)
        if access.name:
            session.authors.note(f"{access.name} deleted {name[:MAX_TEXT]!r} from the session folder")

    async def answer(
        self, access: Access, question_id: str, action: Literal["accept", "decline"], values: dict[str, JsonValue]
    ) -> InboxQuestion:
        """See `Engine`."""
        inbox, whose = self._registry.inbox, owner_asked_for(access)
        by = access.name or access.principal
        await inbox.answer(question_id, whose, action=action, values=values, by=by, where=access.via)
        return inbox.find(question_id, whose)

    async def note_presence(self, access: Access) -> None:
        """See `Engine`."""
        self._registry.inbox.note_presence(owner_asked_for(access))

    async def _reach(self, access: Access, session_id: str) -> Session:
        row = await self._row(access, session_id)
        return await self._registry.reach(session_id, row.principal)
