"""The guardrails of workflows and steps: rules in the form of a policy file, which only add to the server's policy.

A call or code has to pass both. Personal data that they name is hidden in the whole run, because a run has one session.
What a running session cannot be given later, memory and network, is refused here.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import concat
from typing import Any

from pydantic import ValidationError

from belljar.policy.guard import Guard, compile_policy
from belljar.policy.rules import Policy, PolicyLimits, ToolRule
from belljar.privacy.rules import PrivacyRules
from belljar.workflows import switches
from belljar.workflows.definition import Definition, Step, StepForm, SubWorkflow, WorkflowForm
from belljar.workflows.library import reference_of
from belljar.workflows.source_text import Path

MAX_REGIONS = 4
"""The most countries whose telephone numbers a run looks for: each takes a second over 40 kB of nothing but digits."""
_PRIVACY = ("hide", "phone_regions")
"""The privacy rules that a workflow may have; which tools get something back is the server's to say."""


def guardrails_problem(policy: Policy) -> str:
    """Return what of a workflow's guardrails cannot be obeyed; empty when all can."""
    if policy.limits.model_dump(exclude={"max_execution_time"}, exclude_none=True):
        return "guardrails of a workflow can limit max_execution_time, not memory, GPUs or network"
    if others := [name for name in policy.privacy if name not in _PRIVACY]:
        return f"privacy rules of a workflow are {', '.join(_PRIVACY)}, not {others[0][:100]!r}"
    try:
        PrivacyRules.model_validate(policy.privacy)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        return f"privacy.{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}"[:500]
    return ""


def guardrail_notes(definition: Definition) -> list[str]:
    """Return, in words, what of the guardrails does less or something else than it says, with its file and line."""
    found: list[str] = []
    for place in [definition.place, *(step.place for step in definition.walk())]:
        table = _at(definition.source.data, place).get("guardrails")
        found += [str(definition.source.problem((*place, "guardrails"), note)) for note in switches.switch_notes(table)]
    return [*found, *(note for child in definition.children.values() for note in guardrail_notes(child))]


def _at(data: Any, place: Path) -> Mapping[str, Any]:
    for key in place:
        data = data[key]
    return data


def hidden_in(definition: Definition) -> PrivacyRules | None:
    """Return the privacy rules of a run: all that its workflow, steps and sub-workflows name; None for none."""
    tables = [form.guardrails.privacy for form in _forms(definition) if form.guardrails and form.guardrails.privacy]
    return reduce(PrivacyRules.joined, map(PrivacyRules.model_validate, tables)) if tables else None


def _forms(definition: Definition) -> Iterator[WorkflowForm | StepForm]:
    yield definition.form
    yield from (step.form for step in definition.walk())
    for child in definition.children.values():
        yield from _forms(child)


class StepGuards:
    """The guards of one run. A step obeys its own guardrails and those of every step and workflow around it."""

    def __init__(self, definition: Definition) -> None:
        self._outermost = definition.form.guardrails
        self._policies: dict[int, Policy] = {}
        """By the identity of a step's form."""
        self._guards: dict[int, Guard] = {}
        self._collect(definition.steps, self._outermost, definition)

    def _collect(self, steps: tuple[Step, ...], around: Policy | None, definition: Definition) -> None:
        for step in steps:
            # A sub-workflow may be named twice; then its steps obey what is around both places.
            policy = _both(_both(around, step.form.guardrails), self._policies.get(id(step.form)))
            if policy is not None:
                self._policies[id(step.form)] = policy
            for block in step.blocks:
                self._collect(block, policy, definition)
            if isinstance(step.config, SubWorkflow):
                child = definition.children[reference_of(step.config)]
                self._collect(child.steps, _both(policy, child.form.guardrails), child)

    def _policy(self, step: Step) -> Policy | None:
        return self._policies.get(id(step.form), self._outermost)

    def of(self, step: Step) -> Guard | None:
        """Return the guard of a step; None where there are no guardrails for it."""
        policy = self._policy(step)
        if policy is None:
            return None
        # One for each set of rules, so that what is counted is counted over all attempts.
        return self._guards.setdefault(id(policy), Guard(compile_policy(policy)))

    def timeout_s(self, step: Step) -> float | None:
        """Return how long a step may take."""
        policy = self._policy(step)
        limit = policy.limits.max_execution_time if policy is not None else None
        return min((each for each in (limit, step.form.timeout_s) if each is not None), default=None)


_STRICTNESS = ("allow", "ask", "deny")


def _both(outer: Policy | None, inner: Policy | None) -> Policy | None:
    """Return a policy that is at least as strict as each of two."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    # A key of a policy that has no entry in `_MERGES` is an error here, because else the outer one would be dropped.
    merged = {name: _MERGES[name](getattr(outer, name), getattr(inner, name)) for name in Policy.model_fields}
    return inner.model_copy(update=merged)


def _shortest(outer: PolicyLimits, inner: PolicyLimits) -> PolicyLimits:
    times = [each.max_execution_time for each in (outer, inner)]
    shortest = min((each for each in times if each is not None), default=None)
    return inner.model_copy(update={"max_execution_time": shortest})


def _denials_first(outer: list[ToolRule], inner: list[ToolRule]) -> list[ToolRule]:
    """Return the rules of both, denials first, because of several rules for a tool the first that decides counts."""
    return sorted([*outer, *inner], key=lambda rule: -_rank(rule.decision))


def _stricter(one: str | None, other: str | None) -> str | None:
    known = [each for each in (one, other) if each is not None]
    return max(known, key=_rank, default=None)


def _rank(decision: str | None) -> int:
    return _STRICTNESS.index(decision) if decision is not None else -1


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "default": _stricter,
    "strict": max,
    "read_only": max,
    "destructive": _stricter,
    "other_kernels": _stricter,
    "limits": _shortest,
    "tools": _denials_first,
    "code": concat,
    "output": concat,
    "privacy": lambda _outer, inner: inner,  # guards know nothing of it: `hidden_in` collects all of a run
}
"""How each key of two policies becomes one that is as strict as both."""
