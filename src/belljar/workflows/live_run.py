"""A run that this server drives: what is known of its steps, who follows it, and what it waits for.

`interpreter.py` walks the steps; this module keeps the records and the questions of the walk.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from belljar.change_signal import ChangeSignal
from belljar.errors import Busy
from belljar.journal.run_records import RunRecord, RunRecords, RunState, StepRecord
from belljar.workflows.definition import MAX_RUN_BYTES, MAX_RUN_STEPS, Definition
from belljar.workflows.outcomes import StepOutcome, error_of, outcome_text
from belljar.workflows.questions import RunQuestion

POLL_S = 1.0
"""How often a run looks whether another process has answered it or wants it stopped."""
MAX_EVENTS = 2_000
MAX_BUSY_S = 300.0
Work = TypeVar("Work")
EventKind = Literal["begin", "output", "end", "ask", "note"]


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened in a run, for those who follow it."""

    number: int
    kind: EventKind
    path: str
    text: str = ""
    stream: str = ""


class StopRun(Exception):
    """The run ends here: a step failed, a person declined or stopped it."""

    def __init__(self, state: RunState, reason: str) -> None:
        super().__init__(reason)
        self.state: RunState = state
        self.reason = reason


class NobodyAnswered(Exception):
    """Everything in the run waits for a person, and has done so long enough: nobody drives it any more."""


