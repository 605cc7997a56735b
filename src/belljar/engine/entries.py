"""Sessions and executions as they are shown: what the journal has of them, joined with what is live in this process."""

import time
from collections.abc import Callable, Iterable

from belljar.engine.contract import cursor_of
from belljar.engine.history import ExecutionRow, HistoryReader
from belljar.engine.models import AskedPerson, ExecutionEntry, RunningCell, SessionEntry
from belljar.engine.usage import UsageSampler
from belljar.executions.execution import Execution
from belljar.journal.journal import KILLED
from belljar.journal.session_records import SessionRecord
from belljar.models import iso_ms
from belljar.sessions.endings import DAY_S
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session

_MAX_FIRST_LINE = 200


class Entries:
    """Makes entries of rows of the journal. Checks no access: its callers do."""

    def __init__(self, registry: Registry, usage: UsageSampler) -> None:
        self._registry = registry
        self._usage = usage

    def running(self, row: ExecutionRow) -> Execution | None:
        """Return the execution itself while its session is live here."""
        session = self._registry.find_open(row.session_id)
        return session.queue.find(row.id) if session is not None else None

    def sessions(self, rows: Iterable[SessionRecord]) -> list[SessionEntry]:
        """Return sessions as lists show them; what waits for a person is looked up once for all of them."""
        asked: dict[str, AskedPerson] = {}
        for question in self._registry.inbox.waiting(None):
            asked.setdefault(
                question.session_id,
                AskedPerson(
                    question_id=question.id,
                    title=question.title,
                    put_at=question.put_at,
                    expires_at=question.expires_at or "",
                ),
            )
        return [self._session(row, asked.get(row.id)) for row in rows]

    def session(self, row: SessionRecord) -> SessionEntry:
        """Return a session as lists show it."""
        (entry,) = self.sessions([row])
        return entry

    def _session(self, row: SessionRecord, asks: AskedPerson | None) -> SessionEntry:
        kept_s = self._registry.settings.keep_days * DAY_S
        entry = SessionEntry(
            session_id=row.id,
            owner=row.principal,
            environment=row.environment,
            state="gone" if row.state == "gone" else "asleep",
            reason=row.reason,
            server=row.run,
            created_at=iso_ms(row.created_at),
            last_used_at=iso_ms(row.used_at),
            expires_at=iso_ms(row.used_at + kept_s) if row.state == "asleep" else "",
            executions=row.executions,
            last_cause=row.end,
        )
        session = self._registry.find_open(row.id)
        entry = self._with_life(entry, session) if session is not None else entry
        is_waiting = asks is not None and entry.state != "gone"
        return entry.model_copy(update={"asks": asks, "state": "waiting"}) if is_waiting else entry

    def _with_life(self, entry: SessionEntry, session: Session) -> SessionEntry:
        kernel, last = session.session_kernel.kernel, session.queue.latest()
        running = next((one for one in session.queue.running() if one.has_started), None)
        memory, cpu = self._usage.of(session.id)
        result = last.result() if last else None
        return entry.model_copy(
            update={
                "state": session.state,
                "last_used_at": iso_ms(session.lease.used_at),
                "expires_at": iso_ms(session.lease.expires_at),
                "executions": session.count,
                "checkpoints": session.session_kernel.checkpoints.count,
                "memory_mb": round(kernel.memory_mb(), 1) if kernel else 0.0,
                "cpu_percent": cpu[-1] if cpu else 0.0,
                "memory_history": memory,
                "cpu_history": cpu,
                "last_status": result.status if result else None,
                "last_error": (result.error or "")[:_MAX_FIRST_LINE] if result else "",
                "last_cause": session.session_kernel.last_cause or "",
                "now": self._running_cell(running) if running else None,
                "rewindable": session.session_kernel.checkpoints.targets,
            }
        )

    def _running_cell(self, execution: Execution) -> RunningCell:
        wall_s = execution.result().usage.wall_s
        return RunningCell(
            execution_id=execution.id,
            first_line=telling_line(execution.cell.code),
            since=iso_ms(time.time() - wall_s),
            running_s=round(wall_s, 1),
        )

    def execution(self, row: ExecutionRow) -> ExecutionEntry:
        """Return an execution without its output; one that no server runs any more was killed with its server."""
        result = row.result
        entry = ExecutionEntry(
            execution_id=row.id,
            session_id=row.session_id,
            code=row.code,
            author=row.author,
            client=row.client,
            status="died",
            submitted_at=iso_ms(row.submitted_at),
            started_at=iso_ms(row.started_at) if row.started_at else None,
            ended_at=iso_ms(row.ended_at) if row.ended_at else None,
            is_undone=row.undone_at is not None,
            undone_at=iso_ms(row.undone_at) if row.undone_at else None,
            is_dropped=row.dropped_at is not None,
            output_bytes=row.output_bytes,
            cursor=cursor_of(str(row.place)),
        )
        if result is not None:
            return entry.model_copy(
                update={
                    "status": result.status,
                    "execution_count": result.execution_count,
                    "usage": result.usage,
                    "error": result.error,
                    "cause": result.cause,
                    "state": result.state,
                    "lost": result.lost,
                    "files": result.files,
                    "events": result.sequence,
                }
            )
        live = self.running(row)
        if live is None:
            return entry.model_copy(update={"cause": KILLED, "state": "lost"})
        return entry.model_copy(update={"status": "running" if live.has_started else "queued"})


async def read_execution(
    history: HistoryReader, execution_id: str, live: Callable[[ExecutionRow], Execution | None]
) -> ExecutionRow | None:
    """Return an execution as the journal has it, with its result if it is not `live` any more."""
    row = await history.execution(execution_id)
    if row is not None and row.result is None and live(row) is None:
        # It may have ended, and its session with it, since it was read. Without a look at what came of it, it would
        # pass for one whose server was killed.
        row = await history.execution(execution_id)
    return row


def telling_line(code: str) -> str:
    """Return the first line of a cell that says what it does: imports and comments do not."""
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    telling = (line for line in lines if not line.startswith(("import ", "from ", "#")))
    return next(telling, lines[0] if lines else "")[:_MAX_FIRST_LINE]
