"""What steps give: their values, how they ended, and which values expressions may use at one place of a workflow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from belljar.inside.expressions import MAX_VALUE_BYTES, plain_value
from belljar.journal.run_records import StepRecord
from belljar.workflows.definition import Definition
from belljar.workflows.templates import TemplateFailed, evaluated, rendered


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


NOTHING: dict[str, Any] = {"result": None, "stdout": "", "files": [], "status": "", "error": ""}


def nothing(status: str, error: str) -> dict[str, Any]:
    """Return the value of a step that gave nothing."""
    return {**NOTHING, "status": status, "error": error}


def given_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the value of a form."""
    return {**NOTHING, "result": values, "status": "done"}


def failed_step(reason: str, failure: str) -> StepOutcome:
    """Return the outcome of a step that failed before or without an execution."""
    return StepOutcome(nothing("failed", reason), "failed", failure)


def recorded(row: StepRecord) -> StepOutcome:
    """Return the outcome that is on record for an attempt."""
    value: dict[str, Any] = json.loads(row.value or "{}")
    failure = str(value.pop("failure", ""))
    state: Any = row.state
    return StepOutcome(value or nothing(row.state, row.error), state, failure)


def error_of(outcome: StepOutcome) -> str:
    """Return the error of an outcome as it is recorded; empty for one that is done."""
    return "" if outcome.state == "done" else outcome.error


def outcome_text(outcome: StepOutcome) -> str:
    """Return how a step ended, in a few words."""
    if outcome.state != "done":
        return f"{outcome.state}: {outcome.error}" if outcome.error != outcome.state else outcome.state
    result = outcome.value.get("result")
    shown = "" if result is None else f", {json.dumps(result, ensure_ascii=False)}"
    return f"done{shown if len(shown) <= 200 else shown[:199] + '…'}"


def composite_value(result: Any) -> dict[str, Any]:
    """Return the value of a step that has others in it."""
    size = len(json.dumps(result))
    if size > MAX_VALUE_BYTES:
        return {"result_bytes": size, "status": "done"}
    return {**NOTHING, "result": result, "status": "done"}


def plain(value: Any) -> Any:
    """Return a value as JSON has it; raises `TemplateFailed` for one that cannot be used."""
    try:
        return plain_value(value)
    except ValueError as error:
        raise TemplateFailed(str(error)) from None


async def truth(condition: str | bool, values: Mapping[str, Any]) -> bool:
    """Return whether a condition holds; raises `TemplateFailed` for one that is neither true nor false."""
    found = condition
    if isinstance(condition, str):
        found = await (rendered(condition, values) if "{{" in condition else evaluated(condition, values))
    if not isinstance(found, bool):
        raise TemplateFailed(f"the condition is {json.dumps(found)[:100]}, neither true nor false")
    return found
