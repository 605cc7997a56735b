"""Listening to a kernel until its cell is over: every event is told, what `input()` asks is asked, a death is buried.

Does not know how the cell came to the kernel, nor whether that was under this server.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from belljar.errors import KernelDied
from belljar.files.volume import Usage
from belljar.kernels.base import Kernel
from belljar.outputs.events import ClearOutput, CommMessage, Event, Finished, InputRequest
from belljar.sandboxes.base import Incident
from belljar.sessions.causes import killed, lethal, rewound, survived
from belljar.sessions.cells import Cell
from belljar.sessions.outcomes import Outcome, cause_of_death, stopped_status
from belljar.sessions.questions import Questions, input_question, text_of
from belljar.sessions.stopping import Stopper
from belljar.sessions.transcript import Transcript

if TYPE_CHECKING:
    from belljar.sessions.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """To one kernel, for one execution, whose outcome it finds out."""

    session: "Session"
    execution_id: str
    cell: Cell
    outcome: Outcome
    transcript: Transcript
    questions: Questions
    kernel: Kernel
    stopper: Stopper

    async def listen(self, events: AsyncIterator[Event]) -> None:
        """Until the cell has finished or its kernel has died."""
        try:
            async for event in events:
                if isinstance(event, Finished):
                    self._conclude(event)
                    continue
                # A question is put to the person as it is on record.
                for passed in await self.transcript.screened(event):
                    if isinstance(passed, CommMessage) or (isinstance(passed, ClearOutput) and passed.in_widget):
                        self._pass_on(passed)
                        continue
                    self.transcript.record(passed)
                    if isinstance(passed, InputRequest):
                        await self._ask(passed)
        except KernelDied as death:
            self.transcript.flush()
            await self._bury(death)
        finally:
            self.transcript.flush()

    def _pass_on(self, event: Event) -> None:
        """For the views of widgets, if there are any; nothing of it is kept, nor seen by the agent."""
        if self.session.comms.tell(self.execution_id, self.transcript.sequence, event):
            self.transcript.on_change()

    async def tell_limits(self, seen: Usage, is_all: bool) -> None:
        """Limits that the kernel met and survived: a word in the output, and the cause unless there is another."""
        quota = self.session.quota
        incidents = self.kernel.incidents()
        await quota.look_if_more_than_half(seen, is_all=is_all)
        if quota.is_over and self.outcome.cause is None:
            incidents.append(Incident("disk_full", f"folder {quota.detail}: delete files before writing more"))
        for incident in incidents:
            said = survived(incident)
            self.transcript.notice(said)
            self.outcome.cause = self.outcome.cause or said

    async def _ask(self, question: InputRequest) -> None:
        if self.stopper.reason is not None:
            # Its interrupt came before the question and waits in the runner for an answer that nobody should give.
            await self.kernel.interrupt()
            return
        if not self.cell.allow_input:  # whatever the kernel believes
            await self.kernel.reply_input(None)
            return
        with self.stopper.paused():
            reply = await self.questions.ask(
                input_question(question), limit_s=self.stopper.pause_left_s(), is_wanted=self._is_wanted
            )
        # A kernel that died meanwhile takes no answer: the next look at its events tells how it ended.
        if self.stopper.reason is None and self.kernel.is_alive():
            await self.kernel.reply_input(text_of(reply))

    def _is_wanted(self) -> bool:
        return self.kernel.is_alive() and self.stopper.reason is None

    def _conclude(self, finished: Finished) -> None:
        folder = self.session.quota.detail
        self.outcome.conclude(finished, self.stopper, timeout_s=self.cell.timeout_s, folder=folder)
        self.session.life.remember(finished)

    async def _bury(self, death: KernelDied) -> None:
        """The process is gone: say why, and what went with it."""
        life, outcome, stopper = self.session.life, self.outcome, self.stopper
        incidents = self.kernel.incidents()
        fatal = None if stopper.was_killed else lethal(incidents, death.message)
        for incident in incidents:
            if incident is not fatal:
                self.transcript.notice(f"{incident.kind}: the session {incident.detail}")
        cause = life.ended_by or (killed(fatal) if fatal else "")
        burial = await life.bury(cause or death.message)
        outcome.status, outcome.state, outcome.lost = stopped_status(stopper) or "died", burial.state, burial.lost
        if burial.is_rewound:
            undone = self.session.take_back(burial.since or self.execution_id)
            self.transcript.notice(rewound(len(undone)))
        if cause:
            outcome.status, outcome.cause = "out_of_memory" if fatal else "died", cause
            return
        folder = self.session.quota.detail
        outcome.cause = cause_of_death(death, stopper, timeout_s=self.cell.timeout_s, folder=folder)
