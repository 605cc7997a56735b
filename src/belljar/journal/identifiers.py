"""The identifiers table of the journal: the names that callers chose for sessions of theirs.

An identifier belongs to a principal, and two principals may use the same one. It is sensitive: whoever has it and the
principal's credentials has the session, so it is in no log line and in no error message.
"""

import time
from dataclasses import dataclass

from belljar.journal.journal import Journal

UNUSED = ""
"""In place of a session's id: the identifier was given out, and nothing has run under it."""


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
