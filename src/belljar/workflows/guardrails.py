"""The guardrails of workflows and steps: rules in the form of a policy file, which only add to the server's policy.

A call or code has to pass both. What a running session cannot be given later, memory and network, is refused here.
"""

from collections.abc import Callable
from operator import concat
from typing import Any

from belljar.policy.guard import Guard, compile_policy
from belljar.policy.rules import Policy, PolicyLimits, ToolRule
from belljar.workflows.definition import Definition, Step, SubWorkflow
from belljar.workflows.library import reference_of


def guardrails_problem(policy: Policy) -> str:
    """Return what of a workflow's guardrails cannot be obeyed; empty when all can."""
    if policy.limits.model_dump(exclude={"max_execution_time"}, exclude_none=True):
        return "guardrails of a workflow can limit max_execution_time, not memory, GPUs or network"
    return "guardrails of a workflow have no privacy rules" if policy.privacy else ""


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
    "privacy": lambda _outer, inner: inner,  # refused by `guardrails_problem`, so both are empty
}
"""How each key of two policies becomes one that is as strict as both."""