class LiveRun:
    """One run, driven here."""

    def __init__(self, record: RunRecord, definition: Definition, records: RunRecords, *, hold_s: float) -> None:
        self.id = record.id
        self.record = record
        self.definition = definition
        self.records = records
        self.state: RunState = "running"
        self.log: dict[str, list[StepRecord]] = {}
        """The attempts of each step so far, by path, in order."""
        self._log_bytes = 0
        for step in records.steps(record.id):
            self.log.setdefault(step.path, []).append(step)
            self._log_bytes += len(step.value or "")
        self.events: deque[RunEvent] = deque(maxlen=MAX_EVENTS)
        self.number = 0
        self.has_output_readers = False
        self.task: asyncio.Task[None] | None = None
        self._hold_s = hold_s
        self._changed = ChangeSignal()
        self._woken = ChangeSignal()
        self.on_question: Callable[[StepRecord, bool], None] = lambda _step, _is_waiting: None
        """Called with a step that asks a person, and whether it waits; again when it waits no more."""
        self._active = 0
        self._waiting = 0
        self._waiting_cells = 0
        self._idle_since = time.monotonic()
        self.is_released = False
        """Whether nobody drives it any more, so that its state on record stays as it is."""

    # For followers

    def tell(self, kind: EventKind, path: str, text: str = "", stream: str = "") -> None:
        """Note an event and wake those who follow."""
        self.number += 1
        self.events.append(RunEvent(self.number, kind, path, text, stream))
        self.notify()

    def notify(self) -> None:
        """Wake those who follow."""
        self._changed.notify()

    def wait_for_change(self, wait_s: float) -> Coroutine[None, None, bool]:
        """Wait until something happens; return False when `wait_s` passed without it. See `ChangeSignal`."""
        return self._changed.wait(wait_s)

    @property
    def is_over(self) -> bool:
        """Return whether the task that drives it here has ended."""
        return self.task is not None and self.task.done()

    @property
    def has_waiting_cell(self) -> bool:
        """Return whether the process of a cell waits for an answer, which ends with whoever drives the run."""
        return self._waiting_cells > 0

    # For whoever answers or stops it

    def wake(self) -> None:
        """Have the run look at its record now."""
        self._woken.notify()

    async def pause(self, wait_s: float) -> None:
        """Wait until the run is woken, or `wait_s` have passed."""
        await self._woken.wait(wait_s)

    def check_wanted(self) -> None:
        """End the run if somebody wants it stopped."""
        if self.records.wanted(self.id) == "stop":
            raise StopRun("stopped", "somebody stopped it")

    # What it is busy with

    # A step that asks is not counted as under way while it waits for the answer: see `resting`.

    @contextmanager
    def resting(self) -> Generator[None]:
        """Do not count a step as under way, because it waits for a person."""
        self._active -= 1
        try:
            yield
        finally:
            self._active += 1
            self._set_state()

    @contextmanager
    def working(self) -> Generator[None]:
        """Count a step as under way."""
        self._active += 1
        self._set_state()
        try:
            yield
        finally:
            self._active -= 1
            self._set_state()

    @contextmanager
    def asking(self, path: str, attempt: int, *, is_from_cell: bool = False) -> Generator[None]:
        """Count the question of a step as open.

        With `is_from_cell`, a cell waits for the answer, so the run cannot be let go.
        """
        self._waiting += 1
        self._waiting_cells += is_from_cell
        self._set_state()
        try:
            yield
        finally:
            self._waiting -= 1
            self._waiting_cells -= is_from_cell
            self._set_state()
            if not self.is_released and (row := self.records.step(self.id, path, attempt)) is not None:
                self.on_question(row, False)

    def _set_state(self) -> None:
        if self.is_released:
            return
        state: RunState = "waiting" if self._waiting and not self._active else "running"
        if state != self.state:
            self.state, self._idle_since = state, time.monotonic()
            self.records.set_state(self.id, state)
            self.notify()

    async def answer_of(self, path: str, attempt: int) -> dict[str, Any] | None:
        """Wait for the answer to the question of a step; None when it has expired. Raises `NobodyAnswered`."""
        while True:
            row = self.records.step(self.id, path, attempt)
            if row is None or row.state not in ("waiting", "answered"):
                raise StopRun("failed", f"the record of step {path} was changed by another process")
            if row.state == "answered":
                return json.loads(row.answer or "{}")
            now = time.time()
            if row.expires_at is not None and now >= row.expires_at:
                return None
            self.check_wanted()
            if (
                self.state == "waiting"
                and not self._waiting_cells
                and time.monotonic() - self._idle_since >= self._hold_s
            ):
                self.is_released = True
            if self.is_released:
                raise NobodyAnswered
            left_s = row.expires_at - now if row.expires_at is not None else POLL_S
            await self.pause(min(POLL_S, max(0.01, left_s)))

    # Steps on record

    def last(self, path: str) -> StepRecord | None:
        """Return the latest attempt of a step; None if there was none."""
        found = self.log.get(path)
        return found[-1] if found else None

    def check_size(self, path: str) -> None:
        """End the run if it has done so much, or kept so much, that another step is too much."""
        if len(self.log) >= MAX_RUN_STEPS:
            raise StopRun("failed", f"step {path}: a run has at most {MAX_RUN_STEPS:,} steps, all rounds counted")
        if self._log_bytes > MAX_RUN_BYTES:
            raise StopRun("failed", f"step {path}: the steps before it gave more than {MAX_RUN_BYTES:,} bytes")

    def failures(self, path: str) -> int:
        """Return how many attempts of a step failed."""
        return sum(step.state == "failed" for step in self.log.get(path, ()))

    def note(self, path: str, attempt: int) -> None:
        """Read an attempt from the record again, because it has changed."""
        if (row := self.records.step(self.id, path, attempt)) is not None:
            kept = [step for step in self.log.get(path, []) if step.attempt != attempt]
            self.log[path] = [*kept, row]
            self._log_bytes += len(row.value or "")

    async def ask(self, path: str, attempt: int, question: RunQuestion, expires_at: float | None = None) -> None:
        """Put a question on record and tell those who follow."""

        async def ask() -> None:
            self.records.ask(self.id, path, attempt, question.as_json(), expires_at)

        await self.patiently(ask)
        self.tell("ask", path, question.message)
        if (row := self.records.step(self.id, path, attempt)) is not None:
            self.on_question(row, True)

    async def patiently(self, work: Callable[[], Awaitable[Work]]) -> Work:
        """Do work again while it is refused because the server is too busy or its journal cannot be written."""
        ends_at = time.monotonic() + MAX_BUSY_S
        while True:
            try:
                return await work()
            except Busy:
                if time.monotonic() > ends_at:
                    raise
            await self.pause(POLL_S)
            self.check_wanted()

    def enter(self, path: str, attempt: int, session_id: str) -> None:
        """Put an attempt on record of which nothing has happened."""
        row = StepRecord(path, attempt, "running", session_id=session_id, began_at=time.time())
        self.records.put(self.id, row)

    def finish(
        self, path: str, attempt: int, outcome: StepOutcome, *, notes: str = "", session_id: str = ""
    ) -> StepOutcome:
        """Put the outcome of an attempt on record, tell those who follow, and return it."""
        if self.records.step(self.id, path, attempt) is None:
            self.enter(path, attempt, session_id)  # it ended before anything of it happened
        value = json.dumps({**outcome.value, "failure": outcome.failure})
        if self.record.tries:
            self.records.settle_run(self.id)
        self.records.finish(self.id, path, attempt, outcome.state, value=value, error=error_of(outcome), notes=notes)
        self.note(path, attempt)
        self.tell("end", path, outcome_text(outcome))
        if notes:
            self.tell("note", path, notes)
        return outcome

    def decide(
        self,
        path: str,
        state: Literal["running", "done", "failed"],
        value: Any,
        *,
        session_id: str = "",
        error: str = "",
    ) -> None:
        """Record what a step with inner steps decided or returned."""
        last, now = self.last(path), time.time()
        row = StepRecord(
            path,
            1,
            state,
            session_id=session_id,
            value=json.dumps(value),
            error=error,
            began_at=last.began_at if last is not None else now,
            ended_at=None if state == "running" else now,
        )
        self.records.put(self.id, row)
        self.log[path] = [row]
        self._log_bytes += len(row.value or "")
