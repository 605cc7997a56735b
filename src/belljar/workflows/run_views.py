"""What callers are told of runs and workflows: models for programs, and the text that models and people read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, JsonValue

from belljar.journal.run_records import ENDED, RunRecord, RunRecords, RunState, StepRecord
from belljar.models import Model, iso
from belljar.workflows.questions import read_question

MAX_STEPS_SHOWN = 60
MAX_RESULT_CHARS = 500
MAX_ERROR_CHARS = 2_000


class QuestionInfo(Model):
    """A question of a run to a person."""

    step: str
    message: str
    fields: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """A JSON Schema of the answer; empty for consent, which is answered with `{}`."""
    in_console: bool = False
    """Whether only people at the server can answer it: in its console, or with `belljar inbox`."""
    asked_at: str = ""
    expires_at: str | None = None


class StepInfo(Model):
    """One step of a run, at its latest attempt."""

    step: str
    state: str
    attempt: int = 1
    result: JsonValue = None
    error: str = ""
    notes: str = ""
    execution_id: str = ""
    duration_s: float | None = None


class RunInfo(Model):
    """A run of a workflow."""

    run: str
    name: str
    state: RunState
    step: str = ""
    """The step that it is at."""
    question: QuestionInfo | None = None
    """The first of the questions that it waits with."""
    started_at: str
    ended_at: str | None = None
    reason: str = ""
    """Why it has ended, if not well."""
    result: JsonValue = None
    session_id: str = ""
    questions: list[QuestionInfo] = Field(default_factory=list[QuestionInfo])
    steps: list[StepInfo] = Field(default_factory=list[StepInfo])
    left_out: int = 0
    """How many steps are not listed."""
    notes: list[str] = Field(default_factory=list[str])
    """What of the workflow's guardrails does less or something else than it says; told once, as it begins."""


class WorkflowInfo(Model):
    """A workflow that can be run by its name."""

    name: str
    description: str = ""
    variables: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    steps: int = 0
    error: str = ""
    """Why it cannot be run as it is."""


def run_info(records: RunRecords, run: RunRecord, state: RunState, *, most: int = MAX_STEPS_SHOWN) -> RunInfo:
    """Return what is known of a run, with its latest steps; `state` is its state as of now."""
    steps, count = records.latest_steps(run.id, most)
    latest = latest_attempts(steps)
    questions = [question_info(step) for step in latest if step.state == "waiting" and step.question]
    if state in ENDED:
        questions = []
    shown = latest[-most:] if most else []
    return RunInfo(
        run=run.id,
        name=run.name,
        state=state,
        step=_current(latest, state),
        question=questions[0] if questions else None,
        started_at=iso(run.started_at),
        ended_at=iso(run.ended_at) if run.ended_at else None,
        reason=run.end,
        result=json.loads(run.value) if run.value is not None else None,
        session_id=run.session_id,
        questions=questions,
        steps=[_step_info(step) for step in shown],
        left_out=count - len(shown),
    )


def latest_attempts(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the latest attempt of each step, in the order the steps began."""
    found: dict[str, StepRecord] = {}
    for step in steps:
        if step.path not in found or step.attempt >= found[step.path].attempt:
            found[step.path] = step
    return [*found.values()]


def question_info(step: StepRecord) -> QuestionInfo:
    """Return the question that a step waits with."""
    question = read_question(step.question or "")
    return QuestionInfo(
        step=step.path,
        message=question.message,
        fields=question.schema,
        in_console=question.in_console,
        asked_at=iso(question.asked_at or step.began_at),
        expires_at=iso(step.expires_at) if step.expires_at else None,
    )


def _current(latest: Sequence[StepRecord], state: RunState) -> str:
    open_steps = [step.path for step in latest if step.state in ("running", "waiting", "answered")]
    if open_steps:
        return open_steps[-1]
    return latest[-1].path if latest and state != "done" else ""


def _step_info(step: StepRecord) -> StepInfo:
    value: dict[str, Any] = json.loads(step.value) if step.value else {}
    result = value.get("result")
    shown = json.dumps(result, ensure_ascii=False)
    if len(shown) > MAX_RESULT_CHARS:
        result = f"{shown[: MAX_RESULT_CHARS - 1]}…"
    elif "result_bytes" in value:
        result = f"<{value['result_bytes']:,} bytes, not kept>"
    return StepInfo(
        step=step.path,
        state=step.state,
        attempt=step.attempt,
        result=result,
        error=step.error[:MAX_ERROR_CHARS],
        notes=step.notes[:MAX_ERROR_CHARS],
        execution_id=step.execution_id,
        duration_s=round(step.ended_at - step.began_at, 3) if step.ended_at else None,
    )


def run_text(info: RunInfo) -> str:
    """Return a run as a model or a person reads it, with what can be done next."""
    lines = [f"run {info.run} of {info.name}: {info.state}{f' ({info.reason})' if info.reason else ''}"]
    lines += [f"Note: {note}" for note in info.notes]
    if info.left_out:
        lines.append(f"  … {info.left_out} earlier steps: run://{info.run} has the latest")
    lines += [f"  {_step_line(step)}" for step in info.steps]
    if info.state == "done":
        lines.append(f"Result: {json.dumps(info.result, ensure_ascii=False)}")
    for question in info.questions:
        lines.append(f"Asks ({question.step}): {question.message}")
        if question.fields:
            lines.append(f"  Fields: {json.dumps(question.fields.get('properties', {}), ensure_ascii=False)}")
    asked = [question for question in info.questions if not question.in_console]
    if info.questions and not asked:
        lines.append(
            "A person has to decide at the server, in `belljar console` or with `belljar inbox`: tell them. "
            f'Then run_workflow(run_id="{info.run}", wait_s=45) returns the rest; an answer from here is refused.'
        )
    elif asked:
        example = _example(asked[0].fields)
        step = f', step="{asked[0].step}"' if len(info.questions) > 1 else ""
        lines.append(
            f'A person has to decide: run_workflow(run_id="{info.run}", answer={example}{step}) passes their answer '
            f'on, answer={{"action": "decline"}} their refusal.'
        )
    elif info.state == "running":
        lines.append(f'It goes on in the background: run_workflow(run_id="{info.run}", wait_s=45) returns the rest.')
    elif info.state in ("interrupted", "failed", "stopped"):
        broken = [step.execution_id for step in info.steps if step.state == "failed" and step.execution_id]
        if broken:
            lines.append(f'get_execution(execution_id="{broken[-1]}") has what the failed step printed.')
        lines.append(f'run_workflow(run_id="{info.run}", resume=true) goes on from the step where it ended.')
    if info.session_id:
        lines.append(f"[session_id: {info.session_id}]")
    return "\n".join(lines)


def _example(schema: Mapping[str, Any]) -> str:
    properties: Mapping[str, Any] = schema.get("properties", {})
    return "{" + ", ".join(f'"{name}": …' for name in properties) + "}"


def _step_line(step: StepInfo) -> str:
    parts = [f"{step.step}: {step.state}"]
    if step.attempt > 1:
        parts.append(f" (attempt {step.attempt})")
    if step.error:
        parts.append(f", {step.error}")
    elif step.state == "done" and step.result is not None:
        shown = step.result if isinstance(step.result, str) else json.dumps(step.result, ensure_ascii=False)
        parts.append(f", {shown}")
    if step.notes:
        parts.append(f" [{step.notes}]")
    return "".join(parts)
