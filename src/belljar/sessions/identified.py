"""Sessions by names that their owners choose: an identifier stands for one session, made when it is first needed.

That is the contract of Azure's dynamic sessions, and the one place where a new session needs no word of its own: when
the session behind a known identifier is over, the next execution under it is told what became of it.

An identifier belongs to a principal, and two principals may use the same one. It is sensitive: whoever has it and the
principal's credentials has the session, so it is in no log line and in no error message. Knows nothing of HTTP.
"""

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4
from weakref import WeakValueDictionary

from belljar.errors import Busy, InvalidArgument, SessionNotFound
from belljar.files.workspace import Workspace
from belljar.journal.journal import Journal
from belljar.journal.session_records import SessionRecord
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session

LEAST_CHARS, MAX_CHARS = 4, 128
UNUSED_S = 24 * 60 * 60.0
"""How long an identifier is remembered under which nothing has run."""
_IDENTIFIER = re.compile(r"""[A-Za-z0-9_|}{\[\]:";'<>?/.,@#$%^&*()\-+=!~`]{4,128}""")
UNUSED = ""
"""In place of a session's id: the identifier was given out, and nothing has run under it."""


def check_identifier(identifier: str) -> str:
    """Return an identifier, or refuse one that Azure would refuse. The error does not quote it."""
    if not LEAST_CHARS <= len(identifier) <= MAX_CHARS:
        raise InvalidArgument(
            f"the identifier has {len(identifier)} characters", hint=f"Pass {LEAST_CHARS} to {MAX_CHARS}, like a UUID"
        )
    if not _IDENTIFIER.fullmatch(identifier):
        raise InvalidArgument(
            "the identifier has characters that none may have",
            hint="Use letters, digits and the signs of US-ASCII, without spaces, line breaks and backslashes",
        )
    return identifier


class IdentifiedSessions:
    """The sessions of a registry by their owners' identifiers."""

    def __init__(self, sessions: Registry) -> None:
        self._sessions = sessions
        self.records = IdentifierRecords(sessions.journal)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def launch(self, principal: str) -> str:
        """Return a new identifier, whose session is made by the first call that needs it."""
        identifier = str(uuid4())
        day_ago = time.time() - UNUSED_S
        self.records.reserve(principal, identifier, forgotten_before=day_ago)
        return identifier

    async def reach_launched(self, identifier: str, principal: str) -> Session:
        """Return the session of an identifier that is known, and refuse one whose session is over or never was."""
        known = self.records.find(principal, check_identifier(identifier))
        entry = self._sessions.records.find(known) if known else None
        if known is None or (known != UNUSED and (entry is None or entry.state not in ("live", "asleep"))):
            raise SessionNotFound("it was never launched, or its session is over")
        return await self.reach(identifier, principal)

    async def reach(self, identifier: str, principal: str, *, environment: str = "") -> Session:
        """Return the session of an identifier: awake, or woken, or a new one where there is none."""
        check_identifier(identifier)
        lock = self._locks.setdefault((principal, identifier), asyncio.Lock())
        async with lock:
            known = self.records.find(principal, identifier)
            if known is None or known == UNUSED:
                return await self._allocate(identifier, principal, known, "", environment)
            try:
                return await self._sessions.reach(known, principal)
            except SessionNotFound:
                entry = self._sessions.records.find(known)
                end = entry.end if entry is not None and entry.end else "is gone"
                return await self._allocate(identifier, principal, known, end, environment)

    async def folder(self, identifier: str, principal: str) -> Workspace:
        """Return the folder of an identifier's session, for reading: a session that sleeps is not woken for it."""
        check_identifier(identifier)
        known = self.records.find(principal, identifier)
        if known is not None:
            entry = self._sessions.records.find(known)
            if entry is not None and entry.state == "asleep" and entry.principal == principal:
                folders, _ = self._sessions.folders_and_environment(known, principal)
                return Workspace(folders.workspace)
        return (await self.reach(identifier, principal)).workspace

    def known(self, identifier: str, principal: str) -> SessionRecord:
        """Return the record of an identifier's session, which lives or sleeps; `SessionNotFound` if there is none."""
        session_id = self.records.find(principal, check_identifier(identifier))
        entry = self._sessions.records.find(session_id) if session_id else None
        if entry is None or entry.principal != principal or entry.state not in ("live", "asleep"):
            raise SessionNotFound(
                "there is no session of this identifier", hint="Any execution or file call under it makes one"
            )
        return entry

    async def clear(self, identifier: str, principal: str) -> None:
        """End the session of an identifier and forget both; nothing happens where there is none."""
        check_identifier(identifier)
        lock = self._locks.setdefault((principal, identifier), asyncio.Lock())
        async with lock:
            known = self.records.find(principal, identifier)
            if known is None:
                return
            with suppress(SessionNotFound):
                await self._sessions.clear(known, principal)
            self.records.forget(principal, identifier)

    async def _allocate(
        self, identifier: str, principal: str, known: str | None, end: str, environment: str
    ) -> Session:
        await self._sessions.make_room(principal)
        session = self._sessions.create(principal, environment=environment)
        try:
            bound = self.records.bind(principal, identifier, session.id, known=known)
        except BaseException:
            await self._sessions.clear(session.id, principal)
            raise
        if bound != session.id:  # another server on the same data directory was quicker
            await self._sessions.clear(session.id, principal)
            raise _at_another_server()
        if end:
            notice = f"the session before this one {end}: its variables and files are gone, and this is a new session"
            session.session_kernel.note_predecessor(notice)
        return session


