"""Walks the steps of a run. Every step that does something is an execution of the run's session.

A step that is on record as finished is never run again. One that was under way when its server died is run again only
if nothing of it can have taken effect twice; otherwise a person is asked: `_leaf` has that decision.
"""

import asyncio
import json
import keyword
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from belljar.errors import BelljarError, Busy, SessionNotFound
from belljar.executions.execution import Execution
from belljar.executions.policy_check import in_words
from belljar.journal.journal import KILLED, ExecutionRecord
from belljar.journal.run_records import StepRecord, StepState
from belljar.models import ExecutionResult
from belljar.sessions.registry import Registry
from belljar.toolbox.arguments import BadArguments, Parameters
from belljar.toolbox.base import Question, QuestionReply
from belljar.toolbox.broker import approval_text
from belljar.toolbox.names import names_of
from belljar.workflows import forms
from belljar.workflows.checks import Tools
from belljar.workflows.definition import (
    MOST_ITERATIONS,
    CodeExecution,
    Condition,
    Definition,
    FormStep,
    FormTarget,
    Goto,
    Loop,
    Parallel,
    Step,
    StepType,
    SubWorkflow,
    ToolCall,
)
from belljar.workflows.guardrails import StepGuards
from belljar.workflows.library import reference_of
from belljar.workflows.live_run import POLL_S, LiveRun, Released, StopRun
from belljar.workflows.questions import RunQuestion, fate_question, missing_fields, read_question
from belljar.workflows.run_session import RunSession
from belljar.workflows.templates import MOST_VALUE_BYTES, TemplateFailed, evaluated, plain_value, rendered

