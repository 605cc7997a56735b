"""The tables of workflow runs in the journal: which runs there are, who drives them, and what became of their steps.

States of a run: `running`, `waiting` (for a person), `interrupted`, `done`, `failed`, `stopped`. Several servers may
share the file: a run is driven by the server that claims it first. Knows nothing of what a workflow is.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from belljar.journal.journal import Journal

RunState = Literal["running", "waiting", "interrupted", "done", "failed", "stopped"]
StepState = Literal["running", "waiting", "answered", "done", "failed", "skipped", "declined", "expired", "repeated"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
ENDED: tuple[RunState, ...] = ("done", "failed", "stopped")

_RUN = (
    "SELECT id, principal, name, text, texts, source, digest, variables, session_id, server, state, wanted, "
    "started_at, ended_at, end, value, tries FROM runs"
)
_STEP = (
    "SELECT path, attempt, state, execution_id, session_id, value, error, notes, question, answer, expires_at, "
    "began_at, ended_at FROM steps"
)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One row of the runs table. Texts named JSON are as they were written."""

    id: str
    principal: str
    name: str
    text: str
    texts: str
    """The texts of its sub-workflows by the names they were found under, as JSON."""
    source: str
    """Where the text came from: a path, a name, or empty for a text that a client sent."""
    digest: str
    variables: str
    """As JSON."""
    session_id: str
    server: str
    """The server that drives it; empty while none does."""
    state: RunState
    wanted: str = ""
    """`stop` when somebody wants it stopped."""
    started_at: float = 0.0
    ended_at: float | None = None
    end: str = ""
    """Why it has ended or waits."""
    value: str | None = None
    """The value of its last step, as JSON."""
    tries: int = 0
    """How many servers in a row took it over from one that had died, and died soon after. See `settle`."""


class StepRecord(NamedTuple):
    """One attempt of a step. A tuple, because a long run has ten thousand of them when it is resumed."""

    path: str
    attempt: int
    state: StepState
    execution_id: str = ""
    session_id: str = ""
    value: str | None = None
    """What the step gave, as JSON."""
    error: str = ""
    notes: str = ""
    question: str | None = None
    """What a person is or was asked, as JSON."""
    answer: str | None = None
    expires_at: float | None = None
    began_at: float = 0.0
    ended_at: float | None = None


