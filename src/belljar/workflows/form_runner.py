"""Runs a `form` step: asks a person for what is missing, and has the session fill in the target with all of it.

A target is a document or page. Cells of the session read it and fill it in with the session's module `forms`; they are
steps of their own, so a run that is resumed reads and fills nothing twice. What a form asks for comes out of the
session, so it is checked like everything that does.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from belljar.questions.schema import schema_problem
from belljar.workflows.definition import CodeExecution, FilledTarget, FormStep, Step, StepForm
from belljar.workflows.live_run import LiveRun, StopRun
from belljar.workflows.outcomes import Scope, StepOutcome, failed_step, given_values, nothing, plain
from belljar.workflows.questions import RunQuestion, missing_fields, read_question
from belljar.workflows.run_session import RunSession
from belljar.workflows.templates import rendered

MAX_FIELDS = 500
MAX_REASON_CHARS = 200

RunStep = Callable[[Step, str, Scope, RunSession], Awaitable[StepOutcome]]


@dataclass(frozen=True, slots=True)
class _ReadForm:
    """A form as the session has read it."""

    values: dict[str, Any]
    """Values that it has, or that were given and fit."""
    missing: dict[str, str]
    """Why each of the other fields needs a value."""
    asked: dict[str, Any]
    """The schema of what a person has to be asked; empty when nothing is missing."""
    fingerprint: str


class FormRunner:
    """Runs the form steps of one run; `run_step` runs the steps that reading and filling in are."""

    def __init__(self, run: LiveRun, run_step: RunStep) -> None:
        self._run = run
        self._run_step = run_step

    async def run(self, config: FormStep, path: str, attempt: int, scope: Scope, session: RunSession) -> StepOutcome:
        """Ask for what is missing, and fill in the target with all of it, if there is one."""
        given = plain(await rendered(config.values, scope.values))
        message = str(await rendered(config.message, scope.values))
        if config.target is None:
            asked, faults = missing_fields(config.fields, given) if config.fields else ({}, {})
            kept = {name: value for name, value in given.items() if name not in faults}
            answered = await self._ask_person(config, path, attempt, RunQuestion(message, asked, given=kept), faults)
            if isinstance(answered, StepOutcome):
                return answered
            return self._run.finish(path, attempt, StepOutcome(given_values(answered[0])))
        target = FilledTarget.model_validate(plain(await rendered(config.target.model_dump(), scope.values)))
        read = await self._run_step(_reading_step(target, given), f"{path}.read", scope, session)
        if read.state != "done":
            return self._run.finish(path, attempt, failed_step(f"the form could not be read: {read.error}", "error"))
        try:
            form = _read_form(read.value.get("result"))
        except ValueError as error:
            return self._run.finish(path, attempt, failed_step(str(error), "error"))
        question = RunQuestion(message, form.asked, given=form.values)
        answered = await self._ask_person(config, path, attempt, question, form.missing)
        if isinstance(answered, StepOutcome):
            return answered
        values, person = answered
        filling = _filling_step(target, form, {**given, **values}, person)
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
        with run.asking(path, attempt):
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


# The steps that read and fill in a target


def _reading_step(target: FilledTarget, values: Mapping[str, Any]) -> Step:
    """Return the step that reads a form."""
    options = {name: value for name in ("form", "browser") if (value := getattr(target, name))}
    code = f"import forms\nforms.read({target.source!r}, {dict(values)!r}{_named(options)})"
    return _code_step("read", code, repeat=True)


def _filling_step(target: FilledTarget, form: _ReadForm, values: Mapping[str, Any], person: Sequence[str]) -> Step:
    """Return the step that fills in a form and saves or sends it; `person` names the values that the person gave."""
    options: dict[str, Any] = {
        name: value for name in ("form", "browser", "save", "button", "dry_run") if (value := getattr(target, name))
    }
    by = {name: "the person" if name in person else "the workflow" for name in values}
    options |= {"by": by, "fingerprint": form.fingerprint}
    code = f"import forms\nforms.fill({target.source!r}, {dict(values)!r}{_named(options)})"
    # A page is sent once; a file can be written again, and nothing is sent in a trial.
    return _code_step("fill", code, repeat=target.dry_run or bool(target.save))


def _read_form(found: Any) -> _ReadForm:
    """Return what the session says of a form; raise ValueError for anything that no form can be."""
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    schema, values, missing = (fields.get(key) for key in ("asked", "values", "missing"))
    if not all(isinstance(each, dict) for each in (schema, values, missing)):
        raise ValueError("the session read no form")
    properties: Any = cast("dict[str, Any]", schema).get("properties")
    reasons = {str(name): str(why)[:MAX_REASON_CHARS] for name, why in cast("dict[str, Any]", missing).items()}
    if len(reasons) > MAX_FIELDS or not isinstance(properties, dict):
        raise ValueError("the session read a form whose fields do not fit its schema")
    if secret := [name for name in reasons if name not in properties]:
        # A run's questions and answers are on record, where no password belongs.
        raise ValueError(
            f"the form needs a password, {secret[0]}, which no person is asked for here: put it into values"
        )
    asked: dict[str, Any] = {}
    if reasons:
        asked = {
            "type": "object",
            "properties": {name: properties[name] for name in reasons},
            "required": [*reasons],
        }
        if problem := schema_problem(asked):
            raise ValueError(f"a person cannot be asked for what is missing: {problem}")
    return _ReadForm(cast("dict[str, Any]", values), reasons, asked, str(fields.get("fingerprint", ""))[:100])


def _named(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _code_step(name: str, code: str, *, repeat: bool) -> Step:
    form = StepForm.model_validate({"name": name, "type": "code_execution", "repeat": repeat})
    return Step(name, "code_execution", CodeExecution(code=code), form, (), (), 0)
