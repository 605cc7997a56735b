"""Runs one step that does something, or takes what is on record of it. Every attempt is an execution under its own key.

A step that is on record as finished is never run again. One that was under way when its server died is run again only
if nothing of it can have taken effect twice; otherwise a person is asked: `StepRunner.run` has that decision.
"""

import json
import keyword
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from belljar.errors import BelljarError, Busy, SessionNotFound
from belljar.executions.execution import Execution
from belljar.executions.policy_check import inspection_text, subject_findings
from belljar.journal.journal import KILLED, ExecutionRecord
from belljar.journal.run_records import StepRecord
from belljar.models import TEXT_KINDS, ExecutionResult
from belljar.questions.models import Question, QuestionReply
from belljar.sessions.registry import Registry
from belljar.toolbox.arguments import BadArguments, Parameters
from belljar.toolbox.broker import approval_text
from belljar.toolbox.names import names_of
from belljar.toolbox.question_subjects import code_subject
from belljar.workflows.checks import Tools
from belljar.workflows.definition import (
    CodeExecution,
    FormStep,
    Step,
    StepKind,
    ToolCallStep,
)
from belljar.workflows.form_runner import FormRunner
from belljar.workflows.live_run import POLL_S, LiveRun, StopRun
from belljar.workflows.outcomes import (
    Scope,
    StepOutcome,
    failed_step,
    nothing,
    plain,
    recorded,
)
from belljar.workflows.questions import fate_question, read_question, run_question
from belljar.workflows.run_session import RunSession
from belljar.workflows.step_guards import StepGuards
from belljar.workflows.templates import TemplateFailed, rendered

_RAN = "had begun when its server ended, and it is not known how far it came"
_UNSAVED = "ran to its end, but its server ended before the variables that it left were saved"