class RunRecords:
    """Reads and writes the two tables for one server. `server` is its name."""

    def __init__(self, journal: Journal, server: str) -> None:
        self._journal = journal
        self.server = server

    # Runs

    def enter(self, run: RunRecord) -> None:
        """Record a new run before anything of it happens; raises `Busy` when that is not possible."""
        self._journal.write_now(
            "INSERT INTO runs (id, principal, name, text, texts, source, digest, variables, session_id, server, state, "
            "started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run.id,
                run.principal,
                run.name,
                run.text,
                run.texts,
                run.source,
                run.digest,
                run.variables,
                run.session_id,
                run.server,
                run.state,
                run.started_at,
            ),
        )

    def claim(self, run: RunRecord) -> bool:
        """Make a run that nobody drives this server's; return False if it is not as it was read any more."""
        claimed = self._journal.write_now(
            "UPDATE runs SET server = ?, state = 'running', end = '', wanted = '', "
            "tries = CASE server WHEN '' THEN 0 ELSE tries + 1 END "
            "WHERE id = ? AND server = ? AND state = ?",
            (self.server, run.id, run.server, run.state),
        )
        return claimed == 1

    def settle(self) -> None:
        """Record that this server does well with the runs that it took over: it has come to look after them again."""
        self._journal.write("UPDATE runs SET tries = 0 WHERE server = ? AND tries > 0", (self.server,))

    def settle_run(self, run_id: str) -> None:
        """Record that a run that was taken over has come further."""
        self._journal.write("UPDATE runs SET tries = 0 WHERE id = ? AND tries > 0", (run_id,))

    def replace_text(self, run_id: str, text: str, texts: str, digest: str) -> None:
        """Go on with another text of the same workflow."""
        self._journal.write_now(
            "UPDATE runs SET text = ?, texts = ?, digest = ? WHERE id = ?", (text, texts, digest, run_id)
        )

    def set_state(self, run_id: str, state: RunState, end: str = "", *, value: str | None = None) -> None:
        """Record the state of a run that this server drives; one that has ended is driven by nobody."""
        has_ended = state in ENDED
        self._journal.write(
            "UPDATE runs SET state = ?, end = ?, value = ?, ended_at = ?, server = ? WHERE id = ? AND server = ?",
            (
                state,
                end,
                value,
                time.time() if has_ended else None,
                "" if has_ended else self.server,
                run_id,
                self.server,
            ),
        )
        self._journal.commit()

    def release(self, run_id: str) -> None:
        """Let anybody drive a run that this server drives."""
        self._journal.write("UPDATE runs SET server = '' WHERE id = ? AND server = ?", (run_id, self.server))
        self._journal.commit()

    def want(self, run_id: str, wanted: str) -> None:
        """Tell whoever drives a run what a person wants of it."""
        self._journal.write_now("UPDATE runs SET wanted = ? WHERE id = ?", (wanted, run_id))

    def end_undriven(self, run: RunRecord, state: RunState, end: str) -> bool:
        """Record the end of a run that nobody drives; return False if it is not as it was read any more."""
        changed = self._journal.write_now(
            "UPDATE runs SET state = ?, end = ?, ended_at = ?, server = '' WHERE id = ? AND server = ? AND state = ?",
            (state, end, time.time(), run.id, run.server, run.state),
        )
        return changed == 1

    def has_any(self) -> bool:
        """Return whether there is any run, ended ones included."""
        return next(self._journal.rows("SELECT 1 FROM runs LIMIT 1"), None) is not None

    def find(self, run_id: str) -> RunRecord | None:
        """Return a run by its id; None if there is none."""
        if not run_id.isascii():
            return None
        return next(self._runs("WHERE id = ?", (run_id,)), None)

    def wanted(self, run_id: str) -> str:
        """Return what a person wants of a run."""
        row = next(self._journal.rows("SELECT wanted FROM runs WHERE id = ?", (run_id,)), None)
        return row[0] if row else ""

    def begins_with(self, prefix: str, principal: str, most: int) -> list[RunRecord]:
        """Return the runs of a principal whose id begins with `prefix`."""
        condition = "WHERE principal = ? AND substr(id, 1, length(?)) = ? ORDER BY started_at DESC LIMIT ?"
        return [*self._runs(condition, (principal, prefix, prefix, most))]

    def of_anyone(self, prefix: str, most: int) -> list[RunRecord]:
        """Return the runs of all principals whose id begins with `prefix`, newest first, for the operator."""
        condition = "WHERE substr(id, 1, length(?)) = ? ORDER BY started_at DESC, rowid DESC LIMIT ?"
        return [*self._runs(condition, (prefix, prefix, most))]

    def latest(self, principal: str, most: int) -> list[RunRecord]:
        """Return the latest runs of a principal, newest first."""
        return [*self._runs("WHERE principal = ? ORDER BY started_at DESC, rowid DESC LIMIT ?", (principal, most))]

    def unfinished(self) -> list[RunRecord]:
        """Return every run that somebody drives or should drive: `running`, or `waiting` with a server."""
        return [*self._runs("WHERE state = 'running' OR (state = 'waiting' AND server <> '')", ())]

    def with_work(self, now: float) -> list[RunRecord]:
        """Return the waiting runs that nobody drives and that can go on: a question was answered or has expired."""
        condition = (
            "WHERE state = 'waiting' AND server = '' AND EXISTS (SELECT 1 FROM steps WHERE run_id = runs.id AND "
            "(steps.state = 'answered' OR (steps.state = 'waiting' AND expires_at < ?)))"
        )
        return [*self._runs(condition, (now,))]

    def forget_ended(self, before: float) -> None:
        """Delete the runs that ended before `before`."""
        ended = "SELECT id FROM runs WHERE ended_at < ?"
        self._journal.write(f"DELETE FROM steps WHERE run_id IN ({ended})", (before,))  # noqa: S608
        self._journal.write("DELETE FROM runs WHERE ended_at < ?", (before,))

    def _runs(self, condition: str, values: tuple[object, ...]) -> Iterator[RunRecord]:
        for row in [*self._journal.rows(f"{_RUN} {condition}", values)]:
            yield RunRecord(*row)

    # Steps

    def begin(self, run_id: str, path: str, attempt: int, session_id: str) -> None:
        """Record that an attempt begins, before anything of it happens; raises `Busy` when that is not possible."""
        self._journal.write_now(
            "INSERT INTO steps (run_id, path, attempt, state, session_id, began_at) VALUES (?, ?, ?, 'running', ?, ?) "
            "ON CONFLICT (run_id, path, attempt) DO UPDATE SET state = 'running', session_id = excluded.session_id, "
            "began_at = excluded.began_at",
            (run_id, path, attempt, session_id, time.time()),
        )

    def note_execution(self, run_id: str, path: str, attempt: int, execution_id: str) -> None:
        """Record which execution an attempt is, with the next commit."""
        self._journal.write(
            "UPDATE steps SET execution_id = ? WHERE run_id = ? AND path = ? AND attempt = ?",
            (execution_id, run_id, path, attempt),
        )

    def finish(
        self,
        run_id: str,
        path: str,
        attempt: int,
        state: StepState,
        *,
        value: str | None = None,
        error: str = "",
        notes: str = "",
    ) -> None:
        """Record what became of an attempt."""
        self._journal.write(
            "UPDATE steps SET state = ?, value = ?, error = ?, notes = ?, ended_at = ? "
            "WHERE run_id = ? AND path = ? AND attempt = ?",
            (state, value, error, notes, time.time(), run_id, path, attempt),
        )
        self._journal.commit()

    def put(self, run_id: str, step: StepRecord) -> None:
        """Record a whole step at once, for one that only decides what comes next."""
        self._journal.write(
            "INSERT INTO steps (run_id, path, attempt, state, session_id, value, error, began_at, ended_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id, path, attempt) DO UPDATE SET "
            "state = excluded.state, session_id = excluded.session_id, value = excluded.value, "
            "error = excluded.error, ended_at = excluded.ended_at",
            (
                run_id,
                step.path,
                step.attempt,
                step.state,
                step.session_id,
                step.value,
                step.error,
                step.began_at,
                step.ended_at,
            ),
        )

    def ask(self, run_id: str, path: str, attempt: int, question: str, expires_at: float | None) -> None:
        """Record that an attempt waits for a person; raises `Busy` when that is not possible."""
        self._journal.write_now(
            "INSERT INTO steps (run_id, path, attempt, state, question, expires_at, began_at) "
            "VALUES (?, ?, ?, 'waiting', ?, ?, ?) ON CONFLICT (run_id, path, attempt) DO UPDATE SET "
            "state = 'waiting', question = excluded.question, expires_at = excluded.expires_at, answer = NULL",
            (run_id, path, attempt, question, expires_at, time.time()),
        )

    def answer(self, run_id: str, path: str, attempt: int, answer: str) -> bool:
        """Record a person's answer; return False if somebody answered first, or nobody waits for it any more."""
        answered = self._journal.write_now(
            "UPDATE steps SET answer = ?, state = 'answered' "
            "WHERE run_id = ? AND path = ? AND attempt = ? AND state = 'waiting'",
            (answer, run_id, path, attempt),
        )
        return answered == 1

    def go_on(self, run_id: str, path: str, attempt: int) -> None:
        """Record that an attempt whose cell asked goes on; the answer is not kept, because it may be a password."""
        self._journal.write(
            "UPDATE steps SET state = 'running', answer = NULL WHERE run_id = ? AND path = ? AND attempt = ?",
            (run_id, path, attempt),
        )
        self._journal.commit()

    def step(self, run_id: str, path: str, attempt: int) -> StepRecord | None:
        """Return one attempt of a step."""
        return next(self._steps("WHERE run_id = ? AND path = ? AND attempt = ?", (run_id, path, attempt)), None)

    def steps(self, run_id: str) -> list[StepRecord]:
        """Return all attempts of all steps of a run, in the order they began."""
        return [*self._steps("WHERE run_id = ? ORDER BY number", (run_id,))]

    def latest_steps(self, run_id: str, most: int) -> tuple[list[StepRecord], int]:
        """Return the attempts that began last and those that are not over, in order, and how many steps there are."""
        latest = "SELECT number FROM steps WHERE run_id = ? ORDER BY number DESC LIMIT ?"
        is_open = "run_id = ? AND state IN ('running', 'waiting', 'answered')"
        steps = self._steps(
            f"WHERE number IN ({latest}) OR ({is_open}) ORDER BY number", (run_id, max(most, 1), run_id)
        )
        ((count,),) = self._journal.rows("SELECT count(DISTINCT path) FROM steps WHERE run_id = ?", (run_id,))
        return [*steps], count

    def asked(self, run_id: str) -> list[StepRecord]:
        """Return the attempts of a run that asked a person, in order."""
        return [*self._steps("WHERE run_id = ? AND question IS NOT NULL ORDER BY number", (run_id,))]

    def questions(self, run_id: str) -> list[StepRecord]:
        """Return the steps of a run that wait for a person, in order."""
        return [*self._steps("WHERE run_id = ? AND state = 'waiting' ORDER BY number", (run_id,))]

    def waiting(self) -> list[tuple[RunRecord, StepRecord]]:
        """Return all steps that wait for a person, with their runs, in order."""
        rows = [*self._journal.rows("SELECT run_id, path, attempt FROM steps WHERE state = 'waiting' ORDER BY number")]
        pairs = [(self.find(run_id), self.step(run_id, path, attempt)) for run_id, path, attempt in rows]
        return [(run, step) for run, step in pairs if run is not None and step is not None and run.state not in ENDED]

    def _steps(self, condition: str, values: tuple[object, ...]) -> Iterator[StepRecord]:
        for row in [*self._journal.rows(f"{_STEP} {condition}", values)]:
            yield StepRecord._make(row)
