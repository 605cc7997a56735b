"""Runs a `form` step: asks a person for what is missing, and has the session fill in the target with all of it.

The cells that read and fill in a document or page are in `forms.py`; they are steps of their own, so a run that is
resumed reads and fills nothing twice.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from belljar.workflows import forms
from belljar.workflows.definition import FilledTarget, FormStep, Step
from belljar.workflows.live_run import LiveRun, StopRun
from belljar.workflows.outcomes import Scope, StepOutcome, failed_step, given_values, nothing, plain
from belljar.workflows.questions import RunQuestion, missing_fields, read_question
from belljar.workflows.run_session import RunSession
from belljar.workflows.templates import rendered

RunStep = Callable[[Step, str, Scope, RunSession], Awaitable[StepOutcome]]


class FormRunner:
    """Runs the form steps of one run; `run_step` runs the steps that reading and filling in are."""

    def __init__(self, run: LiveRun, run_step: RunStep) -> None:
        self._run = run
        self._run_step = run_step

    async def run(self, config: FormStep, path: str, attempt: int, scope: Scope, session: RunSession) -> StepOutcome:
        """Ask for what is missing, and fill in the target with all of it, if there is one."""
        given = plain(rendered(config.values, scope.values))
        message = str(rendered(config.message, scope.values))
        if config.target is None:
            asked, faults = missing_fields(config.fields, given) if config.fields else ({}, {})
            kept = {name: value for name, value in given.items() if name not in faults}
            answered = await self._ask_person(config, path, attempt, RunQuestion("form", message, asked, kept), faults)
            if isinstance(answered, StepOutcome):
                return answered
            return self._run.finish(path, attempt, StepOutcome(given_values(answered[0])))
        target = FilledTarget.model_validate(plain(rendered(config.target.model_dump(), scope.values)))
        read = await self._run_step(forms.reading(target, given), f"{path}.read", scope, session)
        if read.state != "done":
            return self._run.finish(path, attempt, failed_step(f"the form could not be read: {read.error}", "error"))
        try:
            form = forms.read_form(read.value.get("result"))
        except ValueError as error:
            return self._run.finish(path, attempt, failed_step(str(error), "error"))
        question = RunQuestion("form", message, form.asked, form.values)
        answered = await self._ask_person(config, path, attempt, question, form.missing)
        if isinstance(answered, StepOutcome):
            return answered
        values, person = answered
        filling = forms.filling(target, form, {**given, **values}, person)
        filled = await self._run_step(filling, f"{path}.fill", scope, session)
        if filled.state != "done":
            return self._run.finish(path, attempt, failed_step(f"the form was not filled in: {filled.error}", "error"))
        return self._run.finish(path, attempt, StepOutcome(filled.value))

    async def _ask_person(
        self, config: FormStep, path: str, attempt: int, question: RunQuestion, faults: Mapping[str, str]
    ) -> StepOutcome | tuple[dict[str, Any], list[str]]:
        """Return all values and the names of those that the person gave; or how the question ended without them."""
        run = self._run
        last = run.last(path)
        if last is None or last.attempt != attempt or last.question is None:
            if not question.schema and (config.fields or (config.target is not None and not question.message)):
                return question.given, []  # nothing is missing, and there is nothing to consent to
            reasons = [f"{name}: {fault}" for name, fault in faults.items()]
            message = "\n".join(filter(None, [question.message, *reasons])) or "Fill in the form"
            now = time.time()
            asked = replace(question, message=message, asked_at=now)
            await run.ask(path, attempt, asked, now + config.expires_s if config.expires_s else None)
            run.note(path, attempt)
        with run.asking():
            answer = await run.answer_of(path, attempt)
        if answer is None:
            return await self._expire(config, path, attempt)
        if answer["action"] != "accept":
            reason = "a person declined"
            return self._run.finish(path, attempt, StepOutcome(nothing("declined", reason), "declined", "declined"))
        row = run.records.step(run.id, path, attempt)
        known = read_question(row.question).given if row is not None and row.question else {}
        return {**known, **answer["values"]}, [*answer["values"]]

    async def _expire(self, config: FormStep, path: str, attempt: int) -> StepOutcome:
        reason = f"nobody answered within {config.expires_s:g} s"
        outcome = self._run.finish(path, attempt, StepOutcome(nothing("expired", reason), "expired", "expired"))
        if config.on_expiry == "stop":
            raise StopRun("stopped", f"step {path}: {reason}")
        return outcome