class StepRunner:
    """Runs the steps of one run that have no others in them."""

    def __init__(
        self,
        run: LiveRun,
        sessions: Registry,
        tools: Tools | None,
        types: Mapping[str, StepKind],
        *,
        reruns_failed: bool = False,
    ) -> None:
        self._run = run
        self._sessions = sessions
        self._tools = tools
        self._types = types
        self._principal = run.record.principal
        self._guards = StepGuards(run.definition)
        self._forms = FormRunner(run, self.run)
        self._reruns_failed = reruns_failed
        """Whether the step at which the run ended is tried again, because a person resumes it."""

    async def run(self, step: Step, path: str, scope: Scope, session: RunSession) -> StepOutcome:
        """Run a step, or take what is on record of it."""
        last = self._run.last(path)
        attempt = last.attempt if last is not None else 1
        if last is not None:
            if step.is_code and last.execution_id:
                session.note_replayed()
            match last.state:
                case "done" | "skipped":
                    return recorded(last)
                case "expired" | "declined" | "failed":
                    outcome = recorded(last)
                    if not self._is_worth_retrying(step, path, outcome) and not self._reruns(step):
                        return self._stopped_at_expiry(step, path, outcome)
                    attempt += 1
                case "repeated":
                    attempt += 1
                case "running" | "waiting" | "answered":
                    settled = await self._settle(step, path, last, session)
                    if isinstance(settled, StepOutcome):
                        return await self._after(step, path, settled, scope, session)
                    attempt = settled
        return await self._attempts(step, path, attempt, scope, session)

    def _reruns(self, step: Step) -> bool:
        """Return whether a step that ended the run is tried again."""
        is_last = step.config.on_expiry == "stop" if isinstance(step.config, FormStep) else False
        return self._reruns_failed and (is_last or step.form.on_error == "stop")

    @staticmethod
    def _stopped_at_expiry(step: Step, path: str, outcome: StepOutcome) -> StepOutcome:
        if outcome.state == "expired" and isinstance(step.config, FormStep) and step.config.on_expiry == "stop":
            raise StopRun("stopped", f"step {path}: {outcome.error}")
        return outcome

    async def _attempts(self, step: Step, path: str, attempt: int, scope: Scope, session: RunSession) -> StepOutcome:
        """Run a step from this attempt on, as often as it is retried."""
        while True:
            self._run.check_wanted()
            outcome = await self._attempt(step, path, attempt, scope, session)
            if isinstance(outcome, int):
                attempt = outcome
                continue
            if outcome.state != "failed" or not self._is_worth_retrying(step, path, outcome):
                return outcome
            await self._wait_before_retry(step, path)
            attempt += 1

    async def _after(
        self, step: Step, path: str, outcome: StepOutcome, scope: Scope, session: RunSession
    ) -> StepOutcome:
        """Return the outcome of an attempt that an earlier server made, or of the next ones if it is retried."""
        if outcome.state == "failed" and self._is_worth_retrying(step, path, outcome):
            last = self._run.last(path)
            return await self._attempts(step, path, (last.attempt if last else 0) + 1, scope, session)
        return outcome

    def _is_worth_retrying(self, step: Step, path: str, outcome: StepOutcome) -> bool:
        retry = step.retry
        return retry is not None and outcome.failure in retry.on and self._run.failures(path) <= retry.times

    async def _wait_before_retry(self, step: Step, path: str) -> None:
        wait_s = step.retry.delay_s if step.retry is not None else 0.0
        self._run.tell("note", path, f"failed, tried again in {wait_s:g} s" if wait_s else "failed, tried again")
        ends_at = time.monotonic() + wait_s
        while (left_s := ends_at - time.monotonic()) > 0:
            await self._run.pause(min(left_s, POLL_S))
            self._run.check_wanted()

    async def _attempt(
        self, step: Step, path: str, attempt: int, scope: Scope, session: RunSession
    ) -> StepOutcome | int:
        """Make one attempt; return its outcome, or the number of the next attempt if this one does not count."""
        try:
            match step.config:
                case FormStep():
                    return await self._forms.run(step.config, path, attempt, scope, session)
                case CodeExecution():
                    code, expected = step.config.code, ""
                    if (failed := await self.assign(session, path, attempt)) is not None:
                        return failed
                case ToolCallStep():
                    arguments = plain(await rendered(step.config.arguments, scope.values))
                    code, expected = await self._call_code(step.config, arguments)
                case _:
                    written = self._types[step.type].code
                    if not written:
                        raise TypeError(f"nothing runs steps of the type {step.type}")
                    values = plain(await rendered(step.config.model_dump(), scope.values))
                    code, expected = f"config = {values!r}\n{written}", ""
                    if (failed := await self.assign(session, path, attempt)) is not None:
                        return failed
            with self._run.working():
                return await self._execute(step, path, attempt, code, expected, session)
        except TemplateFailed as error:
            return self._run.finish(path, attempt, failed_step(str(error), "template"), session_id=session.id)
        except (SessionNotFound, Busy):
            raise
        except BelljarError as error:
            return self._run.finish(
                path, attempt, failed_step(f"{error.code}: {error}", "error"), session_id=session.id
            )

    async def assign(self, session: RunSession, path: str, attempt: int = 1) -> StepOutcome | None:
        """Give the session's Python what the workflow has set since; return the outcome of the step if that fails."""
        result = await self._run.patiently(session.assign)
        if result is None:
            return None
        reason = f"the variables of the workflow could not be set: {result.error or result.cause}"
        return self._run.finish(path, attempt, failed_step(reason, result.status), session_id=session.id)

    async def _call_code(self, config: ToolCallStep, arguments: dict[str, Any]) -> tuple[str, str]:
        """Return the cell that calls a tool, and the beginning of what a policy would ask about this call."""
        if self._tools is None:
            raise TemplateFailed("no MCP servers are configured")
        catalogue = await self._tools.catalogue(config.server, config.tool)
        tool = catalogue.find(config.server, config.tool)
        if tool is None:
            raise TemplateFailed(f"there is no tool {config.server}.{config.tool}")
        try:
            checked = Parameters(tool).checked(arguments)
        except BadArguments as error:
            raise TemplateFailed(f"{config.server}.{config.tool}: {error}") from None
        names = names_of(catalogue)
        function = names.functions[config.server, config.tool]
        given = (
            ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            if all(name.isidentifier() and not keyword.iskeyword(name) for name in arguments)
            else f"**{arguments!r}"
        )
        code = f"from servers.{names.packages[config.server]} import {function}\n{function}({given})"
        return code, approval_text(tool, checked)

    # One execution

    async def _execute(
        self, step: Step, path: str, attempt: int, code: str, expected: str, session: RunSession
    ) -> StepOutcome | int:
        guard = self._guards.of(step)
        if guard is not None and not self._approved(path, attempt):
            inspection = await guard.examine(code, "")
            if inspection.decision == "deny":
                reason = f"the guardrails of the workflow do not allow its code: {inspection_text(inspection)}"
                return self._run.finish(path, attempt, failed_step(reason, "rejected"), session_id=session.id)
            if inspection.decision == "ask":
                text = f"May step {path} run? {inspection_text(inspection)}"
                # Only code that is written in the workflow: other code has values in it, which nobody has looked at.
                shown = code if isinstance(step.config, CodeExecution) else ""
                about = code_subject(shown, subject_findings(inspection))
                question = Question(text, is_ours=True, in_console=inspection.in_console, about=about)
                return await self._ask_approval(path, attempt, question, begun=False)
        with (await session.reach()).tightened(guard) if guard is not None else nullcontext():
            return await self._execute_guarded(step, path, attempt, code, expected, session)

    async def _execute_guarded(
        self, step: Step, path: str, attempt: int, code: str, expected: str, session: RunSession
    ) -> StepOutcome | int:
        run = self._run
        key, timeout_s = self._key(path, attempt), self._guards.timeout_s(step)
        await self._run.patiently(lambda: self._begin(path, attempt, session.id))
        run.tell("begin", path)
        execution: Execution = await self._run.patiently(lambda: session.submit(code, key, timeout_s, wants_value=True))
        run.records.note_execution(run.id, path, attempt, execution.id)
        approval = await self._follow(execution, path, attempt, expected, session)
        if approval is not None:
            return await self._ask_approval(path, attempt, approval)
        outcome = await self._conclude(step, path, attempt, execution.result(), session)
        if outcome.failure == "interrupted":
            run.check_wanted()
        return outcome

    async def _begin(self, path: str, attempt: int, session_id: str) -> None:
        self._run.records.begin(self._run.id, path, attempt, session_id)

    def _key(self, path: str, attempt: int) -> str:
        return f"{self._run.id}/{path}/{attempt}"

    async def _follow(
        self, execution: Execution, path: str, attempt: int, expected: str, session: RunSession
    ) -> Question | None:
        """Wait until an execution has ended; return what the policy asks about it, if that ended it before it began."""
        parked = None
        approved = self._approved(path, attempt)
        seen = 0
        while not execution.is_finished:
            seen = self._pass_on(execution, path, seen)
            question = execution.question_for_anyone
            if question is None:
                await execution.wait_for_change(POLL_S)
                await self._stop_if_wanted(execution)
            elif approved and (await session.recordable(question)).message == approved:
                execution.reply_for_run(QuestionReply("accept"), execution.question_number)
                approved = ""
            elif question.is_ours and self._is_before_anything(execution, question, expected):
                # Nothing of it has happened, so it need not wait with a process: it is tried again with the answer.
                parked = await session.recordable(question)
                execution.reply_for_run(QuestionReply("cancel"), execution.question_number)
            else:
                await self._hold(execution, question, path, attempt, session)
        self._pass_on(execution, path, seen)
        return parked

    def _is_before_anything(self, execution: Execution, question: Question, expected: str) -> bool:
        """Return whether the policy asks about the code before it runs, or about the only call of a call's cell."""
        if expected and question.message.startswith(expected):
            return True
        record = self._sessions.journal.find(execution.id)
        return record is not None and not record.has_begun

    def _approved(self, path: str, attempt: int) -> str:
        """Return the message of the question that a person has approved for this attempt."""
        row = self._run.records.step(self._run.id, path, attempt)
        if row is None or row.question is None or row.answer is None:
            return ""
        question, answer = read_question(row.question), json.loads(row.answer)
        return question.message if question.kind == "approval" and answer["action"] == "accept" else ""

    async def _hold(
        self, execution: Execution, question: Question, path: str, attempt: int, session: RunSession
    ) -> None:
        """Put a question that a cell waits with to a person; the cell's process is held meanwhile."""
        run, number = self._run, execution.question_number
        recorded = await session.recordable(question)
        await run.ask(path, attempt, run_question(recorded, "held"))
        with run.resting(), run.asking(path, attempt, is_from_cell=True):
            while (
                not execution.is_finished
                and execution.question_number == number
                and execution.question_for_anyone is not None
            ):
                row = run.records.step(run.id, path, attempt)
                if row is not None and row.state == "answered":
                    answer = json.loads(row.answer or "{}")
                    execution.reply_for_run(QuestionReply(answer["action"], answer["values"]), number)
                    break
                await self._stop_if_wanted(execution)
                await run.pause(POLL_S)
        run.records.go_on(run.id, path, attempt)

    async def _stop_if_wanted(self, execution: Execution) -> None:
        if self._run.records.wanted(self._run.id) == "stop" and not execution.is_finished:
            execution.interrupt("because its run was stopped")
            await execution.wait(execution.stop_s)

    def _pass_on(self, execution: Execution, path: str, seen: int) -> int:
        """Tell those who follow what the execution has printed since; return the number of its latest event."""
        if not self._run.has_output_readers:
            self._run.notify()
            return execution.sequence
        for event in self._sessions.journal.events(execution.id, seen):
            seen = event.sequence
            if event.kind in TEXT_KINDS and event.text:
                self._run.tell("output", path, event.text, event.kind)
        return seen

    async def _ask_approval(
        self, path: str, attempt: int, question: Question, *, begun: bool = True
    ) -> int | StepOutcome:
        """Wait for a person's consent to what the policy asks; return the attempt that it is for."""
        run = self._run
        if begun:
            run.records.finish(run.id, path, attempt, "repeated", error="a person is asked first")
            run.note(path, attempt)
            attempt += 1
        await run.ask(path, attempt, run_question(question, "approval"))
        return await self._approval(path, attempt)

    async def _approval(self, path: str, attempt: int) -> int | StepOutcome:
        with self._run.resting(), self._run.asking(path, attempt):
            answer = await self._run.answer_of(path, attempt)
        if answer is None or answer["action"] != "accept":
            reason = "the person was asked and did not allow it"
            return self._run.finish(path, attempt, StepOutcome(nothing("declined", reason), "declined", "declined"))
        return attempt

    async def _conclude(
        self, step: Step, path: str, attempt: int, result: ExecutionResult, session: RunSession
    ) -> StepOutcome:
        """Record what an execution gave; its variables are saved before it counts as done."""
        is_gone = result.status in ("died", "out_of_memory", "rejected")
        notes = ""
        if step.is_code and not is_gone:
            # Also after code that failed, because it may have changed variables before it did.
            notes = await session.save(result.execution_id)
        if result.state == "lost" and result.lost:
            notes = "; ".join(filter(None, [notes, f"lost: {', '.join(result.lost[:20])}"]))
        value = session.value_of(result)
        outcome = StepOutcome(value) if result.status == "ok" else StepOutcome(value, "failed", result.status)
        return self._run.finish(path, attempt, outcome, notes=notes, session_id=session.id)

    # Steps of a server that died

    async def _settle(self, step: Step, path: str, last: StepRecord, session: RunSession) -> StepOutcome | int:
        """Return the outcome of an attempt that was under way, or the number of the attempt to make now."""
        if last.question is not None and last.state != "running":
            question = read_question(last.question)
            if question.kind == "fate":
                return await self._fate(path, last.attempt)
            if question.kind == "approval":
                with self._run.working():
                    return await self._approval(path, last.attempt)
            if question.kind == "form":
                return last.attempt  # the form takes its own question up again
        return await self._settle_execution(step, path, last, session)

    async def _settle_execution(
        self, step: Step, path: str, last: StepRecord, session: RunSession
    ) -> StepOutcome | int:
        journal, attempt = self._sessions.journal, last.attempt
        execution_id = journal.find_key(self._principal, self._key(path, attempt))
        record = journal.find(execution_id) if execution_id is not None else None
        if record is None:
            return attempt  # it never began
        live = self._sessions.executions.find(record.id, self._principal)
        if live is not None:
            with self._run.working():
                self._run.records.note_execution(self._run.id, path, attempt, record.id)
                await self._follow(live, path, attempt, "", session)
                return await self._conclude(step, path, attempt, live.result(), session)
        result = record.result
        if not record.has_begun and (result is None or result.status == "interrupted" or KILLED in str(result.cause)):
            return self._next(path, attempt, "it never ran, because its server ended")
        self._run.records.note_execution(self._run.id, path, attempt, record.id)
        if result is None or result.status == "interrupted" or _was_killed(result):
            return await self._unknown(step, path, attempt, _RAN)
        return await self._settle_ended(step, path, attempt, record, result, session)

    async def _settle_ended(
        self, step: Step, path: str, attempt: int, record: ExecutionRecord, result: ExecutionResult, session: RunSession
    ) -> StepOutcome | int:
        """Settle an attempt whose code came to its end, while its step did not."""
        leaves_nothing = not step.is_code or result.status in ("died", "out_of_memory")
        if leaves_nothing or result.status == "rejected" or not session.keeps_variables:
            return await self._conclude(step, path, attempt, result, session)
        if record.id in session.saved():
            session.use_saved(record.id)
            value = session.value_of(result)
            outcome = StepOutcome(value) if result.status == "ok" else StepOutcome(value, "failed", result.status)
            return self._run.finish(path, attempt, outcome, session_id=session.id)
        if await session.has_live_kernel():
            return await self._conclude(step, path, attempt, result, session)
        return await self._unknown(step, path, attempt, _UNSAVED)

    async def _unknown(self, step: Step, path: str, attempt: int, why: str) -> StepOutcome | int:
        """Decide on a step of which it is not known how far it came: run it again if that is safe, else ask."""
        if step.form.repeat or self._types[step.type].repeat or await self._is_repeatable(step):
            return self._next(path, attempt, why)
        await self._run.ask(path, attempt, fate_question(path, why))
        return await self._fate(path, attempt)

    async def _is_repeatable(self, step: Step) -> bool:
        """Return whether a step does nothing more when it is done twice, by what its tool says of itself."""
        config = step.config
        if not isinstance(config, ToolCallStep) or self._tools is None:
            return False
        tool = (await self._tools.catalogue(config.server, config.tool)).find(config.server, config.tool)
        return tool is not None and (tool.annotations.read_only or tool.annotations.idempotent)

    async def _fate(self, path: str, attempt: int) -> StepOutcome | int:
        with self._run.asking(path, attempt):
            answer = await self._run.answer_of(path, attempt)
        choice = answer["values"].get("choice") if answer and answer["action"] == "accept" else "stop"
        if choice == "again":
            return self._next(path, attempt, "it is run again, as a person said")
        if choice == "skip":
            outcome = StepOutcome(nothing("skipped", "a person said to skip it"), "skipped")
            return self._run.finish(path, attempt, outcome)
        # The question stays open for whoever resumes the run.
        await self._run.ask(path, attempt, fate_question(path, _RAN))
        raise StopRun("stopped", f"a person said to stop at step {path}")

    def _next(self, path: str, attempt: int, why: str) -> int:
        run = self._run
        run.records.finish(run.id, path, attempt, "repeated", error=why)
        run.note(path, attempt)
        run.tell("note", path, why)
        return attempt + 1


def _was_killed(result: ExecutionResult) -> bool:
    return KILLED in str(result.cause)
