"""One execution from its turn to its result: the table of contents of the project.

It belongs to the server, not to the request that asked for it: whoever waits may go away and come back. Read `run` from
top to bottom; each line is a room of the house.
"""

import asyncio
import logging
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from belljar import logs, measures
from belljar.errors import BelljarError, Busy, CodeRejected, KernelDied
from belljar.kernels.base import Kernel
from belljar.kernels.handover import ResumableKernel
from belljar.models import ExecutionResult, FileReference, OutputEvent
from belljar.outputs.events import InputRequest
from belljar.sessions.causes import KILLED, RESUMED
from belljar.sessions.cells import Cell
from belljar.sessions.listening import Listener
from belljar.sessions.outcomes import Outcome
from belljar.sessions.questions import Questions, text_reply
from belljar.sessions.results import Times, make_result, measure
from belljar.sessions.stopping import ON_REQUEST, Stopper
from belljar.sessions.traces import Traces
from belljar.sessions.transcript import Transcript
from belljar.sessions.vetting import vet
from belljar.spans import ExecutionSpan
from belljar.toolbox.base import CallRecord, Question, Reply
from belljar.toolbox.ledger import Ledger

if TYPE_CHECKING:
    from belljar.sessions.session import Session

log = logging.getLogger(__name__)


class Execution:
    """A cell on its way through a session."""

    def __init__(self, execution_id: str, session: "Session", cell: Cell, number: int) -> None:
        self.id = execution_id
        self.number = number
        """Which of its session's executions it is, from 1 on."""
        self.session = session
        self.cell = cell
        self.span = ExecutionSpan(session.id, execution_id, number)
        self._times = Times()
        self._left_s = cell.timeout_s
        self._changed = asyncio.Event()
        self._transcript = Transcript(
            execution_id,
            settings=session.settings,
            outlives_server=session.handover.is_on,
            journal=session.journal,
            displays=session.displays,
            screens=session.screens(),
            on_change=self._notify,
        )
        self._questions = Questions(self._notify)
        self._progress = (0, "")
        self._traces = Traces(session.workspace, session.quota, session.sharing, session.uri_of)
        self._stopper: Stopper | None = None
        self._is_cancelled = self._is_abandoned = False
        self._resumed: ResumableKernel | None = None
        """The kernel that an earlier server gave it to."""
        self._asked = ON_REQUEST
        self._outcome = Outcome()
        self._not_undoable: str | None = None
        self._files: list[FileReference] = []
        self._calls: list[CallRecord] = []
        self._result: ExecutionResult | None = None

    # What callers see

    @property
    def is_finished(self) -> bool:
        """Whether the result is final."""
        return self._times.ended_at is not None

    @property
    def has_started(self) -> bool:
        """Whether its turn has come."""
        return self._times.started_at is not None

    @property
    def sequence(self) -> int:
        """The number of its latest event."""
        return self._transcript.sequence

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

    def result(self) -> ExecutionResult:
        """The result, or as much of it as there is."""
        if self._result is not None:
            return self._result.model_copy()
        return make_result(
            self.id,
            self.session.id,
            outcome=self._outcome,
            transcript=self._transcript,
            times=self._times,
            files=self._files,
            calls=self._calls,
            not_undoable=self._not_undoable,
        )

    def latest_text(self) -> str:
        """The last words, for a progress line: of the cell, or of a call that it waits for."""
        sequence, progress = self._progress
        return progress if progress and sequence == self.sequence else self._transcript.latest_text()

    # What callers may do to it

    def interrupt(self, asked: str = ON_REQUEST) -> None:
        """Stop it: at once if it waits for its turn, by SIGINT and then SIGKILL if it runs; `asked` says by whom."""
        self._is_cancelled, self._asked = True, asked
        if not self.has_started and not self.is_finished:
            cause = f"interrupted {asked} before its turn came; it never ran"
            self._outcome = Outcome(status="interrupted", cause=cause)
            self._finish()
        elif self._stopper is not None:
            self._stopper.stop("interrupted", asked)
        self.answer(None)

    def stop_for_disk(self, *, at_once: bool) -> None:
        """The session folder is over its limit and grows."""
        if self._stopper is None:
            return
        if at_once:
            self._stopper.kill("disk_full")
        else:
            self._stopper.stop("disk_full")
        self.answer(None)

    def asking(self) -> AbstractContextManager[bool]:
        """For whoever wants to put the question to a person: False while another does."""
        return self._questions.asking()

    def answer(self, text: str | None, number: int | None = None) -> None:
        """Answer what `input()` asks; None declines, whatever is asked."""
        self.reply(text_reply(text), number)

    def reply(self, reply: Reply, number: int | None = None) -> None:
        """Answer the pending question. An answer to an earlier `number` is none to this one."""
        self._questions.answer(reply, number)

    # Beyond the end of the server

    def resume(
        self, kernel: ResumableKernel, events: Iterable[OutputEvent], left_s: float, calls: Sequence[CallRecord]
    ) -> None:
        """Its kernel was given it by an earlier server, to which it has said this, and called that. Before `run`."""
        self._resumed, self._left_s = kernel, left_s
        self._calls = [*calls]
        self._transcript.go_on(events)

    def abandon(self) -> None:
        """The server stops, the cell goes on: its result is for the next server to keep."""
        self._is_abandoned = True

    # What its calls may do

    async def ask(self, question: Question) -> Reply | None:
        """Ask the person, while the clock stands still; None when nobody can be asked."""
        if not self.cell.allow_input or not self._is_wanted():
            return None
        with self._stopper.paused() if self._stopper is not None else nullcontext():
            # Told like what `input()` asks: whoever follows the output sees it.
            hide = self.session.veil.cover if question.is_ours else self.session.veil.hide_text
            self._transcript.record(InputRequest(hide(question.message)))
            # Before the cell runs there is no clock to stop.
            limit_s = self._stopper.pause_left_s() if self._stopper else self.session.settings.execution_timeout_s
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
                self._times.started_at = time.monotonic()
                self.span.begin()
                await (self._go_on(self._resumed) if self._resumed is not None else self._run_in_turn())
        except BelljarError as error:
            if isinstance(error, Busy):
                measures.refusals.add("admission")
            self._outcome = Outcome(status="rejected", cause=f"{error.code}: {error}")
        except asyncio.CancelledError:
            if self._stopper is None:
                self._outcome = Outcome(status="interrupted", cause="the server stopped before it ran")
            else:
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
        await self._vet()
        kernel = await self.session.life.ready()
        if self._is_cancelled:
            cause = f"interrupted {self._asked} while its kernel started; it never ran"
            self._outcome = Outcome(status="interrupted", cause=cause)
            return
        self._tell_what_was()
        await self.session.life.keep()
        self.session.begin(self)
        self._not_undoable = self.session.life.checkpoints.gap or None
        self._tell(await self._traces.bring_in())
        await self._traces.begin()
        if self.cell.filename:
            # In its turn: written earlier, it would count as the doing of the cell that runs then.
            await self.session.write_file(self.cell.filename, self.cell.code.encode())
        if self.session.tools is not None:
            await self.session.tools.ready_for(self.cell.code)
        listener = self._listener(kernel)
        with listener.stopper.watching(), self._calling():
            if self._is_cancelled:  # while the folder was looked at
                listener.stopper.stop("interrupted", self._asked)
            cell, on_begin = self.cell, self._put_on_record
            await listener.listen(kernel.execute(cell.code, allow_input=cell.allow_input, on_begin=on_begin))
        await self._tell_changes(listener)

    def _put_on_record(self) -> None:
        """Whatever becomes of the server from here on: this cell may have run, and the kernel has it."""
        self.session.note()
        self.session.journal.start(self.id)
        self.session.life.begin(self.id, self.cell.timeout_s)

    async def _go_on(self, kernel: ResumableKernel) -> None:
        """Follow a cell that was begun under an earlier server, to its end."""
        if self.session.life.kernel is not kernel:
            raise KernelDied("the kernel's process ended")
        self._transcript.notice(f"{RESUMED}; what it said last before that may be missing")
        await self._traces.begin()
        listener = self._listener(kernel)
        with listener.stopper.watching(), self._calling():
            if self._is_cancelled:
                listener.stopper.stop("interrupted", self._asked)
            await listener.listen(kernel.resume())
        if self._outcome.status == "running":
            self._outcome.status = "rejected"
            self._outcome.cause = f"{KILLED} before it reached the kernel; it never ran"
        self._outcome.cause = self._outcome.cause or RESUMED
        if self.session.life.kernel is kernel:
            await self._tell_changes(listener)

    async def _vet(self) -> None:
        """Code that the policy does not allow goes no further; what it only warns of is said."""
        guard, environment = self.session.guard, self.session.environment
        try:
            said = await vet(guard, self.cell.code, environment=environment, execution_id=self.id, ask=self.ask)
        except CodeRejected:
            if self._is_cancelled:  # while the person was asked
                return
            raise
        self._tell(said)

    def _tell_what_was(self) -> None:
        """What became of the last kernel's variables, and who ran cells since the owner did."""
        if (loss := self.session.life.take_loss()) is not None:
            self._outcome.state, self._outcome.lost = loss.state, loss.names
            self._transcript.notice(loss.notice)
        author = self.cell.author
        if said := self.session.authors.begin(author):
            self._transcript.notice(said, **({"author": author} if author else {}))

    def _listener(self, kernel: Kernel) -> Listener:
        """To a kernel that is given the cell, or has it; from now on the cell can be stopped."""
        settings = self.session.settings
        self._stopper = Stopper(
            kernel,
            timeout_s=self._left_s,
            grace_s=settings.interrupt_grace_s,
            # All that its questions wait together; a single one may take as much.
            pause_s=settings.execution_timeout_s,
            on_stop=self.session.cancel_calls,
        )
        return Listener(
            session=self.session,
            execution_id=self.id,
            cell=self.cell,
            outcome=self._outcome,
            transcript=self._transcript,
            questions=self._questions,
            kernel=kernel,
            stopper=self._stopper,
        )

    @contextmanager
    def _calling(self) -> Generator[None]:
        """Calls of tools that begin now are this execution's."""
        ledger = Ledger(earlier=self._calls, on_change=self.session.life.note_call)
        tools = self.session.tools
        try:
            with tools.serving(self, ledger) if tools is not None else nullcontext():
                yield
        finally:
            self._calls = ledger.records()

    async def _tell_changes(self, listener: Listener) -> None:
        """What the cell left in the folder, and the limits that its kernel met and survived."""
        self._tell(await self._traces.end())
        await listener.tell_limits(*self._traces.seen)
        self._files, left_out = self._traces.files()
        if left_out:
            _, is_all = self._traces.seen
            count = f"{left_out:,}" if is_all else f"at least {left_out:,}"
            self._tell([f"{count} more files were created or changed: list_session_files names them, a page at a time"])

    def _tell(self, words: list[str]) -> None:
        for word in words:
            self._transcript.notice(word)

    def _finish(self) -> None:
        if self.is_finished:
            return
        self._times.ended_at = time.monotonic()
        self._stopper = None
        self.session.life.last_cause = self._outcome.cause or self.session.life.last_cause
        self._result = self.result()
        if not self._is_abandoned:
            kept = self._transcript
            self.session.note()
            self.session.journal.finish(self._result, output_bytes=kept.text_bytes, display_bytes=kept.display_bytes)
            measure(self._result, self.span)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