def _at_another_server() -> Busy:
    return Busy(
        "the session of this identifier lives at another server of the same data directory",
        hint="Send the calls of one identifier to the same server",
    )


@dataclass(frozen=True, slots=True)
class IdentifierRecord:
    """One row: a principal's identifier, and the session that it stands for."""

    identifier: str
    session_id: str


class IdentifierRecords:
    """Reads and writes the identifiers table. Several servers may share the file."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def find(self, principal: str, identifier: str) -> str | None:
        """Return the session that an identifier stands for; `UNUSED` if it is only reserved, None if it is unknown."""
        query = "SELECT session_id FROM identifiers WHERE principal = ? AND identifier = ?"
        row = next(self._journal.rows(query, (principal, identifier)), None)
        return row[0] if row else None

    def reserve(self, principal: str, identifier: str, *, forgotten_before: float) -> None:
        """Record an identifier that stands for no session yet, and forget older ones under which nothing has run."""
        stale = "principal = ? AND session_id = ? AND made_at < ?"
        self._journal.write_now(f"DELETE FROM identifiers WHERE {stale}", (principal, UNUSED, forgotten_before))  # noqa: S608
        statement = "INSERT OR IGNORE INTO identifiers (session_id, principal, identifier, made_at) VALUES (?, ?, ?, ?)"
        self._journal.write_now(statement, (UNUSED, principal, identifier, time.time()))

    def bind(self, principal: str, identifier: str, session_id: str, *, known: str | None) -> str:
        """Let an identifier stand for a session, unless another server was quicker; return the session it stands for.

        `known` is the session that it stood for when the caller looked. Committed before this returns, because a caller
        who gets an answer under an identifier must find the same session after the server was killed.
        """
        values = (session_id, principal, identifier)
        if known is None:
            columns = "(session_id, principal, identifier, made_at)"
            statement = f"INSERT OR IGNORE INTO identifiers {columns} VALUES (?, ?, ?, ?)"  # noqa: S608
            self._journal.write_now(statement, (*values, time.time()))
        else:
            statement = (
                "UPDATE identifiers SET session_id = ? WHERE principal = ? AND identifier = ? AND session_id = ?"
            )
            self._journal.write_now(statement, (*values, known))
        return self.find(principal, identifier) or session_id

    def forget(self, principal: str, identifier: str) -> None:
        """Let an identifier stand for nothing."""
        statement = "DELETE FROM identifiers WHERE principal = ? AND identifier = ?"
        self._journal.write_now(statement, (principal, identifier))

    def of(self, principal: str, *, after: int, count: int) -> list[IdentifierRecord]:
        """Return a page of a principal's identifiers whose sessions are not over, in a fixed order."""
        query = (
            "SELECT identifier, session_id FROM identifiers JOIN sessions ON sessions.id = session_id "
            "WHERE identifiers.principal = ? AND state IN ('live', 'asleep') ORDER BY identifier LIMIT ? OFFSET ?"
        )
        return [IdentifierRecord(*row) for row in self._journal.rows(query, (principal, count, after))]
