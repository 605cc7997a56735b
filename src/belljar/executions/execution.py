"""One execution from its turn to its result: policy check, kernel, output, questions, changed files.

To learn how belljar works, start here and read `run`, then `_run_in_turn`. An execution belongs to the server, not to
the request that submitted it, so a client may disconnect and ask for the result later. Knows its session only as
`context.py` describes it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from belljar import logs, metrics
from belljar.change_signal import ChangeSignal
from belljar.errors import BelljarError, Busy, CodeRejected, KernelDied, out_of_descriptors
from belljar.executions.cell import Cell
from belljar.executions.context import ExecutionContext
from belljar.executions.outcome import (
    ON_REQUEST,
    RESUMED,
    SERVER_STOPPED,
    GpuUse,
    Outcome,
    Stopper,
    Times,
    cause_of_death,
    fatal_incident,
    killed_text,
    make_result,
    measure,
    never_ran,
    rewound_text,
    stopped_status,
    survived_text,
    with_gpu_memory,
)
from belljar.executions.policy_check import SyntaxFault, check_policy
from belljar.executions.questions import ExecutionQuestions, input_question, question_text, text_of
from belljar.executions.transcript import FileChanges, Transcript, keep_figures, keep_uris
from belljar.facts import CellFacts
from belljar.files.disk_usage import FolderUsage
from belljar.journal.journal import KILLED
from belljar.kernels.base import Kernel, is_remote
from belljar.kernels.ipython import IPythonKernel
from belljar.models import ExecutionResult, FileReference, OutputEvent
from belljar.outputs.events import ClearOutput, CommMessage, Event, Finished, InputRequest
from belljar.privacy.signed_urls import without_signatures
from belljar.provisioning.handover import ResumableKernel
from belljar.questions.models import Question, QuestionReply
from belljar.sandboxes.base import Incident
from belljar.toolbox.base import CallLog, CallRecord
from belljar.toolbox.broker import Broker
from belljar.tracing import ExecutionSpan

_MAX_CHANGED_CHARS = 2_000

log = logging.getLogger(__name__)


class Execution:
    """One run of a cell in a session."""

    def __init__(self, execution_id: str, session: ExecutionContext, cell: Cell, number: int) -> None:
        self.id = execution_id
        self.number = number
        """Its number among its session's executions, from 1 on."""
        self.session_id = session.id
        self.cell = cell
        self._session = session
        self.span = ExecutionSpan(session.id, execution_id, number)
        self._times = Times()
        self._left_s = cell.timeout_s
        self._changed = ChangeSignal()
        self.changed_at = time.time()
        """Wall-clock time of its last change."""
        self._transcript = Transcript(
            execution_id,
            settings=session.settings,
            outlives_server=session.handover.is_on,
            journal=session.journal,
            displays=session.displays,
            screens=session.screens(),
            on_change=self._notify,
        )
        self._made_questions: ExecutionQuestions | None = None
        """None until first used: most cells ask nothing."""
        self._progress = (0, "")
        self._waits_for = ""
        self._file_changes = FileChanges(session.id, session.workspace, session.quota, session.sharing)
        self._stopper: Stopper | None = None
        self._gpu_use: GpuUse | None = None
        """None in a session without a GPU."""
        self._is_cancelled = self._is_abandoned = self._is_starting_kernel = False
        self._resumed: ResumableKernel | None = None
        """The kernel that an earlier server gave the cell to; None for a cell of this server."""
        self._why_interrupted = ON_REQUEST
        self._outcome = Outcome()
        self._files: list[FileReference] = []
        self._calls: list[CallRecord] = []
        self._result: ExecutionResult | None = None

    # State, for callers

    @property
    def is_finished(self) -> bool:
        """Return whether the result is final."""
        return self._times.ended_at is not None

    @property
    def has_started(self) -> bool:
        """Return whether its turn has come."""
        return self._times.started_at is not None

    @property
    def sequence(self) -> int:
        """Return the number of its latest event."""
        return self._transcript.sequence

    @property
    def stop_s(self) -> float:
        """Return how long an interrupt may take, including the kill of a cell that ignores it."""
        return self._session.settings.interrupt_grace_s + 5

    @property
    def _questions(self) -> ExecutionQuestions:
        if self._made_questions is None:
            session = self._session
            # Questions of a workflow's cell are put by its run, which waits in the inbox itself.
            inbox = None if self.cell.wants_value else session.inbox
            self._made_questions = ExecutionQuestions(
                self._notify, inbox, execution_id=self.id, session_id=session.id, owner=session.principal
            )
        return self._made_questions

    @property
    def question(self) -> Question | None:
        """Return the question that the client should put to a person now; never one for the console."""
        current = self.question_for_anyone
        return None if current is not None and current.in_console else current

    @property
    def question_for_anyone(self) -> Question | None:
        """Return the question that waits, also if it is for the console: for the run that drives this cell."""
        return self._made_questions.current if self._made_questions is not None else None

    @property
    def question_number(self) -> int:
        """Return the number of the latest question."""
        return self._questions.number

    async def wait(self, wait_s: float) -> None:
        """Wait until it has finished, asks a question, or `wait_s` have passed."""
        deadline = time.monotonic() + wait_s
        while not self.is_finished and self.question is None:
            left = deadline - time.monotonic()
            if left <= 0 or not await self.wait_for_change(left):
                return

    def wait_for_change(self, wait_s: float) -> Coroutine[None, None, bool]:
        """Wait for new output, a new question or a new state; return False when `wait_s` passed without one.

        Counts from this call on, see `ChangeSignal`. When it has finished, nothing is waited for: nothing will change.
        """
        return self._changed.wait(0.0 if self.is_finished else wait_s)

    def result(self) -> ExecutionResult:
        """Return the result, or as much of it as is known yet."""
        if self._result is not None:
            return self._result.model_copy()
        result = make_result(
            self.id,
            self.session_id,
            outcome=self._outcome,
            transcript=self._transcript,
            times=self._times,
            files=self._files,
            calls=self._calls,
            waits_for=self._what_it_waits_for() or None,
        )
        result.asks_person = self.asks_person
        return result

    def _what_it_waits_for(self) -> str:
        if self._waits_for or self.has_started or self.is_finished:
            return self._waits_for
        return self._session.waits_for(self.id)

    @property
    def asks_person(self) -> str | None:
        """Return, in words for the agent, what a person is asked now and where it can be answered."""
        if self._made_questions is None or self.is_finished:
            return None
        asked, inbox = self._made_questions.current, self._made_questions.inbox
        if asked is None or inbox is None:
            return None
        return question_text(f"{self.id}-{self.question_number}", asked, where=inbox.place())

    def notices(self) -> str:
        """Return belljar's notices so far; they are in neither stdout nor stderr of the result."""
        return self._transcript.summary.stream("notice")

    def latest_text(self) -> str:
        """Return the latest text for a progress line: the cell's output, or the progress of its tool call."""
        sequence, progress = self._progress
        return progress if progress and sequence == self.sequence else self._transcript.latest_text()

    # Control, for callers

    def interrupt(self, why: str = ON_REQUEST) -> None:
        """Stop it: at once if it waits for its turn, else by SIGINT and then SIGKILL; `why` says on whose behalf."""
        self._is_cancelled, self._why_interrupted = True, why
        if not self.has_started and not self.is_finished:
            self._outcome = never_ran(why, "its turn came")
            self._finish()
        elif self._is_starting_kernel:
            # It ends now, and the kernel starts on: making its environment may take minutes.
            self._waits_for, self._outcome = "", never_ran(why, "its code began")
            self._finish()
        elif self._stopper is not None:
            self._stopper.stop("interrupted", why)
        self._questions.withdraw()

    def stop_for_disk(self, *, at_once: bool) -> None:
        """Stop the cell because the session folder is over its limit and grows."""
        if self._stopper is None:
            return
        if at_once:
            self._stopper.kill("disk_full")
        else:
            self._stopper.stop("disk_full")
        self._questions.withdraw()

    def asking(self) -> AbstractContextManager[bool]:
        """Claim the right to put the question to a person; yields False while another caller has it."""
        return self._questions.asking()

    def reply(self, reply: QuestionReply, number: int | None = None, *, by: str = "", where: str = "client") -> None:
        """Answer the pending question for the client; an answer that names the `number` of another one is ignored.

        So is one to a question that a rule keeps for the console, whose number a client could guess.
        `by` is the person who answers, and `where` they do, for the record.
        """
        if self.question is not None:
            self._questions.answer(reply, number, by=by, where=where)

    def reply_for_run(self, reply: QuestionReply, number: int) -> None:
        """Answer the pending question for the run that drives this cell, which has checked who may."""
        self._questions.answer(reply, number)

    # Across a change of servers

    def resume(
        self,
        kernel: ResumableKernel,
        events: Iterable[OutputEvent],
        left_s: float,
        calls: Sequence[CallRecord],
        *,
        queued_s: float = 0.0,
        ran_s: float = 0.0,
    ) -> None:
        """Continue an execution of an earlier server, after its events and tool calls so far. Call it before `run`.

        `ran_s` is how long it has run, `queued_s` how long it had waited before.
        """
        self._resumed, self._left_s = kernel, left_s
        self._times = Times(time.monotonic() - ran_s - queued_s, earlier_s=ran_s)
        self._calls = [*calls]
        self._transcript.continue_after(events)

    def abandon(self) -> None:
        """Record no result, because the server stops while the cell continues: the next server records it."""
        self._is_abandoned = True

    # For its tool calls

    async def ask(self, question: Question) -> QuestionReply | None:
        """Ask the person, while the cell's timeout is paused; return None when nobody can be asked."""
        if not self.cell.allow_input or not self._is_wanted():
            return None
        inbox = self._questions.inbox
        if question.in_console and inbox is not None and not inbox.may_ask(self._session.principal, in_console=True):
            return None
        with self._stopper.paused() if self._stopper is not None else nullcontext():
            # Recorded like the prompt of `input()`, so that whoever follows the output sees it.
            redact = self._session.redactor.redact_own_text if question.is_ours else self._session.redactor.redact_text
            recorded = question.recordable(redact)
            self._transcript.record(InputRequest(recorded.message))
            # Before the cell runs (the policy check) there is no stopper, hence no timeout to pause.
            limit_s = self._stopper.pause_left_s() if self._stopper else self._session.settings.ask_timeout_s
            reply = await self._questions.ask(question, limit_s=limit_s, is_wanted=self._is_wanted, recorded=recorded)
        self._tell_who_answered(reply)
        return reply or QuestionReply("cancel")

    def _tell_who_answered(self, reply: QuestionReply | None) -> None:
        """Tell the agent of an answer that did not come through its client."""
        if reply is not None and reply.by and reply.by != self.cell.author:
            said = "answered" if reply.action == "accept" else "declined"
            changed = ", and changed what it asked about" if reply.edited else ""
            words = self._session.redactor.redact_own_text(reply.words)
            self._transcript.notice(f"{reply.by} {said} its question at the server's inbox{changed}{words}")

    def _is_wanted(self) -> bool:
        is_stopped = self._stopper is not None and self._stopper.reason is not None
        return not (is_stopped or self._is_cancelled or self.is_finished)

    def note_progress(self, text: str) -> None:
        """Note the progress text of a tool call."""
        self._progress = (self.sequence, text)
        self._notify()

    def _note_preparation(self, line: str) -> None:
        """Note what is said about the environment that the cell has to wait for."""
        self._waits_for = f"the environment of sessions, which is being made, once: {line}"
        self.note_progress(line)

    # Running

    async def run(self) -> None:
        """Take the turn, run the cell, report changed files, record the result. Never raises what the cell caused."""
        logs.bind(session_id=self.session_id, execution_id=self.id, principal=self._session.principal)
        try:
            async with self._session.turn, self._session.admission.slot(self._session.principal):
                if self.is_finished:
                    return
                self._times.started_at = time.monotonic() - self._times.earlier_s
                self.span.start()
                await (self._follow_resumed(self._resumed) if self._resumed is not None else self._run_in_turn())
        except BelljarError as error:
            if isinstance(error, Busy):
                metrics.refusals.add("admission")
            self._outcome = Outcome(status="rejected", cause=f"{error.code}: {error}")
        except asyncio.CancelledError:
            if self._stopper is None:
                self._outcome = Outcome(status="interrupted", cause="the server stopped before it ran")
            else:
                self._outcome = Outcome(status="interrupted", state="lost", cause=SERVER_STOPPED)
            raise
        except Exception as error:
            # The last boundary: a fault of belljar must not leave an execution that stays `running` for ever.
            log.exception("execution %s failed inside belljar", self.id)
            named = out_of_descriptors(error)
            cause = f"{named.code}: {named}" if named is not None else f"internal-error: {type(error).__name__}"
            if named is not None and self._stopper is None:  # nothing of the cell has run
                self._outcome = Outcome(status="rejected", cause=cause)
                return
            # Give up the kernel, because the cell may still run in it and the next cell would get its output.
            loss = await self._session.session_kernel.on_death("belljar itself failed while a cell ran")
            self._outcome = Outcome(status="rejected", state=loss.state, lost=loss.lost, cause=cause)
        finally:
            self._finish()
            if not self._is_abandoned and "after_execution" in self._session.plugins.used_hooks:
                self._session.plugins.tell_aside("after_execution", cell=self._facts, result=self.result())

    @property
    def _facts(self) -> CellFacts:
        """Return the cell as plugins see it."""
        session, cell = self._session, self.cell
        return CellFacts(session.id, session.principal, self.id, cell.code, session.environment, cell.author)

    async def _run_in_turn(self) -> None:
        fault = await self._check_policy()
        if self._is_cancelled:
            self._outcome = never_ran(self._why_interrupted, "its code began")
            return
        self._is_starting_kernel = True
        try:
            is_started = self._session.session_kernel.kernel is not None
            with nullcontext() if is_started else self._session.following_environment(self._note_preparation):
                kernel = await self._session.session_kernel.ensure_started()
        finally:
            self._waits_for, self._is_starting_kernel = "", False
        if self.is_finished:  # interrupted meanwhile
            return
        if fault is not None:
            if not isinstance(kernel, IPythonKernel) or not fault.is_of(kernel.environment.version):
                fault.deny()
                raise fault
            self._transcript.record(fault.raised)
            self._outcome.status = "error"
            return
        self._report_loss_and_author()
        await self._session.session_kernel.take_checkpoint()
        self._session.on_turn(self.id, self.number)
        self._notice_all(await self._file_changes.bring_in())
        if self._session.skills is not None:
            self._notice_all(await self._session.skills.refresh())
        await self._file_changes.scan_before()
        if self.cell.filename:
            # Written only in its turn: earlier, it would be reported as a change by the cell that runs then.
            await self._session.write_file(self.cell.filename, self.cell.code.encode())
        if self._session.tools is not None:
            self._session.tools.reconnect_for(self.cell.code)
        if "before_execution" in self._session.plugins.used_hooks:
            self._notice_all(await self._session.plugins.tell("before_execution", cell=self._facts))
        if is_remote(kernel):
            kernel.limit_cell(self.cell.timeout_s)
        cell, on_begin = self.cell, self._record_start
        await self._listen(
            kernel,
            kernel.execute(cell.code, allow_input=cell.allow_input, on_begin=on_begin, wants_value=cell.wants_value),
        )
        await self._report_changes(kernel)

    def _record_start(self) -> None:
        """Record, just before the kernel gets the cell, that it may have run, in case the server is killed."""
        self._session.record_use()
        self._session.journal.start(self.id)
        self._session.session_kernel.note_execution(self.id, self.cell.timeout_s)
        self._session.on_start(self.id)

    async def _follow_resumed(self, kernel: ResumableKernel) -> None:
        """Follow a cell that an earlier server started, to its end."""
        if self._session.session_kernel.kernel is not kernel:
            raise KernelDied("the kernel's process ended")
        self._transcript.notice(f"{RESUMED}; what it said last before that may be missing")
        await self._file_changes.scan_before()
        await self._listen(kernel, kernel.resume())
        if self._outcome.status == "running":
            self._outcome.status = "rejected"
            self._outcome.cause = f"{KILLED} before it reached the kernel; it never ran"
        self._outcome.cause = self._outcome.cause or RESUMED
        if self._session.session_kernel.kernel is kernel:
            await self._report_changes(kernel)

    async def _check_policy(self) -> SyntaxFault | None:
        """Reject code that the policy does not allow; record a notice for each of its warnings.

        Return the fault of code that is no Python, which must not run.
        """
        guard, plugins = self._session.guard, self._session.plugins
        if not guard.inspects_code and "judge_code" not in plugins.used_hooks:
            return None
        try:
            allowed = await check_policy(plugins, guard, self._facts, self.ask)
            if allowed.code != self.cell.code:
                # What runs is what was allowed, and so is what is on record.
                self.cell = replace(self.cell, code=allowed.code)
                self._session.journal.change_code(self.id, without_signatures(allowed.code))
                self._transcript.notice(f"this ran instead of the cell's code: {allowed.code[:_MAX_CHANGED_CHARS]!r}")
            self._notice_all(allowed.warnings)
        except SyntaxFault as fault:
            return fault
        except CodeRejected:
            if not self._is_cancelled:  # interrupted while the person was asked
                raise
        return None

    def _report_loss_and_author(self) -> None:
        """Record notices about what became of the last kernel's variables, and about cells of other authors."""
        if (loss := self._session.session_kernel.take_loss()) is not None:
            self._outcome.state, self._outcome.lost = loss.state, loss.names
            self._transcript.notice(loss.notice)
        author = self.cell.author
        if notice := self._session.note_author(author):
            self._transcript.notice(notice, **({"author": author} if author else {}))

    # While the kernel has the cell

    async def _listen(self, kernel: Kernel, events: AsyncIterator[Event]) -> None:
        """Record the kernel's events until the cell or the kernel ends; the cell can be stopped meanwhile."""
        tools, settings = self._session.tools, self._session.settings
        self._stopper = stopper = Stopper(
            kernel,
            timeout_s=self._left_s,
            grace_s=settings.interrupt_grace_s,
            # The limit for all its questions together; a single one may use all of it.
            pause_s=settings.ask_timeout_s,
            on_stop=tools.cancel if tools is not None else lambda: None,
        )
        has_calls = tools is not None or bool(self._calls)
        if self._session.gpus.is_on and self._session.gpus.of(self.session_id):
            self._gpu_use = GpuUse(self._session.gpus, self.session_id)
        gpu_watch = self._gpu_use.watching(kernel, self._outcome) if self._gpu_use else nullcontext()
        with stopper.watching(), self._record_calls(tools) if has_calls else nullcontext():
            if self._is_cancelled:  # interrupted while the folder was scanned
                stopper.stop("interrupted", self._why_interrupted)
            try:
                async with gpu_watch:
                    async for event in events:
                        if isinstance(event, Finished):
                            self._outcome.conclude(event, stopper, self.cell.timeout_s, self._session.quota)
                            self._session.session_kernel.remember(event)
                        else:
                            await self._record(event, kernel, stopper)
            except KernelDied as death:
                self._transcript.flush()
                await self._on_kernel_death(kernel, stopper, death)
            finally:
                self._transcript.flush()

    @contextmanager
    def _record_calls(self, tools: Broker | None) -> Generator[None]:
        """Count the tool calls that begin now as this execution's."""

        def on_change(number: int, call: CallRecord) -> None:
            self._session.session_kernel.note_call(number, call)
            self._session.journal.record_call(self.id, number, call)

        call_log = CallLog(earlier=self._calls, on_change=on_change)
        try:
            with tools.attribute_calls_to(self, call_log) if tools is not None else nullcontext():
                yield
        finally:
            self._calls = call_log.records()

    async def _record(self, event: Event, kernel: Kernel, stopper: Stopper) -> None:
        """Record what the screens (filters for output) leave of an event; ask the person what `input()` then asks."""
        if self._gpu_use is not None:
            self._gpu_use.on_event(event)
        for passed in await self._transcript.screens.apply(event):
            if isinstance(passed, CommMessage) or (isinstance(passed, ClearOutput) and passed.in_widget):
                # For the front ends that show widgets, if there are any; neither recorded nor shown to the agent.
                if self._session.pass_to_views(self.id, self.sequence, passed):
                    self._notify()
                continue
            self._transcript.record(passed)
            if isinstance(passed, InputRequest):
                await self._ask_input(passed, kernel, stopper)

    async def _ask_input(self, request: InputRequest, kernel: Kernel, stopper: Stopper) -> None:
        if stopper.reason is not None:
            # The cell was interrupted before it asked, but the runner waits for an answer: interrupt it again.
            await kernel.interrupt()
            return
        if not self.cell.allow_input:  # the kernel was told so, but may be hostile
            await kernel.reply_input(None)
            return

        def is_wanted() -> bool:
            return kernel.is_alive() and stopper.reason is None

        with stopper.paused():
            question, limit_s = input_question(request), stopper.pause_left_s()
            reply = await self._questions.ask(question, limit_s=limit_s, is_wanted=is_wanted)
        self._tell_who_answered(reply)
        # A kernel that died meanwhile takes no answer; the next event read from it raises how it ended.
        if is_wanted():
            await kernel.reply_input(text_of(reply, request))

    async def _on_kernel_death(self, kernel: Kernel, stopper: Stopper, death: KernelDied) -> None:
        """Set the outcome of a cell whose kernel died: why it died, and what was lost with it."""
        session_kernel, outcome = self._session.session_kernel, self._outcome
        incidents = kernel.incidents()
        fatal = None if stopper.was_killed else fatal_incident(incidents, death.message)
        for incident in incidents:
            if incident is not fatal:
                self._transcript.notice(f"{incident.kind}: the session {incident.detail}")
        cause = session_kernel.ended_by or (killed_text(fatal) if fatal else "")
        loss = await session_kernel.on_death(cause or death.message)
        outcome.status, outcome.state, outcome.lost = stopped_status(stopper) or "died", loss.state, loss.lost
        if loss.is_rewound:
            undone = self._session.undo_since(loss.since or self.id)
            self._transcript.notice(rewound_text(len(undone), loss.lost))
        if cause:
            outcome.status = "out_of_memory" if fatal else "died"
        cause = cause or cause_of_death(death, stopper, self.cell.timeout_s, self._session.quota)
        outcome.cause = with_gpu_memory(cause, outcome.gpu_memory_mb)

    # Reporting

    async def _report_changes(self, kernel: Kernel) -> None:
        """Report the files that the cell changed, and the limits that its kernel hit and survived."""
        if self.cell.keeps_uris:
            await keep_uris(self._session, self._transcript)
        self._notice_all(await self._file_changes.scan_after())
        if self.cell.keeps_figures:
            await keep_figures(self._session, self._transcript, self._file_changes)
        seen, is_all = self._file_changes.seen
        await self._report_limits(kernel, seen, is_all)
        self._files, left_out = self._file_changes.files()
        if left_out:
            count = f"{left_out:,}" if is_all else f"at least {left_out:,}"
            which = "list_session_files names them, a page at a time"
            self._transcript.notice(f"{count} more files were created or changed: {which}")

    async def _report_limits(self, kernel: Kernel, seen: FolderUsage, is_all: bool) -> None:
        """Record a notice for each limit that the kernel hit and survived; the first is the default cause."""
        quota, incidents = self._session.quota, kernel.incidents()
        if self._gpu_use is not None:
            incidents += await self._gpu_use.incidents(kernel)
        await quota.measure_if_over_half(seen, is_all=is_all)
        if quota.is_over and self._outcome.cause is None:
            incidents.append(Incident("disk_full", f"folder {quota.detail}: delete files before writing more"))
        for incident in incidents:
            notice = survived_text(incident)
            self._transcript.notice(notice)
            self._outcome.cause = self._outcome.cause or notice

    def _notice_all(self, notices: list[str]) -> None:
        for notice in notices:
            self._transcript.notice(notice)

    def _finish(self) -> None:
        if self.is_finished:
            return
        self._times.ended_at = time.monotonic()
        self._stopper = None
        self._session.session_kernel.last_cause = self._outcome.cause or self._session.session_kernel.last_cause
        self._result = self.result()
        if not self._is_abandoned:
            self._session.record_use()
            self._record_result(self._result)
            if unkept := self._session.journal.unkept():  # known only when the result should have been recorded
                self._transcript.notice(f"this execution is not kept: {unkept}")
                self._result = None
                self._result = self.result()
                self._record_result(self._result)
            measure(self._result, self.span)
        self._notify()

    def _record_result(self, result: ExecutionResult) -> None:
        recorder = self._transcript.recorder
        self._session.journal.finish(result, output_bytes=recorder.text_bytes, display_bytes=recorder.display_bytes)

    def _notify(self) -> None:
        self.changed_at = time.time()
        self._changed.notify()