BUSY_S = 1.0
MOST_BUSY_S = 300.0
MOST_BACKOFF_S = 3_600.0
_RAN = "had begun when its server ended, and it is not known how far it came"
_UNSAVED = "ran to its end, but its server ended before the variables that it left were saved"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step gave, or how it failed."""

    value: dict[str, Any]
    state: Literal["done", "failed", "skipped", "declined", "expired"] = "done"
    failure: str = ""
    """Why it failed: a status of an execution, or `template`."""

    @property
    def error(self) -> str:
        """Return the error in words."""
        return str(self.value.get("error") or self.state)


@dataclass(slots=True)
class Scope:
    """The values that expressions may use at one place of a workflow."""

    definition: Definition
    values: dict[str, Any]
    prefix: str
    """The beginning of the paths of its steps."""

    def inner(self, prefix: str, **more: Any) -> "Scope":
        """Return a scope within this one."""
        return Scope(self.definition, {**self.values, **more}, prefix)


class Interpreter:
    """Drives one run."""

    def __init__(
        self,
        run: LiveRun,
        sessions: Registry,
        tools: Tools | None,
        types: Mapping[str, StepType],
        *,
        reruns_failed: bool = False,
    ) -> None:
        self._run = run
        self._sessions = sessions
        self._tools = tools
        self._types = types
        self._principal = run.record.principal
        self._guards = StepGuards(run.definition)
        self._reruns_failed = reruns_failed
        """Whether the step at which the run ended is tried again, because a person resumes it."""

    async def run(self, session: RunSession, variables: dict[str, Any]) -> Any:
        """Run all steps and return the value of the last; raise `StopRun` or `Released` if it does not come to that."""
        definition = self._run.definition
        for name, value in variables.items():
            session.set_variable(name, value)
        if not session.is_restored:
            for path, rows in self._run.log.items():
                if rows[-1].state == "done":
                    session.set_step(path.rpartition(".")[2], _recorded(rows[-1]).value)
        return await self._block(definition.steps, Scope(definition, dict(variables), ""), session)

    async def _block(self, steps: tuple[Step, ...], scope: Scope, session: RunSession) -> Any:
        """Run a list of steps; return the result of the last one that gave one."""
        last: Any = None
        index = 0
        while index < len(steps):
            step = steps[index]
            path = f"{scope.prefix}{step.name}"
            outcome = await self._step(step, path, scope, session)
            scope.values[step.name] = outcome.value
            session.set_step(step.name, outcome.value)
            index += 1
            if outcome.state == "done":
                last = outcome.value.get("result")
            elif outcome.state in ("failed", "declined"):
                on_error = step.form.on_error
                if isinstance(on_error, Goto):
                    index = next(number for number, each in enumerate(steps) if each.name == on_error.goto)
                elif on_error == "stop":
                    raise self._end_of(path, outcome)
        return last

    @staticmethod
    def _end_of(path: str, outcome: StepOutcome) -> StopRun:
        if outcome.state == "declined":
            return StopRun("stopped", f"step {path} was declined")
        return StopRun("failed", f"step {path}: {outcome.error}")

    async def _step(self, step: Step, path: str, scope: Scope, session: RunSession) -> StepOutcome:
        last = self._run.last(path)
        if step.blocks or isinstance(step.config, SubWorkflow):
            if last is not None and (last.state == "done" or (last.state == "failed" and step.form.on_error != "stop")):
                if _has_code((step,), scope.definition):
                    session.note_replayed()
                return _recorded(last)
            self._run.check_wanted()
            return await self._composite(step, path, scope, session)
        return await self._leaf(step, path, scope, session)

    # Steps with other steps in them

    async def _composite(self, step: Step, path: str, scope: Scope, session: RunSession) -> StepOutcome:
        try:
            match step.config:
                case Condition():
                    result = await self._condition(step, step.config, path, scope, session)
                case Loop():
                    result = await self._loop(step, step.config, path, scope, session)
                case Parallel():
                    result = await self._parallel(step, path, scope, session)
                case SubWorkflow():
                    result = await self._sub_workflow(step.config, path, scope, session)
                case _:
                    raise TypeError(f"{step.type} has no steps")
        except TemplateFailed as error:
            return self._failed_decision(path, str(error))
        except StopRun as stop:
            if stop.state == "failed" and step.form.on_error != "stop":
                return self._failed_decision(path, stop.reason)
            raise
        value = _composite_value(result)
        self._run.decide(path, "done", value)
        self._run.tell("end", path, "done")
        return StepOutcome(value)

    def _failed_decision(self, path: str, reason: str) -> StepOutcome:
        value = _nothing("failed", reason)
        self._run.decide(path, "failed", value, error=reason)
        self._run.tell("end", path, f"failed: {reason}")
        return StepOutcome(value, "failed", "template")

    def _decided(self, path: str) -> Any:
        """Return what a step decided before its server died; None if it had not."""
        last = self._run.last(path)
        is_known = last is not None and last.value is not None and last.state != "failed"
        return json.loads(last.value) if is_known else None  # pyright: ignore

    async def _condition(self, step: Step, config: Condition, path: str, scope: Scope, session: RunSession) -> Any:
        decided = self._decided(path)
        if decided is None:
            is_true = _truth(config.if_, scope.values)
            decided = {"branch": 0 if is_true else 1}
            self._run.decide(path, "running", decided)
            self._run.tell("begin", path, "then" if is_true else "else")
        steps = step.blocks[decided["branch"]]
        return await self._block(steps, scope.inner(f"{path}."), session)

    async def _loop(self, step: Step, config: Loop, path: str, scope: Scope, session: RunSession) -> list[Any]:
        results: list[Any] = []
        if config.for_ is None:
            return await self._while(step, config, path, scope, session)
        decided = self._decided(path)
        if decided is None:
            found = rendered(config.for_, scope.values)
            if not isinstance(found, list):
                raise TemplateFailed(f"for is {type(found).__name__}, not a list")
            items = cast("list[Any]", found)
            if len(items) > MOST_ITERATIONS:
                raise TemplateFailed(f"for has {len(items):,} items, the limit is {MOST_ITERATIONS:,}")
            decided = {"items": _plain(items)}
            self._run.decide(path, "running", decided)
            self._run.tell("begin", path, f"{len(items)} rounds")
        for index, item in enumerate(decided["items"]):
            session.set_variable(config.as_, item)
            inner = scope.inner(f"{path}[{index}].", **{config.as_: item})
            results.append(await self._block(step.blocks[0], inner, session))
        return results

    async def _while(self, step: Step, config: Loop, path: str, scope: Scope, session: RunSession) -> list[Any]:
        results: list[Any] = []
        inner = scope.inner(path, **{each.name: _NOTHING for each in step.blocks[0]})
        while _truth(config.while_ or False, inner.values):
            if len(results) >= (config.most or 1):
                raise TemplateFailed(f"while still holds after {config.most} rounds, the most that it may have")
            inner.prefix = f"{path}[{len(results)}]."
            inner.values[config.as_] = len(results)
            session.set_variable(config.as_, len(results))
            results.append(await self._block(step.blocks[0], inner, session))
        return results

    async def _sub_workflow(self, config: SubWorkflow, path: str, scope: Scope, session: RunSession) -> Any:
        child = scope.definition.children[reference_of(config)]
        decided = self._decided(path)
        if decided is None:
            decided = {"variables": {**child.variables, **_plain(rendered(config.variables, scope.values))}}
            self._run.decide(path, "running", decided)
            self._run.tell("begin", path, child.name)
        for name, value in decided["variables"].items():
            session.set_variable(name, value)
        return await self._block(child.steps, Scope(child, dict(decided["variables"]), f"{path}."), session)

    # Parallel branches

    async def _parallel(self, step: Step, path: str, scope: Scope, session: RunSession) -> list[Any]:
        if self._decided(path) is None:
            self._run.decide(path, "running", {"branches": len(step.blocks)})
            self._run.tell("begin", path, f"{len(step.blocks)} branches")
        # What the workflow has set so far must be in the session before it is forked.
        pending = [index for index in range(len(step.blocks)) if not self._is_done(f"{path}[{index}]")]
        if pending and _has_code((step,), scope.definition):
            await self._assign(session, path)
        sessions = {index: await self._branch_session(f"{path}[{index}]", session) for index in pending}
        found = await asyncio.gather(
            *(
                self._branch(step.blocks[index], f"{path}[{index}]", scope, sessions.get(index))
                for index in range(len(step.blocks))
            ),
            return_exceptions=True,
        )
        # Every branch has come to its end, or to a question, before the run does.
        for kind in (asyncio.CancelledError, StopRun, Released, BaseException):
            if (error := next((each for each in found if isinstance(each, kind)), None)) is not None:
                raise error
        return list(found)

    def _is_done(self, path: str) -> bool:
        last = self._run.last(path)
        return last is not None and last.state == "done"

    async def _branch_session(self, path: str, session: RunSession) -> RunSession:
        """Return the session of a branch: the one it had, if it has left something there, or a new fork."""
        last = self._run.last(path)
        if last is not None and last.session_id:
            known = session.branch(last.session_id)
            if (saved := self._latest_saved(path, known)) or not session.keeps_variables:
                known.use_saved(saved, is_dirty=True)
                return known
            if await known.has_live_kernel():
                return known
        while True:
            await session.reach()
            try:
                fork, _ = await self._sessions.fork(session.id, self._principal)
                break
            except Busy:
                await self._run.pause(BUSY_S)
                self._run.check_wanted()
        self._run.decide(path, "running", {}, session_id=fork.id)
        return session.branch(fork.id)

    async def _branch(self, steps: tuple[Step, ...], path: str, scope: Scope, session: RunSession | None) -> Any:
        if session is None:
            return self._decided(path)["result"]
        result = await self._block(steps, scope.inner(f"{path}."), session)
        self._run.decide(path, "done", {"result": result}, session_id=session.id)
        session.forget_saved()
        live = [each for each in self._sessions.of(self._principal) if each.id == session.id and each.is_idle]
        for each in live:
            # It is not needed any more, and what it ran stays on record.
            await self._sessions.closer.retire(each, "was a branch of a workflow that has come to its end")
        return result

    def _latest_saved(self, prefix: str, session: RunSession) -> str:
        """Return the execution after which a session's variables were saved last."""
        found = [
            row.execution_id
            for path, rows in self._run.log.items()
            for row in rows
            if path.startswith(f"{prefix}.") and row.session_id == session.id and row.execution_id
        ]
        return next((each for each in reversed(found) if session.has_saved(each)), "")

    # Steps that do something

    async def _leaf(self, step: Step, path: str, scope: Scope, session: RunSession) -> StepOutcome:
        """Run a step, or take what is on record of it."""
        last = self._run.last(path)
        attempt = last.attempt if last is not None else 1
        if last is not None:
            if isinstance(step.config, CodeExecution) and last.execution_id:
                session.note_replayed()
            match last.state:
                case "done" | "skipped":
                    return _recorded(last)
                case "expired" | "declined" | "failed":
                    outcome = _recorded(last)
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
            await self._back_off(step, path)
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

    async def _back_off(self, step: Step, path: str) -> None:
        backoff_s = step.retry.backoff_s if step.retry is not None else 0.0
        wait_s = min(MOST_BACKOFF_S, backoff_s * 2 ** (self._run.failures(path) - 1))
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
                    return await self._form(step.config, path, attempt, scope, session)
                case CodeExecution():
                    code, expected = step.config.code, ""
                    if (failed := await self._assign(session, path, attempt)) is not None:
                        return failed
                case ToolCall():
                    arguments = _plain(rendered(step.config.arguments, scope.values))
                    code, expected = await self._call_code(step.config, arguments)
                case _:
                    values = _plain(rendered(step.config.model_dump(), scope.values))
                    code, expected = f"config = {values!r}\n{self._types[step.type].code}", ""
                    if (failed := await self._assign(session, path, attempt)) is not None:
                        return failed
            with self._run.working():
                return await self._execute(step, path, attempt, code, expected, session)
        except TemplateFailed as error:
            return self._finish(path, attempt, _failure(str(error), "template"), session_id=session.id)
        except (SessionNotFound, Busy):
            raise
        except BelljarError as error:
            return self._finish(path, attempt, _failure(f"{error.code}: {error}", "error"), session_id=session.id)

    async def _assign(self, session: RunSession, path: str, attempt: int = 1) -> StepOutcome | None:
        result = await self._patiently(session.assign)
        if result is None:
            return None
        reason = f"the variables of the workflow could not be set: {result.error or result.cause}"
        return self._finish(path, attempt, _failure(reason, result.status), session_id=session.id)

    async def _call_code(self, config: ToolCall, arguments: dict[str, Any]) -> tuple[str, str]:
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
        function = names.function(config.server, config.tool)
        given = (
            ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            if all(name.isidentifier() and not keyword.iskeyword(name) for name in arguments)
            else f"**{arguments!r}"
        )
        code = f"from servers.{names.package(config.server)} import {function}\n{function}({given})"
        return code, approval_text(tool, checked)

    # One execution

    async def _execute(
        self, step: Step, path: str, attempt: int, code: str, expected: str, session: RunSession
    ) -> StepOutcome | int:
        guard = self._guards.of(step)
        if guard is not None and not self._approved(path, attempt):
            inspection = await guard.examine(code, "")
            if inspection.decision == "deny":
                reason = f"the guardrails of the workflow do not allow its code: {in_words(inspection)}"
                return self._finish(path, attempt, _failure(reason, "rejected"), session_id=session.id)
            if inspection.decision == "ask":
                question = Question(f"May step {path} run? {in_words(inspection)}", is_ours=True)
                return await self._ask_approval(path, attempt, question, begun=False)
        with (await session.reach()).tightened(guard) if guard is not None else nullcontext():
            return await self._execute_guarded(step, path, attempt, code, expected, session)

    async def _execute_guarded(
        self, step: Step, path: str, attempt: int, code: str, expected: str, session: RunSession
    ) -> StepOutcome | int:
        run = self._run
        key, timeout_s = self._key(path, attempt), self._guards.timeout_s(step)
        await self._patiently(lambda: self._begin(path, attempt, session.id))
        run.tell("begin", path)
        execution: Execution = await self._patiently(lambda: session.submit(code, key, timeout_s, wants_value=True))
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

    async def _patiently(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do work again while it is refused because the server is too busy or its journal cannot be written."""
        ends_at = time.monotonic() + MOST_BUSY_S
        while True:
            try:
                return await work()
            except Busy:
                if time.monotonic() > ends_at:
                    raise
            await self._run.pause(BUSY_S)
            self._run.check_wanted()

    async def _follow(
        self, execution: Execution, path: str, attempt: int, expected: str, session: RunSession
    ) -> Question | None:
        """Wait until an execution has ended; return what the policy asks about it, if that ended it before it began."""
        parked = None
        approved = self._approved(path, attempt)
        seen = 0
        while not execution.is_finished:
            seen = self._pass_on(execution, path, seen)
            question = execution.question
            if question is None:
                await execution.wait_for_change(POLL_S)
                await self._stop_if_wanted(execution)
            elif approved and await session.redacted(question.message, is_ours=question.is_ours) == approved:
                execution.reply(QuestionReply("accept"), execution.questions)
                approved = ""
            elif question.is_ours and self._is_before_anything(execution, question, expected):
                # Nothing of it has happened, so it need not wait with a process: it is tried again with the answer.
                parked = replace(question, message=await session.redacted(question.message, is_ours=True))
                execution.reply(QuestionReply("cancel"), execution.questions)
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
        run, number = self._run, execution.questions
        message = await session.redacted(question.message, is_ours=question.is_ours)
        asked = RunQuestion("held", message, question.schema, asked_at=time.time(), is_password=question.is_password)
        run.ask(path, attempt, asked)
        with run.resting(), run.asking(is_held=True):
            while not execution.is_finished and execution.questions == number and execution.question is not None:
                row = run.records.step(run.id, path, attempt)
                if row is not None and row.state == "answered":
                    answer = json.loads(row.answer or "{}")
                    execution.reply(QuestionReply(answer["action"], answer["values"]), number)
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
            if event.kind in ("stdout", "stderr", "notice") and event.text:
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
        run.ask(path, attempt, RunQuestion("approval", question.message, asked_at=time.time()))
        return await self._approval(path, attempt)

    async def _approval(self, path: str, attempt: int) -> int | StepOutcome:
        with self._run.resting(), self._run.asking():
            answer = await self._run.answer_of(path, attempt)
        if answer is None or answer["action"] != "accept":
            reason = "the person was asked and did not allow it"
            return self._finish(path, attempt, StepOutcome(_nothing("declined", reason), "declined", "declined"))
        return attempt

    async def _conclude(
        self, step: Step, path: str, attempt: int, result: ExecutionResult, session: RunSession
    ) -> StepOutcome:
        """Record what an execution gave; its variables are saved before it counts as done."""
        is_gone = result.status in ("died", "out_of_memory", "rejected")
        notes = ""
        if isinstance(step.config, CodeExecution) and not is_gone:
            # Also after code that failed, because it may have changed variables before it did.
            notes = await session.save(result.execution_id)
        if result.state == "lost" and result.lost:
            notes = "; ".join(filter(None, [notes, f"lost: {', '.join(result.lost[:20])}"]))
        value = session.value_of(result)
        outcome = StepOutcome(value) if result.status == "ok" else StepOutcome(value, "failed", result.status)
        return self._finish(path, attempt, outcome, notes=notes, session_id=session.id)

    def _finish(
        self, path: str, attempt: int, outcome: StepOutcome, *, notes: str = "", session_id: str = ""
    ) -> StepOutcome:
        run, state = self._run, _step_state(outcome)
        if run.records.step(run.id, path, attempt) is None:
            run.records.begin(run.id, path, attempt, session_id)
        value = json.dumps({**outcome.value, "failure": outcome.failure})
        run.records.finish(run.id, path, attempt, state, value=value, error=_error_of(outcome), notes=notes)
        run.note(path, attempt)
        run.tell("end", path, _told(outcome))
        if notes:
            run.tell("note", path, notes)
        return outcome

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
        leaves_nothing = not isinstance(step.config, CodeExecution) or result.status in ("died", "out_of_memory")
        if leaves_nothing or result.status == "rejected" or not session.keeps_variables:
            return await self._conclude(step, path, attempt, result, session)
        if session.has_saved(record.id):
            session.use_saved(record.id)
            value = session.value_of(result)
            outcome = StepOutcome(value) if result.status == "ok" else StepOutcome(value, "failed", result.status)
            return self._finish(path, attempt, outcome, session_id=session.id)
        if await session.has_live_kernel():
            return await self._conclude(step, path, attempt, result, session)
        return await self._unknown(step, path, attempt, _UNSAVED)

    async def _unknown(self, step: Step, path: str, attempt: int, why: str) -> StepOutcome | int:
        """Decide on a step of which it is not known how far it came: run it again if that is safe, else ask."""
        if step.form.repeat or self._types[step.type].repeat or await self._is_repeatable(step):
            return self._next(path, attempt, why)
        self._run.ask(path, attempt, fate_question(path, why))
        return await self._fate(path, attempt)

    async def _is_repeatable(self, step: Step) -> bool:
        """Return whether a step does nothing more when it is done twice, by what its tool says of itself."""
        config = step.config
        if not isinstance(config, ToolCall) or self._tools is None:
            return False
        tool = (await self._tools.catalogue(config.server, config.tool)).find(config.server, config.tool)
        return tool is not None and (tool.annotations.read_only or tool.annotations.idempotent)

    async def _fate(self, path: str, attempt: int) -> StepOutcome | int:
        with self._run.asking():
            answer = await self._run.answer_of(path, attempt)
        choice = answer["values"].get("choice") if answer and answer["action"] == "accept" else "stop"
        if choice == "again":
            return self._next(path, attempt, "it is run again, as a person said")
        if choice == "skip":
            outcome = StepOutcome(_nothing("skipped", "a person said to skip it"), "skipped")
            return self._finish(path, attempt, outcome)
        # The question stays open for whoever resumes the run.
        self._run.ask(path, attempt, fate_question(path, _RAN))
        raise StopRun("stopped", f"a person said to stop at step {path}")

    def _next(self, path: str, attempt: int, why: str) -> int:
        run = self._run
        run.records.finish(run.id, path, attempt, "repeated", error=why)
        run.note(path, attempt)
        run.tell("note", path, why)
        return attempt + 1

    # Forms

    async def _form(self, config: FormStep, path: str, attempt: int, scope: Scope, session: RunSession) -> StepOutcome:
        """Ask for what is missing, and fill in the target with all of it, if there is one."""
        given = _plain(rendered(config.values, scope.values))
        message = str(rendered(config.message, scope.values))
        if config.target is None:
            asked, faults = missing_fields(config.fields, given) if config.fields else ({}, {})
            kept = {name: value for name, value in given.items() if name not in faults}
            answered = await self._answered(config, path, attempt, RunQuestion("form", message, asked, kept), faults)
            return answered if isinstance(answered, StepOutcome) else self._finish(path, attempt, _filled(answered))
        target = FormTarget.model_validate(_plain(rendered(config.target.model_dump(), scope.values)))
        read = await self._leaf(forms.reading(target, given), f"{path}.read", scope, session)
        if read.state != "done":
            return self._finish(path, attempt, _failure(f"the form could not be read: {read.error}", "error"))
        try:
            form = forms.read_form(read.value.get("result"))
        except ValueError as error:
            return self._finish(path, attempt, _failure(str(error), "error"))
        question = RunQuestion("form", message, form.asked, form.values)
        answered = await self._answered(config, path, attempt, question, form.missing)
        if isinstance(answered, StepOutcome):
            return answered
        values, person = answered
        filling = forms.filling(target, form, {**given, **values}, person)
        filled = await self._leaf(filling, f"{path}.fill", scope, session)
        if filled.state != "done":
            return self._finish(path, attempt, _failure(f"the form was not filled in: {filled.error}", "error"))
        return self._finish(path, attempt, StepOutcome(filled.value))

    async def _answered(
        self, config: FormStep, path: str, attempt: int, question: RunQuestion, faults: Mapping[str, str]
    ) -> StepOutcome | tuple[dict[str, Any], list[str]]:
        """Return all values and the names of those that the person gave; or how the question ended without them."""
        run = self._run
        last = run.last(path)
        if last is None or last.attempt != attempt or last.question is None:
            if not question.schema and (config.fields or (config.target is not None and not question.message)):
                return question.given, []  # nothing is missing, and there is nothing to consent to
            reasons = [f"{name}: {fault}" for name, fault in faults.items()]
            told = "\n".join(filter(None, [question.message, *reasons])) or "Fill in the form"
            now = time.time()
            asked = replace(question, message=told, asked_at=now)
            run.ask(path, attempt, asked, now + config.expires_s if config.expires_s else None)
            run.note(path, attempt)
        with run.asking():
            answer = await run.answer_of(path, attempt)
        if answer is None:
            return await self._expire(config, path, attempt)
        if answer["action"] != "accept":
            reason = "a person declined"
            return self._finish(path, attempt, StepOutcome(_nothing("declined", reason), "declined", "declined"))
        row = run.records.step(run.id, path, attempt)
        known = read_question(row.question).given if row is not None and row.question else {}
        return {**known, **answer["values"]}, [*answer["values"]]

    async def _expire(self, config: FormStep, path: str, attempt: int) -> StepOutcome:
        reason = f"nobody answered within {config.expires_s:g} s"
        outcome = self._finish(path, attempt, StepOutcome(_nothing("expired", reason), "expired", "expired"))
        if config.on_expiry == "stop":
            raise StopRun("stopped", f"step {path}: {reason}")
        return outcome


# Values and words

_NOTHING: dict[str, Any] = {"result": None, "stdout": "", "files": [], "status": "", "error": ""}


def _nothing(status: str, error: str) -> dict[str, Any]:
    return {**_NOTHING, "status": status, "error": error}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {**_NOTHING, "result": values, "status": "done"}


def _filled(answered: tuple[dict[str, Any], list[str]]) -> StepOutcome:
    return StepOutcome(_given(answered[0]))


def _failure(reason: str, failure: str) -> StepOutcome:
    return StepOutcome(_nothing("failed", reason), "failed", failure)


def _recorded(row: StepRecord) -> StepOutcome:
    value: dict[str, Any] = json.loads(row.value or "{}")
    failure = str(value.pop("failure", ""))
    state: Any = row.state
    return StepOutcome(value or _nothing(row.state, row.error), state, failure)


def _step_state(outcome: StepOutcome) -> StepState:
    return outcome.state


def _error_of(outcome: StepOutcome) -> str:
    return "" if outcome.state == "done" else outcome.error


def _told(outcome: StepOutcome) -> str:
    """Return how a step ended, in a few words."""
    if outcome.state != "done":
        return f"{outcome.state}: {outcome.error}" if outcome.error != outcome.state else outcome.state
    result = outcome.value.get("result")
    shown = "" if result is None else f", {json.dumps(result, ensure_ascii=False)}"
    return f"done{shown if len(shown) <= 200 else shown[:199] + '…'}"


def _composite_value(result: Any) -> dict[str, Any]:
    size = len(json.dumps(result))
    if size > MOST_VALUE_BYTES:
        return {"result_bytes": size, "status": "done"}
    return {**_NOTHING, "result": result, "status": "done"}


def _plain(value: Any) -> Any:
    try:
        return plain_value(value)
    except ValueError as error:
        raise TemplateFailed(str(error)) from None


def _truth(condition: str | bool, values: Mapping[str, Any]) -> bool:
    found = condition
    if isinstance(condition, str):
        found = rendered(condition, values) if "{{" in condition else evaluated(condition, values)
    if not isinstance(found, bool):
        raise TemplateFailed(f"the condition is {json.dumps(found)[:100]}, neither true nor false")
    return found


def _was_killed(result: ExecutionResult) -> bool:
    return KILLED in str(result.cause)


def _has_code(steps: tuple[Step, ...], definition: Definition) -> bool:
    """Return whether there is code among the steps and those inside them."""
    for step in steps:
        if isinstance(step.config, CodeExecution) or any(_has_code(block, definition) for block in step.blocks):
            return True
        if isinstance(step.config, SubWorkflow):
            child = definition.children[reference_of(step.config)]
            if _has_code(child.steps, child):
                return True
    return False
