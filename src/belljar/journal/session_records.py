"""The sessions table of the journal: which sessions there are, their owner, state and server.

States: `unborn` (pooled, without an owner, or a map's; it is gone with its server, and the word is in the journals of
earlier versions), `live` (a server runs it),
`asleep` (only on disk), `gone` (ended).
Several servers may share the file: a sleeping session is woken by the server that claims it first.
"""

import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from belljar.errors import JournalDamaged
from belljar.journal.journal import Journal
from belljar.models import SessionInfo, iso

SessionState = Literal["unborn", "live", "asleep", "gone"]
_DAY_S = 86_400

# Executions are counted by a query, because a counter in this table would be another row to change for every cell.
_COUNT = "(SELECT count(*) FROM executions WHERE session_id = sessions.id)"
SESSION_COLUMNS = (
    "id, principal, environment, reason, run, state, created_at, used_at, "
    f"{_COUNT}, variables, unkept, end, origin, origin_execution"
)
# Without the count, which takes milliseconds for a session of 10,000 cells.
UNCOUNTED_COLUMNS = SESSION_COLUMNS.replace(_COUNT, "0")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One row of the sessions table."""

    id: str
    principal: str
    environment: str
    reason: str
    run: str
    """The name of the server that runs it, or ran it last."""
    state: SessionState
    created_at: float
    used_at: float
    executions: int
    variables: tuple[str, ...]
    """The names of its variables after its last cell."""
    unkept: tuple[str, ...]
    """What of it could not be saved to disk, and why."""
    end: str
    """Why it is not live."""
    origin: str
    """The session that it is a fork of."""
    origin_execution: str


def session_record(row: tuple[Any, ...]) -> SessionRecord:
    """Return the record for a row of `SESSION_COLUMNS`."""
    values = dict(zip((field.name for field in fields(SessionRecord)), row, strict=True))
    kept: dict[str, Any] = {name: tuple(json.loads(values[name])) for name in ("variables", "unkept")}
    return SessionRecord(**values | kept)


def sleeping_info(entry: SessionRecord, *, sandbox: str, keep_days: float) -> SessionInfo:
    """Return a session that is only on disk as its owner sees it."""
    return SessionInfo(
        session_id=entry.id,
        environment=entry.environment,
        kernel="asleep",
        sandbox=sandbox,
        state="asleep",
        created_at=iso(entry.created_at),
        last_used_at=iso(entry.used_at),
        expires_at=iso(entry.used_at + keep_days * _DAY_S),
        age_s=round(time.time() - entry.created_at, 1),
        memory_mb=0.0,
        executions=entry.executions,
        files=None,
        reason=entry.reason,
        last_cause=entry.end,
    )


UNRECORDED = "was found without a record in the journal"


def session_folders(sessions: Path) -> list[Path]:
    """Return the folders of sessions in `sessions`, where those of zygotes are as well."""
    try:
        return sorted(folder for folder in sessions.iterdir() if folder.name.isalnum() and folder.is_dir())
    except OSError:
        return []


def last_used(folder: Path) -> float:
    """Return about when a session was last used that only its folder is left of."""
    times = [0.0]
    for path in (folder, folder / "workspace", folder / "state"):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def unrecorded_session(folder: Path) -> SessionRecord:
    """Return a session of which there is nothing but its folder, as a record that nobody owns."""
    used_at = last_used(folder)
    return SessionRecord(folder.name, "", "-", "", "", "asleep", used_at, used_at, 0, (), (), UNRECORDED, "", "")


class SessionRecords:
    """Reads and writes the sessions table for one server, whose name is `run`."""

    def __init__(self, journal: Journal, run: str) -> None:
        self._journal = journal
        self.run = run

    def new_id(self) -> str:
        """Return an id for a new session, which nobody can guess."""
        return self._journal.new_id()

    def enter(
        self, session_id: str, principal: str, environment: str, reason: str, state: SessionState = "live"
    ) -> None:
        """Record a new session, or the owner of one that was in the pool."""
        now = time.time()
        self._journal.write(
            "INSERT INTO sessions (id, principal, environment, reason, run, state, created_at, used_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET principal = excluded.principal, "
            "environment = excluded.environment, reason = excluded.reason, state = excluded.state, "
            "created_at = excluded.created_at, used_at = excluded.used_at",
            (session_id, principal, environment, reason, self.run, state, now, now),
        )

    def rename(self, session_id: str, reason: str) -> bool:
        """Change the reason of a session that is this server's or sleeps; return False where it is neither."""
        changed = self._journal.write_now(
            "UPDATE sessions SET reason = ? WHERE id = ? AND (state = 'asleep' OR (state = 'live' AND run = ?))",
            (reason, session_id, self.run),
        )
        return changed == 1

    def record_origin(self, session_id: str, origin: str, execution_id: str = "") -> None:
        """Record that a session is a fork of another one, as that was before an execution if one is named."""
        values = (origin, execution_id, session_id)
        self._journal.write("UPDATE sessions SET origin = ?, origin_execution = ? WHERE id = ?", values)

    def record_use(self, session_id: str, variables: Sequence[str]) -> None:
        """Record that a session was used, and the names of its variables."""
        self._journal.write(
            "UPDATE sessions SET used_at = ?, variables = ? WHERE id = ?",
            (time.time(), json.dumps([*variables]), session_id),
        )

    def put_to_sleep(self, session_id: str, end: str, unkept: Sequence[str] = ()) -> None:
        """Record that a session is only on disk from now on."""
        self._journal.write("UPDATE sessions SET unkept = ? WHERE id = ?", (json.dumps([*unkept]), session_id))
        self._set(session_id, "asleep", end)

    def claim(self, session_id: str) -> bool:
        """Make a sleeping session this server's; return False when it does not sleep any more."""
        # Without an owner object it is not its bundle any more (see `bundle_records.py`).
        claimed = self._journal.write_now(
            "UPDATE sessions SET state = 'live', run = ?, used_at = ?, "
            "bundle = CASE WHEN owned > 0 THEN bundle ELSE -abs(bundle) END, owned = max(owned, 0) "
            "WHERE id = ? AND state = 'asleep'",
            (self.run, time.time(), session_id),
        )
        return claimed == 1

    def take_over(self, session_id: str) -> None:
        """Record that a session continues here with the kernel that an earlier server left."""
        self._journal.write(
            "UPDATE sessions SET state = 'live', run = ?, end = '', unkept = '[]' WHERE id = ?",
            (self.run, session_id),
        )
        self._journal.commit()

    def record_end(self, session_id: str, end: str) -> None:
        """Record that a session is over, and why."""
        self._set(session_id, "gone", end)

    def _set(self, session_id: str, state: SessionState, end: str) -> None:
        values = (state, end, time.time(), session_id)
        self._journal.write("UPDATE sessions SET state = ?, end = ?, used_at = ? WHERE id = ?", values)
        self._journal.commit()

    def find(self, session_id: str) -> SessionRecord | None:
        """Return a session by its id; None if there is none."""
        if not session_id.isascii():
            return None
        return next(self._where("id = ?", (session_id,)), None)

    def is_stored(self, session_id: str) -> bool:
        """Return whether a store has something of a session."""
        query = "SELECT 1 FROM sessions WHERE id = ? AND (bundle <> 0 OR owned <> 0)"
        return next(self._journal.rows(query, (session_id,)), None) is not None

    def count_unstored(self) -> int:
        """Return how many sleeping sessions are only on this disk."""
        query = "SELECT count(*) FROM sessions WHERE state = 'asleep' AND (bundle <= 0 OR owned <> 0)"
        return next(self._journal.rows(query))[0]

    def asleep(self, principal: str) -> list[SessionRecord]:
        """Return the sleeping sessions of a principal, oldest first."""
        return [*self._where("state = 'asleep' AND principal = ? ORDER BY created_at", (principal,))]

    def all_asleep(self) -> list[SessionRecord]:
        """Return the sleeping sessions of all principals, oldest first."""
        return [*self._where("state = 'asleep' ORDER BY created_at", ())]

    def has_asleep(self, principal: str, count: int) -> bool:
        """Return whether at least `count` sessions of a principal sleep on disk."""
        query = "SELECT count(*) FROM (SELECT 1 FROM sessions WHERE state = 'asleep' AND principal = ? LIMIT ?)"
        return next(self._journal.rows(query, (principal, count)))[0] >= count

    def count_asleep(self) -> float:
        """Return how many sessions of all principals sleep on disk; NaN while the file cannot be read."""
        try:
            return next(self._journal.rows("SELECT count(*) FROM sessions WHERE state = 'asleep'"))[0]
        except (sqlite3.Error, JournalDamaged):
            return math.nan

    def abandoned(self, living: Collection[str]) -> list[SessionRecord]:
        """Return the live and pooled sessions of servers that are not among the living."""
        return [entry for entry in self._where("state IN ('live', 'unborn')", ()) if entry.run not in living]

    def outdated(self, before: float) -> list[SessionRecord]:
        """Return the sleeping and ended sessions that were last used before `before`."""
        return [*self._where("state IN ('asleep', 'gone') AND used_at < ?", (before,))]

    def unrecorded(self, sessions: Path) -> list[Path]:
        """Return the session folders in `sessions` that the journal has no record of."""
        known = {identifier for (identifier,) in self._journal.rows("SELECT id FROM sessions")}
        return [folder for folder in session_folders(sessions) if folder.name not in known]

    def adopt(self, folder: Path, principal: str, environment: str) -> None:
        """Record a session of which there is nothing but its folder, so that its owner can wake it."""
        used_at = last_used(folder)
        self._journal.write_now(
            "INSERT INTO sessions (id, principal, environment, reason, run, state, created_at, used_at, end) "
            "VALUES (?, ?, ?, '', ?, 'asleep', ?, ?, ?)",
            (folder.name, principal, environment, self.run, used_at, used_at, UNRECORDED),
        )

    def forget(self, session_id: str) -> None:
        """Delete a session and its executions from the journal."""
        self._journal.forget_session(session_id)
        self._journal.write("DELETE FROM sessions WHERE id = ?", (session_id,))
        self._journal.write("DELETE FROM identifiers WHERE session_id = ?", (session_id,))
        self._journal.commit()

    def _where(self, condition: str, values: tuple[object, ...]) -> Iterator[SessionRecord]:
        for row in [*self._journal.rows(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {condition}", values)]:  # noqa: S608
            yield session_record(row)
