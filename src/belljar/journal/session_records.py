"""Which sessions there are, in memory and on disk: whose, in what state, and run by which server.

Several servers may share the file: a session that sleeps is woken by the one that claims it first.
"""

import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from belljar.journal.journal import Journal

SessionState = Literal["unborn", "live", "asleep", "gone"]

# Executions are counted where they are: a number beside them would be another row to change for every cell.
_COLUMNS = (
    "id, principal, environment, reason, run, state, created_at, used_at, "
    "(SELECT count(*) FROM executions WHERE session_id = sessions.id), variables, unkept, end"
)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session as it is on record."""

    id: str
    principal: str
    environment: str
    reason: str
    run: str
    """The server that has it, or had it last."""
    state: SessionState
    created_at: float
    used_at: float
    executions: int
    variables: tuple[str, ...]
    """Their names after its last cell."""
    unkept: tuple[str, ...]
    """What of it could not be put on disk, and why."""
    end: str
    """Why it is not live."""


class SessionRecords:
    """The server's view of it. `run` is this server's name."""

    def __init__(self, journal: Journal, run: str) -> None:
        self._journal = journal
        self._run = run

    def enter(
        self, session_id: str, principal: str, environment: str, reason: str, state: SessionState = "live"
    ) -> None:
        """A session is made, or one that was kept ready gets its owner."""
        now = time.time()
        self._journal.write(
            "INSERT INTO sessions (id, principal, environment, reason, run, state, created_at, used_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET principal = excluded.principal, "
            "environment = excluded.environment, reason = excluded.reason, state = excluded.state, "
            "created_at = excluded.created_at, used_at = excluded.used_at",
            (session_id, principal, environment, reason, self._run, state, now, now),
        )

    def record_use(self, session_id: str, variables: Sequence[str]) -> None:
        """A session was used, and has these variables."""
        self._journal.write(
            "UPDATE sessions SET used_at = ?, variables = ? WHERE id = ?",
            (time.time(), json.dumps([*variables]), session_id),
        )

    def put_to_sleep(self, session_id: str, end: str, unkept: Sequence[str] = ()) -> None:
        """A session is on disk alone from now on."""
        self._journal.write("UPDATE sessions SET unkept = ? WHERE id = ?", (json.dumps([*unkept]), session_id))
        self._set(session_id, "asleep", end)

    def claim(self, session_id: str) -> bool:
        """Take a sleeping session; False when it is no longer there to take."""
        claimed = self._journal.write_now(
            "UPDATE sessions SET state = 'live', run = ?, used_at = ? WHERE id = ? AND state = 'asleep'",
            (self._run, time.time(), session_id),
        )
        return claimed == 1

    def take_over(self, session_id: str) -> None:
        """A session goes on with the kernel that an earlier server left."""
        self._journal.write(
            "UPDATE sessions SET state = 'live', run = ?, end = '', unkept = '[]' WHERE id = ?",
            (self._run, session_id),
        )
        self._journal.commit()

    def record_end(self, session_id: str, end: str) -> None:
        """A session is over; only why is remembered."""
        self._set(session_id, "gone", end)

    def _set(self, session_id: str, state: SessionState, end: str) -> None:
        values = (state, end, time.time(), session_id)
        self._journal.write("UPDATE sessions SET state = ?, end = ?, used_at = ? WHERE id = ?", values)
        self._journal.commit()

    def find(self, session_id: str) -> SessionRecord | None:
        """One session by its id."""
        if not session_id.isascii():
            return None
        return next(self._where("id = ?", (session_id,)), None)

    def asleep(self, principal: str) -> list[SessionRecord]:
        """The sleeping sessions of a caller, oldest first."""
        return [*self._where("state = 'asleep' AND principal = ? ORDER BY created_at", (principal,))]

    def has_asleep(self, principal: str, count: int) -> bool:
        """Whether that many sessions of a caller sleep on disk."""
        query = "SELECT count(*) FROM (SELECT 1 FROM sessions WHERE state = 'asleep' AND principal = ? LIMIT ?)"
        return next(self._journal.rows(query, (principal, count)))[0] >= count

    def count_asleep(self) -> float:
        """How many sleep on disk, whoever's they are; not a number while the disk cannot be read."""
        try:
            return next(self._journal.rows("SELECT count(*) FROM sessions WHERE state = 'asleep'"))[0]
        except sqlite3.Error:
            return math.nan

    def abandoned(self, living: Collection[str]) -> list[SessionRecord]:
        """Sessions of servers that are no more."""
        return [entry for entry in self._where("state IN ('live', 'unborn')", ()) if entry.run not in living]

    def outdated(self, before: float) -> list[SessionRecord]:
        """Sessions that nobody has asked for since."""
        return [*self._where("state IN ('asleep', 'gone') AND used_at < ?", (before,))]

    def forget(self, session_id: str) -> None:
        """Nothing of it stays."""
        self._journal.forget_session(session_id)
        self._journal.write("DELETE FROM sessions WHERE id = ?", (session_id,))
        self._journal.commit()

    def _where(self, condition: str, values: tuple[object, ...]) -> Iterator[SessionRecord]:
        for row in [*self._journal.rows(f"SELECT {_COLUMNS} FROM sessions WHERE {condition}", values)]:  # noqa: S608
            *plain, variables, unkept, end = row
            identifier, principal, environment, reason, run, state, created_at, used_at, executions = plain
            yield SessionRecord(
                identifier,
                principal,
                environment,
                reason,
                run,
                cast("SessionState", state),
                created_at,
                used_at,
                executions,
                tuple(json.loads(variables)),
                tuple(json.loads(unkept)),
                end,
            )
