"""One execution from its turn to its result: the table of contents of the project.

It belongs to the server, not to the request that asked for it: whoever waits may go away and come back. Read `run` from
top to bottom; each line is a room of the house.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from belljar import logs, measures
from belljar.errors import BelljarError, Busy, CodeRejected, KernelDied
from belljar.files.changes import Snapshot, changes, snapshot
from belljar.kernels.base import Keepable, Kernel
from belljar.models import ExecutionResult, FileReference, OutputEvent, State, Status, ToolCall, Usage
from belljar.outputs.displays import DisplayStore
from belljar.outputs.events import Event, Finished, InputRequest
from belljar.outputs.recording import Recorder
from belljar.outputs.summary import Summary
from belljar.sandboxes.base import Incident
from belljar.sessions.causes import KILLED, RESUMED, killed, lethal, rewound, survived
from belljar.sessions.questions import Questions, input_question, text_of, text_reply
from belljar.sessions.stopping import Stopper
from belljar.sessions.vetting import vet
from belljar.spans import ExecutionSpan
from belljar.toolbox.base import CallRecord, Question, Reply
from belljar.toolbox.ledger import most_telling

if TYPE_CHECKING:
    from belljar.sessions.session import Session

SMALL_FOLDER = 100
MOST_CALLS_TOLD = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cell:
    """What a caller wants run, and how."""

    code: str
    timeout_s: float
    allow_input: bool = False
    filename: str = ""
    author: str = ""
    """Who wants it run, where that is not the session's owner."""


@dataclass(slots=True)
class Outcome:
    """How the cell ended."""

    status: Status = "running"
    state: State = "kept"
    lost: tuple[str, ...] = ()
    cause: str | None = None
    count: int = 0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0


class Execution:
    """A cell on its way through a session."""

    def __init__(self, execution_id: str, session: "Session", cell: Cell, number: int) -> None:
        settings = session.settings
        self.id = execution_id
        self.number = number
        """Which of its session's executions it is, from 1 on."""
        self.session = session
        self.cell = cell
        store = DisplayStore(session.folders.displays, execution_id)
        self._recorder = Recorder(store, cap_bytes=settings.output_cap_bytes, text_chars=settings.output_budget_chars)
        self._summary = Summary(budget_chars=settings.output_budget_chars, uri=output_uri(execution_id))
        self._screens = session.screens()
        self._stopper: Stopper | None = None
        self._outcome = Outcome()
        self._files: list[FileReference] = []
        self._submitted_at = time.monotonic()
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._is_cancelled = False
        self._is_resumed = self._is_abandoned = False
        self._left_s = cell.timeout_s
        self._result: ExecutionResult | None = None
        self._changed = asyncio.Event()
        self._questions = Questions(self._notify)
        self._progress = (0, "")
        self._calls: list[CallRecord] = []
        self.span = ExecutionSpan(session.id, execution_id, number)

    # What callers see

    @property
    def is_finished(self) -> bool:
        """Whether the result is final."""
        return self._ended_at is not None

    @property
    def has_started(self) -> bool:
        """Whether its turn has come."""
        return self._started_at is not None

    @property
    def sequence(self) -> int:
        """The number of its latest event."""
        return self._recorder.sequence

    @property
    def question(self) -> Question | None:
        """What a person is to be asked now."""
        return self._questions.current

    @property
    def questions(self) -> int:
        """The number of the latest question."""
        return self._questions.number

    async def wait(self, wait_s: float) -> None:
        """Until it has finished, asks a question, or `wait_s` have passed."""
        deadline = time.monotonic() + wait_s
        while not self.is_finished and self.question is None:
            left = deadline - time.monotonic()
            if left <= 0 or not await self.wait_for_change(left):
                return

    async def wait_for_change(self, wait_s: float) -> bool:
        """Until it says, asks or becomes something new; False when `wait_s` passed without."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def settle(self, wait_s: float) -> None:
        """Until it has finished or asks, but no longer than `wait_s`: between two looks at what it says."""
        await self.wait(wait_s)

    def result(self) -> ExecutionResult:
        """The result, or as much of it as there is."""
        if self._result is not None:
            return self._result.model_copy()
        segments = self._summary.segments()
        outcome = self._outcome
        now = self._ended_at or time.monotonic()
        started = self._started_at or now
        return ExecutionResult(
            success=outcome.status in ("ok", "running"),
            status=outcome.status,
            execution_id=self.id,
            session_id=self.session.id,
            execution_count=outcome.count,
            output=[text for _, text in segments],
            stdout=self._summary.stream("stdout"),
            stderr=self._summary.stream("stderr"),
            result=self._summary.result,
            displays=self._summary.displays,
            error=(None if outcome.status in ("ok", "error") else outcome.cause) or self._summary.error,
            traceback=self._summary.traceback,
            files=self._files,
            truncated=self._summary.truncation,
            usage=Usage(
                wall_s=round(now - started, 6),
                cpu_s=round(outcome.cpu_s, 6),
                queue_s=round(started - self._submitted_at, 6),
                peak_memory_mb=round(outcome.peak_memory_mb, 1),
            ),
            state=outcome.state,
            lost=list(outcome.lost),
            cause=outcome.cause,
            sequence=self._recorder.sequence,
            calls=self._told_calls(),
        )

    def _told_calls(self) -> list[ToolCall]:
        """Of a cell that did not end well: who reads on needs to know what it has done already."""
        if self._outcome.status in ("ok", "running"):
            return []
        return [
            ToolCall(
                server=call.server, tool=call.tool, state=call.state, duration_s=call.duration_s, reason=call.reason
            )
            for call in most_telling(self._calls, MOST_CALLS_TOLD)
        ]

    def latest_text(self) -> str:
        """The last words, for a progress line: of the cell, or of a call that it waits for."""
        sequence, progress = self._progress
        if progress and sequence == self.sequence:
            return progress
        segments = self._summary.segments()
        return segments[-1][1] if segments else ""

    # What callers may do to it

    def interrupt(self) -> None:
        """Stop it: at once if it waits for its turn, by SIGINT and then SIGKILL if it runs."""
        self._is_cancelled = True
        if self._started_at is None and not self.is_finished:
            self._outcome = Outcome(status="interrupted", cause="interrupted before its turn came; it never ran")
            self._finish()
        elif self._stopper is not None:
            self._stopper.stop("interrupted")
        self.answer(None)

    def answer(self, text: str | None, number: int | None = None) -> None:
        """Answer what `input()` asks; None declines, whatever is asked."""
        self.reply(text_reply(text), number)

    def reply(self, reply: Reply, number: int | None = None) -> None:
        """Answer the pending question. An answer to an earlier `number` is none to this one."""
        self._questions.answer(reply, number)

    def stop_for_disk(self, *, at_once: bool) -> None:
        """The session folder is over its limit and grows."""
        if self._stopper is None:
            return
        if at_once:
            self._stopper.kill("disk_full")
        else:
            self._stopper.stop("disk_full")
        self.answer(None)

    # Beyond the end of the server

    def resume(self, events: Iterable[OutputEvent], left_s: float) -> None:
        """Its kernel was given it by an earlier server, to which it has said this. Called before `run`."""
        self._is_resumed, self._left_s = True, left_s
        for event in events:
            self._recorder.go_on(event)
            self._summary.add(event)

    def abandon(self) -> None:
        """The server stops, the cell goes on: its result is for the next server to keep."""
        self._is_abandoned = True

    @contextmanager
    def asking(self) -> Generator[bool]:
        """For whoever wants to put the question to a person: False while another does."""
        with self._questions.asking() as is_ours:
            yield is_ours

    # What its calls may do

    async def ask(self, question: Question) -> Reply | None:
        """Ask the person, while the clock stands still; None when nobody can be asked."""
        if not self.cell.allow_input or not self._is_wanted():
            return None
        with self._stopper.paused() if self._stopper is not None else nullcontext():
            # Told like what `input()` asks: whoever follows the output sees it.
            said = InputRequest(self.session.veil.hide_text(question.message))
            if (output := self._recorder.record(said)) is not None:
                self._keep(output)
            limit_s = self.session.settings.execution_timeout_s
            reply = await self._questions.ask(question, limit_s=limit_s, is_wanted=self._is_wanted)
        return reply or Reply("cancel")

    def _is_wanted(self) -> bool:
        is_stopped = self._stopper is not None and self._stopper.reason is not None
        return not (is_stopped or self._is_cancelled or self.is_finished)

    def note_progress(self, text: str) -> None:
        """A call says how far it is."""
        self._progress = (self.sequence, text)
        self._notify()

    # The way through

    async def run(self) -> None:
        """Take the turn, run the cell, tell what changed, keep the result. Never raises what the cell caused."""
        logs.bind(session_id=self.session.id, execution_id=self.id, principal=self.session.principal)
        try:
            async with self.session.turn, self.session.admission.slot(self.session.principal):
                if self.is_finished:
                    return
                self._started_at = time.monotonic()
                self.span.begin()
                await self._run_in_turn()
        except BelljarError as error:
            if isinstance(error, Busy):
                measures.refusals.add("admission")
            self._outcome = Outcome(status="rejected", cause=f"{error.code}: {error}")
        except asyncio.CancelledError:
            self._outcome = Outcome(status="interrupted", state="lost", cause="the server stopped while it ran")
            raise
        except Exception as error:
            # The last boundary: a fault of ours must not leave an execution that runs for ever.
            log.exception("execution %s failed inside belljar", self.id)
            # The cell may still run in there, and the next one would be answered with its words.
            burial = await self.session.life.bury("belljar itself failed while a cell ran")
            cause = f"internal-error: {type(error).__name__}"
            self._outcome = Outcome(status="rejected", state=burial.state, lost=burial.lost, cause=cause)
        finally:
            self._finish()

    async def _run_in_turn(self) -> None:
        if self._is_resumed:
            await self._go_on()
            return
        await self._vet()
        kernel = await self.session.life.ready()
        if self._is_cancelled:
            self._outcome = Outcome(status="interrupted", cause="interrupted while its kernel started; it never ran")
            return
        if (loss := self.session.life.take_loss()) is not None:
            self._outcome.state, self._outcome.lost = loss.state, loss.names
            self._keep(self._recorder.notice(loss.notice))
        self._tell_authors()
        await self.session.life.keep()
        self.session.begin(self)
        if self.session.sharing is not None:
            self._tell(await self.session.sharing.bring_in(self.session.quota.room_bytes))
        before = await self._look()
        if self.cell.filename:
            # In its turn: written earlier, it would count as the doing of the cell that runs then.
            await self.session.write_file(self.cell.filename, self.cell.code.encode())
        if self.session.tools is not None:
            await self.session.tools.ready_for(self.cell.code)
        self._stopper = Stopper(
            kernel,
            timeout_s=self._left_s,
            grace_s=self.session.settings.interrupt_grace_s,
            on_stop=self.session.cancel_calls,
        )
        with self._stopper.watching(), self._calling():
            if self._is_cancelled:  # while the folder was looked at
                self._stopper.stop("interrupted")
            self.session.journal.start(self.id)
            self.session.life.begin(self.id, self.cell.timeout_s)
            events = kernel.execute(self.cell.code, allow_input=self.cell.allow_input)
            await self._consume(kernel, events, self._stopper)
        await self._tell_changes(kernel, before)

    async def _go_on(self) -> None:
        """Follow a cell that was begun under an earlier server, to its end."""
        kernel = self.session.life.kernel
        if not isinstance(kernel, Keepable):
            raise KernelDied("the kernel's process ended")
        self._keep(self._recorder.notice(f"{RESUMED}; what it said last before that may be missing"))
        before = await self._look()
        self._stopper = Stopper(kernel, timeout_s=self._left_s, grace_s=self.session.settings.interrupt_grace_s)
        with self._stopper.watching():
            if self._is_cancelled:
                self._stopper.stop("interrupted")
            await self._consume(kernel, kernel.resume(), self._stopper)
        if self._outcome.status == "running":
            self._outcome = Outcome(status="rejected", cause=f"{KILLED} before it reached the kernel; it never ran")
        self._outcome.cause = self._outcome.cause or RESUMED
        if self.session.life.kernel is kernel:
            await self._tell_changes(kernel, before)

    async def _tell_changes(self, kernel: Kernel, before: Snapshot) -> None:
        after = await self._look()
        if self.session.sharing is not None:
            self._tell(await self.session.sharing.take_out(after))
        await self._tell_limits(kernel, after)
        self._files = [
            FileReference(
                uri=self.session.uri_of(change.name),
                name=change.name,
                mime_type=change.mime_type,
                size=change.size,
                change=change.change,
            )
            for change in changes(before, after)
        ]

    def _tell_authors(self) -> None:
        """A cell of somebody else says whose it is; the owner's next one, that there were such."""
        author = self.cell.author
        authors = self.session.take_authors(author)
        if author:
            self._keep(self._recorder.notice(f"run by {author}, who shares this session", author=author))
        elif authors:
            names = " and ".join(dict.fromkeys(authors))
            cells = "a cell" if len(authors) == 1 else f"{len(authors)} cells"
            self._keep(self._recorder.notice(f"{names} ran {cells} in this session since your last one"))

    async def _vet(self) -> None:
        """Code that the policy does not allow goes no further; what it only warns of is said."""
        session = self.session
        try:
            warnings = await vet(
                session.guard,
                self.cell.code,
                environment=session.environment,
                execution_id=self.id,
                ask=self.ask,
            )
        except CodeRejected:
            if self._is_cancelled:  # while the person was asked
                return
            raise
        for warning in warnings:
            self._keep(self._recorder.notice(warning))

    @contextmanager
    def _calling(self) -> Generator[None]:
        """Calls of tools that begin now are this execution's."""
        if self.session.tools is None:
            yield
            return
        with self.session.tools.serving(self) as ledger:
            try:
                yield
            finally:
                self._calls = ledger.records()

    def _tell(self, words: list[str]) -> None:
        for word in words:
            self._keep(self._recorder.notice(word))

    async def _tell_limits(self, kernel: Kernel, after: Snapshot) -> None:
        """Limits that a kernel met and survived: a word in the output, and the cause unless there is another."""
        quota = self.session.quota
        incidents = kernel.incidents()
        await quota.look_if_more_than_half(sum(fingerprint[1] for fingerprint in after.files.values()))
        if quota.is_over and self._outcome.cause is None:
            incidents.append(Incident("disk_full", f"folder {quota.detail}: delete files before writing more"))
        for incident in incidents:
            said = survived(incident)
            self._keep(self._recorder.notice(said))
            self._outcome.cause = self._outcome.cause or said

    async def _look(self) -> Snapshot:
        """The session folder now. A small one is read here in 50 µs; a thread for it would cost four times that."""
        small = snapshot(self.session.workspace, limit=SMALL_FOLDER)
        return small if small.is_complete else await asyncio.to_thread(snapshot, self.session.workspace)

    async def _consume(self, kernel: Kernel, events: AsyncIterator[Event], stopper: Stopper) -> None:
        try:
            async for event in events:
                if isinstance(event, Finished):
                    self._conclude(event, stopper)
                    continue
                # A question is put to the person as it is on record.
                for passed in await self._screens.passed(event):
                    self._record(passed)
                    if isinstance(passed, InputRequest):
                        await self._ask(kernel, passed, stopper)
        except KernelDied as death:
            self._give_out()
            await self._bury(kernel, death, stopper)
        finally:
            self._give_out()

    def _record(self, event: Event) -> None:
        if (output := self._recorder.record(event)) is not None:
            self._keep(output)

    def _give_out(self) -> None:
        """What a screen held back of a stream that is over."""
        for event in self._screens.flush():
            self._record(event)

    async def _ask(self, kernel: Kernel, question: InputRequest, stopper: Stopper) -> None:
        if stopper.reason is not None:
            # Its interrupt came before the question and waits in the runner for an answer that nobody should give.
            await kernel.interrupt()
            return
        with stopper.paused():
            reply = await self._questions.ask(
                input_question(question),
                limit_s=self.session.settings.execution_timeout_s,
                is_wanted=kernel.is_alive,
            )
        # A kernel that died meanwhile takes no answer: the next look at its events tells how it ended.
        if stopper.reason is None and kernel.is_alive():
            await kernel.reply_input(text_of(reply))

    def _conclude(self, finished: Finished, stopper: Stopper) -> None:
        outcome = self._outcome
        outcome.status = _status(stopper) or ("ok" if finished.is_ok else "error")
        outcome.count = finished.execution_count
        outcome.cpu_s = finished.cpu_s
        outcome.peak_memory_mb = finished.peak_memory_mb
        if stopper.reason == "timeout":
            outcome.cause = f"timeout: interrupted after {self.cell.timeout_s:g} s; variables are kept"
        elif stopper.reason == "interrupted":
            outcome.cause = "interrupted on request; variables are kept"
        elif stopper.reason == "disk_full":
            full = Incident("disk_full", f"folder {self.session.quota.detail}, so the cell was interrupted")
            outcome.cause = survived(full)
        self.session.life.remember(finished)

    async def _bury(self, kernel: Kernel, death: KernelDied, stopper: Stopper) -> None:
        """The process is gone: say why, and what went with it."""
        incidents = kernel.incidents()
        fatal = None if stopper.was_killed else lethal(incidents, death.message)
        for incident in incidents:
            if incident is not fatal:
                self._keep(self._recorder.notice(f"{incident.kind}: the session {incident.detail}"))
        cause = self.session.life.ended_by or (killed(fatal) if fatal else "")
        outcome = self._outcome
        burial = await self.session.life.bury(cause or death.message)
        outcome.status, outcome.state, outcome.lost = _status(stopper) or "died", burial.state, burial.lost
        if burial.is_rewound:
            undone = self.session.take_back(burial.since or self.id)
            if self.session.sharing is not None:
                self.session.sharing.forget()
            self._keep(self._recorder.notice(rewound(len(undone))))
        if cause:
            outcome.status, outcome.cause = "out_of_memory" if fatal else "died", cause
            return
        if stopper.was_killed and stopper.reason == "disk_full":
            full = Incident("disk_full", f"folder {self.session.quota.detail}, and the cell went on")
            outcome.cause = killed(full)
            return
        if stopper.was_killed and stopper.reason == "timeout":
            outcome.cause = f"timeout: killed after {self.cell.timeout_s:g} s, because it ignored the interrupt"
        elif stopper.was_killed:
            outcome.cause = "killed on request, because it ignored the interrupt"
        else:
            outcome.cause = f"{KernelDied.code}: {death.message}"

    def _keep(self, output: OutputEvent) -> None:
        self.session.journal.append(self.id, output)
        if self.session.settings.keep_alive and output.kind not in ("result", "error"):
            # What a killed server has read and not committed is missing in the middle of a cell that goes on. Those two
            # are followed by the end, which is committed.
            self.session.journal.commit()
        self._summary.add(output)
        self._notify()

    def _finish(self) -> None:
        if self.is_finished:
            return
        self._ended_at = time.monotonic()
        self._stopper = None
        self.session.life.last_cause = self._outcome.cause or self.session.life.last_cause
        self._result = self.result()
        if self._is_abandoned:
            self._notify()
            return
        kept = self._recorder
        self.session.note()
        self.session.journal.finish(self._result, output_bytes=kept.text_bytes, display_bytes=kept.display_bytes)
        self._measure(self._result)
        self._notify()

    def _measure(self, result: ExecutionResult) -> None:
        usage = result.usage
        measures.executions.add(result.status)
        measures.execution_queue.observe(usage.queue_s)
        measures.execution_wall.observe(usage.wall_s)
        self.span.end(
            result.status,
            is_failure=not result.success,
            queue_s=usage.queue_s,
            wall_s=usage.wall_s,
            cpu_s=usage.cpu_s,
            peak_memory_mb=usage.peak_memory_mb,
            events=result.sequence,
            displays=len(result.displays),
            files=len(result.files),
            lost=len(result.lost),
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _status(stopper: Stopper) -> Status | None:
    """The status of a cell that was stopped."""
    return "interrupted" if stopper.reason == "disk_full" else stopper.reason


def output_uri(execution_id: str) -> str:
    """Where the whole output of an execution is."""
    return f"execution://{execution_id}/output"
